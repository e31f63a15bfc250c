"""generate: prompts, files of prompts and conversations with a micro model and the built-in tokenizer."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
from filelock import FileLock

from micro import micro_model
from nemotron_ultra import evaluate, report
from nemotron_ultra import generate as cli
from nemotron_ultra.data.chat import ChatTemplate, load_template
from nemotron_ultra.data.tokenizer import load_tokenizer
from nemotron_ultra.generate.talk import Dialog, Interrupt
from nemotron_ultra.generation import generate
from nemotron_ultra.model.hf_folder import load_model, save_model

TOKENIZER = load_tokenizer("builtin")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "micro"
    save_model(micro_model(vocab_size=TOKENIZER.vocab_size), path)
    TOKENIZER.save(path)
    return path


@pytest.fixture
def run(capsys, folder):
    def call(*arguments: object) -> tuple[int, str, str]:
        code = cli.main([str(folder), *map(str, arguments)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def expected(folder, prompt, count, **options):
    model = load_model(folder)
    options = {"vocab_size": TOKENIZER.vocab_size, "seeds": [0], "stop_ids": [TOKENIZER.eos_id]} | options
    return generate(model, [prompt], count, **options)[0]


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_text_is_continued(run, folder):
    code, out, err = run("--prompt", "one two", "--max-tokens", 12, "--temperature", 0.7)
    own = expected(folder, TOKENIZER.encode("one two"), 12, temperature=0.7)
    assert (code, out) == (0, TOKENIZER.decode(own.tokens) + "\n")
    assert "12 tokens in" in err and "tokens/s" in err and "continued" in err


def test_a_question_is_asked_by_the_template(run, folder):
    code, out, err = run("--prompt", "why?", "--chat", "--max-tokens", 6, "--temperature", 0)
    prompt = ChatTemplate(TOKENIZER).prompt([{"role": "user", "content": "why?"}])
    own = expected(folder, prompt, 6)
    assert (code, out) == (0, TOKENIZER.decode(own.tokens) + "\n") and "chat template" in err


def test_drafts_change_speed_alone(run):
    plain = run("--prompt", "one two", "--max-tokens", 16)
    drafted = run("--prompt", "one two", "--max-tokens", 16, "--draft", 3)
    assert plain[1] == drafted[1] and "acceptance length" in drafted[2]
    assert run("--prompt", "one two", "--max-tokens", 16, "--draft", "auto")[1] == plain[1]


def test_a_stop_text_is_not_shown(run):
    whole = run("--prompt", "one two", "--max-tokens", 16)[1].rstrip("\n")
    stop = whole[5:7]
    assert run("--prompt", "one two", "--max-tokens", 16, "--stop", stop)[1] == whole.split(stop)[0] + "\n"


def test_a_file_of_prompts_keeps_order_and_is_continued(run, tmp_path):
    asked = [
        {"prompt": "one", "max_tokens": 9, "id": "a"},
        {"tokens": [5, 6, 7], "max_tokens": 2},
        {"messages": [{"role": "user", "content": "two"}], "temperature": 0},
        {"prompt": "one", "stop": "e", "seed": 3},
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, asked)))
    out = tmp_path / "out.jsonl"
    command = ("--prompts", tmp_path / "in.jsonl", "--max-tokens", 5, "--slots", 2)
    assert run(*command, "--out", out)[0] == 0
    found = rows(out)
    assert [row["index"] for row in found] == [0, 1, 2, 3] and found[0]["id"] == "a"
    assert [len(row["tokens"]) for row in found][:2] == [9, 2]
    assert all(len(row["tokens"]) == len(row["logprobs"]) == len(row["model_logprobs"]) for row in found)
    assert run(*command)[1] == out.read_text()
    whole = out.read_bytes()
    out.write_bytes(whole[: len(whole) // 2])
    code, _, err = run(*command, "--out", out)
    assert code == 0 and "are there already" in err and out.read_bytes() == whole
    assert run(*command, "--out", out)[0] == 0 and out.read_bytes() == whole


def test_another_file_is_not_overwritten(run, tmp_path):
    (tmp_path / "in.jsonl").write_text('{"prompt": "one"}\n', encoding="utf-8-sig")
    out = tmp_path / "out.jsonl"
    out.write_text('{"mine": 1}\n')
    code, _, err = run("--prompts", tmp_path / "in.jsonl", "--out", out)
    assert code == 3 and "nothing is overwritten" in err and out.read_text() == '{"mine": 1}\n'
    out.write_text("my notes")
    assert run("--prompts", tmp_path / "in.jsonl", "--out", out)[0] == 3 and out.read_text() == "my notes"
    out.unlink()
    with FileLock(tmp_path / ".out.jsonl.lock"):
        code, _, err = run("--prompts", tmp_path / "in.jsonl", "--out", out)
        assert code == 3 and "another process" in err
    assert run("--prompts", tmp_path / "in.jsonl", "--out", out, "--max-tokens", 2)[0] == 0
    assert run("--prompts", tmp_path / "in.jsonl", "--out", out, "--max-tokens", 3)[0] == 3


def test_streams_that_are_closed_or_of_few_characters(folder, tmp_path):
    (tmp_path / "in.jsonl").write_text('{"prompt": "one", "id": "\u00e9"}\n', encoding="utf-8")
    command = f"{sys.executable} -m nemotron_ultra.generate {folder} --max-tokens 2"
    script = rf"{command} --prompts in.jsonl <&- 2>&- && printf 'a\377\n' | {command} --chat >&-"
    few = os.environ | {"PYTHONIOENCODING": "ascii:strict"}
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=few, capture_output=True)
    assert json.loads(done.stdout.decode("utf-8"))["id"] == "\u00e9" and done.returncode == 0
    assert b"Traceback" not in done.stderr and b"no valid text" in done.stderr


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "in.jsonl:2 is not JSON"),
        ("[1]", "is not a JSON object"),
        ('{"promt": "x"}', "did you mean 'prompt'"),
        ('{"prompt": "x", "tokens": [1]}', "one of prompt, messages and tokens"),
        ('{"prompt": ""}', "in.jsonl:2: prompt is empty"),
        ('{"tokens": [99999]}', "a token id the model does not have"),
        ('{"prompt": "x", "temperature": -1}', "temperature: cannot be"),
        ('{"prompt": "x", "temperature": "hot"}', "temperature is no number"),
        ('{"prompt": "\\ud800"}', "in.jsonl:2 is not JSON"),
        ('{"prompt": "x", "id": "\\ud800"}', "in.jsonl:2 is not JSON"),
        ("[" * 100_000, "in.jsonl:2 is not JSON"),
        ('{"prompt": "x", "thinking": ["off"]}', "unknown thinking"),
        ('{"prompt": "x", "thinking": "regular"}', "in.jsonl:2: thinking and --system belong to"),
        ('{"tokens": [5], "thinking": "regular"}', "in.jsonl:2: thinking belongs to the chat template"),
        ('{"prompt": "x", "budget": 5}', "in.jsonl:2: budget is for thoughts"),
        ('{"messages": [1]}', "in.jsonl:2: messages is not a list of objects"),
        ('{"messages": [{"role": "user", "content": "x"}], "tools": {"a": 1}}', "tools is not a list"),
        ('{"messages": []}', "must end with a message of the user"),
        (
            '{"messages": [{"role": "king", "content": "x"}, {"role": "user", "content": "x"}]}',
            "unknown role",
        ),
    ],
)
def test_a_bad_line_is_named_before_any_work(run, tmp_path, line, said):
    (tmp_path / "in.jsonl").write_text('{"prompt": "x"}\n' + line + "\n")
    out = tmp_path / "out.jsonl"
    code, _, err = run("--prompts", tmp_path / "in.jsonl", "--out", out)
    assert code in (2, 3) and said in err and "Traceback" not in err and not out.exists()


def test_a_conversation_by_lines(run, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\nagain\n/reset\nhello\n/what\n/quit\nnever\n"))
    code, out, err = run("--chat", "--max-tokens", 4, "--temperature", 0)
    first, _, third = (out.split("\n") + [""] * 3)[:3]
    assert code == 0 and first == third and "/reset begins anew" in err and "12 tokens" in err


def test_a_change_in_a_conversation_is_said(run, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("/budget 8\n/thinking regular\n/budget 3\n/budget 0\n"))
    code, _, err = run("--chat")
    assert code == 0 and err.splitlines()[-4:] == [
        "budget 8 tokens of thoughts, of use after /thinking regular",
        "thinking regular",
        "budget 3 tokens of thoughts",
        "no budget",
    ]


def test_rows_of_prep_prompts_are_answered(run, tmp_path):
    row = {"messages": [{"role": "user", "content": "1 + 1?"}], "domain": "sums", "answer": None}
    row |= {"environment": {"name": "exact", "args": {}}, "pass_rate": 0.5, "extra": {"a": 1}}
    (tmp_path / "in.jsonl").write_text(json.dumps(row) + "\n")
    code, out, _ = run("--prompts", tmp_path / "in.jsonl", "--max-tokens", 3)
    assert code == 0 and len(json.loads(out)["tokens"]) <= 3


def test_a_full_conversation_says_so(run, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\nagain\n/reset\nhello\n"))
    code, _, err = run("--chat", "--max-tokens", 30, "--context", 50)
    assert code == 0 and "no room for an answer" in err and "/reset" in err


@pytest.fixture
def interrupts():
    """Ctrl-C raises, also where the tests were begun in the background, with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_ends_an_answer_between_rounds(interrupts):
    with Interrupt() as stop:
        signal.raise_signal(signal.SIGINT)  # at once, in this thread, whatever others there are
        assert stop.asked
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("thinking", ["off", "medium"])
def test_history_only_grows(thinking):
    template = ChatTemplate(TOKENIZER)
    dialog = Dialog(template, "be brief")
    first = dialog.asked("one", thinking, None)
    drawn = [*TOKENIZER.encode("o"), *TOKENIZER.encode("k"), template.stop_ids[0]]  # not as "ok" is encoded
    dialog.answered(first, drawn)
    second = dialog.asked("two", thinking, 9)
    assert second[: len(first) + len(drawn)] == [*first, *drawn]
    dialog.answered(first, drawn[:-1])
    assert dialog.asked("two", thinking, 9) == second, "an answer that was cut is closed"
    said = "</think>o" if thinking == "off" else "<think>\no"
    assert said in TOKENIZER.decode(second) and TOKENIZER.decode(second).count("be brief") == 1


def test_history_is_what_the_template_renders():
    template = ChatTemplate(TOKENIZER)
    dialog = Dialog(template, None)
    first = dialog.asked("one", "off", None)
    dialog.answered(first, [*TOKENIZER.encode("fine"), template.stop_ids[0]])
    chat = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "fine"},
        {"role": "user", "content": "two"},
    ]
    assert dialog.asked("two", "off", None) == template.prompt(chat)


JINJA = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_folder_that_brings_a_template_is_asked_by_it(folder, tmp_path, capsys):
    path = tmp_path / "own"
    shutil.copytree(folder, path)
    (path / "chat_template.jinja").write_text(JINJA)
    assert cli.main([str(path), "--prompt", "why?", "--max-tokens", "6", "--temperature", "0"]) == 0
    captured = capsys.readouterr()
    prompt = TOKENIZER.encode("<|im_start|>user\nwhy?<|im_end|>\n<|im_start|>assistant\n", special=True)
    assert captured.out == TOKENIZER.decode(expected(folder, prompt, 6).tokens) + "\n"
    dialog = Dialog(load_template(load_tokenizer(path), "tokenizer"), None)
    dialog.answered(dialog.asked("why?", "off", None), [9, 8, TOKENIZER.id("<|im_end|>")])
    rest = "\n<|im_start|>user\nso?<|im_end|>\n<|im_start|>assistant\n"
    assert dialog.asked("so?", "off", None) == dialog.ids + TOKENIZER.encode(rest, special=True)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--out", "x"], 2, "no prompt"),
        (["--prompt", "x", "--out", "y"], 2, "--out is the file of answers"),
        (["--prompt", "x", "--budget", "3"], 2, "--budget is for thoughts"),
        (["--prompt", "x", "--raw", "--thinking", "regular"], 2, "belong to the chat template"),
        (["--prompt", "x", "--thinking", "regular"], 2, "texts are continued here; add --chat"),
        (["--prompt", "x", "--system", "be short"], 2, "texts are continued here; add --chat"),
        (["--prompts", "nowhere"], 3, "no such file"),
        (["--prompt", ""], 3, "prompt is empty"),
        (["--prompt", "a\udcff"], 3, "prompt is no valid text"),
        (["--prompt", "x", "--context", "4", "--max-tokens", "9"], 3, "or raise --context"),
        (["--prompt", "x", "--temperature", "1e-40"], 2, "or 1e-05 or more"),
        (["--prompt", "x", "--tokenizer", "nowhere"], 3, "tokenizer not found"),
        (["--prompt", "x", "--template", "nowhere"], 3, "chat template not found"),
        (["--prompt", "x", "--max-tokens", "99999999999"], 2, "memory than is free"),
    ],
)
def test_what_cannot_be_is_one_line(run, monkeypatch, arguments, code, said):
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    found, out, err = run(*arguments)
    assert (found, out) == (code, "") and said in err and err.count("\n") <= 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["runs"], "runs holds runs and is none itself; name one: runs/mine\n"),
        (["runs/sft"], "runs/sft is not a folder; name one of the runs there (runs/mine), or a folder"),
        (["nowhere"], "nowhere is not a folder; name the folder of a run, or a folder of weights\n"),
    ],
)
def test_a_folder_of_runs_names_them(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    for name in ("config.yaml", "run.json"):
        (tmp_path / "runs" / "mine" / name).write_text("{}")
    for status in (cli.main([*words, "--prompt", "x"]), evaluate.main(words)):
        assert status == 2
    first, second = capsys.readouterr().err.splitlines(keepends=True)
    assert first == second and first.startswith(f"error: {said}")


@pytest.mark.parametrize(
    ("command", "words", "said"),
    [
        (cli, ["x", "--promt", "y"], "unknown option --promt (did you mean --prompt?)"),
        (cli, ["x", "--top-k", "many"], "argument --top-k: many is not a whole number"),
        (evaluate, ["x", "--problem=3", "a=b"], "unknown option --problem (did you mean --problems?)"),
        (report, ["x", "--uot", "y"], "unknown option --uot (did you mean --out?)"),
    ],
)
def test_a_mistaken_option_is_one_line(capsys, command, words, said):
    with pytest.raises(SystemExit, match="2"):
        command.main(words)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {said}") and line.endswith("--help")


def test_a_text_may_begin_with_dashes(run):
    code, out, _ = run("--prompt", "--- a line", "--max-tokens", 2)
    assert code == 0 and out


def test_drafts_of_a_model_without_mtp(tmp_path, capsys):
    save_model(micro_model(vocab_size=TOKENIZER.vocab_size, num_nextn_predict_layers=0), tmp_path / "m")
    TOKENIZER.save(tmp_path / "m")
    command = [str(tmp_path / "m"), "--prompt", "x", "--max-tokens", "3", "--draft"]
    assert cli.main([*command, "2"]) == 2 and "no MTP module" in capsys.readouterr().err
    assert cli.main([*command, "auto"]) == 0


def test_help_and_bad_arguments_need_no_torch(tmp_path):
    program = """
import sys
from nemotron_ultra.generate import main
codes = []
for line in [["--help"], [], ["x", "--temperature", "-1"], ["x", "--top-p", "0"],
             ["x", "--prompt", "a", "--serve"],
             ["nowhere", "--prompt", "a"], [".", "--prompts", "nowhere"], [".", "--max-tokens", "0"]]:
    try:
        codes.append(main(line))
    except SystemExit as end:
        codes.append(end.code)
print(codes, sorted({"torch", "starlette", "uvicorn"} & set(sys.modules)), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == "[0, 2, 2, 2, 2, 2, 3, 2] []", done.stderr
    assert "Traceback" not in done.stderr and not list(tmp_path.iterdir())
