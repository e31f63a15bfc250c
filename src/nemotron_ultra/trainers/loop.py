"""The one step loop: a global batch, forward and backward, optimizer step, hooks. It knows no trainer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from nemotron_ultra.data.batch import TokenBatch
from nemotron_ultra.engine.base import Engine, Objective
from nemotron_ultra.trainers.hooks import Hook


def fit(
    engine: Engine,
    stream: Iterator[Sequence[TokenBatch]],
    objective: Objective,
    *,
    steps: int,
    hooks: Sequence[Hook] = (),
) -> None:
    """Train until `engine.step` is `steps`. Hooks see each step in order; they finish in reverse, errors or
    not.
    """
    with ExitStack() as stack:
        for hook in hooks:
            stack.callback(hook.finish)
            hook.start()
        while engine.step < steps:
            batches = next(stream)
            metrics = engine.forward_backward(batches, objective) | engine.optimizer_step()
            for hook in hooks:
                hook.after_step(engine.step, metrics)
