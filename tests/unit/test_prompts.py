import datetime
import decimal
import gzip
import json
import subprocess
import sys

import pytest

from nemotron_ultra import prep
from nemotron_ultra.data.documents import BOM
from nemotron_ultra.data.messages import RowDropped
from nemotron_ultra.data.prompt_rows import read_prompt

CHOICE = {
    "responses_create_params": {
        "input": [{"role": "user", "content": "Which gas do plants take in?\nA: oxygen\nB: carbon dioxide"}],
        "temperature": None,
    },
    "options": [{"A": "oxygen"}, {"B": "carbon dioxide"}],
    "expected_answer": "B",
    "grading_mode": "strict_single_letter_boxed",
    "uuid": "u-1",
    "pass_rate": 0.625,
    "pass_rate_total": 8,
    "_ng_task_index": 3,
    "agent_ref": {"type": "responses_api_agents", "name": "mcqa_simple_agent"},
}
TOOL = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}}
CALLS = {
    "responses_create_params": {
        "instructions": "Be exact.",
        "input": [
            {
                "role": "user",
                "content": [{"type": "input_text", "text": "What is 2 + 2, "}, {"text": "twice?"}],
            },
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Add first."}]},
            {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 2}'},
            {"type": "function_call", "call_id": "c2", "name": "add", "arguments": '{"a": 3}'},
            {"type": "function_call_output", "call_id": "c1", "output": "4"},
            {"type": "function_call_output", "call_id": "c2", "output": "5"},
        ],
        "tools": [TOOL, {"type": "function", "function": {"name": "nested"}}],
        "parallel_tool_calls": True,
    },
    "verifier_metadata": {"ground_truth_answer": 8, "unit": "none"},
    "dataset": "workplace",
    "agent_ref": {"name": "workplace_agent"},
}


RESULT = {"type": "function_call_output", "call_id": "c1"}


def own(question, **fields):
    row = {"messages": [{"role": "user", "content": question}], "domain": "sums"}
    return row | {"environment": {"name": "reasoning_gym", "args": {"name": "chain_sum"}}, **fields}


def write(path, rows):
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def run(tmp_path, rows, *flags, name="in.jsonl", out="out"):
    source = write(tmp_path / name, rows)
    status = prep.main(["prompts", str(source), "--out", str(tmp_path / out), *flags])
    manifest = tmp_path / out / "manifest.json"
    return status, json.loads(manifest.read_text()) if manifest.exists() else None


def test_a_gym_row_of_multiple_choice():
    prompt = read_prompt(CHOICE)
    assert prompt.messages == CHOICE["responses_create_params"]["input"]
    assert (prompt.domain, prompt.answer, prompt.pass_rate) == ("mcqa", "B", 0.625)
    args = {key: CHOICE[key] for key in ("options", "expected_answer", "grading_mode")}
    assert prompt.environment == {"name": "mcqa_simple_agent", "args": args}
    assert prompt.extra == {"uuid": "u-1", "pass_rate_total": 8, "_ng_task_index": 3}


def test_a_gym_row_with_tool_calls_becomes_chat_messages():
    prompt = read_prompt(CALLS)
    assert [message["role"] for message in prompt.messages] == ["system", "user", "assistant", "tool", "tool"]
    assert prompt.messages[1]["content"] == "What is 2 + 2, twice?"
    assistant = prompt.messages[2]
    assert assistant["reasoning_content"] == "Add first."
    assert [call["id"] for call in assistant["tool_calls"]] == ["c1", "c2"]
    assert assistant["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 2}'}
    assert prompt.messages[3] == {"role": "tool", "tool_call_id": "c1", "content": "4"}
    assert [tool["function"]["name"] for tool in prompt.tools] == ["add", "nested"]
    assert (prompt.domain, prompt.answer) == ("workplace", "8")
    assert prompt.environment["args"] == {"ground_truth_answer": 8, "unit": "none"}


def test_our_own_rows_come_through_unchanged_and_a_second_time_too(tmp_path):
    rows = [own(f"{i} + {i} =", answer=str(2 * i), pass_rate=i / 50, extra={"n": i}) for i in range(50)]
    status, manifest = run(tmp_path, rows, "--valid-fraction", "0.2")
    written = lines(tmp_path / "out" / "train.jsonl") + lines(tmp_path / "out" / "valid.jsonl")
    assert status == 0 and manifest["rows"] == 50 and not manifest["dropped"]
    assert sorted(map(json.dumps, written)) == sorted(
        json.dumps({k: row[k] for k in ("messages", "domain", "environment", "answer", "pass_rate", "extra")})
        for row in rows
    )
    assert min(manifest["splits"][s]["prompts"] for s in ("train", "valid")) >= 3
    again = tmp_path / "again"
    inputs = [str(tmp_path / "out" / f"{split}.jsonl") for split in ("train", "valid")]
    assert prep.main(["prompts", *inputs, "--out", str(again), "--valid-fraction", "0.2"]) == 0
    for split in ("train.jsonl", "valid.jsonl"):
        assert (again / split).read_bytes() == (tmp_path / "out" / split).read_bytes()


def test_a_chat_gives_its_last_answer_as_reference():
    chat = [
        {"role": "user", "content": "1 + 1"},
        {"role": "assistant", "content": "2", "reasoning_content": "r"},
    ]
    prompt = read_prompt({"messages": chat, "id": "x"}, "sums", "exact")
    assert prompt.messages == chat[:1] and prompt.answer == "2" and prompt.extra == {"id": "x"}
    assert prompt.environment == {"name": "exact", "args": {}}
    with pytest.raises(RowDropped, match="no environment"):
        read_prompt({"messages": chat}, "sums")
    chat[1] = {"role": "assistant", "content": "<think>one and one</think>\n2"}
    assert read_prompt({"messages": chat}, "sums", "exact").answer == "2"
    chat[1] = {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": {}}]}
    assert read_prompt({"messages": chat}, "sums", "exact").answer is None


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (own("q") | {"messages": [{"role": "robot", "content": "q"}]}, "unknown role"),
        (own("q") | {"messages": []}, "no messages"),
        (own("q") | {"messages": "q"}, "no messages"),
        (own(" "), "empty content"),
        (own("q") | {"messages": [{"role": "system", "content": "s"}]}, "no user message"),
        (own("q", pass_rate=1.5), "pass rate is not in 0 to 1"),
        (own("q", environment={}), "no environment"),
        (own("q", domain=""), "no domain"),
        (own("q", tools=[{"a": 1}]), "bad tools"),
        (own("q", messages="[{"), "a field's JSON text is malformed"),
        ({"responses_create_params": {"input": [{"type": "item_reference"}]}}, "unknown kind of input"),
        ({"responses_create_params": {}}, "no messages"),
        (own([{"type": "text", "text": "q"}, {"type": "image_url", "image_url": {}}]), "bad content"),
        ({"responses_create_params": {"input": [RESULT | {"output": {"x": 1}}]}}, "bad content"),
        ({"responses_create_params": {"input": [RESULT | {"output": [{"type": "file"}]}]}}, "bad content"),
    ],
)
def test_rows_that_are_no_prompts(row, reason):
    with pytest.raises(RowDropped) as caught:
        read_prompt(row)
    assert caught.value.reason == reason


def test_every_drop_is_counted_with_its_line(tmp_path, capsys):
    rows = [own("3 + 4 ="), "{broken\n", "\n", "[1]\n", own("3 + 4 ="), own("hard", pass_rate=0.0)]
    rows += [own("easy", pass_rate=1.0), own("long " * 100), own("other", environment="chess")]
    rows += [own("half", environment='{"name": "reasoning_gym", "args": {"x": "\\ud800"}}')]
    flags = ["--min-pass-rate", "0.1", "--max-pass-rate", "0.9", "--max-tokens", "40"]
    status, manifest = run(tmp_path, rows, *flags, "--only-environment", "reasoning_gym")
    assert status == 0 and manifest["rows"] == 9
    assert manifest["examples"]["not JSON"] == ["in.jsonl:2"]
    assert manifest["examples"]["not a JSON object"] == ["in.jsonl:4"]
    assert manifest["examples"]["duplicate prompt"] == ["in.jsonl:5"]
    assert manifest["examples"]["pass rate below the bound"] == ["in.jsonl:6: 0.0"]
    assert manifest["examples"]["pass rate above the bound"] == ["in.jsonl:7: 1.0"]
    assert manifest["examples"]["prompt too long"][0].startswith("in.jsonl:8: 1")
    assert manifest["examples"]["environment not chosen"] == ["in.jsonl:9: chess"]
    assert manifest["examples"]["half of a surrogate pair in the text"] == ["in.jsonl:10"]
    assert sum(manifest["dropped"].values()) == 8
    assert "dropped 1: duplicate prompt (first: in.jsonl:5)" in capsys.readouterr().out


def test_what_is_no_utf8_is_mended_and_counted(tmp_path, capsys):
    rows = [own("caf\xe9"), own("half \ud83d"), own("whole \U0001f642")]
    lines = [
        json.dumps(rows[0], ensure_ascii=False).encode("latin-1"),
        *(json.dumps(r).encode() for r in rows[1:]),
    ]
    (tmp_path / "in.jsonl").write_bytes(b"\n".join([BOM + lines[0], *lines[1:]]))
    assert prep.main(["prompts", str(tmp_path / "in.jsonl"), "--out", str(tmp_path / "out")]) == 0
    written = [json.loads(line) for line in (tmp_path / "out" / "train.jsonl").read_bytes().splitlines()]
    texts = [row["messages"][0]["content"] for row in written]
    assert texts == ["caf\ufffd", "half \ufffd", "whole \U0001f642"]
    assert "2 rows held invalid UTF-8" in capsys.readouterr().out


def test_held_out_prompts_leave_but_shared_instructions_do_not(tmp_path):
    wording = "Sort the following words in the order of the alphabet and give the sorted list as the answer: "
    rows = [own(wording + " ".join(f"w{i}x{j}" for j in range(5))) for i in range(40)]
    rows.append(own("one two three four five six seven eight nine ten eleven twelve thirteen fourteen"))
    held_out = write(
        tmp_path / "held.jsonl", [rows[7], {"question": rows[-1]["messages"][0]["content"] + " x"}]
    )
    status, manifest = run(tmp_path, rows, "--held-out", str(held_out))
    assert status == 0 and manifest["dropped"] == {"in the held-out texts": 2}
    assert manifest["examples"]["in the held-out texts"][0] == "in.jsonl:8: held.jsonl:1"


def test_bad_commands_say_what_and_write_nothing(tmp_path, capsys):
    good = [own("3 + 4 =")]
    assert run(tmp_path, ["{broken\n"], "--strict")[0] == 3
    assert "in.jsonl:1: not JSON" in capsys.readouterr().err
    assert run(tmp_path, good, "--min-pass-rate", "0.9", "--max-pass-rate", "0.1", out="b")[0] == 2
    assert run(tmp_path, good, name="in.txt", out="c")[0] == 3
    assert "allowed: .jsonl" in capsys.readouterr().err
    assert run(tmp_path, [{"messages": []}], out="d") == (3, None)
    assert "no usable prompt" in capsys.readouterr().err
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "train.jsonl").write_text("precious")
    assert run(tmp_path, good, out="mine") == (3, None)
    assert (mine / "train.jsonl").read_text() == "precious"


def test_the_same_command_again_and_another_into_the_same_folder(tmp_path, capsys):
    rows = [own(f"{i} =") for i in range(10)]
    assert run(tmp_path, rows)[0] == 0
    assert run(tmp_path, rows)[0] == 0
    assert "already complete" in capsys.readouterr().out
    assert run(tmp_path, rows, "--valid-fraction", "0.5")[0] == 3
    assert "options.valid_fraction: 0.01 there, 0.5 here" in capsys.readouterr().err
    (tmp_path / "out" / "train.jsonl").write_text("")
    assert run(tmp_path, rows)[0] == 3
    assert "finished but damaged" in capsys.readouterr().err


def test_after_an_error_the_folder_takes_the_mended_command(tmp_path, capsys):
    rows = [own("q") | {"domain": None}]
    assert run(tmp_path, rows)[0] == 3
    assert "--domain NAME gives one" in capsys.readouterr().err
    assert run(tmp_path, rows, "--domain", "d")[0] == 0
    assert run(tmp_path, rows, "--domain", "e")[0] == 3
    assert "options.domain: d there, e here" in capsys.readouterr().err


def test_parquet_and_compressed_rows_are_the_same_prompts(tmp_path):
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    rows = [CHOICE, CALLS | {"responses_create_params": json.dumps(CALLS["responses_create_params"])}]
    parquet.write_table(arrow.Table.from_pylist([CHOICE]), tmp_path / "a.parquet")
    parquet.write_table(arrow.Table.from_pylist([rows[1]]), tmp_path / "b.parquet")
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress("".join(json.dumps(r) + "\n" for r in rows).encode()))
    inputs = [str(tmp_path / name) for name in ("a.parquet", "b.parquet", "c.jsonl.gz")]
    assert prep.main(["prompts", *inputs, "--out", str(tmp_path / "out")]) == 0
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["dropped"] == {"duplicate prompt": 2}
    assert manifest["environments"] == {"mcqa_simple_agent": 1, "workplace_agent": 1}


def test_columns_of_a_table_that_json_does_not_know(tmp_path):
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    facts = {"day": datetime.date(2026, 1, 2), "at": datetime.datetime(2026, 1, 2, 3), "raw": b"a\xff"}
    facts |= {"price": decimal.Decimal("1.50"), "tags": [datetime.date(2026, 1, 3)], "nothing": None}
    parquet.write_table(arrow.Table.from_pylist([own("q") | facts]), tmp_path / "in.parquet")
    assert prep.main(["prompts", str(tmp_path / "in.parquet"), "--out", str(tmp_path / "out")]) == 0
    (row,) = lines(tmp_path / "out" / "train.jsonl") + lines(tmp_path / "out" / "valid.jsonl")
    texts = {"day": "2026-01-02", "at": "2026-01-02 03:00:00", "raw": "a\ufffd", "price": "1.50"}
    assert row["extra"] == texts | {"tags": ["2026-01-03"]}


def test_the_command_loads_no_torch():
    code = "import sys, nemotron_ultra.prep.prompts; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_folder_of_unfinished_work_is_done_again(tmp_path, capsys):
    rows = [own(f"{i} =") for i in range(10)]
    assert run(tmp_path, rows)[0] == 0
    first = (tmp_path / "out" / "train.jsonl").read_bytes()
    (tmp_path / "out" / "manifest.json").unlink()
    (tmp_path / "out" / "train.jsonl").write_bytes(first[:20])
    assert run(tmp_path, rows)[0] == 0
    assert (tmp_path / "out" / "train.jsonl").read_bytes() == first
    empty = write(tmp_path / "empty.jsonl", ["{}\n"])
    assert run(tmp_path, rows, "--held-out", str(empty), out="other")[0] == 3
    assert "no held-out text in it" in capsys.readouterr().err
