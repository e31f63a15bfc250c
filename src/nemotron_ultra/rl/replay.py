"""Batch n is made from the weights of version max(0, n - max_age) and trained at version n.

max_age 0 is the plain loop: batch n is made when it is asked for. max_age 1 is one step off-policy (report
3.2): a thread makes batch n + 1 while the trainer learns from batch n. Weights change only between two
batches, so that which weights drew a batch never depends on timing. Differs from the report's runs, whose
rollouts go on under new weights.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch
from torch import Tensor

from nemotron_ultra.errors import BackendError
from nemotron_ultra.rl.rollout import Group, Problem, Rollout


class Replay:
    """next() is batch 0, 1, 2, ... of `steps` (None: endless), each `produce(n)`.

    Whoever changes the generator's weights calls `settle()` before and `published(version)` after. An error
    of `produce` is raised by the next() of its batch, with its own traceback. All methods belong to the
    trainer's thread; with max_age 1 `produce` runs in another one.
    """

    def __init__(self, produce: Callable[[int], list[Group]], *, max_age: int = 0, steps: int | None = None):
        assert max_age >= 0
        self.produce, self.max_age, self.steps = produce, max_age, steps
        self.step = 0  # the batch that next() gives
        self.version = 0  # of the weights in use
        self._batches: dict[int, Future[list[Group]]] = {}
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="rollouts") if max_age else None
        self._waited = 0.0
        self._metrics: dict[str, float] = {}

    def __iter__(self) -> Iterator[list[Group]]:
        return self

    def __next__(self) -> list[Group]:
        if self.steps is not None and self.step >= self.steps:
            raise StopIteration
        self.start_ahead()
        begin = time.perf_counter()
        groups = self._take()
        self._waited += time.perf_counter() - begin
        self._metrics = _ages(groups, self.step, self.max_age) | {"replay/wait_seconds": self._waited}
        self._batches.pop(self.step, None)
        self.step, self._waited = self.step + 1, 0.0
        return groups

    def start_ahead(self) -> None:
        """Begin to make what the weights in use may make; next() and published() do so too."""
        if self._worker is None:
            return
        end = self.version + self.max_age + 1
        for step in range(self.step, end if self.steps is None else min(end, self.steps)):
            if step not in self._batches:
                self._batches[step] = self._worker.submit(self.produce, step)

    def settle(self) -> None:
        """Wait until the weights in use have made all that they are to make."""
        begin = time.perf_counter()
        wait(self._batches.values())
        self._waited += time.perf_counter() - begin

    def published(self, version: int) -> None:
        """The generator holds the weights after `version` steps: make the batches that come of them."""
        assert all(made.done() for made in self._batches.values()), "settle() before weights change"
        self.version = version
        self.start_ahead()

    def metrics(self) -> dict[str, float]:
        """Of the batch given last: age of its tokens in steps, seconds waited for it, batches ready now."""
        return self._metrics | {"replay/buffered": float(sum(made.done() for made in self._batches.values()))}

    def state_dict(self) -> dict[str, Any]:
        """Where next() stands and the batches made ahead, the one under way included (it is waited for).

        Their problems are kept without `entry`: their answers are scored already.
        """
        batches = {step: made.result() for step, made in sorted(self._batches.items())}
        return {"step": self.step, "batches": [_pack(step, groups) for step, groups in batches.items()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on before the saved step. Saved batches older than max_age allows now are made anew."""
        assert not self._batches, "load before anything is made"
        self.step = self.version = state["step"]
        for saved in state["batches"]:
            step, groups = saved["step"], _unpack(saved)
            if _oldest(groups, step) >= step - self.max_age:
                self._batches[step] = Future()
                self._batches[step].set_result(groups)

    def close(self) -> None:
        """End the thread; a batch under way is finished first, those not begun are not made."""
        if self._worker is not None:
            self._worker.shutdown(wait=True, cancel_futures=True)

    def _take(self) -> list[Group]:
        if self.step in self._batches:
            return self._batches[self.step].result()
        if self._worker is None:
            return self.produce(self.step)
        raise BackendError(
            f"batch {self.step} has no weights to be drawn with",
            got=f"version {self.version}, the last that was published",
            allowed=f"version {self.step - self.max_age} or newer with max_age {self.max_age}",
            do="publish the weights after every step",
        )


def _ages(groups: list[Group], step: int, max_age: int) -> dict[str, float]:
    """Metrics of the batch's ages. Raises BackendError for a token beyond the bound, or of no version."""
    total, count, oldest = 0, 0, 0
    for group in groups:
        for number, rollout in enumerate(group.rollouts):
            versions = rollout.versions
            name = f"rollout {number} of {group.problem.domain}:{group.problem.index}"
            if len(versions) != len(rollout.tokens):
                raise BackendError(
                    f"{name}: every token needs a version",
                    got=f"{len(versions)} versions for {len(rollout.tokens)} tokens",
                )
            if versions and not step - max_age <= min(versions) <= max(versions) <= step:
                raise BackendError(
                    f"{name}: tokens of other weights than step {step} may train on",
                    got=f"versions {min(versions)} to {max(versions)}",
                    allowed=f"{max(0, step - max_age)} to {step} (rollout.max_age {max_age})",
                    do="the generator was given weights out of turn, or missed some",
                )
            total, count = total + len(versions) * step - sum(versions), count + len(versions)
            oldest = max(oldest, step - min(versions, default=step))
    return {"replay/age_mean": total / max(1, count), "replay/age_max": float(oldest)}


def _oldest(groups: list[Group], step: int) -> int:
    """Version of the oldest token."""
    return min((v for group in groups for r in group.rollouts for v in r.versions), default=step)


def _pack(step: int, groups: list[Group]) -> dict[str, Any]:
    """A batch as tensors, and its texts as one JSON text, whatever they begin with."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    texts = {
        "problems": [
            [g.problem.domain, g.problem.index, g.problem.question, g.problem.answer] for g in groups
        ],
        "sizes": [len(group.rollouts) for group in groups],
        "answers": [[rollout.text, rollout.finish_reason] for rollout in rollouts],
    }
    return {
        "step": step,
        "texts": json.dumps(texts),
        "reward_B": torch.tensor([r.reward for r in rollouts], dtype=torch.float64),
        "prompt": _rows([r.prompt for r in rollouts], torch.int64),
        "tokens": _rows([r.tokens for r in rollouts], torch.int64),
        "versions": _rows([r.versions for r in rollouts], torch.int64),
        "logprobs": _rows([r.logprobs for r in rollouts], torch.float64),
    }


def _unpack(saved: dict[str, Any]) -> list[Group]:
    texts = json.loads(saved["texts"])
    columns = {name: _lists(saved[name]) for name in ("prompt", "tokens", "versions", "logprobs")}
    rows = zip(saved["reward_B"].tolist(), texts["answers"], *columns.values(), strict=True)
    rollouts = iter(
        Rollout(reward=reward, text=text, finish_reason=reason, **dict(zip(columns, lists, strict=True)))
        for reward, (text, reason), *lists in rows
    )
    groups = []
    for (domain, index, question, answer), size in zip(texts["problems"], texts["sizes"], strict=True):
        problem = Problem(domain=domain, index=index, question=question, answer=answer)
        groups.append(Group(problem=problem, rollouts=[next(rollouts) for _ in range(size)]))
    return groups


def _rows(rows: list[list[Any]], dtype: torch.dtype) -> dict[str, Tensor]:
    return {
        "values": torch.tensor([value for row in rows for value in row], dtype=dtype),
        "lengths": torch.tensor([len(row) for row in rows], dtype=torch.int64),
    }


def _lists(rows: dict[str, Tensor]) -> list[list[Any]]:
    return [part.tolist() for part in rows["values"].split(rows["lengths"].tolist())]
