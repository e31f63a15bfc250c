"""How many tokens to draft: k that gives the most tokens a second, E(k) / T(rows, k), both as measured.

E(k) = 1 + sum_{j<=k} prod_{i<=j} r_i, r_i the share of drafts i that stayed after drafts 1..i-1 had. T is
the median of the latest rounds of (rows, k), and where there are too few of them a plane through the others.
Drafts must promise GAIN more than none, so that noise costs little: many rows fill the machine without them.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from statistics import median
from typing import Protocol
from weakref import WeakKeyDictionary

import numpy as np
from torch import nn

GAIN = 1.03
NEAR = 0.8  # of plain decoding's speed: drafts so fast are tried again
ENOUGH = 2  # rounds of a pair (rows, k) that make its median
LATEST = 9
PRIOR_RATE, PRIOR_DRAFTS = 0.6, 4.0
MEMORY = 0.99  # weight of a round's acceptance after the next one
LENGTHS = (0, 1, 2, 3, 4, 5, 6, 7)
TRY_PLAIN, TRY_DRAFTS = 48, 256  # rounds after which the other way is measured anew
HOLD = 16  # rounds that a choice is kept for


class DraftLength(Protocol):
    most: int

    def choose(self, rows: int) -> int:
        """Drafts of the next round, at most `most`."""
        ...

    def note(self, rows: int, count: int, seconds: float, tried: list[int], kept: list[int]) -> None:
        """What a round took, and of its drafts 1..count how many were verified and stayed."""


class FixedLength:
    def __init__(self, most: int):
        self.most = most

    def choose(self, rows: int) -> int:
        return self.most

    def note(self, rows: int, count: int, seconds: float, tried: list[int], kept: list[int]) -> None:
        """Nothing to learn."""


class Costs:
    """Seconds of a round by (rows, drafts)."""

    def __init__(self) -> None:
        self.seconds: dict[tuple[int, int], deque[float]] = defaultdict(lambda: deque(maxlen=LATEST))
        self._plane: np.ndarray | None = None

    def note(self, rows: int, count: int, seconds: float) -> None:
        self.seconds[_class(rows), count].append(seconds)
        if count:
            self._plane = None

    def rounds(self, rows: int, count: int) -> int:
        return len(self.seconds.get((_class(rows), count), ()))

    def of(self, rows: int, count: int) -> float | None:
        """None where nothing like it was measured."""
        own = self.seconds.get((_class(rows), count), ())
        if len(own) >= ENOUGH or (own and not count):
            return median(own)
        if not count:
            return None
        if self._plane is None:
            self._plane = self._fit()
        guess = None if self._plane is None else float(_features(rows, count) @ self._plane)
        return guess if guess is None or guess > 0 else None

    def _fit(self) -> np.ndarray | None:
        """Least squares of relative errors, over pairs with drafts."""
        known = [(key, median(seconds)) for key, seconds in self.seconds.items() if key[1]]
        if not known:
            return None
        weighed = np.stack([_features(*key) / seconds for key, seconds in known])
        ridge = 0.02 * np.diag(_features(8, 3) / median(seconds for _, seconds in known))
        target = np.concatenate([np.ones(len(known)), np.full(len(ridge), 0.02 / len(ridge))])
        return np.linalg.lstsq(np.concatenate([weighed, ridge]), target, rcond=None)[0]


class AdaptiveLength:
    """The measured choice; one object serves all generation with a model, so that nothing is learnt twice."""

    def __init__(self, most: int):
        self.most, self.costs, self.rounds = most, Costs(), 0
        self._tried = 0
        self.tried, self.kept = np.zeros(most), np.zeros(most)
        self._held: dict[int, tuple[int, int]] = {}  # class of rows: (choice, last round of it)

    def rates(self) -> list[float]:
        """r_1..r_most; a place that is hardly measured is like the one before it."""
        rates, before = [], PRIOR_RATE
        for tried, kept in zip(self.tried, self.kept, strict=True):
            before = (kept + before * PRIOR_DRAFTS) / (tried + PRIOR_DRAFTS)
            rates.append(before)
        return rates

    def speeds(self, rows: int) -> dict[int, float]:
        """Tokens a second of a row by draft length, where something is known of its time."""
        runs = [1.0, *(1 + np.cumprod(self.rates()).cumsum())]
        lengths = (k for k in LENGTHS if k <= self.most)
        return {k: runs[k] / s for k in lengths if (s := self.costs.of(rows, k)) is not None}

    def choose(self, rows: int) -> int:
        self.rounds += 1
        choice, last = self._held.get(_class(rows), (0, 0))
        if self.rounds <= last:
            return choice
        best, other = self._best(rows)
        if other is not None and self.rounds - self._tried >= (TRY_PLAIN if best else TRY_DRAFTS):
            self._tried = self.rounds
            return other
        if self.costs.rounds(rows, best) >= ENOUGH:
            self._held[_class(rows)] = (best, self.rounds + HOLD)
        return best

    def _best(self, rows: int) -> tuple[int, int | None]:
        """What looks fastest, and what to measure anew now and then, if anything."""
        speeds = self.speeds(rows)
        plain = speeds.pop(0, None)
        if plain is None:
            return 0, None
        if not speeds:
            return min(self.most, 3 if rows <= 8 else 1), None
        best = max(speeds, key=speeds.get)
        if speeds[best] > GAIN * plain:
            return best, 0
        return 0, best if speeds[best] > NEAR * plain else None

    def note(self, rows: int, count: int, seconds: float, tried: list[int], kept: list[int]) -> None:
        self.costs.note(rows, count, seconds)
        if count:
            self.tried[:count] = self.tried[:count] * MEMORY + tried
            self.kept[:count] = self.kept[:count] * MEMORY + kept


_known: WeakKeyDictionary[nn.Module, dict[int, AdaptiveLength]] = WeakKeyDictionary()


def adaptive_length(model: nn.Module, most: int) -> AdaptiveLength:
    """What is known of this model so far."""
    return _known.setdefault(model, {}).setdefault(most, AdaptiveLength(most))


def _class(rows: int) -> int:
    """1, 2, 3, 4, 6, 8, 11, 16, ...: rows whose rounds take about as long."""
    return rows if rows <= 4 else round(2 ** (round(2 * math.log2(rows)) / 2))


def _features(rows: int, count: int) -> np.ndarray:
    return np.array([1.0, rows, count, rows * count])
