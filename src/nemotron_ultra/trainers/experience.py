"""Experience: groups of rollouts -> the micro-batches of one step; the stream of GRPO and MOPD.

Each trainer hands in `learn_from(groups)`, which gives credit, anchors and packs; waiting, resuming and
measuring are the same for all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nemotron_ultra.config.advantage import AdvantageConfig
from nemotron_ultra.config.tasks import TasksConfig
from nemotron_ultra.data.batch import TokenBatch
from nemotron_ultra.data.facts import refuse_changes
from nemotron_ultra.engine.base import Engine
from nemotron_ultra.rl.advantage import gap_advantages
from nemotron_ultra.rl.collect import rollout_metrics
from nemotron_ultra.rl.replay import Replay
from nemotron_ultra.rl.rollout import Group, Rollout

Learn = Callable[[list[Group]], tuple[list[TokenBatch], dict[str, float]]]


class Experience:
    """next() is one step's micro-batches. `metrics` and `groups` are those of the step just given.

    `facts` is what the order of problems depends on; a run is not continued with other facts.
    """

    def __init__(self, replay: Replay, learn_from: Learn, tasks: TasksConfig, facts: dict[str, Any]):
        self.replay, self.learn_from, self.tasks, self.facts = replay, learn_from, tasks, facts
        self.metrics: dict[str, float] = {}
        self.groups: list[Group] = []

    def __iter__(self) -> Iterator[list[TokenBatch]]:
        return self

    def __next__(self) -> list[TokenBatch]:
        begin = time.perf_counter()
        self.groups = next(self.replay)
        drawn = time.perf_counter()
        batches, metrics = self.learn_from(self.groups)
        self.metrics = {
            **rollout_metrics(self.groups),
            **metrics,
            **self.replay.metrics(),
            "seconds/rollouts": drawn - begin,
            "seconds/credit": time.perf_counter() - drawn,
        }
        return batches

    def describe(self) -> dict[str, dict[str, Any]]:
        """Of each domain that is trained on: environment and share."""
        return describe_tasks(self.tasks)

    def state_dict(self) -> dict[str, Any]:
        return {"replay": self.replay.state_dict(), "facts": self.facts}

    def load_state_dict(self, state: dict[str, Any], *, allow_change: bool = False) -> None:
        """Go on with the batch after the last one. Raises DataError if the run drew other problems."""
        refuse_changes(state["facts"], self.facts, allow_change)
        self.replay.load_state_dict(state["replay"])


def describe_tasks(tasks: TasksConfig) -> dict[str, dict[str, Any]]:
    """Facts by domain for the start panel and run.json."""
    total = sum(task.weight for task in tasks.trained.values())
    return {
        domain: {
            "environment": f"{task.environment}:{task.name}",
            "arguments": dict(task.args),
            "share": task.weight / total,
            "held_out_problems": tasks.validation_problems,
        }
        for domain, task in tasks.trained.items()
    }


def pack(
    groups: Sequence[Group],
    advantage_B: Tensor,
    keep_B: Tensor,
    micro_batch_size: int,
) -> list[TokenBatch]:
    """Rollouts, in order, as micro-batches of `micro_batch_size` documents.

    advantage_B [rollouts] is the advantage of every token of a rollout; keep_B: whether it is trained on.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    domains = [group.problem.domain for group in groups for _ in group.rollouts]
    names = [
        f"{group.problem.domain}:{group.problem.index}/{number}"
        for group in groups
        for number in range(len(group.rollouts))
    ]
    return [
        _micro_batch(
            rollouts[i : i + micro_batch_size],
            advantage_B[i : i + micro_batch_size].tolist(),
            keep_B[i : i + micro_batch_size].tolist(),
            {"documents": names[i : i + micro_batch_size], "domains": domains[i : i + micro_batch_size]},
        )
        for i in range(0, len(rollouts), micro_batch_size)
    ]


def anchor(batch: TokenBatch, engine: Engine) -> TokenBatch:
    """The batch with proximal log-probabilities: the learner's, before this step's update."""
    return replace(batch, proximal_logprob_T=engine.logprob(batch).float().cpu())


def with_gap(
    batches: Sequence[TokenBatch], teacher: Sequence[Tensor], config: AdvantageConfig
) -> tuple[list[TokenBatch], dict[str, float]]:
    """The anchored batches with advantage teacher - proximal (report 3.3.1, equation 2), and its metrics.

    `teacher` has log p of labels_T under the document's teacher for each batch.
    """
    sizes = [batch.num_tokens for batch in batches]
    names = list(dict.fromkeys(name for batch in batches for name in batch.stats["domains"]))
    domain_T = [
        torch.tensor([names.index(name) for name in b.stats["domains"]]).repeat_interleave(
            b.cu_seqlens.diff()
        )
        for b in batches
    ]
    advantage_T, metrics = gap_advantages(
        torch.cat(list(teacher)),
        torch.cat([batch.proximal_logprob_T for batch in batches]),
        torch.cat([batch.weight_T for batch in batches]),
        config,
        domain_T=torch.cat(domain_T),
        domains=names,
    )
    parts = zip(batches, advantage_T.split(sizes), strict=True)
    return [replace(batch, advantage_T=part) for batch, part in parts], metrics


def _micro_batch(
    rollouts: Sequence[Rollout], advantages: list[float], kept: list[bool], stats: dict[str, Any]
) -> TokenBatch:
    batch = TokenBatch.from_documents([[*r.prompt, *r.tokens] for r in rollouts], stats=stats)
    per_rollout = list(zip(rollouts, advantages, kept, strict=True))

    def spread(value: Callable[[Rollout, float, bool], list[float]], fill: float) -> Tensor:
        """A value for each label: `fill` before the first answer token and behind the last."""
        rows = [[fill] * (len(r.prompt) - 1) + value(r, a, k) + [fill] for r, a, k in per_rollout]
        return torch.tensor([x for row in rows for x in row])

    return replace(
        batch,
        weight_T=spread(lambda r, a, k: [float(k)] * len(r.tokens), 0.0),
        behavior_logprob_T=spread(lambda r, a, k: [float(x) for x in r.logprobs], 0.0),
        advantage_T=spread(lambda r, a, k: [float(a)] * len(r.tokens), 0.0),
        version_T=spread(lambda r, a, k: list(r.versions), -1).long(),
    )
