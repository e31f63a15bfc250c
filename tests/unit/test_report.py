"""`python -m nemotron_ultra.report`: a page, its name, exit codes, and no torch."""

import os
import subprocess
import sys

import pytest

from nemotron_ultra import report
from nemotron_ultra.observe.metrics import MetricsLog


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "runs" / "a"
    log = MetricsLog(folder / "metrics.jsonl")
    for step in range(1, 4):
        log.append({"step": step, "loss": 5.0 - step})
    return folder


def test_page_in_the_run_folder(run, capsys):
    assert report.main([str(run)]) == 0
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    assert (run / "report.html").read_text().startswith("<!doctype html>")


def test_two_runs_do_not_replace_the_page_of_one(run, tmp_path, capsys):
    second = tmp_path / "runs" / "b"
    MetricsLog(second / "metrics.jsonl").append({"step": 1, "loss": 4.0})
    assert report.main([str(run)]) == 0 and report.main([str(run), str(second)]) == 0
    assert (run / "report_with_b.html").is_file()
    assert "report_with_b.html" in capsys.readouterr().out


def test_out(run, tmp_path):
    assert report.main([str(run), "--out", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").is_file() and not (run / "report.html").exists()


@pytest.mark.parametrize(
    ("prepare", "code", "said"),
    [
        (lambda folder: None, 2, "is not a folder"),
        (lambda folder: folder.mkdir(), 2, "is not a run folder"),
        (
            lambda folder: (folder.mkdir(), [(folder / f).touch() for f in ("scores.json", "report.html")]),
            2,
            "open the page of this chain",
        ),
        (lambda folder: (folder.mkdir(), (folder / "config.yaml").touch()), 3, "no metrics.jsonl yet"),
        (lambda folder: (folder.mkdir(), (folder / "metrics.jsonl").touch()), 3, "holds no step"),
        (lambda folder: (folder.mkdir(), (folder / "metrics.jsonl").write_text("x\n{}\n")), 3, "line 1"),
    ],
)
def test_errors(tmp_path, capsys, prepare, code, said):
    prepare(tmp_path / "run")
    before = sorted(tmp_path.rglob("*"))
    assert report.main([str(tmp_path / "run")]) == code
    errors = capsys.readouterr().err
    assert said in errors and errors.count("\n") == 1 and sorted(tmp_path.rglob("*")) == before


def test_a_run_that_is_not_there_is_named_first(tmp_path, capsys):
    assert report.main([str(tmp_path / "nowhere")]) == 2
    assert "name the folder of a run" in capsys.readouterr().err


@pytest.mark.parametrize("out", ["/dev/zero", "/proc/report.html"])
def test_a_device_and_an_unwritable_folder_are_refused(run, capsys, out):
    """A device is not read to its end; nothing can be made in /proc."""
    if not os.path.exists(os.path.dirname(out)):
        pytest.skip(f"no {out} here")
    assert report.main([str(run), "--out", out]) in (2, 3)
    assert "name another file with --out" in capsys.readouterr().err


def test_no_arguments_is_a_usage_error():
    with pytest.raises(SystemExit) as stop:
        report.main([])
    assert stop.value.code == 2


def test_command_needs_no_torch(run):
    code = (
        "import sys\nfrom nemotron_ultra.report import main\n"
        f"code = main([{str(run)!r}])\nassert 'torch' not in sys.modules\n"
        "sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
