"""How many tokens to draft: k that gives the most tokens a second, E(k) / T(rows, k), both as measured.

E(k) = 1 + sum_{j<=k} prod_{i<=j} r_i, r_i the share of drafts i that stayed after drafts 1..i-1 had. T is
the median of the latest rounds of (rows, k); T(k) - T(0) is taken as proportional to k + 1/2 from the nearest
k that was measured. Drafts must promise GAIN more than none, so that noise costs little. Rounds that only
measure are few: PROBES with drafts when so many rows come for the first time, later one in TRY_CLOSE (drafts
promise little: a machine whose speed drifts is soon found out), TRY_PLAIN, TRY_NEAR or TRY_FAR.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from dataclasses import dataclass, field
from statistics import median
from typing import Protocol
from weakref import WeakKeyDictionary

import numpy as np
from torch import nn

GAIN = 1.08  # besides noise: rows that draft cost a little outside their rounds
NEAR = 0.8  # of plain decoding's speed: drafts so fast are tried again sooner
PROBES = 2  # rounds; the first of a length is not timed, it has to prepare
ENOUGH = 2  # rounds of a length that make its median
LATEST = 5
PRIOR_RATE, PRIOR_DRAFTS = 0.6, 4.0
MEMORY = 0.99  # weight of a round's acceptance after the next one
CLEAR = 1.3  # times plain decoding: drafts so fast hardly turn out to be slower
TRY_CLOSE, TRY_PLAIN = 12, 48  # rounds with drafts after which one without is measured anew
TRY_NEAR, TRY_FAR = 128, 256  # and the other way round
HOLD = 16  # rounds that a choice is kept for, fewer while few of its kind were timed


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


@dataclass
class Rounds:
    """What is known of rounds of about so many rows. seconds: of the latest ones, by their drafts."""

    seconds: dict[int, deque[float]] = field(
        default_factory=lambda: defaultdict(lambda: deque(maxlen=LATEST))
    )
    prepared: set[int] = field(default_factory=set)
    count: int = 0
    drafted: int = 0
    last: int = 0  # drafts of the last round
    choice: int = 0
    until: int = 0  # the round that the choice is kept to
    tried: int = 0  # the last round that was not of the chosen kind

    def note(self, drafts: int, seconds: float) -> None:
        self.count, self.last = self.count + 1, drafts
        self.drafted += drafts > 0
        if drafts in self.prepared:
            self.seconds[drafts].append(seconds)
        self.prepared.add(drafts)
        if (drafts > 0) != (self.choice > 0):
            self.tried = self.count

    def of(self, most: int) -> dict[int, float]:
        """Seconds of a round by its drafts, 0 to `most`; empty before rounds of both kinds were timed."""
        known = {k: median(seconds) for k, seconds in self.seconds.items() if seconds}
        plain = known.pop(0, None)
        if plain is None or not known:
            return {}
        found = {0: plain}
        for k in range(1, most + 1):
            near = min(known, key=lambda m: (abs(m - k), m))
            share = 1.0 if len(self.seconds.get(k, ())) >= ENOUGH else (k + 0.5) / (near + 0.5)
            found[k] = plain + max(known[near] - plain, 0.02 * plain) * share
        return found


class AdaptiveLength:
    """The measured choice; one object serves all generation with a model, so that nothing is learnt twice."""

    def __init__(self, most: int):
        self.most = most
        self.rounds: dict[int, Rounds] = defaultdict(Rounds)
        self.tried, self.kept = np.zeros(most), np.zeros(most)

    def rates(self) -> list[float]:
        """r_1..r_most; a place that is hardly measured is like the one before it."""
        rates, before = [], PRIOR_RATE
        for tried, kept in zip(self.tried, self.kept, strict=True):
            before = (kept + before * PRIOR_DRAFTS) / (tried + PRIOR_DRAFTS)
            rates.append(before)
        return rates

    def choose(self, rows: int) -> int:
        own = self.rounds[_class(rows)]
        if own.count < own.until:
            return own.choice
        seconds = own.of(self.most)
        if own.drafted < PROBES or not seconds:
            between = own.last or len(own.seconds[0]) < ENOUGH
            return 0 if between else min(self.most, 3 if rows <= 8 else 1)
        runs = [1.0, *(1 + np.cumprod(self.rates()).cumsum())]
        speeds = {k: runs[k] / seconds[k] for k in seconds}
        plain = speeds.pop(0)
        best = other = max(speeds, key=speeds.get)
        wait = TRY_NEAR if speeds[best] > NEAR * plain else TRY_FAR
        if speeds[best] > GAIN * plain:
            other, wait = 0, TRY_PLAIN if speeds[best] > CLEAR * plain else TRY_CLOSE
        else:
            best = 0
        if own.count - own.tried >= wait:
            return other
        timed = len(own.seconds.get(best, ()))
        own.choice, own.until = best, own.count + (min(HOLD, 2 * max(1, timed)) if best else HOLD)
        return best

    def note(self, rows: int, count: int, seconds: float, tried: list[int], kept: list[int]) -> None:
        self.rounds[_class(rows)].note(count, seconds)
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
