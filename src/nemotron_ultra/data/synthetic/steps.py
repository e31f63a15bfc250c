"""One step over JSONL that a kill cannot harm: rows in order -> rows or a reason, in chunks with a receipt.

A chunk's rows are appended and synced, then the receipt says how far the files are good. A resumed step cuts
both files back to that and goes on with the next row, so the finished file is the same as without the kill.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from nemotron_ultra.data.manifest import write_json
from nemotron_ultra.data.parts import EXAMPLES
from nemotron_ultra.errors import DataError

Row = dict[str, Any]
CHUNK = 256


@dataclass(frozen=True)
class Drop:
    """Why a row goes no further. reason: short and stable, for counting; detail: what was found."""

    reason: str
    detail: str = ""


class Step(Protocol):
    """One result for every row, in order and whatever the chunks; `chunk` rows at a time."""

    name: str
    chunk: int

    def open(self, source: Path | None, kept: Iterable[Row]) -> None:
        """Before the first chunk. source: all rows of the input; kept: rows of the output so far."""
        ...

    def work(self, rows: list[Row]) -> list[Row | Drop]: ...


@dataclass
class Receipt:
    """How far a step is: rows in = rows out + dropped; bytes of the two files that are good."""

    name: str
    rows_in: int = 0
    rows_out: int = 0
    bytes: int = 0
    dropped_bytes: int = 0
    finished: bool = False
    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def counts(self) -> dict[str, Any]:
        """What a manifest says of the step."""
        return {
            "name": self.name,
            "in": self.rows_in,
            "out": self.rows_out,
            "dropped": dict(self.dropped),
            "examples": self.examples,
        }


Report = Callable[[Receipt, int], None]


def step_path(folder: Path, number: int, name: str) -> Path:
    return folder / f"{number}-{name}.jsonl"


def run_step(
    folder: Path,
    number: int,
    step: Step,
    source: Path | Callable[[int], Iterator[Row]],
    report: Report = lambda receipt, new: None,
) -> Receipt:
    """Work off `source` (the file of the step before, or rows from a number on) into NUMBER-NAME.jsonl.

    report is told of every finished chunk and its rows. Raises DataError if a file is shorter than its
    receipt says.
    """
    path = step_path(folder, number, step.name)
    place = path.with_suffix(".json")
    receipt = _receipt(place, step.name)
    dropped_path = path.with_suffix(".dropped.jsonl")
    for file, size in ((path, receipt.bytes), (dropped_path, receipt.dropped_bytes)):
        _check_size(file, size, receipt.finished)
    if receipt.finished:
        report(receipt, 0)
        return receipt
    with _cut(path, receipt.bytes) as out, _cut(dropped_path, receipt.dropped_bytes) as dropped:
        rows = source(receipt.rows_in) if callable(source) else read_jsonl(source, receipt.rows_in)
        step.open(None if callable(source) else source, read_jsonl(path))
        while chunk := list(islice(rows, step.chunk)):
            results = step.work(chunk)
            for row, result in zip(chunk, results, strict=True):
                _write(row, result, out, dropped, receipt)
            _commit(place, receipt, out, dropped)
            report(receipt, len(chunk))
        receipt.finished = True
        _commit(place, receipt, out, dropped)
    return receipt


def read_jsonl(path: Path, start: int = 0) -> Iterator[Row]:
    """Rows of a step's file from row `start` on."""
    with open(path, "rb") as file:
        for line in islice(file, start, None):
            yield json.loads(line)


def _write(row: Row, result: Row | Drop, out: BinaryIO, dropped: BinaryIO, receipt: Receipt) -> None:
    receipt.rows_in += 1
    if not isinstance(result, Drop):
        out.write(line(result))
        receipt.rows_out += 1
        return
    receipt.dropped[result.reason] += 1
    places = receipt.examples.setdefault(result.reason, [])
    if len(places) < EXAMPLES:
        places.append(f"{row['id']}: {result.detail}" if result.detail else row["id"])
    dropped.write(line({"reason": result.reason, "detail": result.detail, "row": row}))


def line(row: Row) -> bytes:
    """A row as JSONL; half of a surrogate pair, which UTF-8 cannot hold, stays an escape."""
    try:
        return (json.dumps(row, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError:
        return (json.dumps(row) + "\n").encode()


def _commit(place: Path, receipt: Receipt, out: BinaryIO, dropped: BinaryIO) -> None:
    for file in (out, dropped):
        file.flush()
        os.fsync(file.fileno())
    receipt.bytes, receipt.dropped_bytes = out.tell(), dropped.tell()
    write_json(place, vars(receipt))


def _receipt(place: Path, name: str) -> Receipt:
    if not place.is_file():
        return Receipt(name)
    content = json.loads(place.read_text(encoding="utf-8"))
    return Receipt(**content | {"dropped": Counter(content["dropped"])})


def _check_size(path: Path, size: int, finished: bool) -> None:
    there = path.stat().st_size if path.exists() else 0
    if there < size or (finished and there != size):
        raise DataError(
            f"{path} is not what its receipt says",
            got=f"{there} bytes, not {size}",
            do="remove the folder and give the command again",
        )


def _cut(path: Path, size: int) -> BinaryIO:
    path.touch()
    file = open(path, "r+b")  # noqa: SIM115, the caller's `with` closes it
    file.truncate(size)
    file.seek(size)
    return file
