"""Problems -> groups of scored rollouts: render, draw group_size answers each, let the environment judge.

reward = the environment's score, and 0 for an answer that is empty or was cut at the limit. Every rollout has
a seed of its own from (run, step, problem, sample): a step's rollouts are a function of the weights alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from nemotron_ultra.config.rollout import RolloutConfig
from nemotron_ultra.data.chat import ChatTemplate
from nemotron_ultra.data.order import keyed
from nemotron_ultra.errors import DataError
from nemotron_ultra.rl.environments import Environment
from nemotron_ultra.rl.rollout import Group, Problem, Rollout

if TYPE_CHECKING:
    from nemotron_ultra.generation.base import Completion, Generator


@dataclass
class Collector:
    """collector(problems, step) -> one Group per problem, in order.

    `longest`: tokens that prompt and answer may have together. A prompt that leaves no room for
    max_new_tokens is an error or, with long_prompts=skip, leaves the batch (counted in `skipped`).
    """

    generator: Generator
    chat: ChatTemplate
    environments: Mapping[str, Environment]
    options: RolloutConfig
    longest: int
    seed: int
    skipped: int = field(default=0, init=False)

    def __call__(self, problems: Sequence[Problem], step: int) -> list[Group]:
        asked = [(slot, problem, self.prompt(problem)) for slot, problem in enumerate(problems)]
        fitting = [entry for entry in asked if self._fits(*entry[1:])]
        if not fitting:
            raise DataError(
                f"step {step}: every prompt is longer than the limit",
                got=f"{len(asked)} prompts of {min(len(p) for _, _, p in asked)} tokens and more",
                allowed=f"data.sequence_length - rollout.max_new_tokens = {self._limit} tokens",
                do="raise data.sequence_length, or lower rollout.max_new_tokens",
            )
        size = self.options.group_size
        completions = self.generator.generate(
            [prompt for _, _, prompt in fitting for _ in range(size)],
            max_new_tokens=self.options.max_new_tokens,
            temperature=self.options.temperature,
            stop_ids=self.chat.stop_ids,
            seeds=[self._seed(step, slot, sample) for slot, _, _ in fitting for sample in range(size)],
        )
        groups = []
        for number, (_, problem, prompt) in enumerate(fitting):
            drawn = completions[number * size : (number + 1) * size]
            groups.append(Group(problem=problem, rollouts=[self._judge(problem, prompt, c) for c in drawn]))
        return groups

    def prompt(self, problem: Problem) -> list[int]:
        """Token ids of the question, up to where the answer begins."""
        return self.chat.prompt([{"role": "user", "content": problem.question}])

    @property
    def _limit(self) -> int:
        return self.longest - self.options.max_new_tokens

    def _fits(self, problem: Problem, prompt: list[int]) -> bool:
        if len(prompt) <= self._limit:
            return True
        if self.options.long_prompts == "error":
            raise DataError(
                f"problem {problem.index} of domain {problem.domain}: the prompt is longer than the limit",
                got=f"{len(prompt)} tokens",
                allowed=f"data.sequence_length - rollout.max_new_tokens = {self._limit} tokens",
                do="raise data.sequence_length, or leave such prompts out with rollout.long_prompts=skip",
            )
        self.skipped += 1
        return False

    def _seed(self, step: int, slot: int, sample: int) -> int:
        return keyed(self.seed, "rollout", step, slot, sample) >> 1  # a signed 64-bit number

    def _judge(self, problem: Problem, prompt: list[int], completion: Completion) -> Rollout:
        text = self.chat.text(completion.tokens)
        finished = completion.finish_reason == "stop" and bool(text.strip())
        return Rollout(
            prompt=prompt,
            tokens=completion.tokens,
            logprobs=completion.logprobs,
            versions=completion.versions,
            finish_reason=completion.finish_reason,
            text=text,
            reward=self.environments[problem.domain].score(problem, text) if finished else 0.0,
        )


def rollout_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Lengths in tokens, shares of cut and of empty answers, and the mean of -log p of the drawn tokens."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    lengths = np.array([len(rollout.tokens) for rollout in rollouts])
    return {
        "rollout/length_mean": float(lengths.mean()),
        "rollout/length_max": float(lengths.max()),
        "rollout/truncated": float(np.mean([r.finish_reason == "length" for r in rollouts])),
        "rollout/empty": float(np.mean([not r.text.strip() for r in rollouts])),
        "rollout/entropy": -float(np.mean([p for r in rollouts for p in r.logprobs])),
    }
