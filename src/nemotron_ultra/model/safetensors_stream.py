"""safetensors files read and written in pieces of a few megabytes.

The library's reader maps the file, so that loading holds a model twice (the map and the parameters), and its
writer makes bytes of every tensor before the first write. Here a tensor goes from the disk straight into the
memory of its parameter and back. Format: u64 length, JSON header {name: {dtype, shape, data_offsets}}, bytes.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from nemotron_ultra.errors import CheckpointError

DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
CHUNK_BYTES = 2 << 20
MAX_HEADER_BYTES = 100_000_000  # the library's own limit


@dataclass(frozen=True)
class Entry:
    """One tensor in a file: its bytes are [begin, end) from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(path: Path) -> dict[str, Entry]:
    """Entries of a file by name. Raises CheckpointError for a truncated or damaged file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise _damaged(path, f"the header should be {length} bytes, the file has {size}")
        text = file.read(length)
    try:
        header = json.loads(text)
        start = 8 + length
        entries = {name: _entry(value, start) for name, value in header.items() if name != "__metadata__"}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, f"the header is unreadable ({error})") from error
    needed = max((entry.end for entry in entries.values()), default=start)
    if needed != size:
        raise _damaged(path, f"the header asks for {needed:,} bytes, the file has {size:,}")
    for name, entry in entries.items():
        width = DTYPES[entry.dtype].itemsize if entry.dtype in DTYPES else None
        if width and entry.end - entry.begin != width * math.prod(entry.shape):
            raise _damaged(path, f"{name} of shape {list(entry.shape)} has {entry.end - entry.begin} bytes")
    return entries


def read_into(file: BinaryIO, entry: Entry, target: Tensor) -> None:
    """Fill `target` (contiguous, the entry's shape, any float dtype and device) from an unbuffered file."""
    dtype = DTYPES[entry.dtype]
    file.seek(entry.begin)
    flat = target.detach().view(-1)
    if dtype == target.dtype and target.device.type == "cpu":
        _fill(file, flat)
        return
    step = CHUNK_BYTES // dtype.itemsize
    buffer = torch.empty(min(step, flat.numel()), dtype=dtype)
    for start in range(0, flat.numel(), step):
        part = flat[start : start + step]
        piece = buffer[: part.numel()]
        _fill(file, piece)
        part.copy_(piece)


def write_file(path: Path, tensors: Iterable[tuple[str, torch.dtype, Tensor]]) -> str:
    """Write (name, dtype on disk, tensor) in the order given, flushed to disk; blake2b of the file."""
    tensors = list(tensors)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, dtype, tensor in tensors:
        end = offset + tensor.numel() * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.blake2b()
    with path.open("wb", buffering=0) as file:
        _write(file, digest, len(text).to_bytes(8, "little") + text)
        for _, dtype, tensor in tensors:
            for piece in _byte_pieces(tensor, dtype):
                _write(file, digest, piece)
        os.fsync(file.fileno())
    return digest.hexdigest()


def file_digest(path: Path) -> str:
    """blake2b of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, hashlib.blake2b).hexdigest()


def _entry(value: dict, start: int) -> Entry:
    begin, end = value["data_offsets"]
    if not 0 <= begin <= end:
        raise ValueError(f"offsets {begin}, {end}")
    return Entry(str(value["dtype"]), tuple(value["shape"]), start + begin, start + end)


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path}: truncated or damaged, {what}", do="copy or download this file again")


def _bytes_of(flat: Tensor) -> memoryview:
    return memoryview(flat.view(torch.uint8).numpy())


def _fill(file: BinaryIO, flat: Tensor) -> None:
    view = _bytes_of(flat)
    while view:
        count = file.readinto(view)
        if not count:
            raise CheckpointError(
                f"{file.name}: ended while a tensor was being read", do="copy the file again"
            )
        view = view[count:]


def _write(file: BinaryIO, digest, data: bytes | memoryview) -> None:
    digest.update(data)
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def _byte_pieces(tensor: Tensor, dtype: torch.dtype) -> Iterator[memoryview]:
    flat = tensor.detach().reshape(-1)
    step = CHUNK_BYTES // max(dtype.itemsize, flat.dtype.itemsize)
    for start in range(0, flat.numel(), step):
        yield _bytes_of(flat[start : start + step].to("cpu", dtype))
