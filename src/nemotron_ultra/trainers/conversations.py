"""Conversations: question and answer of each problem -> rows with an assistant mask; the stream of SFT."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from nemotron_ultra.config.tasks import TasksConfig
from nemotron_ultra.data.batch import TokenBatch
from nemotron_ultra.data.chat import ChatTemplate
from nemotron_ultra.data.facts import refuse_changes
from nemotron_ultra.data.loss_mean import LossMean
from nemotron_ultra.errors import DataError
from nemotron_ultra.rl.environments import Environment
from nemotron_ultra.rl.problems import ProblemStream
from nemotron_ultra.rl.rollout import Problem
from nemotron_ultra.trainers.experience import describe_tasks


class Conversations:
    """next() is the micro-batches of one step: a function of (seed, step) alone.

    A micro-batch packs `micro_batch_size` whole conversations; the loss is on the assistant's tokens and
    their end marker. A conversation of more than `longest` tokens is a DataError.
    """

    def __init__(
        self,
        problems: ProblemStream,
        chat: ChatTemplate,
        tasks: TasksConfig,
        *,
        micro_batch_size: int,
        longest: int,
        facts: dict[str, Any],
        mean: LossMean | None = None,
    ):
        self.problems, self.chat, self.tasks, self.facts = problems, chat, tasks, facts
        self.micro_batch_size, self.longest = micro_batch_size, longest
        self.mean = mean or LossMean()
        self.step = 0

    def __iter__(self) -> Iterator[list[TokenBatch]]:
        return self

    def __next__(self) -> list[TokenBatch]:
        batches = self.mean(self.pack(self.problems(self.step)), self.step)
        self.step += 1
        return batches

    def held_out(self, environments: Mapping[str, Environment]) -> list[TokenBatch]:
        """Conversations of the held-out problems of every domain."""
        count = range(self.tasks.validation_problems)
        return self.pack([env.held_out(i) for env in environments.values() for i in count])

    def pack(self, problems: Sequence[Problem]) -> list[TokenBatch]:
        """Problems, in order, as micro-batches."""
        size = self.micro_batch_size
        return [self._batch(problems[i : i + size]) for i in range(0, len(problems), size)]

    def describe(self) -> dict[str, dict[str, Any]]:
        return describe_tasks(self.tasks)

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "facts": self.facts}

    def load_state_dict(self, state: dict[str, Any], *, allow_change: bool = False) -> None:
        """Go on at the saved step. Raises DataError if the run drew other problems."""
        refuse_changes(state["facts"], self.facts, allow_change)
        self.step = state["step"]

    def _batch(self, problems: Sequence[Problem]) -> TokenBatch:
        rows = [self.chat.conversation(_messages(problem)) for problem in problems]
        for problem, row in zip(problems, rows, strict=True):
            if not problem.answer:
                raise DataError(
                    f"problem {problem.index} of domain {problem.domain} comes without a solution",
                    do=f"its generator only scores answers; leave it out: ~tasks.domains.{problem.domain}",
                )
            if len(row.tokens) > self.longest:
                raise DataError(
                    f"problem {problem.index} of domain {problem.domain}: the conversation is too long",
                    got=f"{len(row.tokens)} tokens",
                    allowed=f"data.sequence_length = {self.longest}",
                    do="raise data.sequence_length, or make the task's arguments smaller",
                )
        names = [f"{problem.domain}:{problem.index}" for problem in problems]
        batch = TokenBatch.from_documents([row.tokens for row in rows], stats={"documents": names})
        # The mask says which tokens are the assistant's; position t is trained if the token it predicts is.
        weight_T = [float(m) for row in rows for m in [*row.mask[1:], 0]]
        return replace(batch, weight_T=torch.tensor(weight_T))


def _messages(problem: Problem) -> list[dict[str, str]]:
    return [
        {"role": "user", "content": problem.question},
        {"role": "assistant", "content": problem.answer},
    ]
