"""Generator: what rollouts, evaluation and people draw text with. `sampler` is the reference."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypedDict

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt and how it is to be continued; token ids in, token ids out.

    temperature 0 takes the likeliest id, others are 1e-5 or more. top_p, top_k and min_p cut the heated
    distribution in the order min_p (odds of at least min_p times the largest), top_k (0: all), top_p (the
    fewest likeliest ids that hold this mass). A stop id, or the text of `stop_texts` that a token completes,
    ends the request.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop_ids: tuple[int, ...] = ()
    stop_texts: tuple[str, ...] = ()
    seed: int = 0


class Extras(TypedDict, total=False):
    """Fields of `Request` that not every generator takes."""

    top_p: float
    top_k: int
    min_p: float
    stop_texts: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Completion:
    """New tokens after one prompt, the stop id included where one was drawn, and the token that completed a
    stop text.

    logprobs[i] is the log-probability of tokens[i] under the distribution it was drawn from (temperature and
    truncation applied; for temperature 0 under the unmodified model), model_logprobs[i] under the unmodified
    model: temperature 1, all rows of the head. versions[i] is the version of the weights that drew it.
    finish_reason: "stop", "length" or "cancelled".
    """

    tokens: list[int]
    logprobs: list[float]
    finish_reason: str
    model_logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    stats: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Event:
    """What one round of a `Scheduler` gave request `id`: new tokens, and the whole once it is finished."""

    id: int
    tokens: list[int]
    logprobs: list[float]
    model_logprobs: list[float]
    completion: Completion | None = None


class Generator(Protocol):
    """A model of its own that draws tokens, with weights that are replaced from outside.

    `version` is that of the weights in use, `stats` describe the latest `generate`. load_weights waits for a
    running `generate`.
    """

    version: int
    stats: dict[str, float]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None: ...

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        temperature: float = 1.0,
        stop_ids: Sequence[int] = (),
        seeds: Sequence[int] | None = None,
    ) -> list[Completion]:
        """One completion per prompt, in order. The same prompt, seed and weights give the same tokens,
        whatever else is in the list."""
        ...
