"""Engine: the few verbs that every trainer is written on. `torch_engine` is the reference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from torch import Tensor

from nemotron_ultra.data.batch import TokenBatch

Metrics = dict[str, float]


class Objective(Protocol):
    """What a trainer optimises. Losses are sums over tokens divided by counts of the whole global batch.

    `count(batch)` names the denominators that one micro-batch adds to (for example {"tokens": 2048,
    "mtp_1": 2040}); the engine sums them over the global batch before the first backward and hands the
    totals to every call. `mtp_depths` is how often the forward applies the MTP module, at most.
    """

    mtp_depths: int

    def count(self, batch: TokenBatch) -> dict[str, float]: ...

    def __call__(
        self, output: Any, batch: TokenBatch, counts: dict[str, float]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """(loss, metrics): a differentiable scalar and detached scalars, already divided, so that both add
        up. A metric whose name ends in /min or /max is combined by minimum or maximum.
        """
        ...

    def finish(self, metrics: Metrics) -> Metrics:
        """What is reported, from the metrics of the whole global batch: ratios of sums are made here."""
        ...


class Engine(Protocol):
    """forward_backward adds gradients (FP32); optimizer_step applies and clears them."""

    step: int
    tokens: float

    def forward_backward(self, batches: Sequence[TokenBatch], objective: Objective) -> Metrics: ...

    def optimizer_step(self) -> Metrics: ...

    def evaluate(self, batches: Sequence[TokenBatch], objective: Objective) -> Metrics: ...

    def logprob(self, batch: TokenBatch) -> Tensor: ...

    def export_weights(self) -> Iterator[tuple[str, Tensor]]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...
