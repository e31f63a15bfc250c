"""The documents of one part, each with its text or the reason why it has none. Nothing is left out without a
reason."""

from __future__ import annotations

import bz2
import gzip
import importlib
import io
import json
import lzma
import re
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from nemotron_ultra.data.inputs import Part, Piece, missing_extra, parquet_module
from nemotron_ultra.errors import DataError

# A text file is one document and is read whole; larger ones are surely many documents in one file.
LARGEST_TEXT = 256 << 20
BOM = b"\xef\xbb\xbf"
READ_BYTES = 1 << 20

# JSON can spell half of a surrogate pair, which no UTF-8 can hold.
LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_OPENERS = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}


@dataclass(frozen=True)
class Reading:
    """How text is found in the input. text_field: the key or column. split_on: text between the documents of
    a text file."""

    text_field: str = "text"
    split_on: str | None = None


@dataclass(frozen=True)
class Document:
    """`text`, or `dropped`: why there is none. invalid: it held bytes that are not UTF-8, now U+FFFD."""

    name: str
    text: str = ""
    dropped: str | None = None
    invalid: bool = False


def read_documents(part: Part, reading: Reading) -> Iterator[Document]:
    """Documents of a part in order. Raises DataError naming the file where a file cannot be read at all."""
    if part.kind == "rows":
        for index, value in enumerate(part.rows):
            yield _checked(f"{part.source}:{part.number}:{index}", value)
        return
    readers = {"text": _text_file, "jsonl": _jsonl, "parquet": _parquet}
    for piece in part.pieces:
        try:
            yield from readers[part.kind](piece, reading)
        except DataError:
            raise
        except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError) as error:
            raise DataError(f"cannot read {piece.path}", got=error) from error


def _text_file(piece: Piece, reading: Reading) -> Iterator[Document]:
    with open_binary(piece.path) as file:
        if reading.split_on:
            for index, raw in enumerate(_split(file, reading.split_on.encode())):
                yield _decoded(f"{piece.name}:{index}", raw)
            return
        raw = file.read(LARGEST_TEXT + 1)
    if len(raw) > LARGEST_TEXT:
        raise DataError(
            f"{piece.path}: a text file is one document, and this one is too large for that",
            got=f"over {LARGEST_TEXT >> 20} MiB",
            do="name the text between its documents with --split-on, or convert it to JSONL",
        )
    yield _decoded(piece.name, raw)


def _split(file: BinaryIO, separator: bytes) -> Iterator[bytes]:
    rest = bytearray()
    while block := file.read(READ_BYTES):
        search = max(0, len(rest) - len(separator) + 1)
        rest += block
        while (at := rest.find(separator, search)) >= 0:
            yield bytes(rest[:at])
            del rest[: at + len(separator)]
            search = 0
        if len(rest) > LARGEST_TEXT:
            raise OSError(f"over {LARGEST_TEXT >> 20} MiB without {separator!r}")
    # What follows the last separator is a document only if there is something.
    if rest.strip():
        yield bytes(rest)


def _jsonl(piece: Piece, reading: Reading) -> Iterator[Document]:
    for offset, line in read_lines(piece):
        if not line.strip():
            continue
        name = f"{piece.name}:byte {offset}"
        try:
            text, invalid = line.decode("utf-8"), False
        except UnicodeDecodeError:
            text, invalid = line.decode("utf-8", "replace"), True
        try:
            row = json.loads(text)
        except ValueError:
            yield Document(name, dropped="not JSON")
            continue
        if not isinstance(row, dict) or reading.text_field not in row:
            yield Document(name, dropped=f"no field {reading.text_field!r}")
            continue
        yield _checked(name, row[reading.text_field], invalid)


def read_lines(piece: Piece) -> Iterator[tuple[int, bytes]]:
    """(byte offset, line) of the lines that begin in start..stop."""
    with open_binary(piece.path) as file:
        at = piece.start
        if at:
            # The line that the byte before `start` belongs to is the previous part's.
            file.seek(at - 1)
            at += len(file.readline()) - 1
        while piece.stop < 0 or at < piece.stop:
            line = file.readline()
            if not line:
                return
            yield at, line
            at += len(line)


def _parquet(piece: Piece, reading: Reading) -> Iterator[Document]:
    parquet = parquet_module()
    file = parquet.ParquetFile(piece.path)
    columns = file.schema_arrow.names
    if reading.text_field not in columns:
        what = f"{piece.path} has no column {reading.text_field!r}"
        raise DataError(what, allowed=", ".join(columns), do="name it with --text-field")
    row = 0
    groups = list(range(piece.start, piece.stop))
    for batch in file.iter_batches(batch_size=256, row_groups=groups, columns=[reading.text_field]):
        for value in batch.column(0).to_pylist():
            yield _checked(f"{piece.name}:group {piece.start}:row {row}", value)
            row += 1


def _decoded(name: str, raw: bytes) -> Document:
    if b"\0" in raw:
        return Document(name, dropped="binary file")
    raw = raw.removeprefix(BOM)
    try:
        return _checked(name, raw.decode("utf-8"))
    except UnicodeDecodeError:
        return _checked(name, raw.decode("utf-8", "replace"), True)


def _checked(name: str, value: object, invalid: bool = False) -> Document:
    if not isinstance(value, str):
        return Document(name, dropped="text is not a string")
    if not value or value.isspace():
        return Document(name, dropped="empty")
    text = LONE_SURROGATE.sub("\ufffd", value) if LONE_SURROGATE.search(value) else value
    return Document(name, text, invalid=invalid or text is not value)


def open_binary(path: str) -> BinaryIO | Any:
    """The plain bytes of a file that may be compressed (.gz .bz2 .xz; .zst with Python 3.14 or pyarrow)."""
    suffix = "." + path.rsplit(".", 1)[-1].lower()
    if suffix in _OPENERS:
        return _OPENERS[suffix](path, "rb")
    if suffix != ".zst":
        return open(path, "rb")
    if sys.version_info >= (3, 14):
        return importlib.import_module("compression.zstd").open(path, "rb")
    try:
        import pyarrow
    except ImportError as error:
        raise missing_extra(f"{path} (.zst)", "pyarrow") from error
    return io.BufferedReader(pyarrow.input_stream(path, compression="zstd"))
