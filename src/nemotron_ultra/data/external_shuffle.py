"""Shuffle in bounded memory: record n comes out in the order of key(seed, n), a 64-bit number.

Report section 3.2, step 7. Records go to buckets by the upper bits of their keys, on disk once they outgrow
the bound; then one bucket at a time is read and sorted. The order is that of the keys alone: neither the
bound, nor the number of buckets, nor the sizes of the records change it.
"""

from __future__ import annotations

import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from nemotron_ultra.data.order import STEP, keyed
from nemotron_ultra.errors import ConfigError, DataError

_HEAD = struct.Struct("<QI")  # key, bytes of the record
_SPLIT_BITS = 6
_OVERHEAD = 200  # bytes that Python keeps beside a small record: the object, its key, their places in lists
_LEAST_MEMORY = 1 << 20
_SUFFIX = ".bucket"


def shuffle_keys(seed: int, start: int, stop: int) -> np.ndarray:
    """Keys of the records start..stop-1, uint64, no two equal; the shuffled order is that of the keys.

    A counter times an odd number, plus the seed's bits, through the finaliser of splitmix64: each step is one
    to one, so keys never tie, and the same on every machine.
    """
    key = np.arange(start, stop, dtype=np.uint64) * np.uint64(STEP) + np.uint64(keyed("shuffle", seed))
    key = (key ^ (key >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    key = (key ^ (key >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return key ^ (key >> np.uint64(31))


def shuffle_plan(seed: int, count: int, buckets: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Where each of `count` records goes: (bucket int64 [count], place inside it int64 [count]).

    Buckets in order, places in order, is the order of the keys, whatever the number of buckets; sizes of
    buckets differ as those of random draws do. 24 bytes of memory a record.
    """
    if buckets < 1:
        raise ConfigError("buckets of a shuffle", got=buckets, allowed="1 or more")
    keys = shuffle_keys(seed, 0, count)
    bucket_n = ((keys >> np.uint64(32)) * np.uint64(buckets) >> np.uint64(32)).astype(np.int64)
    order = np.argsort(keys)
    place_n = np.empty(count, np.int64)
    place_n[order] = np.arange(count)
    starts = np.concatenate([[0], np.cumsum(np.bincount(bucket_n, minlength=buckets))])
    return bucket_n, place_n - starts[bucket_n]


class ExternalShuffle:
    """Records (bytes of any size) in, the same records in shuffled order out, in about `memory` bytes.

        with ExternalShuffle(folder, seed=0) as shuffle:
            for record in records: shuffle.add(record)
            for record in shuffle.drain(): ...

    folder: for buckets alone, made when needed and removed at the end; what an interrupted shuffle left in it
    is removed first. The bound holds but for a single record larger than it. Raises DataError for a folder
    with anything else in it and for a disk that cannot be written.
    """

    def __init__(self, folder: str | Path, *, seed: int, memory: int = 128 << 20):
        if memory < _LEAST_MEMORY:
            raise ConfigError("memory of a shuffle", got=memory, allowed=f"{_LEAST_MEMORY} bytes or more")
        self.folder, self.seed, self.memory = Path(folder), seed, memory
        self._count = 0
        self._keys: np.ndarray = np.zeros(0, np.uint64)
        self._first = 0  # number of the record that _keys[0] belongs to
        _check_folder(self.folder)
        shutil.rmtree(self.folder, ignore_errors=True)
        self._root = _Split(self.folder, 0, memory // 2)

    def __enter__(self) -> ExternalShuffle:
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def __len__(self) -> int:
        return self._count

    def add(self, record: bytes) -> None:
        """Take the next record."""
        at = self._count - self._first
        if at >= len(self._keys):
            self._first, at = self._count, 0
            self._keys = shuffle_keys(self.seed, self._first, self._first + 4096)
        self._root.add(int(self._keys[at]), record)
        self._count += 1

    def drain(self) -> Iterator[bytes]:
        """Every record once, shuffled; what was read is removed from disk as it goes."""
        yield from self._root.drain(self.memory // 2)


class _Split:
    """Records by the key bits `depth` * 6 .. + 6: in memory up to `room` bytes, then in files."""

    def __init__(self, folder: Path, depth: int, room: int):
        self.folder, self.room = folder, room
        self._shift = 64 - _SPLIT_BITS * (depth + 1)
        self._depth = depth
        self._held: list[list[tuple[int, bytes]]] = [[] for _ in range(1 << _SPLIT_BITS)]
        self._held_bytes = 0
        self._disk_bytes = [0] * len(self._held)  # as they would be in memory

    def add(self, key: int, record: bytes) -> None:
        self._held[key >> self._shift & (1 << _SPLIT_BITS) - 1].append((key, record))
        self._held_bytes += len(record) + _OVERHEAD
        if self._held_bytes > self.room:
            self._write()

    def drain(self, room: int) -> Iterator[bytes]:
        if any(self._disk_bytes):
            self._write()
        for number, held in enumerate(self._held):
            self._held[number] = []
            if not self._disk_bytes[number]:
                held.sort(key=lambda pair: pair[0])
                yield from (record for _, record in held)
            elif self._disk_bytes[number] <= room or self._shift < _SPLIT_BITS:
                yield from self._sorted(self._path(number))
            else:
                yield from self._deeper(number, room)

    def _deeper(self, number: int, room: int) -> Iterator[bytes]:
        """A bucket that is too large for the bound, split once more."""
        path = self._path(number)
        split = _Split(path.with_suffix(""), self._depth + 1, room)
        with path.open("rb") as file:
            for key, record in _records(file):
                split.add(key, record)
        path.unlink()
        yield from split.drain(room)

    def _sorted(self, path: Path) -> Iterator[bytes]:
        with path.open("rb") as file:
            found = sorted(_records(file), key=lambda pair: pair[0])
        path.unlink()
        for _, record in found:
            yield record

    def _write(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for number in range(len(self._held)):
                self._append(number)
        except OSError as error:
            what = f"cannot write a bucket of the shuffle in {self.folder}"
            raise DataError(
                what, got=error.strerror, do="free space there, or name another folder"
            ) from error
        self._held_bytes = 0

    def _append(self, number: int) -> None:
        held, self._held[number] = self._held[number], []
        if not held:
            return
        with self._path(number).open("ab") as file:
            for key, record in held:
                file.write(_HEAD.pack(key, len(record)))
                file.write(record)
        self._disk_bytes[number] += sum(len(record) + _OVERHEAD for _, record in held)

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:02d}{_SUFFIX}"


def _check_folder(folder: Path) -> None:
    others = (path for path in folder.rglob("*") if not path.is_dir() and path.suffix != _SUFFIX)
    if other := next(others, None):
        what = f"{folder} is not for a shuffle alone"
        raise DataError(what, got=str(other), do="name a folder that is empty or not there")


def _records(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    while head := file.read(_HEAD.size):
        key, size = _HEAD.unpack(head)
        yield key, file.read(size)
