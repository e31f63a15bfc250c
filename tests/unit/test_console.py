"""The screen: plain in a file, live and coloured on a terminal only, readable at 80 columns, never fatal."""

import io
import math
import os
import pty
import subprocess
import sys

import pytest

from nemotron_ultra.observe.console import Console
from nemotron_ultra.observe.numbers import compact, duration, fixed, scientific

ROW = {
    "step": 12,
    "loss": 4.812,
    "mtp_1/loss": 4.91,
    "mtp_2/loss": 5.02,
    "grad_norm": 1.92,
    "lr": 6e-5,
    "tokens_per_second": 9134.0,
    "seconds": 0.3,
}


class Terminal(io.StringIO):
    def isatty(self):
        return True


def lines_of(*rows, total=200, every=1):
    out = io.StringIO()
    console = Console(total, every, out)
    for row in rows:
        console.step(row)
    return out.getvalue().splitlines()


@pytest.fixture
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)


def test_step_line():
    (line,) = lines_of(ROW)
    expected = " 12/200   6%  loss 4.812  mtp 4.91/5.02  grad 1.92  lr 6.0e-5  9.13k tok/s  0:56 left"
    assert line == expected


def test_every_prints_first_multiples_and_last():
    lines = lines_of(*({**ROW, "step": step} for step in range(1, 11)), total=10, every=4)
    assert [line.split("/")[0].strip() for line in lines] == ["1", "4", "8", "10"]
    assert lines[-1].endswith("done")


def test_validation_has_its_own_line():
    lines = lines_of({**ROW, "val/loss": 4.5, "val/bits_per_byte": 2.31, "val/mtp_1/loss": 4.7})
    assert len(lines) == 2
    assert lines[1] == " 12/200   6%  valid loss 4.500  2.310 bits per byte  mtp 4.70"


def test_not_finite_and_huge():
    (line,) = lines_of({"step": 1, "loss": math.nan, "grad_norm": 3.2e30, "lr": math.inf})
    assert "loss nan" in line and "grad 3.2e30" in line and "lr inf" in line and "-:-- left" in line


def test_only_step_is_needed():
    assert lines_of({"step": 3}) == ["  3/200   1%  loss -  -:-- left"]


def test_file_gets_no_escape_codes():
    out = io.StringIO()
    console = Console(10, 1, out)
    console.panel([("pretrain", "run runs/a"), ("model", "MEM*E " * 40)])
    console.step(ROW)
    console.note("saved")
    console.done("runs/a", "next")
    assert "\033" not in out.getvalue() and "\r" not in out.getvalue()


def test_panel_wraps_and_keeps_line_breaks():
    out = io.StringIO()
    Console(10, 1, out).panel([("pretrain", "one\ntwo"), ("pattern", "ME" * 150), ("plan", "")])
    lines = out.getvalue().splitlines()
    assert lines[0] == "pretrain   one" and lines[1] == "           two"
    assert max(map(len, lines)) <= 100 and lines[-1].startswith("plan")


def test_done_names_folder_page_and_commands(tmp_path):
    (tmp_path / "report.html").write_text("x")
    out = io.StringIO()
    Console(10, 1, out).done(tmp_path, ["first", "second"])
    assert [line.split()[0] for line in out.getvalue().splitlines()] == ["run", "report", "next", "or"]


def test_terminal_has_colours_and_a_bar(wide):
    out = Terminal()
    Console(200, 50, out).step(ROW)
    assert "\033[1mloss 4.812\033[0m" in out.getvalue()
    assert "[#" in out.getvalue() or "[--" in out.getvalue()


def test_no_color_keeps_the_bar_plain(wide, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    out = Terminal()
    Console(200, 1, out).step(ROW)
    assert "\033[1m" not in out.getvalue() and "\r\033[K" in out.getvalue()


def test_dumb_terminal_is_a_file(wide, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    out = Terminal()
    Console(200, 1, out).step(ROW)
    assert "\033" not in out.getvalue()


def test_lines_fit_in_80_columns(wide):
    out = Terminal()
    big = {**ROW, "step": 123456, "mtp_3/loss": 5.1, "tokens_per_second": 1.5e9, "grad_norm": 1e-9}
    console = Console(1_000_000, 1, out)
    console._colour = False
    console.step(big)
    console.close()
    for line in out.getvalue().replace("\r\033[K", "\n").splitlines():
        assert len(line) <= 80, line


def test_bar_is_gone_at_the_end(wide):
    out = Terminal()
    console = Console(12, 1, out)
    console.step({**ROW, "step": 11})
    console.step(ROW)
    assert "[###" in out.getvalue() and out.getvalue().endswith("\r\033[K")


def test_closed_pipe_does_not_stop_a_run():
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    console = Console(10, 1, Closed())
    console.step(ROW)
    console.done("runs/a", "next")


def test_no_standard_output_at_all(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    console = Console(10)
    console.step(ROW)
    console.done("runs/a", "next")


def test_reader_that_goes_away_leaves_exit_code_0():
    code = (
        "import time\nfrom nemotron_ultra.observe.console import Console\nc = Console(99)\n"
        "for s in range(1, 60): c.step({'step': s, 'loss': 1.0}); time.sleep(0.005)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.readline()
    process.stdout.close()
    errors = process.stderr.read()
    assert process.wait() == 0 and errors == b""


def test_ascii_stream_takes_any_text():
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    Console(10, 1, out).note("prose: ü → \N{GRINNING FACE}")
    assert out.buffer.getvalue() == b"prose: ? ? ?\n"


def test_real_terminal():
    leader, follower = pty.openpty()
    code = (
        "from nemotron_ultra.observe.console import Console\nc = Console(40)\n"
        "c.step({'step': 1, 'loss': 2.5}); c.note('x'); c.done('runs/a', 'go on')\n"
    )
    environment = {**os.environ, "TERM": "xterm"}
    subprocess.run([sys.executable, "-c", code], stdout=follower, env=environment, check=True)
    os.close(follower)
    text = os.read(leader, 65536).decode()
    os.close(leader)
    assert "loss 2.500" in text and "\033[" in text and "runs/a" in text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0.000"),
        (4.8123, "4.812"),
        (12345.0, "1.2e4"),
        (1e-5, "1.0e-5"),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
    ],
)
def test_fixed(value, text):
    assert fixed(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (941, "941"),
        (9134, "9.13k"),
        (999_960, "1.00M"),
        (2e13, "20.0T"),
        (1e18, "1.0e18"),
        (0.5, "0.50"),
    ],
)
def test_compact(value, text):
    assert compact(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(54, "0:54"), (723, "12:03"), (12310, "3:25:10"), (187200, "2d 4h"), (math.nan, "-:--"), (None, "-:--")],
)
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_scientific_of_text_and_huge_integers():
    assert scientific("x") == "-" and scientific(10**400) == "inf" and scientific(3e-7) == "3.0e-7"
