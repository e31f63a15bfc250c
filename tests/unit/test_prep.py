import errno
import gzip
import json
import random
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from filelock import FileLock

from nemotron_ultra import prep
from nemotron_ultra.data.documents import Reading, read_documents
from nemotron_ultra.data.inputs import find_files, fingerprint, make_parts, with_digests
from nemotron_ultra.data.manifest import read_manifest
from nemotron_ultra.data.parts import Options, split_of
from nemotron_ultra.data.prepare import Job, prepare
from nemotron_ultra.data.shards import Shard
from nemotron_ultra.data.tokenizer import load_tokenizer
from nemotron_ultra.errors import DataError
from nemotron_ultra.prep import text

TOKENIZER = load_tokenizer("builtin")


def words(seed, count=40):
    draw = random.Random(seed)
    return " ".join(draw.choice(["alpha", "beta", "größe", "delta", "x = 1", "\n"]) for _ in range(count))


def write_jsonl(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def texts_of(out, split="train"):
    shard = Shard(out / split)
    assert all(shard.document(i)[-1] == TOKENIZER.eos_id for i in range(shard.documents))
    return [TOKENIZER.decode(shard.document(i)[:-1]) for i in range(shard.documents)]


def outputs(out):
    names = ("train.bin", "train.idx", "valid.bin", "valid.idx", "manifest.json")
    return {name: (out / name).read_bytes() for name in names}


def job_for(path, out, fraction=0.2, part_bytes=1200):
    files = with_digests(find_files([str(path)], out))
    parts = make_parts(files, part_bytes)
    options = Options(valid_fraction=fraction)
    return Job(out, TOKENIZER, options, {"fingerprint": fingerprint(files)}), lambda first: parts[first:]


def test_every_kind_of_input(tmp_path, capsys):
    source = tmp_path / "in"
    (source / "sub").mkdir(parents=True)
    (source / ".git").mkdir()
    (source / ".git" / "config").write_text("hidden")
    (source / "a.txt").write_text("one")
    (source / "sub" / "b.md").write_bytes(b"\xef\xbb\xbftwo\r\n")
    write_jsonl(source / "c.jsonl", ["three", "four"])
    (source / "d.jsonl.gz").write_bytes(gzip.compress(b'{"text": "five"}\n\n{"text": "six"}'))
    assert prep.main([str(source), "--out", str(tmp_path / "out"), "--valid-fraction", "0"]) == 0
    assert texts_of(tmp_path / "out") == ["one", "three", "four", "five", "six", "two\r\n"]
    manifest = read_manifest(tmp_path / "out")
    assert manifest["splits"]["train"] == {
        "documents": 6,
        "tokens": Shard(tmp_path / "out/train").tokens,
        "bytes": 24,
    }
    assert "valid is empty" in capsys.readouterr().out


def test_nothing_is_dropped_without_a_reason(tmp_path, capsys):
    source = tmp_path / "in"
    source.mkdir()
    (source / "bad.txt").write_bytes(b"caf\xe9 is latin-1")
    (source / "image.png").write_bytes(b"\x89PNG\0\0")
    (source / "empty.txt").write_bytes(b" \n")
    lines = [
        b'{"text": "good"}',
        b"not json",
        b'{"body": 1}',
        b'{"text": 5}',
        b'{"text": "\\ud800"}',
        b'{"text": "\xff"}',
    ]
    (source / "rows.jsonl").write_bytes(b"\n".join(lines))
    assert prep.main([str(source), "--out", str(tmp_path / "out"), "--valid-fraction", "0"]) == 0
    manifest = read_manifest(tmp_path / "out")
    assert manifest["documents_in"] == 9 and manifest["invalid_utf8"] == 3
    assert manifest["splits"]["train"]["documents"] == 4
    reasons = {"binary file", "empty", "not JSON", "no field 'text'", "text is not a string"}
    assert manifest["dropped"] == dict.fromkeys(reasons, 1)
    assert texts_of(tmp_path / "out") == ["caf\ufffd is latin-1", "good", "\ufffd", "\ufffd"]
    assert "3 documents held invalid UTF-8" in capsys.readouterr().out


def test_separator_inside_text_files(tmp_path, monkeypatch):
    monkeypatch.setattr("nemotron_ultra.data.documents.READ_BYTES", 5)
    (tmp_path / "a.txt").write_text("one<|end|>two\n<|end|>\n<|end|>three<|end|>\n")
    out = tmp_path / "out"
    command = [str(tmp_path / "a.txt"), "--out", str(out), "--split-on", "<|end|>", "--valid-fraction", "0"]
    assert prep.main(command) == 0
    assert texts_of(out) == ["one", "two\n", "three"]
    assert read_manifest(out)["dropped"] == {"empty": 1}


@pytest.mark.parametrize("part_bytes", [1, 7, 64, 1000])
def test_byte_ranges_of_jsonl_cover_each_line_once(tmp_path, part_bytes):
    texts = [words(i, i % 7 + 1) for i in range(30)]
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    parts = make_parts(find_files([str(path)], tmp_path / "out"), part_bytes)
    found = [document.text for part in parts for document in read_documents(part, Reading())]
    assert found == texts


def test_parquet(tmp_path):
    pa = pytest.importorskip("pyarrow", reason="pyarrow (extra `data`) is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    texts = [words(i) for i in range(50)]
    parquet.write_table(pa.table({"body": texts, "n": range(50)}), tmp_path / "a.parquet", row_group_size=7)
    files = find_files([str(tmp_path / "a.parquet")], tmp_path / "out")
    parts = make_parts(files, 500)
    assert len(parts) > 3
    assert [d.text for p in parts for d in read_documents(p, Reading("body"))] == texts
    with pytest.raises(DataError, match=r"no column 'text'; allowed: body, n; name it with --text-field"):
        list(read_documents(parts[0], Reading()))


def test_datasets_are_streamed(tmp_path, monkeypatch):
    pytest.importorskip("datasets", reason="datasets (extra `data`) is not installed")
    monkeypatch.setattr("nemotron_ultra.data.hf_rows.ROWS", 8)
    (tmp_path / "in").mkdir()
    texts = [words(i) for i in range(30)]
    write_jsonl(tmp_path / "in" / "train.jsonl", texts)
    out = tmp_path / "out"
    command = [
        f"datasets:{tmp_path / 'in'}:train",
        "--out",
        str(out),
        "--workers",
        "1",
        "--valid-fraction",
        "0",
    ]
    assert prep.main(command) == 0
    assert texts_of(out) == texts


def test_missing_extra_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert prep.main(["datasets:wikitext", "--out", str(tmp_path)]) == 3
    assert "pip install 'nemotron-ultra[data]'" in capsys.readouterr().err


def test_equal_texts_never_lie_in_both_splits(tmp_path):
    texts = [words(i % 40) for i in range(120)]
    job, parts = job_for(write_jsonl(tmp_path / "a.jsonl", texts), tmp_path / "out", 0.3)
    manifest, _ = prepare(job, parts)
    train, valid = texts_of(job.out), texts_of(job.out, "valid")
    assert len(train) + len(valid) == 120 and len(valid) > 10
    assert not set(train) & set(valid)
    assert all(split_of(text.encode(), 0.3) == "valid" for text in valid)
    assert manifest["xz_bytes"] == manifest["splits"]["valid"]["bytes"] > 0


def test_named_validation_input(tmp_path):
    for name in ("train", "held"):
        (tmp_path / f"{name}.txt").write_text(name)
    out = tmp_path / "out"
    assert (
        prep.main([str(tmp_path / "train.txt"), "--valid", str(tmp_path / "held.txt"), "--out", str(out)])
        == 0
    )
    assert (texts_of(out), texts_of(out, "valid")) == (["train"], ["held"])
    assert read_manifest(out)["sources"][str(tmp_path / "held.txt")]["valid"]["documents"] == 1


def test_workers_and_interruptions_change_nothing(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [words(i) for i in range(40)])
    job, parts = job_for(path, tmp_path / "plain")
    prepare(job, parts)
    other, _ = job_for(path, tmp_path / "two")
    prepare(other, parts, workers=2)
    assert outputs(other.out) == outputs(job.out)
    third, _ = job_for(path, tmp_path / "stopped")
    for _attempt in range(2):
        with pytest.raises(KeyboardInterrupt):
            prepare(third, parts, progress=StopAfter(3))
    (third.out / ".parts" / "0000000.train.idx").write_bytes(b"")
    again = []
    prepare(third, parts, progress=lambda receipt, resumed: resumed or again.append(receipt.number))
    assert again[0] == 0 and len(again) == len(parts(0)) - 5
    assert outputs(third.out) == outputs(job.out) and not (third.out / ".parts").exists()


class StopAfter:
    def __init__(self, parts):
        self.left = parts

    def __call__(self, receipt, resumed):
        self.left -= not resumed
        if self.left == 0:
            raise KeyboardInterrupt


KILLED = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from test_prep import job_for
from nemotron_ultra.data.prepare import prepare
if __name__ == "__main__":
    job, parts = job_for(Path(sys.argv[1]), Path(sys.argv[2]))
    seen = []
    def progress(receipt, resumed):
        seen.append(receipt.number)
        if len(seen) == 4:
            print("here", flush=True)
            time.sleep(60)
    prepare(job, parts, workers=2, progress=progress)
"""


def test_kill_in_the_middle_leaves_no_workers_and_resumes(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [words(i) for i in range(40)])
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    command = [sys.executable, str(script), str(path), str(tmp_path / "out"), str(Path(__file__).parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "here\n"
        children = psutil.Process(process.pid).children(recursive=True)
        process.kill()
    assert len(children) >= 2 and psutil.wait_procs(children, timeout=20)[1] == []
    job, parts = job_for(path, tmp_path / "out")
    plain, _ = job_for(path, tmp_path / "plain")
    found = []
    prepare(job, parts, progress=lambda receipt, resumed: found.append(resumed))
    prepare(plain, parts)
    assert sum(found) >= 4 and outputs(job.out) == outputs(plain.out)


def test_a_finished_folder_is_left_alone(tmp_path, capsys):
    path, out = write_jsonl(tmp_path / "a.jsonl", ["a", "b"]), tmp_path / "out"
    command = [str(path), "--out", str(out), "--valid-fraction", "0"]
    assert prep.main(command) == 0
    before = outputs(out)
    assert prep.main(command) == 0
    assert "already complete" in capsys.readouterr().out and outputs(out) == before
    assert prep.main([*command, "--text-field", "body"]) == 3
    assert "options.reading" in capsys.readouterr().err
    write_jsonl(path, ["a", "b", "c"])
    assert prep.main(command) == 3 and outputs(out) == before
    assert "other input" in capsys.readouterr().err


def test_damage_to_a_finished_folder_is_seen(tmp_path, capsys):
    path, out = write_jsonl(tmp_path / "a.jsonl", ["a", "b"]), tmp_path / "out"
    command = [str(path), "--out", str(out), "--valid-fraction", "0"]
    assert prep.main(command) == 0
    content = bytearray((out / "train.bin").read_bytes())
    content[0] ^= 1
    (out / "train.bin").write_bytes(content)
    assert prep.main(command) == 3
    assert "damaged; got missing or changed: train.bin" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["missing"], "input not found; got missing"),
        (["empty"], "empty corpus: no files in the input"),
        (
            ["blank.txt"],
            "empty corpus: nothing to train on; got 1 documents in, 0 to valid, dropped: 1 empty",
        ),
        (["cut.jsonl.gz"], "cannot read cut.jsonl.gz"),
        (["a.txt", "datasets:x"], "datasets:NAME stands alone"),
        (["a.txt", "--tokenizer", "nowhere"], "tokenizer not found"),
        (["a.txt", "--out", "a.txt"], "a.txt is not a folder"),
        (["linked"], "gone is not a regular file"),
        (["bad.parquet"], "bad.parquet is not a parquet file"),
        (["a.txt", "--out", "full"], "full holds train.bin of something else"),
    ],
)
def test_bad_input_gives_one_clear_error(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("full").mkdir()
    Path("full/train.bin").write_text("x")
    Path("linked").mkdir()
    Path("linked/gone").symlink_to("nowhere")
    Path("bad.parquet").write_text("PAR1 no")
    Path("blank.txt").write_text("\n")
    Path("a.txt").write_text("text")
    Path("cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}' * 99)[:-9])
    assert prep.main(["--out", "out", *arguments]) == 3
    error = capsys.readouterr().err
    assert message in error and error.count("error:") == 1 and "Traceback" not in error


def test_one_preparation_at_a_time(tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    (tmp_path / "a.txt").write_text("text")
    with FileLock(out / ".lock"):
        assert prep.main([str(tmp_path / "a.txt"), "--out", str(out)]) == 3
    assert "another preparation is at work" in capsys.readouterr().err


def test_full_disk_keeps_finished_parts(tmp_path, monkeypatch, capsys):
    (tmp_path / "a.txt").write_text("text")

    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("nemotron_ultra.data.parts.write_json", full)
        assert prep.main([str(tmp_path / "a.txt"), "--out", str(tmp_path / "out")]) == 3
    assert "No space left on device; make room for" in capsys.readouterr().err
    assert not list((tmp_path / "out").glob("*.bin"))
    assert prep.main([str(tmp_path / "a.txt"), "--out", str(tmp_path / "out"), "--valid-fraction", "0"]) == 3
    assert prep.main([str(tmp_path / "a.txt"), "--out", str(tmp_path / "out")]) == 0


def test_the_command_needs_no_torch():
    code = "import sys, nemotron_ultra.prep; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_progress_says_rate_and_time_left(tmp_path):
    progress = text.Progress(2000)
    files = find_files([str(write_jsonl(tmp_path / "a.jsonl", ["a"]))], tmp_path / "out")
    job, parts = job_for(files[0].path, tmp_path / "out", 0)
    prepare(job, parts, progress=progress)
    assert " of 0.0 MB (1 %)  " in progress.line() and progress.line().endswith("s left")


def test_a_fraction_that_is_no_number(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        prep.main([str(tmp_path), "--out", str(tmp_path / "out"), "--valid-fraction", "x"])
    assert "invalid fraction value: 'x'" in capsys.readouterr().err


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit, match="0"):
        prep.main(["--help"])
    shown = capsys.readouterr().out
    assert all(f"  {name:<9}{about}" in shown for name, about in prep.COMMANDS.items())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["sft", "a=b", "--out", "x", "--max-lenght", "9"],
            "unknown option --max-lenght (did you mean --max-length?)",
        ),
        (["synth", "--cuont=3"], "unknown option --cuont (did you mean --count?)"),
        (["preview", "x", "--row", "1"], "unknown option --row (did you mean --rows?)"),
        (["text", "x", "--zzz", "1", "--out", "x"], "unknown option --zzz;"),
        (["prompts"], "the following arguments are required: INPUT, --out"),
    ],
)
def test_a_mistake_in_the_options_is_one_line(capsys, words, said):
    with pytest.raises(SystemExit, match="2"):
        prep.main(words)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {said}") and line.endswith("--help")


def test_a_misspelt_command(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert prep.main(["sfft", "a=b", "--out", "x"]) == 2
    assert capsys.readouterr().err == "error: no command and no file sfft (did you mean sft?)\n"
    write_jsonl(tmp_path / "texts", ["a folder's own name is no mistake"] * 3)
    with pytest.raises(SystemExit, match="2"):
        prep.main(["texts"])
    assert "required: --out" in capsys.readouterr().err


def test_without_arguments_the_commands_are_named(capsys):
    with pytest.raises(SystemExit, match="2"):
        prep.main([])
    shown = capsys.readouterr().err
    assert all(f"  {name}" in shown for name in prep.COMMANDS)
