"""Generator: what rollouts, evaluation and people draw text with. `sampler` is the reference."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Completion:
    """New tokens after one prompt, the stop id included where one was drawn.

    logprobs[i] is the log-probability of tokens[i] under the distribution it was drawn from (temperature and
    truncation applied; for temperature 0 under the unmodified model), versions[i] the version of the weights
    that drew it. finish_reason: "stop" or "length".
    """

    tokens: list[int]
    logprobs: list[float]
    finish_reason: str
    versions: list[int] = field(default_factory=list)
    stats: dict[str, Any] = field(default_factory=dict)


class Generator(Protocol):
    """A model of its own that draws tokens, with weights that are replaced from outside.

    `version` is that of the weights in use. load_weights waits for a running `generate`.
    """

    version: int

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
