"""The rows of one part of a source: each a mapping, or the reason why it is none.

A row's place is the number of its line (JSONL, blank lines counted) or row (parquet, streams) within the
part; with the sizes of the parts before, that is its place in the file.
"""

from __future__ import annotations

import json
import lzma
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nemotron_ultra.data.documents import LONE_SURROGATE, open_binary, read_lines
from nemotron_ultra.data.inputs import Part, Piece, parquet_module
from nemotron_ultra.data.sft_sources import check_columns
from nemotron_ultra.errors import DataError

READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Row:
    """`value`, or `dropped`: why there is none, and `detail`. invalid: it held bytes that are no UTF-8."""

    place: int
    value: dict[str, Any] | None
    dropped: str = ""
    detail: str = ""
    invalid: bool = False


def read_rows(part: Part, columns: Sequence[str]) -> Iterator[Row]:
    """Rows of a part in order, blank lines as rows that are dropped as "". Raises DataError: unreadable."""
    if part.kind == "rows":
        for place, text in enumerate(part.rows):
            row = _parsed(place, text, False)
            yield replace(row, value=_without_nulls(row.value))
        return
    (piece,) = part.pieces
    try:
        yield from (_parquet(piece, columns) if part.kind == "parquet" else _jsonl(piece))
    except DataError:
        raise
    except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError) as error:
        raise DataError(f"cannot read {piece.path}", got=error) from error


def place_name(kind: str, name: str, place: int) -> str:
    """How a person finds a row: file:LINE counted from 1, or file:row N counted from 0."""
    return f"{name}:{place + 1}" if kind == "jsonl" else f"{name}:row {place}"


def lines_before(part: Part) -> int:
    """Lines of the file before the part's first one (read again: only needed to name a fatal line)."""
    (piece,) = part.pieces
    count, left = 0, piece.start
    with open_binary(piece.path) as file:
        while left > 0 and (block := file.read(min(READ_BYTES, left))):
            count, left = count + block.count(b"\n"), left - len(block)
            ended = block.endswith(b"\n")
    # A line that begins before the part and ends in it is the previous part's.
    return count + (0 if piece.start <= 0 or ended else 1)


def _jsonl(piece: Piece) -> Iterator[Row]:
    for place, (offset, line) in enumerate(read_lines(piece)):
        if not line.strip():
            yield Row(place, None)
            continue
        if offset == 0 and line.startswith(b"\xef\xbb\xbf"):
            line = line[3:]
        try:
            yield _parsed(place, line.decode("utf-8"), False)
        except UnicodeDecodeError:
            yield _parsed(place, line.decode("utf-8", "replace"), True)


def _parsed(place: int, text: str, invalid: bool) -> Row:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return Row(place, None, "not JSON", " ".join(str(error).split()))
    if not isinstance(value, dict):
        return Row(place, None, "not a JSON object", f"got {type(value).__name__}")
    if "\\ud" in text or "\\uD" in text:
        value, found = _mended(value)
        invalid = invalid or found
    return Row(place, value, invalid=invalid)


def _mended(value: Any) -> tuple[Any, bool]:
    """Half surrogate pairs, which JSON can spell and UTF-8 cannot hold, become U+FFFD."""
    text = json.dumps(value, ensure_ascii=False)
    if not LONE_SURROGATE.search(text):
        return value, False
    return json.loads(LONE_SURROGATE.sub("\ufffd", text)), True


def _parquet(piece: Piece, columns: Sequence[str]) -> Iterator[Row]:
    file = parquet_module().ParquetFile(piece.path)
    there = file.schema_arrow.names
    check_columns(piece.path, there, columns)
    wanted = [name for name in columns if name in there]
    groups = list(range(piece.start, piece.stop))
    place = 0
    for batch in file.iter_batches(batch_size=256, row_groups=groups, columns=wanted):
        for value in batch.to_pylist():
            yield Row(place, {key: _without_nulls(item) for key, item in value.items() if item is not None})
            place += 1


def _without_nulls(value: Any) -> Any:
    """A struct has every key in every row, absent ones as null; `content` may really be null."""
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None or k == "content"}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
