"""ProblemStream: a pure function of (seed, step), shares by weight, every problem of a domain once."""

from __future__ import annotations

from collections import Counter

import pytest

from nemotron_ultra.config.tasks import TaskConfig, TasksConfig
from nemotron_ultra.errors import ConfigError
from nemotron_ultra.rl.problems import ProblemStream
from nemotron_ultra.rl.rollout import Problem

WEIGHTS = {"a": 5.0, "b": 3.0, "c": 2.0}


class Numbers:
    """Problem i asks for i."""

    def __init__(self, domain: str):
        self.domain = domain

    def problem(self, index: int) -> Problem:
        return Problem(domain=self.domain, index=index, question=str(index), answer=str(index))

    def held_out(self, index: int) -> Problem:
        return self.problem(-1 - index)

    def score(self, problem: Problem, text: str) -> float:
        return float(text == problem.answer)


ENVIRONMENTS = {domain: Numbers(domain) for domain in "abcd"}


def stream(seed: int = 0, per_step: int = 7) -> ProblemStream:
    return ProblemStream(ENVIRONMENTS, WEIGHTS, seed, per_step)


def test_any_step_at_any_time():
    whole = stream()
    in_order = [whole(step) for step in range(40)]
    assert [stream()(step) for step in reversed(range(40))] == in_order[::-1]
    assert in_order != [stream(seed=1)(step) for step in range(40)]


def test_steps_of_another_size_cut_the_same_list():
    seven = [p for step in range(10) for p in stream(per_step=7)(step)]
    ten = [p for step in range(7) for p in stream(per_step=10)(step)]
    assert seven == ten


def test_every_problem_of_a_domain_once_and_in_order():
    drawn = [p for step in range(200) for p in stream(seed=5)(step)]
    for domain in WEIGHTS:
        indices = [p.index for p in drawn if p.domain == domain]
        assert indices == list(range(len(indices)))


def test_shares_are_exact_at_every_step():
    one, counts = stream(per_step=10), Counter()
    for step in range(300):
        counts.update(p.domain for p in one(step))
        for domain, weight in WEIGHTS.items():
            assert abs(counts[domain] - weight * (step + 1)) < 4, (step, counts)
    assert "d" not in counts


def test_only_domains_that_are_trained_on():
    domains = {name: TaskConfig(name="chain_sum", weight=w) for name, w in WEIGHTS.items()}
    tasks = TasksConfig(domains=domains, only=["c"])
    drawn = ProblemStream.of(tasks, ENVIRONMENTS, 0, 8)(3)
    assert [(p.domain, p.index) for p in drawn] == [("c", i) for i in range(24, 32)]


def test_nothing_to_draw_from():
    with pytest.raises(ConfigError, match="no domain"):
        ProblemStream(ENVIRONMENTS, {"a": 0.0}, 0, 4)
