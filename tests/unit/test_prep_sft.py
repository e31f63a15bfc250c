import errno
import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from nemotron_ultra import prep
from nemotron_ultra.data.chat import load_template
from nemotron_ultra.data.messages import read_conversation
from nemotron_ultra.data.pack_manifest import read_pack_manifest
from nemotron_ultra.data.sft_sources import parse_source
from nemotron_ultra.data.tokenizer import load_tokenizer
from nemotron_ultra.data.training_rows import MaskOptions, training_rows

pa = pytest.importorskip("pyarrow", reason="pyarrow (extra `data`) is not installed")
parquet = pytest.importorskip("pyarrow.parquet")
from nemotron_ultra.data.packs import PackFiles  # noqa: E402

TEMPLATE = load_template(load_tokenizer("builtin"))
CALL = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def chat(number, thoughts=False):
    answer = {"role": "assistant", "content": f"It is {number * number}."}
    answer |= {"reasoning_content": f"{number} times {number}"} if thoughts else {}
    again = {"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Yes, größer als 日本."}
    return {"messages": [{"role": "user", "content": f"Square of {number}?"}, answer, *again]}


def calling():
    messages = [
        {"role": "user", "content": "1 + 2?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "3."},
    ]
    return {"messages": messages, "tools": json.dumps([TOOL])}


def write_rows(path, rows):
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(line + "\n" for line in lines))
    return path


def prepared(out, *arguments, status=0):
    command = ["sft", *map(str, arguments), "--out", str(out), "--max-length", "256"]
    assert prep.main(command) == status
    return read_pack_manifest(out) if status == 0 else None


def outputs(out):
    return {path.name: path.read_bytes() for path in out.iterdir() if path.suffix == ".parquet"}


def rows_of(files):
    """(tokens, trained flags) of every conversation in packed files, as Python values."""
    packs = PackFiles(files)
    return [
        (tokens.tolist(), mask.tolist()) for i in range(len(packs)) for tokens, mask in packs[i].conversations
    ]


def expected(rows, **options):
    found = training_rows(TEMPLATE, [read_conversation(row) for row in rows], MaskOptions(**options))
    return [(row.tokens.tolist(), row.mask.tolist()) for made in found for row in made]


def test_packs_hold_the_training_rows_of_every_conversation_once(tmp_path):
    rows = [*(chat(i, thoughts=i % 3 == 0) for i in range(60)), calling()]
    path = write_rows(tmp_path / "a.jsonl", rows)
    manifest = prepared(tmp_path / "out", f"a={path}", "--valid-fraction", "0.2")
    train, valid = sorted((tmp_path / "out").glob("train-*")), sorted((tmp_path / "out").glob("valid-a-*"))
    assert sorted(rows_of(train) + rows_of(valid)) == sorted(expected(rows))
    assert len(rows_of(valid)) > 5 and manifest["splits"]["valid"]["a"]["fill"] > 0.5
    facts = manifest["sources"]["a"]
    assert (facts["conversations"], facts["rows"]) == (61, 81)
    assert facts["tokens"] == sum(len(tokens) for tokens, _ in expected(rows))
    assert facts["trained"] == sum(sum(mask) for _, mask in expected(rows))


def test_a_pack_says_where_its_conversations_come_from(tmp_path):
    a = write_rows(tmp_path / "a.jsonl", ["", *(chat(i) for i in range(20))])
    b = write_rows(tmp_path / "b.jsonl", [chat(i) for i in range(20, 50)])
    prepared(tmp_path / "out", f"a={a}", f"b={b}", "--valid-fraction", "0", "--part-bytes", "700")
    packs, found = PackFiles(tmp_path / "out"), {}
    for pack in (packs[i] for i in range(len(packs))):
        for (tokens, _), source, row in zip(pack.conversations, pack.sources, pack.rows, strict=True):
            found[(int(source), int(row))] = tokens.tolist()
    wanted = {(0, i + 1): tokens for i, (tokens, _) in enumerate(expected([chat(i) for i in range(20)]))}
    wanted |= {(1, i): tokens for i, (tokens, _) in enumerate(expected([chat(i) for i in range(20, 50)]))}
    assert found == wanted


def test_every_kind_of_file_gives_the_same_packs(tmp_path, monkeypatch):
    pytest.importorskip("datasets", reason="datasets (extra `data`) is not installed")
    monkeypatch.setattr("nemotron_ultra.data.hf_rows.ROWS", 8)
    rows = [calling(), *(chat(i, thoughts=i % 2 == 0) for i in range(20))]
    plain = write_rows(tmp_path / "a.jsonl", rows)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
    with pa.CompressedOutputStream(str(tmp_path / "a.jsonl.zst"), "zstd") as file:
        file.write(plain.read_bytes())
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=7)
    (tmp_path / "hub").mkdir()
    write_rows(tmp_path / "hub" / "train.jsonl", rows)
    paths = [plain, *(tmp_path / f"a.{kind}" for kind in ("jsonl.gz", "jsonl.zst", "parquet"))]
    found = []
    for number, path in enumerate([*paths, f"datasets:{tmp_path / 'hub'}:train"]):
        out = tmp_path / f"out{number}"
        prepared(out, f"a={path}", "--workers", "1", "--part-bytes", "900")
        found.append(outputs(out))
    assert found[0] and all(files == found[0] for files in found)


def test_neither_workers_nor_parts_change_a_byte(tmp_path):
    paths = [
        write_rows(tmp_path / f"{n}.jsonl", [chat(i + 40 * k) for i in range(40)]) for k, n in enumerate("ab")
    ]
    sources = [f"a={paths[0]}", f"b={paths[1]}:weight=2"]
    prepared(tmp_path / "one", *sources, "--shard-tokens", "600")
    prepared(tmp_path / "two", *sources, "--shard-tokens", "600", "--workers", "2", "--part-bytes", "2500")
    assert len(outputs(tmp_path / "one")) > 4 and outputs(tmp_path / "one") == outputs(tmp_path / "two")


def test_equal_conversations_are_taken_once_and_lie_in_one_split(tmp_path):
    rows = [chat(i % 30) for i in range(90)]
    a, b = write_rows(tmp_path / "a.jsonl", rows), write_rows(tmp_path / "b.jsonl", rows[:20])
    options = ["--valid-fraction", "0.3", "--part-bytes", "2000"]
    manifest = prepared(
        tmp_path / "out", f"a={a}", f"b={b}", f"c={write_rows(tmp_path / 'c.jsonl', [chat(99)])}", *options
    )
    assert manifest["dropped"] == {"equal to an earlier conversation": 80}
    assert manifest["sources"]["a"]["examples"]["equal to an earlier conversation"][0] == "a.jsonl:31"
    kept = prepared(tmp_path / "kept", f"a={a}", "--duplicates", "keep", *options)
    train, valid = (rows_of(sorted((tmp_path / "kept").glob(f"{name}-*"))) for name in ("train", "valid"))
    assert kept["dropped"] == {} and len(train) + len(valid) == 90 and len(valid) > 9
    assert not {str(row) for row in train} & {str(row) for row in valid}


def test_drops_are_counted_with_file_and_line(tmp_path, capsys):
    user = {"role": "user", "content": "Hi"}
    bad = [
        "not json",
        "[1]",
        {"text": "no messages"},
        {"messages": [user, user]},
        {"messages": [{"role": "alien", "content": "x"}]},
        {"messages": [user, {"role": "assistant", "content": " "}]},
        {"messages": [user, {"role": "tool", "content": "3"}]},
        {"messages": [{"role": "user", "content": "x" * 2000}, {"role": "assistant", "content": "No."}]},
        {"messages": [user, {"role": "assistant", "content": "go on " * 300}]},
    ]
    rows = [chat(0), "", *(row for i, row in enumerate(bad) for row in (row, chat(i + 1)))]
    path = write_rows(tmp_path / "a.jsonl", rows)
    manifest = prepared(tmp_path / "out", f"a={path}", "--part-bytes", "300", "--valid-fraction", "0")
    source = manifest["sources"]["a"]
    first = {reason: examples[0].split(":")[1] for reason, examples in source["examples"].items()}
    lines = dict(zip(source["dropped"], map(str, range(3, 21, 2)), strict=True))
    assert first == lines and len(first) == 9
    assert {"not JSON", "role order", "unknown role", "tool result without call"} < set(first)
    assert {"longer than a pack", "prompt longer than a pack"} < set(first)
    assert source["rows_in"] == 19 and source["conversations"] == 10
    assert "dropped 1: not JSON (first: a.jsonl:3: Expecting value" in capsys.readouterr().out
    packed = source["train"]["tokens"] + sum(counts["tokens"] for counts in source["dropped"].values())
    assert source["read"]["tokens"] == packed


def test_strict_names_the_line(tmp_path, capsys):
    path = write_rows(tmp_path / "a.jsonl", [chat(0), "", chat(1), '{"messages": ', chat(2)])
    for part_bytes in ("200", "100000"):
        prepared(tmp_path / part_bytes, f"a={path}", "--strict", "--part-bytes", part_bytes, status=3)
        assert "a.jsonl:4: not JSON; got Expecting value" in capsys.readouterr().err


def test_only_rows_with_a_value_are_taken(tmp_path):
    used = [["one"], ["one", "two"], "two", None, ["three"]]
    path = write_rows(tmp_path / "a.jsonl", [chat(i) | {"used_in": value} for i, value in enumerate(used)])
    options = ["--row-filter", "used_in=two", "--strict", "--valid-fraction", "0"]
    manifest = prepared(tmp_path / "out", f"a={path}", *options)
    assert sorted(rows_of(tmp_path / "out")) == sorted(expected([chat(1), chat(2)]))
    assert manifest["dropped"] == {"left out by --row-filter": 3}


@pytest.mark.parametrize(
    "ended, drawn, repeated",
    [("leave-out", (60, 20), 0), ("stop", (7, 20), 0), ("repeat", (60, 180), 160)],
)
def test_weights_caps_and_a_source_that_ends(tmp_path, capsys, ended, drawn, repeated):
    a = write_rows(tmp_path / "a.jsonl", [chat(i) for i in range(60)])
    b = write_rows(tmp_path / "b.jsonl", [chat(i) for i in range(100, 150)])
    options = ["--when-ended", ended, "--valid-fraction", "0"]
    manifest = prepared(tmp_path / "out", f"a={a}", f"b={b}:weight=3:cap=20", *options)
    packs = PackFiles(tmp_path / "out")
    sources = [int(source) for i in range(len(packs)) for source in packs[i].sources]
    assert (sources.count(0), sources.count(1)) == drawn
    facts = manifest["sources"]["b"]
    assert facts["dropped"] == {"over the source's cap": facts["dropped"]["over the source's cap"]}
    assert facts["repeated"].get("conversations", 0) == repeated
    told = "ran out after 33 % of the draws" in capsys.readouterr().out
    assert told == (ended == "leave-out")


def test_a_source_is_read_only_to_its_cap(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", [chat(i) for i in range(200)])
    manifest = prepared(tmp_path / "out", f"a={path}:cap=10", "--part-bytes", "1500", "--valid-fraction", "0")
    assert manifest["sources"]["a"]["conversations"] == 10 and manifest["sources"]["a"]["rows_in"] < 20
    assert sorted(rows_of(tmp_path / "out")) == sorted(expected([chat(i) for i in range(10)]))


def test_a_blend_file_with_options_by_source(tmp_path):
    for number, name in enumerate("ab"):
        write_rows(tmp_path / f"{name}.jsonl", [chat(i + 10 * number) for i in range(10)])
    blend = tmp_path / "blend.yaml"
    blend.write_text(
        f"sources:\n  a: {tmp_path}/a.jsonl\n  b: {{path: ['{tmp_path}/b.jsonl'], weight: 2, train: last}}\n"
    )
    prepared(tmp_path / "out", blend, "--valid-fraction", "0")
    second = expected([chat(i) for i in range(10, 20)], train="last")
    assert sorted(rows_of(tmp_path / "out")) == sorted(expected([chat(i) for i in range(10)]) + second)
    public = {"datasets": [{"name": n, "path": f"{tmp_path}/{n}.jsonl", "weight": 1.5} for n in "ab"]}
    (tmp_path / "public.json").write_text(json.dumps(public))
    manifest = prepared(tmp_path / "other", tmp_path / "public.json", "--valid-fraction", "0")
    assert {name: source["weight"] for name, source in manifest["sources"].items()} == {"a": 1.5, "b": 1.5}


def test_reasoning_transforms_depend_on_the_conversation_alone(tmp_path):
    rows = [chat(i, thoughts=True) for i in range(40)]
    path = write_rows(tmp_path / "a.jsonl", rows)
    back = write_rows(tmp_path / "b.jsonl", rows[::-1])
    options = ["--strip-share", "0.5", "--valid-fraction", "0"]
    prepared(tmp_path / "one", f"a={path}", *options)
    prepared(tmp_path / "two", f"a={back}", *options, "--part-bytes", "2000")
    prepared(tmp_path / "other", f"a={path}", *options, "--seed", "1")
    assert sorted(rows_of(tmp_path / "one")) == sorted(rows_of(tmp_path / "two"))
    assert sorted(rows_of(tmp_path / "one")) != sorted(rows_of(tmp_path / "other"))
    stripped = {str(row) for row in expected(rows, thinking="off")}
    assert 10 < sum(str(row) in stripped for row in rows_of(tmp_path / "one")) < 30


def test_a_finished_folder_is_left_alone_and_changes_are_named(tmp_path, capsys):
    path, out = write_rows(tmp_path / "a.jsonl", [chat(i) for i in range(9)]), tmp_path / "out"
    prepared(out, f"a={path}", "--valid-fraction", "0")
    before = outputs(out)
    prepared(out, f"a={path}", "--valid-fraction", "0")
    assert "already complete" in capsys.readouterr().out and outputs(out) == before
    prepared(out, f"a={path}:weight=2", "--valid-fraction", "0", "--train", "last", status=3)
    error = capsys.readouterr().err
    assert "other source.a.weight and source.a.train; got source.a.weight: 1.0 there, 2.0 here" in error
    template = tmp_path / "mine.jinja"
    template.write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    )
    prepared(out, f"a={path}", "--valid-fraction", "0", "--template", template, status=3)
    assert "a preparation with other template.hash; got" in capsys.readouterr().err
    (out / "train-00000.parquet").write_bytes(before["train-00000.parquet"][:-1])
    prepared(out, f"a={path}", "--valid-fraction", "0", status=3)
    assert "damaged; got missing or changed: train-00000.parquet" in capsys.readouterr().err


def test_another_tokenizer_in_an_unfinished_folder(tmp_path, monkeypatch, capsys):
    path, out = write_rows(tmp_path / "a.jsonl", [chat(i) for i in range(9)]), tmp_path / "out"

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("nemotron_ultra.data.sft_shards.write_json", full)
        prepared(out, f"a={path}", status=3)
    assert "No space left on device; make room for" in capsys.readouterr().err
    content = json.loads(load_tokenizer("builtin")._text)
    content["added_tokens"].append(content["added_tokens"][-1] | {"id": 4096, "content": "<new>"})
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    prepared(out, f"a={path}", "--tokenizer", tmp_path, status=3)
    assert "other tokenizer.hash" in capsys.readouterr().err
    prepared(out, f"a={path}")
    assert "1 part finished by an earlier run" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["a=missing.jsonl"], "input not found; got missing.jsonl"),
        (["missing.yaml"], "cannot read the blend missing.yaml; got No such file"),
        (["good.jsonl"], "not a source; got good.jsonl; allowed: NAME=PATH"),
        (["a=good.jsonl:weight=0"], "source a: weight; got 0.0; allowed: a number above 0"),
        (["a=good.jsonl:cap=x"], "cap; got x; allowed: a whole number"),
        (["a=good.jsonl:train=first"], "source a: train; got first; allowed: assistant, last"),
        (["a/b=good.jsonl"], "a source's name becomes part of file names; got 'a/b'"),
        (["a=good.jsonl:cap=1", "a=other.jsonl"], "source a is named twice with other options"),
        (
            ["a=rows.jsonl:wieght=2"],
            "source a: unknown option wieght (did you mean weight?); got rows.jsonl:w",
        ),
        (["a=there:x=1/rows.jsonl"], "input not found; got there:x=1/rows.jsonl"),
        (["bad.yaml"], "bad.yaml: a: unknown wieght; allowed: path, weight, cap"),
        (["list.yaml"], "list.yaml is no blend of sources"),
        (["torn.json"], "torn.json is no YAML or JSON"),
        (["twice.yaml"], "twice.yaml is no YAML or JSON; got line 2: 'a' is there twice"),
        (["part.yaml"], "part.yaml: a: cap; got 1.5; allowed: a whole number"),
        (["true.yaml"], "true.yaml: a: weight; got True; allowed: a number"),
        (["a=empty.jsonl"], "source a is empty; got 1 files, 0 bytes"),
        (["a=a.txt"], "source a: a.txt is no file of rows; allowed: .jsonl"),
        (["good=good.jsonl", "b=useless.jsonl"], "source b has no conversation to train on; got 1 rows in"),
        (["a=cut.jsonl.gz"], "cannot read cut.jsonl.gz"),
        (["a=bad.parquet"], "bad.parquet is not a parquet file"),
        (["a=text.parquet"], "text.parquet has no column 'messages'; allowed: text; name it with"),
        (["a=good.jsonl", "--max-length", "4"], "nothing to train on; got 2 conversations"),
        (
            ["a=good.jsonl", "--max-length", "4", "--on-overlong", "error"],
            "good.jsonl:1: 64 tokens: prompt longer",
        ),
        (["a=good.jsonl", "--window", "99", "--pool-size", "9"], "window is longer than twice the pool"),
        (["a=good.jsonl", "--strip-share", "0.7", "--effort-share", "0.7"], "together at most 1"),
        (
            ["a=good.jsonl", "b=other.jsonl:weight=1e6", "--duplicates", "keep", "--when-ended", "repeat"],
            "source b would be drawn 1,000,000 times over; got 2,000,000 draws of 2 conversations",
        ),
        (["a=good.jsonl", "--template", "nowhere.jinja"], "nowhere.jinja"),
        (["a=good.jsonl", "--out", "good.jsonl"], "good.jsonl is not a folder"),
        (["a=good.jsonl", "--out", "full"], "full holds train-00000.parquet of something else"),
    ],
)
def test_bad_input_gives_one_clear_error(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    for name in ("good", "other"):
        write_rows(Path(f"{name}.jsonl"), [chat(1), chat(2)])
    write_rows(Path("useless.jsonl"), [{"messages": []}])
    Path("empty.jsonl").touch()
    Path("a.txt").write_text("text")
    Path("bad.yaml").write_text("sources: {a: {path: good.jsonl, wieght: 2}}")
    Path("list.yaml").write_text("- a")
    Path("twice.yaml").write_text("sources:\n  a: good.jsonl\n  a: other.jsonl\n")
    Path("part.yaml").write_text("sources: {a: {path: good.jsonl, cap: 1.5}}")
    Path("true.yaml").write_text("sources: {a: {path: good.jsonl, weight: true}}")
    Path("torn.json").write_text("{")
    Path("bad.parquet").write_text("PAR1 no")
    parquet.write_table(pa.table({"text": ["x"]}), "text.parquet")
    Path("cut.jsonl.gz").write_bytes(gzip.compress(Path("good.jsonl").read_bytes())[:-9])
    Path("full").mkdir()
    Path("full/train-00000.parquet").touch()
    assert prep.main(["sft", "--out", "out", *arguments, "--valid-fraction", "0"]) in (2, 3)
    error = capsys.readouterr().err
    assert message in error and error.count("error:") == 1 and "Traceback" not in error


def test_unreadable_file(tmp_path, capsys):
    path = write_rows(tmp_path / "a.jsonl", [chat(1)])
    path.chmod(0)
    try:
        path.read_bytes()
    except PermissionError:
        prepared(tmp_path / "out", f"a={path}", status=3)
        assert "Permission denied" in capsys.readouterr().err
    else:
        pytest.skip("this user may read any file")


def test_one_preparation_at_a_time(tmp_path, capsys):
    path, out = write_rows(tmp_path / "a.jsonl", [chat(1)]), tmp_path / "out"
    out.mkdir()
    with FileLock(out / ".lock"):
        prepared(out, f"a={path}", status=3)
    assert "another preparation is at work" in capsys.readouterr().err


def test_missing_extra_is_named(tmp_path, monkeypatch, capsys):
    path = write_rows(tmp_path / "a.jsonl", [chat(1)])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    prepared(tmp_path / "out", f"a={path}", status=3)
    assert "pip install 'nemotron-ultra[data]'" in capsys.readouterr().err


def test_the_command_needs_no_torch():
    code = "import sys, nemotron_ultra.prep.sft; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_the_summary_names_what_to_run_next(tmp_path, capsys):
    path = write_rows(tmp_path / "a.jsonl", [chat(i) for i in range(20)])
    prepared(tmp_path / "out", f"a={path}", "--valid-fraction", "0")
    out = capsys.readouterr().out
    assert "valid is empty: use a larger --valid-fraction" in out and "% trained  fill " in out
    where = f"data=packs trainer=packs data.packs={tmp_path / 'out'} data.sequence_length=256"
    assert f"recipe=sft run.name=chats tasks=null {where}" in out


def test_a_reader_that_leaves_at_the_end_is_no_error(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", [chat(0)])
    words = ["-m", "nemotron_ultra.prep", "sft", f"a={path}", "--out", str(tmp_path / "out")]
    reads, writes = os.pipe()
    os.close(reads)
    done = subprocess.run([sys.executable, *words], stdout=writes, stderr=subprocess.PIPE, text=True)
    os.close(writes)
    assert (done.returncode, "error" in done.stderr, "Exception" in done.stderr) == (0, False, False)
    again = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True)
    assert "nothing to do" in again.stdout and " 1 pack " in again.stdout and " 1 row " in again.stdout


def test_a_path_may_end_like_an_option(tmp_path):
    path = write_rows(tmp_path / "rows:x=1", [chat(0)])
    assert parse_source(f"a={path}:weight=2").paths == (str(path),)
