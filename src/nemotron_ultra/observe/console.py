"""The screen of a run: start panel, one line a step, validation lines, last lines; a live bar on a terminal.

A file or a pipe gets plain text; colours go to a terminal only, and not with NO_COLOR set (no-color.org).
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

from nemotron_ultra.observe.numbers import compact, duration, fixed, scientific

_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "cyan": "36"}
_LOG_WIDTH = 100
_LABEL = 10
_BAR_SECONDS = 0.1


class Console:
    """Writes a run's lines to `stream` (stdout). It never raises: a closed pipe only ends the output.

    Args: total_steps of the whole run; every: steps between step lines.
    """

    def __init__(self, total_steps: int, every: int = 1, stream: TextIO | None = None):
        self.total_steps, self.every = total_steps, max(1, every)
        # Without a standard output (`>&-`) sys.stdout is None.
        self._stream = stream or sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        self._lock = threading.Lock()  # sinks report from their threads
        self._live = _is_terminal(self._stream)
        self._colour = self._live and not os.environ.get("NO_COLOR")
        self._bar = ""
        self._bar_time = 0.0
        self._first: tuple[int, float] | None = None

    @property
    def width(self) -> int:
        """Columns of the terminal, or 100 for a log file; never under 40."""
        columns = shutil.get_terminal_size((80, 24)).columns if self._live else _LOG_WIDTH
        return max(40, columns)

    def panel(self, rows: Sequence[tuple[str, str]]) -> None:
        """Label and text of each row; a long text goes on below itself, and its own line breaks are kept."""
        for number, (label, text) in enumerate(rows):
            indent = max(_LABEL, max(len(name) for name, _ in rows)) + 1
            lines = _wrap(str(text), self.width - indent)
            style = "bold" if number == 0 else "cyan"
            head = self._paint(label.ljust(indent), style)
            self._print("\n".join([head + lines[0], *(" " * indent + line for line in lines[1:])]))

    def step(self, row: Mapping[str, object]) -> None:
        """A line every `every` steps, at the first and the last; `val/` figures get a line of their own."""
        step, now = int(row["step"]), time.monotonic()
        left = self._left(step, row, now)
        begins = self._first is None
        if begins:
            self._first = (step, now)
        if begins or step % self.every == 0 or step >= self.total_steps:
            self._print(self._step_line(step, row, left))
        if any(key.startswith("val/") for key in row):
            self.validation(row)
        if self._live:
            self._draw_bar(step, row, left, now)

    def validation(self, row: Mapping[str, object]) -> None:
        """One line with every `val/` figure of the row."""
        fields = [f"loss {fixed(row['val/loss'])}"] if "val/loss" in row else []
        if "val/bits_per_byte" in row:
            fields.append(f"{fixed(row['val/bits_per_byte'])} bits per byte")
        losses = [
            key for key in row if key.startswith("val/") and key.endswith("/loss") and key != "val/loss"
        ]
        depths = sorted(key for key in losses if key.startswith("val/mtp_"))
        if depths:
            fields.append("mtp " + "/".join(fixed(row[key], 2) for key in depths))
        sources = [f"{key.split('/')[1]} {fixed(row[key], 2)}" for key in losses if key not in depths]
        fields += [f"loss by source: {', '.join(sources)}"] if sources else []
        fields += [
            f"{key.removeprefix('val/').removesuffix('/score') or 'score'} {fixed(row[key])}"
            for key in row
            if key.startswith("val/") and key.endswith("score")
        ]
        self._print(f"{self._place(int(row['step']))}  {self._paint('valid', 'green')} {'  '.join(fields)}")

    def note(self, text: str) -> None:
        """A line of its own, such as a checkpoint saved or a resume."""
        for line in str(text).splitlines():
            self._print(self._paint(line, "dim"))

    def done(self, run_dir: str | Path, next_command: str | Sequence[str] | None = None) -> None:
        """The last lines: the run folder, its page if there is one, and the next command."""
        self._clear_bar()
        commands = [next_command] if isinstance(next_command, str) else list(next_command or [])
        rows = [("run", str(run_dir))]
        if (Path(run_dir) / "report.html").is_file():
            rows.append(("report", str(Path(run_dir) / "report.html")))
        rows += [("next" if i == 0 else "or", command) for i, command in enumerate(commands)]
        for label, text in rows:
            self._print(self._paint(label.ljust(_LABEL + 1), "cyan") + text)

    def close(self) -> None:
        """Remove the live bar, before another program writes to the terminal."""
        self._clear_bar()

    def _step_line(self, step: int, row: Mapping[str, object], left: float) -> str:
        for spread in (True, False):
            fields = self._fields(row, left, spread)
            line = f"{self._place(step)}  " + "  ".join(fields)
            if len(line) <= self.width:
                break
        while len(line) > self.width and self._live and len(fields) > 2:
            del fields[-2]  # keep the loss in front and the time left at the end
            line = f"{self._place(step)}  " + "  ".join(fields)
        return self._emphasise(line, row)

    def _fields(self, row: Mapping[str, object], left: float, spread: bool) -> list[str]:
        depths = [row[f"mtp_{k}/loss"] for k in range(1, 33) if f"mtp_{k}/loss" in row]
        fields = [f"loss {fixed(row.get('loss'))}"]
        if depths and spread:
            fields.append("mtp " + "/".join(fixed(loss, 2) for loss in depths))
        elif depths:
            fields.append("mtp " + fixed(sum(depths) / len(depths), 2))
        if "reward/mean" in row:
            fields.append(f"reward {fixed(row['reward/mean'])}")
        if "teacher/gap_mean" in row:
            fields.append(f"gap {fixed(row['teacher/gap_mean'])}")
        if "grad_norm" in row:
            fields.append(f"grad {fixed(row['grad_norm'], 2)}")
        if "lr" in row:
            fields.append(f"lr {scientific(row['lr'])}")
        if "tokens_per_second" in row:
            fields.append(f"{compact(row['tokens_per_second'])} tok/s")
        fields.append(f"{duration(left)} left" if step_of(row) < self.total_steps else "done")
        return fields

    def _place(self, step: int) -> str:
        digits = len(str(self.total_steps))
        percent = 100 * step // self.total_steps if self.total_steps else 100
        return f"{step:>{digits}}/{self.total_steps} {percent:>3}%"

    def _left(self, step: int, row: Mapping[str, object], now: float) -> float:
        """Seconds to the end at the pace since the first step seen, validation and checkpoints included."""
        if self._first is not None and step > self._first[0]:
            pace = (now - self._first[1]) / (step - self._first[0])
        else:
            seconds = row.get("seconds")
            pace = float(seconds) if isinstance(seconds, int | float) else float("nan")
        return pace * max(0, self.total_steps - step)

    def _emphasise(self, line: str, row: Mapping[str, object]) -> str:
        if not self._colour:
            return line
        line = line.replace(
            f"loss {fixed(row.get('loss'))}", self._paint(f"loss {fixed(row.get('loss'))}", "bold"), 1
        )
        return line.replace("nan", self._paint("nan", "red")).replace("inf", self._paint("inf", "red"))

    def _paint(self, text: str, style: str) -> str:
        return f"\033[{_CODES[style]}m{text}\033[0m" if self._colour else text

    def _draw_bar(self, step: int, row: Mapping[str, object], left: float, now: float) -> None:
        if step >= self.total_steps:
            self._clear_bar()
        elif now - self._bar_time >= _BAR_SECONDS:
            room = max(10, min(40, self.width - 44))
            full = room * step // max(1, self.total_steps)
            bar = "#" * full + "-" * (room - full)
            text = (
                f"[{bar}] {self._place(step).strip()}  loss {fixed(row.get('loss'))}  {duration(left)} left"
            )
            self._bar, self._bar_time = text[: self.width - 1], now
            self._write("\r\033[K" + self._bar)

    def _clear_bar(self) -> None:
        if self._bar:
            self._bar = ""
            self._write("\r\033[K")

    def _print(self, text: str) -> None:
        erase, again = ("\r\033[K", self._bar) if self._bar else ("", "")
        self._write(f"{erase}{text}\n{again}")

    def _write(self, text: str) -> None:
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        with self._lock:
            try:
                self._stream.write(text.encode(encoding, "replace").decode(encoding))
                self._stream.flush()
            except (OSError, ValueError):  # a closed pipe or terminal: the run and metrics.jsonl go on
                self._mute()

    def _mute(self) -> None:
        """Send all further output nowhere, also what the interpreter flushes when it ends."""
        nowhere = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        if self._stream is sys.__stdout__ and not self._stream.closed:
            os.dup2(nowhere.fileno(), self._stream.fileno())
        self._stream, self._live, self._colour, self._bar = nowhere, False, False, ""


def step_of(row: Mapping[str, object]) -> int:
    return int(row["step"])


def _wrap(text: str, width: int) -> list[str]:
    lines = []
    for line in text.splitlines() or [""]:
        lines += textwrap.wrap(line, max(20, width), break_on_hyphens=False, drop_whitespace=True) or [""]
    return lines


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty() and os.environ.get("TERM") != "dumb"
    except ValueError:  # closed
        return False
