"""How many tokens to draft: k that gives the most tokens a second, E(k) / Q(k), both as measured.

E(k) = 1 + sum_{j<=k} prod_{i<=j} r_i, r_i the share of drafts i that stayed after drafts 1..i-1 had.
Q(k) = T(k) / T(0), the median of the latest quotients of a round with k drafts and those without just before
it: a machine whose speed drifts changes both. Q(k) - 1 is taken as proportional to k + 1/2 from the nearest k
that was measured. Drafts must promise GAIN more than none, so that noise costs little. Quotients come from
visits, rare and always alike, since what runs seldom finds its weights far away in memory: SETTLED rounds
without drafts, then two with.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import Protocol
from weakref import WeakKeyDictionary

import numpy as np
from torch import nn

GAIN = 1.08  # besides noise: rows that draft cost a little outside their rounds
NEAR = 0.8  # of plain decoding's speed: drafts so fast are visited sooner
CLEAR = 1.3  # times plain decoding: drafts so fast hardly turn out to be slower
SETTLED, BESIDE = 6, 3  # rounds without drafts before one with them is timed; the last ones count
TRY_CLOSE, TRY_PLAIN = 48, 128  # rounds from visit to visit while there are drafts
TRY_NEAR, TRY_FAR, LONGEST = 128, 256, 2  # while there are none; LONGEST times twice as many
EARLY = 4  # visits come so much sooner before ENOUGH quotients of a length are known
ENOUGH, TWICE = 3, 2  # without TWICE quotients there are no drafts but on a visit
LATEST, REMEMBERED = 5, 8  # quotients that are kept of a length, visits that one without new ones is kept for
HOLD = 16  # rounds with drafts that a choice is kept for
PRIOR_RATE, PRIOR_DRAFTS = 0.6, 4.0
MEMORY = 0.99  # weight of a round's acceptance after the next one with drafts
VISITED = 0.9  # the same where such rounds are rare


class DraftLength(Protocol):
    most: int

    def choose(self, rows: int) -> int:
        """Drafts of the next round, at most `most`; the same until `note`."""
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
    """What is known of rounds of about so many rows. Numbers count the rounds of all."""

    # the latest by their drafts, each with the number of its visit
    quotients: dict[int, deque[tuple[int, float]]] = field(default_factory=dict)
    plain: deque[float] = field(default_factory=lambda: deque(maxlen=SETTLED))  # seconds, one after another
    number: int = 0  # of the last round
    drafts: int = 0  # of the last round
    count: int = 0
    choice: int = 0
    until: int = 0  # the count that the choice is kept to
    visit: deque[int] = field(default_factory=deque)  # drafts of the rounds that are left of a visit
    visits: int = 0
    visited: int = 0  # the count at the last visit
    idle: int = 0  # visits in a row while there were no drafts

    def note(self, number: int, drafts: int, seconds: float) -> None:
        again = drafts == self.drafts and number == self.number + 1
        if drafts and again and len(self.plain) == SETTLED:  # the first round had to prepare
            self._measured(drafts, seconds / max(median(list(self.plain)[-BESIDE:]), 1e-9))
            self.until = 0
        if number != self.number + 1 or self.drafts:
            self.plain.clear()
        if not drafts:
            self.plain.append(seconds)
        self.number, self.drafts, self.count = number, drafts, self.count + 1
        if self.visit and self.visit.popleft() != drafts:  # the rows had not so many tokens to get
            self.visit.clear()

    def _measured(self, drafts: int, quotient: float) -> None:
        """A length that was not visited for long is forgotten: it may have been an accident."""
        self.quotients.setdefault(drafts, deque(maxlen=LATEST)).append((self.visits, quotient))
        old = [k for k, found in self.quotients.items() if self.visits - found[-1][0] > REMEMBERED]
        for k in old:
            del self.quotients[k]

    def begin(self, *drafts: int) -> int:
        self.visit.extend(drafts)
        self.visits, self.visited = self.visits + 1, self.count
        return drafts[0]

    def known(self) -> int:
        return sum(map(len, self.quotients.values()))

    def of(self, most: int) -> list[float]:
        """Q(0) to Q(most); some length is known."""
        found = {k: max(0.02, median(q for _, q in latest) - 1) for k, latest in self.quotients.items()}
        quotients = [1.0]
        for k in range(1, most + 1):
            near = min(found, key=lambda m: (abs(m - k), m))
            quotients.append(1 + found[near] * (k + 0.5) / (near + 0.5))
        return quotients


class AdaptiveLength:
    """The measured choice; one object serves all generation with a model, so that nothing is learnt twice."""

    def __init__(self, most: int):
        self.most, self.number = most, 0
        self.rounds: dict[int, Rounds] = {}
        self.tried, self.kept = np.zeros(most), np.zeros(most)

    def rates(self) -> list[float]:
        """r_1..r_most; a place that is hardly measured is like the one before it."""
        rates, before = [], PRIOR_RATE
        for tried, kept in zip(self.tried, self.kept, strict=True):
            before = (kept + before * PRIOR_DRAFTS) / (tried + PRIOR_DRAFTS)
            rates.append(before)
        return rates

    def choose(self, rows: int) -> int:
        own = self._of(rows)
        if own.visit:
            return own.visit[0]
        if own.count < own.until:
            return own.choice
        best, drafts, wait = self._weigh(own, rows)
        due = own.visited + wait
        if own.count >= due:
            own.idle = 0 if best or own.known() < ENOUGH else own.idle + 1
            return own.begin(*[0] * SETTLED * (best > 0), drafts, drafts)
        own.choice, own.until = best, min(due, own.count + HOLD) if best else due
        return best

    def note(self, rows: int, count: int, seconds: float, tried: list[int], kept: list[int]) -> None:
        own = self._of(rows)
        self.number += 1
        own.note(self.number, count, seconds)
        if count:
            memory = MEMORY if own.choice else VISITED
            self.tried[:count] = self.tried[:count] * memory + tried
            self.kept[:count] = self.kept[:count] * memory + kept

    def _weigh(self, own: Rounds, rows: int) -> tuple[int, int, int]:
        """The best choice, the best number of drafts above 0, and rounds from one visit to the next."""
        if not own.quotients:
            return 0, min(self.most, 3 if rows <= 8 else 1), min(TRY_FAR, SETTLED << min(2 * own.visits, 8))
        runs = [1.0, *(1 + np.cumprod(self.rates()).cumsum())]
        speeds = [run / quotient for run, quotient in zip(runs, own.of(self.most), strict=True)]
        drafts = max(range(1, self.most + 1), key=speeds.__getitem__)
        if speeds[drafts] > GAIN and own.known() < TWICE:
            return 0, drafts, 2 * SETTLED
        if speeds[drafts] > GAIN:
            best, wait = drafts, TRY_PLAIN if speeds[drafts] > CLEAR else TRY_CLOSE
        else:
            best, wait = 0, (TRY_NEAR if speeds[drafts] > NEAR else TRY_FAR) << min(own.idle, LONGEST)
        return best, drafts, wait // EARLY if len(own.quotients.get(drafts, ())) < ENOUGH else wait

    def _of(self, rows: int) -> Rounds:
        found = self.rounds.get(rows)
        if found is None:
            alike = rows if rows <= 4 else round(2 ** (round(2 * math.log2(rows)) / 2))
            found = self.rounds[rows] = self.rounds.setdefault(alike, Rounds())
        return found


_known: WeakKeyDictionary[nn.Module, dict[int, AdaptiveLength]] = WeakKeyDictionary()


def adaptive_length(model: nn.Module, most: int) -> AdaptiveLength:
    """What is known of this model so far."""
    return _known.setdefault(model, {}).setdefault(most, AdaptiveLength(most))
