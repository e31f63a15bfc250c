"""Problems of reasoning-gym, which has 100 and more generators with scorers: offline, the same for a seed.

Problem n of a generator is its draw with random seed first + n. `first` lies in [2^30, 1.5 x 2^30) by the
run's seed: the numbers that RL trains on begin below 2^29, those it holds out lie from 2^31 on. An answer
counts only if the library's scorer gives it full marks, also after the problem went through JSON.
"""

from __future__ import annotations

import difflib
import importlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date
from functools import lru_cache
from typing import Any

from nemotron_ultra.data.order import keyed
from nemotron_ultra.data.synthetic.explain import explain
from nemotron_ultra.data.synthetic.steps import Drop, Row
from nemotron_ultra.data.synthetic.wrong import others_of, wrong_answers
from nemotron_ultra.errors import BackendError, ConfigError

PREFIX = "reasoning_gym:"
# One-line answers, problems that do not depend on the day they are made, several domains.
DEFAULT = (
    "chain_sum",
    "letter_counting",
    "simple_equations",
    "knights_knaves",
    "gcd",
    "spell_backward",
    "complex_arithmetic",
    "number_sequence",
    "prime_factorization",
    "base_conversion",
    "family_relationships",
    "leg_counting",
)
_FIRST, _BEGINNINGS = 2**30, 2**29
_CHUNK = 500  # problems of one generator object: some prepare all of them when they are built
_OTHERS = 24  # problems whose answers are candidates for wrong ones


@dataclass(frozen=True)
class Spec:
    """A generator and its options: "reasoning_gym:NAME" or "reasoning_gym:NAME:{JSON options}"."""

    name: str
    args: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Spec:
        """Raises ConfigError for an unknown generator or options that are no JSON object."""
        name, _, options = text.removeprefix(PREFIX).partition(":")
        try:
            args = json.loads(options) if options else {}
        except ValueError as error:
            raise ConfigError(f"options of generator {name} are not JSON", got=options) from error
        if not isinstance(args, dict) or {"seed", "size"} & set(args):
            raise ConfigError(
                f"options of generator {name} must be a JSON object without seed and size", got=options
            )
        names = list(generators())
        if name not in names:
            close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
            hint = f" (did you mean {' or '.join(close)}?)" if close else ""
            do = "list them: python -c 'import reasoning_gym.factory as f; print(*f.DATASETS)'"
            raise ConfigError("unknown generator of reasoning-gym", got=repr(name) + hint, do=do)
        return cls(name, args)

    def text(self) -> str:
        return f"{PREFIX}{self.name}" + (f":{json.dumps(self.args, sort_keys=True)}" if self.args else "")


class Gym:
    """One generator. Raises ConfigError if it refuses its options."""

    def __init__(self, spec: Spec, seed: int):
        self.spec, self._first = spec, _FIRST + keyed(seed, "synthetic", spec.name) % _BEGINNINGS
        self.domain = domain_of(spec.name)
        self._dataset = lru_cache(maxsize=4)(self._build)
        self._entry = lru_cache(maxsize=2 * _OTHERS)(self._draw)
        self._dataset(0)

    def make(self, number: int, wrong: int, key: str) -> Row | Drop:
        """{"raw": question, answer, wrong_answers, reasoning; "entry": what the scorer needs} of a problem.

        wrong: how many wrong answers to look for, 0 for none; fewer come where there are no more.
        """
        try:
            entry = self._entry(number)
        except Exception as error:  # some generators give up on some seeds, each in its own way
            return Drop("the generator failed", f"{type(error).__name__}: {error}")
        if entry["answer"] is None:
            return Drop("the generator gives no answer", self.spec.name)
        answer = str(entry["answer"]).strip()
        plain = json.loads(json.dumps(entry, default=_plain))
        if self.score(answer, entry) < 1 or self.score(answer, plain) < 1:
            return Drop("the scorer does not accept the answer", answer[:80])
        raw = {"question": entry["question"], "answer": answer, "reasoning": explain(self.spec.name, entry)}
        if wrong:
            own = others_of(self.spec.name, entry)
            others = own or list(self._others(number))
            raw["wrong_answers"] = wrong_answers(
                answer, others, wrong, key, lambda text: self.score(text, entry) >= 1, near=not own
            )
        return {"raw": raw, "entry": plain}

    def score(self, answer: str, entry: Mapping[str, Any]) -> float:
        """The generator's own score; 0 for text that its scorer cannot read."""
        try:
            return float(self._dataset(0).score_answer(answer, entry))
        except Exception:  # scorers raise whatever they meet in a text they cannot parse
            return 0.0

    def _others(self, number: int) -> Iterator[str]:
        """Answers of the problems around one, of the same generator object."""
        start = number - number % _CHUNK
        for i in range(1, _OTHERS + 1):
            try:
                answer = self._entry(start + (number - start + i) % _CHUNK)["answer"]
            except Exception:  # as in make: one more or less does not matter here
                continue
            if answer is not None:
                yield str(answer)

    def _draw(self, number: int) -> dict[str, Any]:
        chunk, place = divmod(number, _CHUNK)
        return self._dataset(chunk)[place]

    def _build(self, chunk: int) -> Any:
        gym = importlib.import_module("reasoning_gym")
        seed = self._first + chunk * _CHUNK
        try:
            return gym.create_dataset(self.spec.name, **self.spec.args, seed=seed, size=_CHUNK)
        except Exception as error:  # each generator checks its options in its own way
            raise ConfigError(
                f"generator {self.spec.name} refuses its options",
                got=f"{self.spec.args or 'none'}: {type(error).__name__}: {error}",
                do="they are the fields of the generator's configuration in reasoning_gym",
            ) from error


def generators() -> Mapping[str, Any]:
    """Name -> (class, configuration) of all generators. Raises BackendError without the library."""
    try:
        importlib.import_module("reasoning_gym")
        return importlib.import_module("reasoning_gym.factory").DATASETS
    except ImportError as error:
        raise missing("rule-made problems", "reasoning-gym") from error


def missing(what: str, package: str) -> BackendError:
    return BackendError(f"{what} need the package {package}", do="pip install 'nemotron-ultra[synth]'")


def domain_of(name: str) -> str:
    """arithmetic, algebra, logic, ...: the library's own grouping."""
    return generators()[name][0].__module__.split(".")[1]


def _plain(value: Any) -> Any:
    """What JSON does not know: numpy's scalars and arrays, sets, dates, exact numbers."""
    for turn in ("item", "tolist"):
        if callable(getattr(value, turn, None)):
            return value.item() if turn == "item" and getattr(value, "size", 1) == 1 else value.tolist()
    if isinstance(value, set | frozenset):
        return sorted(value, key=str)
    return value.isoformat() if isinstance(value, date) else str(value)
