"""Answers with a budget of thoughts: a first request for the thoughts, a second for what follows them.

At the budget thoughts are closed by force, with the very ids that training closes cut thoughts with
(report 3.1.2, 3.5). `Answers` is a Scheduler for such turns; without a budget a turn is one request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from nemotron_ultra.data.tokenizer import Tokenizer
from nemotron_ultra.errors import ConfigError
from nemotron_ultra.generation.base import Completion, Event, Request
from nemotron_ultra.generation.request import check_request, check_room
from nemotron_ultra.generation.scheduler import Scheduler
from nemotron_ultra.generation.text import UNTHINK

OTHER_HALF = 1 << 63  # seeds of second requests differ by this bit


@dataclass(frozen=True, kw_only=True)
class Mode:
    """How a prompt is asked: whether thoughts are opened, and the effort asked for."""

    thinking: bool
    effort: str | None = None


# "medium" is spelled as the marker of training (`data/reasoning.py`).
MODES = {
    "off": Mode(thinking=False),
    "regular": Mode(thinking=True),
    "medium": Mode(thinking=True, effort="efficient"),
}


@dataclass(frozen=True)
class Budget:
    """tokens of thoughts; `close` is put in where they reach it, `tag` ends them by itself."""

    tokens: int
    close: tuple[int, ...]
    tag: int

    @classmethod
    def of(cls, tokens: int, tokenizer: Tokenizer) -> Budget:
        """Raises ConfigError for a tokenizer whose thoughts are not ended by a token."""
        tag = tokenizer.id(UNTHINK)
        if tag is None:
            raise ConfigError(
                f"budget: tokenizer {tokenizer.name} has no token {UNTHINK} to end thoughts with",
                do="leave the budget out",
            )
        return cls(tokens, (*tokenizer.encode("\n"), tag), tag)


class Turn:
    """An answer on its way. `request` is for the whole; see `take`."""

    def __init__(self, request: Request, budget: Budget | None = None):
        self.request, self.budget = request, budget
        self._done: Completion | None = None  # the thoughts, closed

    def check(self, rows: int, max_tokens: int, *, decodes: bool, name: str = "prompt") -> None:
        """Raises DataError or ConfigError for what no scheduler of these limits would take."""
        check_request(self.request, rows, decodes=decodes, name=name)
        check_room(self.request, max_tokens, name)

    def first(self) -> Request:
        if self.budget is None:
            return self.request
        most = min(self.budget.tokens, self.request.max_new_tokens)
        return replace(self.request, max_new_tokens=most, stop_ids=(*self.request.stop_ids, self.budget.tag))

    def take(self, event: Event) -> tuple[Event, Request | None]:
        """An event of the latest request -> the same as an event of the turn, and the request to go on with.

        Ids put in by force have log-probability 0 (nothing else could come) and, under the model, NaN.
        """
        found = event.completion
        if found is None or self.budget is None:
            return event, None
        if self._done is not None:
            return replace(event, completion=_joined(self._done, found)), None
        ended = found.finish_reason == "stop"
        if found.finish_reason == "cancelled" or (ended and found.tokens[-1] != self.budget.tag):
            return event, None
        forced = () if ended else self.budget.close
        room = self.request.max_new_tokens - len(found.tokens)
        event, found = _forced(event, found, forced[:room])
        if room <= len(forced):
            return replace(event, completion=replace(found, finish_reason="length")), None
        self._done = found
        more = replace(
            self.request,
            prompt=(*self.request.prompt, *found.tokens),
            max_new_tokens=room - len(forced),
            seed=self.request.seed ^ OTHER_HALF,
        )
        return replace(event, completion=None), more


class Answers:
    """Turns by a key of the caller's own, on one Scheduler."""

    def __init__(self, scheduler: Scheduler):
        self.scheduler = scheduler
        self._turns: dict[int, tuple[int, Turn]] = {}

    @property
    def idle(self) -> bool:
        return self.scheduler.idle

    def __len__(self) -> int:
        """Turns that wait or run."""
        return len(self._turns)

    def submit(self, key: int, turn: Turn) -> None:
        """Raises what `Scheduler.submit` does."""
        self._turns[self.scheduler.submit(turn.first())] = (key, turn)

    def cancel(self, keys: Sequence[int]) -> None:
        gone = set(keys)
        for id, (key, _) in list(self._turns.items()):
            if key in gone:
                self.scheduler.cancel(id)

    def step(self) -> list[tuple[int, Event]]:
        """One round -> (key, what that turn got)."""
        out = []
        for event in self.scheduler.step():
            key, turn = self._turns[event.id]
            shown, more = turn.take(event)
            if event.completion is not None:
                del self._turns[event.id]
            if more is not None:
                self._turns[self.scheduler.submit(more)] = (key, turn)
            out.append((key, shown))
        return out


def _forced(event: Event, found: Completion, ids: Sequence[int]) -> tuple[Event, Completion]:
    if not ids:
        return event, found
    sure, unknown = [0.0] * len(ids), [float("nan")] * len(ids)
    event = Event(
        event.id, [*event.tokens, *ids], event.logprobs + sure, event.model_logprobs + unknown, found
    )
    versions = found.versions + found.versions[-1:] * len(ids)
    return event, replace(
        found,
        tokens=[*found.tokens, *ids],
        logprobs=found.logprobs + sure,
        model_logprobs=found.model_logprobs + unknown,
        versions=versions,
        stats=found.stats | {"forced_tokens": len(ids)},
    )


def _joined(thoughts: Completion, answer: Completion) -> Completion:
    seconds = thoughts.stats["seconds"] + answer.stats["seconds"]
    return Completion(
        tokens=thoughts.tokens + answer.tokens,
        logprobs=thoughts.logprobs + answer.logprobs,
        model_logprobs=thoughts.model_logprobs + answer.model_logprobs,
        versions=thoughts.versions + answer.versions,
        finish_reason=answer.finish_reason,
        stats=answer.stats | thoughts.stats | {"seconds": seconds},
    )
