"""Megatron `.bin/.idx` shards: token ids back to back, and an index of where each document lies.

The layout is megatron-core's IndexedDataset byte for byte (little endian):

    .bin  the ids of all sequences, nothing else
    .idx  "MMIDIDX\\0\\0", uint64 version 1, uint8 dtype code, uint64 sequences, uint64 documents + 1,
          int32 length of each sequence, int64 byte offset of each sequence,
          int64 first sequence of each document, and the number of sequences

Differs from megatron-core: what is opened is checked against the size of both files first.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import BinaryIO

import numpy as np

from nemotron_ultra.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER_BYTES = 34
DTYPES = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    6: np.float64,
    7: np.float32,
    8: np.uint16,
}
CODES = {np.dtype(dtype): code for code, dtype in DTYPES.items()}


def token_dtype(vocab_size: int) -> np.dtype:
    """uint16 below 65,500 entries, else int32: megatron-core's rule."""
    return np.dtype(np.uint16 if vocab_size < 65500 else np.int32)


class ShardWriter:
    """Writes PREFIX.bin and PREFIX.idx; one document is one sequence.

    Both files carry a temporary name until `close`, which syncs and renames them, so a reader never sees half
    of one.
    """

    def __init__(self, prefix: str | Path, dtype: np.dtype):
        self.prefix, self.dtype = Path(prefix), np.dtype(dtype)
        self._temporary = [Path(f"{prefix}.{suffix}.tmp") for suffix in ("bin", "idx")]
        self._bin = open(self._temporary[0], "wb")  # noqa: SIM115 (closed by close and abort)
        self._lengths: list[np.ndarray] = []
        self.tokens = 0

    @property
    def documents(self) -> int:
        return sum(map(len, self._lengths))

    def add(self, tokens: np.ndarray) -> None:
        """Append one document, int [n >= 1]."""
        self.add_many(tokens, np.array([len(tokens)], dtype=np.int32))

    def add_many(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        """Append documents that lie back to back in `tokens`; `lengths` int [documents], each >= 1."""
        assert len(tokens) == int(lengths.sum()) and (len(lengths) == 0 or lengths.min() > 0)
        self._bin.write(np.ascontiguousarray(tokens, dtype=self.dtype).data)
        self._lengths.append(np.asarray(lengths, dtype=np.int32))
        self.tokens += len(tokens)

    def close(self) -> None:
        lengths = np.concatenate([*self._lengths, np.zeros(0, np.int32)])
        with open(self._temporary[1], "wb") as index:
            index.write(index_bytes(lengths, self.dtype))
            sync(index)
        sync(self._bin)
        self._bin.close()
        for temporary in self._temporary:
            os.replace(temporary, temporary.with_suffix(""))

    def abort(self) -> None:
        self._bin.close()
        for temporary in self._temporary:
            temporary.unlink(missing_ok=True)


def index_bytes(lengths: np.ndarray, dtype: np.dtype) -> bytes:
    """The whole .idx of documents with these `lengths` (tokens), each one sequence."""
    count = len(lengths)
    ends = np.cumsum(lengths, dtype=np.int64) * np.dtype(dtype).itemsize
    offsets = np.concatenate([np.zeros(1, np.int64), ends[:-1]])[:count]
    head = MAGIC + struct.pack("<QBQQ", VERSION, CODES[np.dtype(dtype)], count, count + 1)
    parts = (lengths.astype("<i4"), offsets.astype("<i8"), np.arange(count + 1, dtype="<i8"))
    return head + b"".join(part.tobytes() for part in parts)


def sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


class Shard:
    """PREFIX.bin and PREFIX.idx opened for reading through memory maps. Raises DataError naming the file at
    fault.

    starts: int64 [documents + 1], the token offset where each document begins, the last one being the end.
    """

    def __init__(self, prefix: str | Path):
        self.bin_path, self.idx_path = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
        for path in (self.idx_path, self.bin_path):
            if not path.is_file():
                raise DataError(
                    f"{path} is missing", do="make it with: python -m nemotron_ultra.prep INPUT --out DIR"
                )
        self.dtype, sequences, documents = self._header()
        index = np.memmap(self.idx_path, dtype=np.uint8, mode="r")
        lengths, offsets, first = self._arrays(index, sequences, documents)
        itemsize = self.dtype.itemsize
        self._check_arrays(lengths, offsets, first)
        ends = offsets[-1:] // itemsize + lengths[-1:]
        self.starts = (
            np.concatenate([offsets // itemsize, ends])[first] if sequences else np.zeros(1, np.int64)
        )
        self.tokens = int(self.starts[-1])
        self._check_bin(self.tokens * itemsize)
        self._tokens = (
            np.memmap(self.bin_path, dtype=self.dtype, mode="r") if self.tokens else np.zeros(0, self.dtype)
        )

    @property
    def documents(self) -> int:
        return len(self.starts) - 1

    def document(self, index: int) -> np.ndarray:
        """Ids of one document, a view into the memory map."""
        return self._tokens[self.starts[index] : self.starts[index + 1]]

    def slice(self, start: int, stop: int) -> np.ndarray:
        """Ids start..stop of the shard as one run, across documents."""
        return self._tokens[start:stop]

    def _header(self) -> tuple[np.dtype, int, int]:
        with open(self.idx_path, "rb") as file:
            head = file.read(HEADER_BYTES)
        if head[:9] != MAGIC:
            raise DataError(
                f"{self.idx_path}: wrong magic", got=head[:9], allowed=MAGIC, do="not a Megatron .idx"
            )
        if len(head) < HEADER_BYTES:
            raise DataError(
                f"{self.idx_path} is truncated", got=f"{len(head)} bytes", do="prepare the data again"
            )
        version, code, sequences, bounds = struct.unpack("<QBQQ", head[9:])
        if version != VERSION:
            raise DataError(f"{self.idx_path}: unknown version", got=version, allowed=VERSION)
        if code not in DTYPES or np.dtype(DTYPES[code]).kind == "f":
            raise DataError(
                f"{self.idx_path}: wrong dtype code", got=code, allowed="1, 2, 3, 4, 5 or 8 (integers)"
            )
        size, wanted = self.idx_path.stat().st_size, HEADER_BYTES + 12 * sequences + 8 * bounds
        # Multimodal files carry one more byte per sequence at the end.
        if size not in (wanted, wanted + sequences) or bounds < 1:
            raise DataError(f"{self.idx_path}: wrong size", got=f"{size} bytes", allowed=f"{wanted} bytes")
        return np.dtype(DTYPES[code]).newbyteorder("<"), sequences, bounds

    @staticmethod
    def _arrays(index: np.ndarray, sequences: int, bounds: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        at_offsets = HEADER_BYTES + 4 * sequences
        at_first = at_offsets + 8 * sequences
        return (
            index[HEADER_BYTES:at_offsets].view("<i4"),
            index[at_offsets:at_first].view("<i8"),
            index[at_first : at_first + 8 * bounds].view("<i8"),
        )

    def _check_arrays(self, lengths: np.ndarray, offsets: np.ndarray, first: np.ndarray) -> None:
        ends = np.cumsum(lengths, dtype=np.int64) * self.dtype.itemsize
        packed = np.array_equal(offsets[1:], ends[:-1]) and not offsets[:1].any()
        if not packed or first[0] != 0 or first[-1] != len(lengths) or np.any(np.diff(first) < 0):
            raise DataError(
                f"{self.idx_path}: the index contradicts itself",
                got="offsets are not the running sum of lengths, or documents do not run from 0 to the end",
                do="prepare the data again",
            )

    def _check_bin(self, wanted: int) -> None:
        size = self.bin_path.stat().st_size
        if size != wanted:
            raise DataError(
                f"{self.bin_path} is {'truncated' if size < wanted else 'longer than its index says'}",
                got=f"{size} bytes",
                allowed=f"{wanted} bytes by {self.idx_path.name}",
                do="copy it again, or prepare the data again",
            )
