"""After an error of the input or the options, its advice can be followed in the same folder."""

import gzip
import json
import os
from pathlib import Path

import pytest

from nemotron_ultra import prep

pytest.importorskip("pyarrow", reason="pyarrow (extra `data`) is not installed")


def chat(number):
    question = {"role": "user", "content": f"Square of {number}?"}
    return json.dumps({"messages": [question, {"role": "assistant", "content": f"{number * number}"}]})


def prepared(*arguments, out="out"):
    defaults = ["--out", str(out), "--valid-fraction", "0", "--max-length", "256"]
    return prep.main(["sft", *defaults, *arguments])


def files(out="out"):
    return {path.name: path.read_bytes() for path in Path(out).iterdir() if path.name != ".lock"}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text("".join(chat(i) + "\n" for i in range(30)))
    Path("torn.jsonl").write_text(chat(99) + "\n{\n")


@pytest.mark.parametrize(
    "wrong, advice, right",
    [
        (["b=torn.jsonl", "--strict"], "leave out --strict", ["b=torn.jsonl"]),
        (["b=torn.jsonl", "--messages-field", "m"], "check its files, --messages-field", ["b=torn.jsonl"]),
        (["b=cut.jsonl.gz"], "cannot read cut.jsonl.gz", []),
        (["--max-length", "4"], "check --max-length", []),
        (["--max-length", "4", "--on-overlong", "error"], "raise --max-length", []),
    ],
)
def test_the_mended_command_goes_on(capsys, wrong, advice, right):
    Path("cut.jsonl.gz").write_bytes(gzip.compress(chat(1).encode() * 9)[:-9])
    assert prepared("a=a.jsonl", *wrong) == 3 and advice in capsys.readouterr().err
    assert prepared("a=a.jsonl", *right) == 0 and prepared("a=a.jsonl", *right, out="other") == 0
    assert files() == files("other")


def test_what_the_mended_command_left_as_it_was_is_kept(capsys):
    assert prepared("a=a.jsonl", "b=torn.jsonl", "--max-length", "4") == 3
    assert prepared("a=a.jsonl:weight=2", "b=torn.jsonl:thinking=on") == 0
    assert "1 part finished by an earlier run" in capsys.readouterr().out


@pytest.fixture
def stopped(monkeypatch):
    """Part 0 has its receipt, and the disk refuses the first file's."""
    with monkeypatch.context() as patch:
        patch.setattr(
            "nemotron_ultra.data.sft_shards.write_json", lambda *_: os.open("/nowhere", os.O_RDONLY)
        )
        assert prepared("a=a.jsonl") == 3


def test_a_receipt_that_the_disk_lost_is_no_receipt(stopped, capsys):
    Path("out/.parts/spools/a/0000000.json").write_bytes(b"")
    Path("out/.parts/files/train-00000.parquet.json").write_bytes(bytes(99))
    assert prepared("a=a.jsonl") == 0 and "finished by an earlier run" not in capsys.readouterr().out
    assert prepared("a=a.jsonl", out="other") == 0 and files() == files("other")


def test_a_lost_plan_is_an_error(stopped, capsys):
    Path("out/.parts/plan.json").write_bytes(b"")
    assert prepared("a=a.jsonl") == 3 and "plan.json is damaged; remove out" in capsys.readouterr().err


def test_a_stopped_preparation_still_refuses_another_command(stopped, capsys):
    assert prepared("a=a.jsonl", "--max-length", "128") == 3
    assert "a preparation with other options.max_length" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["plan", "files", "spools", "failed", "plan.json", "train", "manifest.json"])
def test_a_source_may_have_any_allowed_name(name):
    assert prepared(f"{name}=a.jsonl", "--valid-fraction", "0.5") == 0
    assert set(files()) == {"manifest.json", "train-00000.parquet", f"valid-{name}-00000.parquet"}


def test_a_file_name_that_is_no_utf8(capsys):
    os.mkdir("set")
    with open(b"set/\xff.jsonl", "w") as file:
        file.write(chat(1) + "\n{\n")
    assert prepared("a=set") == 0
    assert r"not JSON (first: set/\xff.jsonl:2: " in capsys.readouterr().out
    assert prepared("a=set") == 0 and "already complete" in capsys.readouterr().out


def test_a_folder_that_cannot_be_made_and_one_of_something_else(capsys):
    assert prepared("a=a.jsonl", out="a.jsonl/out") == 3
    assert "cannot make the folder a.jsonl/out; got Not a directory" in capsys.readouterr().err
    os.mkdir("out")
    Path("out/manifest.json").write_text('{"kind": "prompts"}')
    assert prepared("a=a.jsonl") == 3 and "out holds something else" in capsys.readouterr().err
