"""reward = scorer(answer, problem) in [0, 1]: endless seeded lists of verifiable problems, one per domain.

`reasoning_gym` (100 and more generators, each with a scorer of its own) stands behind the same protocol as
any environment to come. Problem number i is the generator's draw with random seed first + i; training and
held-out problems come from number ranges that never meet, and a training question that the held-out list of
any domain asks too is drawn again.
"""

from __future__ import annotations

import difflib
import importlib
import threading
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, Protocol

from nemotron_ultra.config.tasks import TasksConfig
from nemotron_ultra.data.order import keyed
from nemotron_ultra.errors import BackendError, ConfigError, DataError
from nemotron_ultra.rl.rollout import Problem

TRIES = 100  # draws of one problem before its generator counts as exhausted
# Numbers: training in [0, 2^31), held out in [2^31, 2^32), where the seeds of numpy end. A list begins
# anywhere in the first quarter of its range, so that two runs with seeds 0 and 1 share no problems.
_HELD_OUT, _BEGINNINGS, _FURTHER = 2**31, 2**29, 10_000_000
_CHUNK = 500  # problems that one generator object makes: some prepare all of them when they are built
# Some generators set numpy's global seed, and the library promises nothing about threads.
_LIBRARY = threading.RLock()


class Environment(Protocol):
    """Problems of one domain and the judge of their answers; may be used from several threads."""

    domain: str

    def problem(self, index: int) -> Problem:
        """Training problem number `index` >= 0: always the same one for the same seed."""
        ...

    def held_out(self, index: int) -> Problem:
        """Held-out problem number `index`; training never asks its question."""
        ...

    def score(self, problem: Problem, text: str) -> float:
        """How good an answer is, 0 to 1."""
        ...


class ReasoningGym:
    """One generator of reasoning-gym. `seed` decides the training list; the held-out list is always the same.

    The held-out list has `held_out` different questions, its first n are the same for every length. A
    problem's answer is "" where the generator gives no solution (5 of 106 do not). Raises ConfigError for an
    unknown generator or options that it refuses, DataError if it has too few different questions.
    """

    def __init__(self, domain: str, name: str, args: Mapping[str, Any], seed: int, held_out: int):
        self.domain, self.name = domain, name
        self._args = dict(args)
        _check_own(domain, args)
        self._dataset = lru_cache(maxsize=4)(self._build)
        self._begin = keyed(seed, "problems", domain) % _BEGINNINGS
        self._begin_held_out = _HELD_OUT + keyed("held out", name) % _BEGINNINGS
        self._reserved: set[str] = set()
        self._held_out: list[Problem] = []
        for index in range(held_out):
            self._held_out.append(self._draw(self._begin_held_out, index))
            self._reserved.add(self._held_out[-1].question)

    def problem(self, index: int) -> Problem:
        return self._draw(self._begin, index)

    def held_out(self, index: int) -> Problem:
        if index >= len(self._held_out):
            raise DataError(
                f"domain {self.domain} has no held-out problem {index}",
                allowed=f"0 to {len(self._held_out) - 1}",
                do="raise tasks.validation_problems",
            )
        return self._held_out[index]

    def score(self, problem: Problem, text: str) -> float:
        """The generator's own score, held within [0, 1]; 0 for text that its scorer cannot read."""
        assert problem.entry, f"{problem.domain}:{problem.index} came without what its scorer needs"
        try:
            with _LIBRARY:
                value = float(self._dataset(0).score_answer(text.strip(), problem.entry))
        except Exception:  # scorers parse what a model wrote and raise whatever they meet
            return 0.0
        return min(1.0, value) if value > 0 else 0.0  # NaN is not above 0

    @property
    def questions(self) -> list[str]:
        """Questions of the held-out list."""
        return [problem.question for problem in self._held_out]

    def reserve(self, questions: Iterable[str]) -> None:
        """Questions that training leaves out, beside those of the held-out list."""
        self._reserved.update(questions)

    def _draw(self, first: int, index: int) -> Problem:
        """The problem of number first + index, or of the first further number whose question is free."""
        failure: Exception | None = None
        for attempt in range(TRIES):
            chunk, place = divmod(index + attempt * _FURTHER, _CHUNK)
            try:
                with _LIBRARY:
                    entry = self._dataset(first + chunk * _CHUNK)[place]
            except Exception as error:  # some generators give up on some seeds, each in its own way
                failure = error
                continue
            if entry["question"] not in self._reserved:
                return self._problem(index, entry)
        if failure is not None:
            raise _refused(self.domain, self.name, self._args, failure) from failure
        raise DataError(
            f"domain {self.domain}: {self.name} has too few different questions",
            got=f"{TRIES} draws of problem {index}, each a question that is held out already",
            do=f"widen tasks.domains.{self.domain}.args, or lower tasks.validation_problems",
        )

    def _problem(self, index: int, entry: dict[str, Any]) -> Problem:
        answer = entry["answer"]
        return Problem(
            domain=self.domain,
            index=index,
            question=entry["question"],
            answer="" if answer is None else str(answer),
            entry=entry,
        )

    def _build(self, seed: int) -> Any:
        """The generator's object for the problems of numbers seed to seed + 499. Raises ConfigError."""
        generators = _generators()
        if self.name not in generators:
            raise _unknown(self.domain, self.name, list(generators))
        try:
            gym = importlib.import_module("reasoning_gym")
            return gym.create_dataset(self.name, **self._args, seed=seed, size=_CHUNK)
        except Exception as error:  # each generator checks its options in its own way
            raise _refused(self.domain, self.name, self._args, error) from error


ENVIRONMENTS = {"reasoning_gym": ReasoningGym}


def make_environments(tasks: TasksConfig, seed: int) -> dict[str, Environment]:
    """An environment for every domain, trained on or not.

    No domain trains on a question that any domain holds out. Raises ConfigError, DataError, or BackendError
    if the library is not installed.
    """
    made = {
        domain: ENVIRONMENTS[task.environment](
            domain, task.name, task.args, seed, held_out=tasks.validation_problems
        )
        for domain, task in tasks.domains.items()
    }
    for environment in made.values():
        for other in made.values():
            environment.reserve(other.questions)
    return made


def _generators() -> Mapping[str, Any]:
    try:
        with _LIBRARY:
            importlib.import_module("reasoning_gym")
            return importlib.import_module("reasoning_gym.factory").DATASETS
    except ImportError as error:
        raise BackendError(
            "tasks with environment reasoning_gym need the library reasoning-gym",
            got=error,
            do="pip install 'nemotron-ultra[rl]'",
        ) from error


def _check_own(domain: str, args: Mapping[str, Any]) -> None:
    taken = [key for key in ("seed", "size") if key in args]
    if taken:
        raise ConfigError(
            f"tasks.domains.{domain}.args.{taken[0]} cannot be chosen",
            got=args[taken[0]],
            do="leave it out: problems follow from run.seed, and their list never ends",
        )


def _unknown(domain: str, name: str, names: list[str]) -> ConfigError:
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    return ConfigError(
        f"tasks.domains.{domain}.name is no generator of reasoning-gym",
        got=repr(name) + (f" (did you mean {' or '.join(close)}?)" if close else ""),
        allowed=f"one of its {len(names)}",
        do="list them: python -c 'import reasoning_gym.factory as f; print(*f.DATASETS)'",
    )


def _refused(domain: str, name: str, args: Mapping[str, Any], error: Exception) -> Exception:
    if isinstance(error, ConfigError | BackendError):
        return error
    return ConfigError(
        f"tasks.domains.{domain}.args: {name} cannot make problems with them",
        got=f"{args or 'no args'}: {type(error).__name__}: {error}",
        do="its options are the fields of the generator's configuration in reasoning_gym; "
        f"'~tasks.domains.{domain}.args' drops those that came with the option",
    )
