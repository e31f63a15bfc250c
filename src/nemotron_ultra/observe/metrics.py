"""metrics.jsonl: one JSON object a line, a line a step; the one source of every view of a run.

JSON has no NaN and no infinity: they are written as the strings "NaN", "Infinity" and "-Infinity" and read
back as floats.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from nemotron_ultra.errors import DataError

_SPECIAL = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def encode_row(row: Mapping[str, object]) -> str:
    """One line of strict JSON without its newline; numpy and torch scalars are turned into Python numbers."""
    return json.dumps(
        {key: _plain(value) for key, value in row.items()}, allow_nan=False, separators=(", ", ": ")
    )


def decode_row(line: str | bytes) -> dict[str, object]:
    """The inverse of `encode_row`. Raises ValueError for a line that is no JSON object."""
    row = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError(f"a {type(row).__name__}, not an object")
    return {
        key: _SPECIAL.get(value, value) if isinstance(value, str) else value for key, value in row.items()
    }


def _plain(value: object) -> object:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if not isinstance(value, float):
        value = value.item()  # numpy and torch scalars
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


class MetricsLog:
    """Appends rows to metrics.jsonl. A row is one write to the kernel: a killed process loses no earlier row.

    A last line that was cut by a crash is removed when the file is opened.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._file = self._open()

    def _open(self) -> int:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        _mend_tail(handle)
        return handle

    def append(self, row: Mapping[str, object]) -> None:
        """Write one row. Raises DataError (disk full) and leaves the file at its last whole line."""
        line = (encode_row(row) + "\n").encode()
        if os.fstat(self._file).st_nlink == 0:  # somebody deleted the file: begin it again
            self.close()
            self._file = self._open()
        end = os.fstat(self._file).st_size
        try:
            written = os.write(self._file, line)
            if written < len(line):
                os.write(self._file, line[written:])
        except OSError as error:
            os.ftruncate(self._file, end)
            raise DataError(
                f"cannot write {self.path}",
                got=error.strerror,
                do="free space on that disk and run the same command again",
            ) from error

    def truncate_after(self, step: int) -> int:
        """Drop rows with a step above `step` (on resume) by writing a new file and renaming it.

        Returns the number of rows dropped; the file is untouched if that is 0.
        """
        fresh, dropped = self.path.with_name(f".{self.path.name}.tmp"), 0
        with open(fresh, "wb") as out:
            for line, row in _lines(self.path):
                late = isinstance(row.get("step"), int | float) and row["step"] > step
                dropped += late
                out.write(b"" if late else line + b"\n")
            out.flush()
            os.fsync(out.fileno())
        if not dropped:
            fresh.unlink()
            return 0
        os.replace(fresh, self.path)
        self.close()
        self._file = self._open()
        return dropped

    def close(self) -> None:
        os.close(self._file)


def read_metrics(path: str | Path) -> list[dict[str, object]]:
    """All rows in file order; a cut last line is left out.

    Errors: DataError for a missing file, or a line before the last that is no JSON object.
    """
    if not Path(path).is_file():
        raise DataError(f"{path} is not there", do="name the folder of a run that has begun to train")
    return [row for _, row in _lines(Path(path))]


def _lines(path: Path) -> Iterator[tuple[bytes, dict[str, object]]]:
    """Each whole line with its row; a last line without its newline is left out if it is no JSON object."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            row = _row_or_none(path, number, line)
            if row is not None:
                yield line.rstrip(b"\r\n"), row


def _row_or_none(path: Path, number: int, line: bytes) -> dict[str, object] | None:
    if not line.strip():
        return None
    try:
        return decode_row(line)
    except ValueError as error:
        if not line.endswith(b"\n"):
            return None  # cut by a crash
        raise DataError(
            f"{path}, line {number} is not a JSON object", got=error, do="remove that line"
        ) from error


def _mend_tail(handle: int) -> None:
    """End the file with a newline: cut a torn last line, complete a whole one."""
    size = os.fstat(handle).st_size
    start, tail = size, b""
    while start > 0 and b"\n" not in tail:
        begin = max(0, start - 65536)
        tail = os.pread(handle, start - begin, begin) + tail
        start = begin
    torn = tail.rpartition(b"\n")[2]
    if not torn:
        return
    try:
        decode_row(torn)
        os.write(handle, b"\n")
    except ValueError:
        os.ftruncate(handle, size - len(torn))
