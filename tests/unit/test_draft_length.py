"""Draft lengths that a machine's times and a model's drafts, both made up here, lead to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from nemotron_ultra.generation import draft_length
from nemotron_ultra.generation.draft_length import AdaptiveLength

ANSWER = 128  # tokens of a request, all rows in step


@dataclass
class Machine:
    """seconds(rows, drafts) of a round, times a pace that drifts (autoregressive) and noise, always above."""

    seconds: Callable[[int, int], float]
    rate: float  # of drafts that stay
    noise: float = 0.1
    drift: float = 0.06
    seed: int = 0
    pace: float = 0.0
    counts: list[int] = field(default_factory=list)
    draw: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.draw = np.random.default_rng(self.seed)

    def run(self, length: AdaptiveLength, rows: int, rounds: int) -> float:
        """-> tokens a second over those without drafts, on a machine of even pace without noise."""
        tokens = spent = 0.0
        left, before = ANSWER, 0
        self.counts.clear()
        for _ in range(rounds):
            self.pace = 0.98 * self.pace + self.drift * self.draw.standard_normal()
            count = min(length.choose(rows), left - 1)
            seconds = self.seconds(rows, count)
            seconds += self.seconds(rows, 0) / 2 if count and not before else 0  # pairs that waited
            before = count
            stay = (self.draw.random((rows, count)) < self.rate).cumprod(1).sum(1)
            tried, kept = ([int((stay >= p + after).sum()) for p in range(count)] for after in (0, 1))
            noise = np.exp(self.noise * abs(self.draw.standard_normal()))
            length.note(rows, count, seconds * np.exp(self.pace) * noise, tried, kept)
            got = 1 + stay.mean() if count else 1
            tokens, spent = tokens + got, spent + seconds
            left -= round(got)
            left = left if left > 0 else ANSWER
            self.counts.append(count)
        return tokens * self.seconds(rows, 0) / spent

    def best(self, rows: int, most: int = 7) -> float:
        return max(
            sum(self.rate**j for j in range(k + 1)) * self.seconds(rows, 0) / self.seconds(rows, k)
            for k in range(most + 1)
        )


def line(plain: float, each: float) -> Callable[[int, int], float]:
    return lambda rows, drafts: plain + each * drafts


def dearer_by_rows(rows: int, drafts: int) -> float:
    """Long drafts are best for one row, none for many."""
    return 5 + 0.3 * drafts + 0.3 * rows * (1 + drafts)


@pytest.mark.parametrize("rows", [1, 2, 4, 8, 16, 32, 64])
def test_takes_what_is_fastest(rows):
    length, machine = AdaptiveLength(7), Machine(dearer_by_rows, 0.7)
    machine.run(length, rows, 1500)
    assert machine.run(length, rows, 1500) > 0.9 * machine.best(rows)
    assert length.rates()[0] == pytest.approx(0.7, abs=0.25)
    assert np.median(machine.counts) >= 3 if rows == 1 else rows < 64 or np.median(machine.counts) == 0


@pytest.mark.parametrize(
    ("rows", "rate", "plain", "each", "least"),
    [
        (16, 0.68, 9, 11, 0.98),  # dear drafts
        (8, 0.7, 7.5, 5.2, 0.98),  # neither won nor lost
        (1, 0.1, 4, 0.8, 0.98),  # drafts that do not stay
        (1, 0.7, 4, 0.8, 1.45),
        (4, 0.7, 6, 2, 1.2),
    ],
)
def test_a_drifting_machine_is_seen_through(rows, rate, plain, each, least):
    found = [
        Machine(line(plain, each), rate, seed=seed).run(AdaptiveLength(7), rows, 640) for seed in range(12)
    ]
    assert np.median(found) > least
    assert min(found) > 0.93 * least


def test_drafts_that_do_not_stay_are_tried_again_for_ever():
    """6,000 rounds without use on a noisy machine, then drafts are good; nothing known grows meanwhile."""
    length, machine = AdaptiveLength(7), Machine(line(4, 0.8), 0.1, noise=0.2)
    assert machine.run(length, 1, 6000) > 0.985
    own = length.rounds[1]
    assert max(map(len, own.quotients.values())) <= draft_length.LATEST
    assert len(own.quotients) <= 7 and len(own.plain) <= draft_length.SETTLED and len(own.visit) <= 8
    machine.rate = 0.8
    machine.run(length, 1, 4000)
    assert machine.run(length, 1, 500) > 0.9 * machine.best(1)


def test_drafts_that_no_longer_stay_are_left():
    length, machine = AdaptiveLength(7), Machine(line(4, 0.8), 0.8)
    machine.run(length, 1, 600)
    machine.rate = 0.05
    machine.run(length, 1, 200)
    assert machine.run(length, 1, 600) > 0.95


def test_one_moment_in_which_the_machine_stood_still_is_forgotten():
    """The first round of three drafts that is timed takes 1 s instead of 1.45 ms."""
    length, counts = AdaptiveLength(4), []
    for number in range(3000):
        count = length.choose(1)
        stalls = count == 3 and number < 9
        length.note(1, count, 1.0 if stalls else 1e-3 + 1.5e-4 * count, [1] * count, [1] * count)
        counts.append(count)
    assert counts[:9].count(3) == 2 and np.median(counts[-500:]) == 4


def test_answers_too_short_for_a_visit_are_not_all_visits():
    """Requests of two tokens: a round of one draft at most, so no two alike follow one another."""
    length, counts = AdaptiveLength(7), []
    for _ in range(2000):
        count = min(1, length.choose(4))
        length.note(4, count, 1.0 + count, [4] * count, [2] * count)
        length.note(4, 0, 1.0, [], [])
        counts.append(count)
    assert sum(counts) < 60


def test_asking_twice_changes_nothing():
    asked, length = AdaptiveLength(7), AdaptiveLength(7)
    for number in range(400):
        count = asked.choose(2)
        assert asked.choose(2) == count == length.choose(2)
        for one in (asked, length):
            one.note(2, count, 4 + 0.8 * count + number % 3, [2] * count, [1] * count)
