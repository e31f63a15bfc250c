"""Rows of JSONL and parquet files, each with its place ("file:line") or the reason it is none.

As in `prep text` and `prep sft`, bytes that are not UTF-8 and half surrogate pairs become U+FFFD.
"""

from __future__ import annotations

import json
import lzma
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemotron_ultra.data.documents import BOM, LONE_SURROGATE, open_binary
from nemotron_ultra.data.inputs import InputFile, find_files, parquet_module
from nemotron_ultra.errors import DataError

NOT_JSON = "not JSON"
NOT_AN_OBJECT = "not a JSON object"


@dataclass(frozen=True)
class Row:
    """`value`, or `dropped`: why there is none. place: FILE:LINE, lines from 1 (parquet: rows from 1).
    invalid: it held what is no UTF-8."""

    place: str
    value: dict[str, Any]
    dropped: str | None = None
    invalid: bool = False


def find_row_files(inputs: list[str], out: Path) -> list[InputFile]:
    """The JSONL and parquet files among `inputs` (files or folders). Raises DataError for a file of another
    kind that was named itself, and for no file at all."""
    files = find_files(inputs, out)
    for file in files:
        if file.kind == "text" and Path(file.source).expanduser().is_file():
            raise DataError("input holds no rows", got=file.path, allowed=".jsonl, .ndjson, .parquet")
    rows = [file for file in files if file.kind != "text"]
    if not rows:
        raise DataError("no .jsonl, .ndjson or .parquet file in the input", got=" ".join(inputs))
    return rows


def read_rows(file: InputFile) -> Iterator[Row]:
    """Rows of one file in order; blank lines are none. Raises DataError if it cannot be read at all."""
    try:
        yield from _parquet(file) if file.kind == "parquet" else _jsonl(file)
    except DataError:
        raise
    except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError) as error:
        raise DataError(f"cannot read {file.path}", got=error) from error


def parse_line(line: bytes, place: str) -> Row:
    """The row of a line of JSONL."""
    line = line.removeprefix(BOM)
    try:
        text, invalid = line.decode("utf-8"), False
    except UnicodeDecodeError:
        text, invalid = line.decode("utf-8", "replace"), True
    try:
        value = json.loads(text)
        if "\\ud" in text or "\\uD" in text:
            spelled = json.dumps(value, ensure_ascii=False)
            if LONE_SURROGATE.search(spelled):
                value, invalid = json.loads(LONE_SURROGATE.sub("\ufffd", spelled)), True
    except (ValueError, RecursionError):
        return Row(place, {}, NOT_JSON)
    return Row(place, value, invalid=invalid) if isinstance(value, dict) else Row(place, {}, NOT_AN_OBJECT)


def _jsonl(file: InputFile) -> Iterator[Row]:
    with open_binary(file.path) as stream:
        for number, line in enumerate(stream, 1):
            if line.strip():
                yield parse_line(line, f"{file.name}:{number}")


def _parquet(file: InputFile) -> Iterator[Row]:
    number = 0
    for batch in parquet_module().ParquetFile(file.path).iter_batches(batch_size=256):
        for value in batch.to_pylist():
            number += 1
            yield Row(f"{file.name}:{number}", _as_json(value))


def _as_json(value: Any) -> Any:
    """A table gives every row the fields of all rows, those that a row does not have as None, and has types
    that JSON has not: times, decimals and bytes become text."""
    if isinstance(value, dict):
        return {key: _as_json(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_as_json(inner) for inner in value]
    if value is None or isinstance(value, str | int | float):
        return value
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
