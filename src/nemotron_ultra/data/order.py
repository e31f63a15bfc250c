"""Which row of which source comes when: closed forms in (seed, row), so any step can be reached at once.

The blend draws row g of a phase from source s where frac(g x 0.618...) falls into s's share of [0, 1): a
golden-ratio sequence, whose counts stay within a few rows of weight x rows at every g. How often a source was
drawn before row g is then a sum of floors, found in O(log) steps without walking through the run. Differs
from Megatron's greedy rule, which has to be replayed from row 0 and whose history changes when weights change
(report section 2.2, two phases).
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

MODULUS = 1 << 64
STEP = 0x9E3779B97F4A7C15  # MODULUS / golden ratio, odd


def keyed(*key: object) -> int:
    """64 hash bits of a key, the same on every machine and Python."""
    text = "\x1f".join(map(str, key)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def permutation(count: int, *key: object) -> np.ndarray:
    """Permutation of range(count) by a key. RandomState: its stream is frozen across numpy versions."""
    bits = keyed(*key)
    dtype = np.int32 if count < 2**31 else np.int64
    order = np.arange(count, dtype=dtype)
    np.random.RandomState([bits & 0xFFFFFFFF, bits >> 32]).shuffle(order)
    return order


def floor_sum(n: int, m: int, a: int, b: int) -> int:
    """sum over 0 <= i < n of floor((a i + b) / m), for m > 0 and a, b >= 0, in O(log m) steps."""
    total = 0
    while n > 0:
        total += (n - 1) * n // 2 * (a // m) + n * (b // m)
        a, b = a % m, b % m
        top = a * n + b
        n, b = top // m, top % m
        m, a = a, m
        if m == 0:
            break
    return total


class Draws:
    """The sources of the rows of one phase. `weights` need not sum to 1; row 0 is the phase's first row."""

    def __init__(self, weights: list[float], seed: int, key: str):
        total, running, self._bounds = sum(weights), 0.0, [0]
        for weight in weights:
            running += weight
            self._bounds.append(round(running / total * MODULUS))
        self._bounds[-1] = MODULUS
        # A weight of 0 at the end must not win the bit that rounding leaves over.
        for index in range(len(weights) - 1, 0, -1):
            if weights[index]:
                break
            self._bounds[index] = MODULUS
        self._offset = keyed("blend", seed, key)

    def source(self, row: int) -> int:
        """Number of the source that `row` is drawn from."""
        return bisect_right(self._bounds, (row * STEP + self._offset) % MODULUS) - 1

    def drawn(self, source: int, rows: int) -> int:
        """How many of the first `rows` rows come from `source`."""
        return self._below(self._bounds[source + 1], rows) - self._below(self._bounds[source], rows)

    def _below(self, bound: int, rows: int) -> int:
        # [x mod M < bound] = floor(x / M) - floor((x - bound) / M)
        if bound == 0:
            return 0
        first = floor_sum(rows, MODULUS, STEP, self._offset)
        return first - floor_sum(rows, MODULUS, STEP, self._offset + MODULUS - bound) + rows


@dataclass(frozen=True)
class Epoch:
    """One pass over a source: documents in shuffled order, and the token at which each begins in this
    pass."""

    documents: np.ndarray
    starts: np.ndarray
    rows: np.ndarray


class SourceOrder:
    """The endless row sequence of one source.

    Passes over the documents, each shuffled by (seed, source, pass), are laid end to end and cut into rows of
    `length` tokens, so that no token is lost or repeated where passes meet; the rows that begin in one pass
    are served shuffled. lengths: tokens of each document, int [documents], at least `length` in total.
    """

    def __init__(self, name: str, lengths: np.ndarray, length: int, seed: int):
        self.name, self.length, self.seed = name, length, seed
        self._lengths = lengths
        self.tokens = int(lengths.sum(dtype=np.int64))
        assert self.tokens >= length
        self.epoch = lru_cache(maxsize=2)(self._epoch)

    def place(self, draw: int) -> int:
        """Where in the endless sequence of tokens the draw-th row of this source begins."""
        number = draw * self.length // self.tokens
        first = self._first_row(number)
        return (first + int(self.epoch(number).rows[draw - first])) * self.length

    def stretches(self, place: int, count: int) -> list[tuple[int, int, int]]:
        """(document, first token in it, tokens) that make up `count` tokens from `place`."""
        found = []
        number, at = divmod(place, self.tokens)
        while count:
            epoch = self.epoch(number)
            index = int(np.searchsorted(epoch.starts, at, side="right")) - 1
            if index == len(epoch.documents):
                number, at = number + 1, 0
                continue
            inside = at - int(epoch.starts[index])
            take = min(count, int(epoch.starts[index + 1]) - at)
            found.append((int(epoch.documents[index]), inside, take))
            at, count = at + take, count - take
        return found

    def _first_row(self, number: int) -> int:
        return -(-number * self.tokens // self.length)

    def _epoch(self, number: int) -> Epoch:
        documents = permutation(len(self._lengths), "documents", self.seed, self.name, number)
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(self._lengths[documents], dtype=np.int64)])
        count = self._first_row(number + 1) - self._first_row(number)
        return Epoch(documents, starts, permutation(count, "rows", self.seed, self.name, number))
