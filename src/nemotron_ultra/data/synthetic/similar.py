"""What a set of questions holds twice, and what it shares with held-out texts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from nemotron_ultra.data.ngrams import Common, HeldOut, grams, words
from nemotron_ultra.data.synthetic.gym import missing
from nemotron_ultra.data.synthetic.steps import CHUNK, Drop, Row, read_jsonl

SHINGLE = 3  # words


class Unique:
    """Leaves out a question that was there before, exactly (by its words) or nearly.

    Nearly: the share of common runs of 3 words (Jaccard) is at least `threshold`, without the runs that are
    the wording of the generator's template. Candidates come from MinHash LSH (datasketch), and each is
    compared exactly. The earlier question stays.
    """

    name, chunk = "unique", CHUNK
    PERMUTATIONS = 128

    def __init__(self, threshold: float):
        self._threshold = threshold
        try:
            import datasketch
        except ImportError as error:
            raise missing("near-duplicates", "datasketch") from error
        self._library = datasketch

    def open(self, source: Path | None, kept: Iterable[Row]) -> None:
        self._exact: dict[bytes, str] = {}
        self._grams: dict[str, np.ndarray] = {}
        # Candidates from a little below, since the exact comparison follows and LSH misses some at the edge.
        self._empty = self._library.MinHash(num_perm=self.PERMUTATIONS)
        near = min(0.9, max(0.1, self._threshold - 0.1))
        self._index = self._library.MinHashLSH(threshold=near, num_perm=self.PERMUTATIONS)
        self._common = _boilerplate(source, SHINGLE)
        for row in kept:
            self._add(row, *self._sketch(row))

    def work(self, rows: list[Row]) -> list[Row | Drop]:
        return [self._one(row) for row in rows]

    def _one(self, row: Row) -> Row | Drop:
        key, hashes, sketch = self._sketch(row)
        if key in self._exact:
            return Drop("the same question again", self._exact[key])
        for other in sorted(self._index.query(sketch)):
            shared = np.intersect1d(hashes, self._grams[other], assume_unique=True).size
            jaccard = shared / (hashes.size + self._grams[other].size - shared)
            if jaccard >= self._threshold:
                return Drop("nearly the same question again", f"{other}, {jaccard:.2f}")
        self._add(row, key, hashes, sketch)
        return row

    def _sketch(self, row: Row) -> tuple[bytes, np.ndarray, Any]:
        text = row["sample"]["question"]
        key = hashlib.blake2b(" ".join(words(text)).encode(), digest_size=16).digest()
        own = grams(text, SHINGLE)
        own = own - self._common.of(row["generator"]) or own
        hashes = np.array(sorted(own), dtype=np.uint64)
        sketch = self._empty.copy()
        sketch.update_batch([value.tobytes() for value in hashes])
        return key, hashes, sketch

    def _add(self, row: Row, key: bytes, hashes: np.ndarray, sketch: Any) -> None:
        self._exact[key] = row["id"]
        self._grams[row["id"]] = hashes
        self._index.insert(row["id"], sketch)


class Clean:
    """Leaves out questions that held-out texts hold: a run of n words, or the whole where it is shorter."""

    name, chunk = "clean", CHUNK

    def __init__(self, held_out: HeldOut):
        self._held_out = held_out

    def open(self, source: Path | None, kept: Iterable[Row]) -> None:
        self._common = _boilerplate(source if self._held_out.texts else None, self._held_out.n)

    def work(self, rows: list[Row]) -> list[Row | Drop]:
        return [self._one(row) for row in rows]

    def _one(self, row: Row) -> Row | Drop:
        common = self._common.of(row["generator"])
        place = self._held_out.hit(row["sample"]["question"], common)
        return Drop("in the held-out texts", place) if place else row


def _boilerplate(source: Path | None, n: int) -> Common:
    common = Common(n)
    for row in read_jsonl(source) if source else ():
        common.add(row["generator"], row["sample"]["question"])
    return common
