"""What a person names on the command line -> files with their content's hash -> parts of work.

Parts depend on the files alone, never on the number of workers: text files are grouped, JSONL is cut into
byte ranges, parquet into runs of row groups.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from nemotron_ultra.data.manifest import file_digest
from nemotron_ultra.errors import DataError

Kind = Literal["text", "jsonl", "parquet", "rows"]

PART_BYTES = 8 << 20
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
JSONL = (".jsonl", ".ndjson")
PARQUET = (".parquet",)
STREAM_PREFIX = "datasets:"


@dataclass(frozen=True)
class InputFile:
    """One file: the argument it came from, its name below that argument, what it holds, and whether it is
    validation."""

    source: str
    name: str
    path: str
    kind: Kind
    size: int
    valid: bool = False
    digest: str = ""


@dataclass(frozen=True)
class Piece:
    """A stretch of one file: bytes start..stop of JSONL, row groups start..stop of parquet, the whole of a
    text file."""

    path: str
    name: str
    start: int = 0
    stop: int = 0


@dataclass(frozen=True)
class Part:
    """What one worker does at a time. `rows` holds the documents themselves where they come from a stream."""

    number: int
    source: str
    kind: Kind
    valid: bool
    size: int
    pieces: tuple[Piece, ...] = ()
    rows: tuple[object, ...] = ()


def find_files(inputs: Iterable[str], out: Path, *, valid: bool = False) -> list[InputFile]:
    """All files named by `inputs`. Folders are walked in sorted order, without hidden names and without
    `out`.

    Raises DataError for a name that is not there.
    """
    found, out = [], out.resolve()
    for argument in inputs:
        path = Path(argument).expanduser()
        if not path.exists():
            allowed = "a file, a folder or datasets:NAME[@CONFIG][:SPLIT]"
            raise DataError("input not found", got=argument, allowed=allowed)
        files = list(_walk(path)) if path.is_dir() else [path]
        for file in files:
            if out in file.resolve().parents:
                continue
            if not file.is_file():
                raise DataError(f"{file} is not a regular file", do="remove it, or name the files to read")
            name = file.relative_to(path.parent).as_posix() if path.name else file.as_posix()
            found.append(
                InputFile(argument, printable(name), str(file), _kind(file), file.stat().st_size, valid)
            )
    return found


def printable(name: str) -> str:
    r"""A file's name with \xff for each byte that is no UTF-8: it goes into messages and JSON."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def with_digests(files: Sequence[InputFile]) -> list[InputFile]:
    """The same files with the hash of their content (about 1 GB/s a core)."""
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        digests = list(pool.map(lambda file: file_digest(Path(file.path)), files))
    return [replace(file, digest=digest) for file, digest in zip(files, digests, strict=True)]


def fingerprint(files: Sequence[InputFile]) -> str:
    """Hash over names, sizes and content, so that a copied tree with the same content is the same input."""
    total = hashlib.blake2b(digest_size=16)
    for file in files:
        line = f"{file.name}\0{file.size}\0{file.digest}\0{file.valid}\n"
        total.update(line.encode("utf-8", "surrogateescape"))
    return total.hexdigest()


def make_parts(files: Sequence[InputFile], part_bytes: int = PART_BYTES) -> list[Part]:
    """Cut the input into parts of about `part_bytes`, numbered in the order of the documents."""
    parts: list[Part] = []
    group: list[InputFile] = []

    def close_group() -> None:
        if group:
            pieces = tuple(Piece(f.path, f.name) for f in group)
            size = sum(f.size for f in group)
            parts.append(Part(len(parts), group[0].source, "text", group[0].valid, size, pieces))
            group.clear()

    for file in files:
        same = group and (group[0].source, group[0].valid) == (file.source, file.valid)
        if not (same and file.kind == "text" and sum(f.size for f in group) + file.size <= part_bytes):
            close_group()
        if file.kind == "text":
            group.append(file)
            continue
        for size, piece in _pieces(file, part_bytes):
            parts.append(Part(len(parts), file.source, file.kind, file.valid, size, (piece,)))
    close_group()
    return parts


def _pieces(file: InputFile, part_bytes: int) -> Iterator[tuple[int, Piece]]:
    if file.kind == "parquet":
        yield from _parquet_pieces(file, part_bytes)
    elif file.path.endswith(COMPRESSED):
        yield file.size, Piece(file.path, file.name, 0, -1)
    else:
        for start in range(0, file.size, part_bytes):
            stop = min(start + part_bytes, file.size)
            yield stop - start, Piece(file.path, file.name, start, stop)


def _parquet_pieces(file: InputFile, part_bytes: int) -> Iterator[tuple[int, Piece]]:
    groups = [size for size in parquet_row_groups(file.path)]
    scale = file.size / max(sum(groups), 1)
    start, size = 0, 0
    for index, group in enumerate(groups):
        size += group
        if size >= part_bytes or index + 1 == len(groups):
            yield int(size * scale), Piece(file.path, file.name, start, index + 1)
            start, size = index + 1, 0


def parquet_row_groups(path: str) -> list[int]:
    """Uncompressed bytes of each row group."""
    parquet = parquet_module()
    try:
        metadata = parquet.ParquetFile(path).metadata
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is not a parquet file", got=error) from error
    return [metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)]


def parquet_module():
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise missing_extra("parquet", "pyarrow") from error
    return pyarrow.parquet


def missing_extra(what: str, package: str) -> DataError:
    return DataError(f"{what} needs the package {package}", do="pip install 'nemotron-ultra[data]'")


def _walk(folder: Path) -> Iterator[Path]:
    for here, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(here, name) for name in sorted(files) if not name.startswith("."))


def _kind(path: Path) -> Kind:
    name = path.name.lower()
    for suffix in COMPRESSED:
        name = name.removesuffix(suffix)
    if name.endswith(JSONL):
        return "jsonl"
    return "parquet" if name.endswith(PARQUET) else "text"
