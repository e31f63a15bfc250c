"""Environments: seeded problems, held-out questions that training never asks, scores, and bad input."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from nemotron_ultra.config.tasks import TaskConfig, TasksConfig
from nemotron_ultra.errors import BackendError, ConfigError, DataError
from nemotron_ultra.rl.environments import ReasoningGym, make_environments

SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
WORDS = {"min_word_len": 3, "max_word_len": 4}


def sums(seed: int = 0, held_out: int = 20, **args: int) -> ReasoningGym:
    return ReasoningGym("sums", "chain_sum", SUMS | args, seed, held_out)


def questions(environment: ReasoningGym, count: int) -> list[str]:
    return [environment.problem(index).question for index in range(count)]


def test_problems_follow_from_seed_and_index():
    assert questions(sums(3), 30) == questions(sums(3), 30)
    assert sums(3).problem(2000).question == sums(3).problem(2000).question
    wide = [questions(sums(seed, min_digits=6, max_digits=6), 30) for seed in (0, 1)]
    assert len({*wide[0], *wide[1]}) == 60


def test_held_out_questions_are_the_same_for_every_seed_and_length():
    short, long = sums(0, held_out=10), sums(1, held_out=90)
    assert short.questions == long.questions[:10]
    assert len(set(long.questions)) == 90


def test_training_never_asks_what_is_held_out():
    environment = sums(held_out=90)
    plain = sums(held_out=0)
    asked = questions(environment, 600)
    assert not set(asked) & set(environment.questions)
    assert set(questions(plain, 600)) & set(environment.questions), "the space is too large for this test"
    kept = [a for a, b in zip(asked, questions(plain, 600), strict=True) if a == b]
    assert 200 < len(kept) < 500  # only what is held out was drawn again


def test_two_domains_do_not_train_on_each_others_held_out_questions():
    tasks = TasksConfig(
        domains={
            "few": TaskConfig(name="chain_sum", args=SUMS),
            "signed": TaskConfig(name="chain_sum", args=SUMS | {"allow_negation": True}),
        },
        validation_problems=40,
        only=["few"],
    )
    made = make_environments(tasks, seed=0)
    assert list(made) == ["few", "signed"]
    held = set(made["few"].questions) | set(made["signed"].questions)
    assert not held & set(questions(made["few"], 300))


@pytest.mark.parametrize(
    "name, args",
    [("chain_sum", {}), ("spell_backward", WORDS), ("gsm_symbolic", {}), ("acre", {}), ("count_primes", {})],
)
def test_own_answer_scores_one_and_nonsense_less(name: str, args: dict):
    environment = ReasoningGym("d", name, args, seed=0, held_out=2)
    for problem in [environment.held_out(1), *(environment.problem(index) for index in (0, 499, 500))]:
        assert problem.domain == "d" and isinstance(problem.answer, str)
        assert environment.score(problem, f"  {problem.answer}\n") == 1.0
        assert 0.0 <= environment.score(problem, "nonsense") < 0.5
        assert environment.score(problem, "") < 0.5


def test_scorer_that_raises_on_odd_text_gives_zero():
    environment = ReasoningGym("d", "prime_factorization", {}, seed=0, held_out=1)
    problem = environment.problem(0)
    assert environment.score(problem, problem.answer) == 1.0
    assert environment.score(problem, "two times three") == 0.0


def test_generator_without_a_solution_gives_an_empty_answer():
    assert ReasoningGym("d", "graph_color", {}, seed=0, held_out=1).problem(0).answer == ""


def test_problem_without_its_entry_is_not_scored():
    environment = sums()
    with pytest.raises(AssertionError, match="sums:4"):
        environment.score(replace(environment.problem(4), entry={}), "1")


def test_threads_get_the_same_problems():
    environment = ReasoningGym("d", "pool_matrix", {}, seed=0, held_out=1)  # it sets numpy's global seed
    expected = questions(environment, 60)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda i: environment.problem(i).question, range(60)))
    assert found == expected


def test_space_without_anything_left():
    with pytest.raises(
        DataError, match=r"domain sums: chain_sum has too few.*lower tasks.validation_problems"
    ):
        sums(held_out=500)


def test_held_out_problem_beyond_the_list():
    with pytest.raises(DataError, match="sums has no held-out problem 20; allowed: 0 to 19"):
        sums().held_out(20)


def test_unknown_generator():
    with pytest.raises(ConfigError, match=r"tasks\.domains\.d\.name .*'chain_sums' \(did you mean chain_sum"):
        ReasoningGym("d", "chain_sums", {}, seed=0, held_out=1)


@pytest.mark.parametrize(
    "args, words",
    [
        ({"min_termz": 2}, "min_termz"),
        ({"min_terms": 0}, "min_terms must be positive"),
        ({"min_terms": 9, "max_terms": 2}, "max_terms must be >= min_terms"),
        ({"max_terms": "many"}, "TypeError"),
    ],
)
def test_options_that_the_generator_refuses(args: dict, words: str):
    with pytest.raises(ConfigError, match=rf"tasks\.domains\.d\.args: chain_sum.*{words}"):
        ReasoningGym("d", "chain_sum", args, seed=0, held_out=1)


def test_seed_is_not_an_option():
    with pytest.raises(ConfigError, match=r"tasks\.domains\.sums\.args\.seed.*run\.seed"):
        ReasoningGym("sums", "chain_sum", {"seed": 3}, seed=0, held_out=1)


def test_library_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(BackendError, match=r"nemotron-ultra\[rl\]"):
        sums()
