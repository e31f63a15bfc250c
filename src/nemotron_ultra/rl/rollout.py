"""Problem -> Rollout -> Group: what an environment asks, what a policy answered, and how well.

A rollout keeps token ids from the prompt on; nothing is ever tokenised a second time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One task of a domain. `index` is its number in the domain's endless, seeded list of problems.

    `answer` is a solution that the environment itself gives full marks; `entry` is what its scorer needs.
    """

    domain: str
    index: int
    question: str
    answer: str
    entry: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One answer. logprobs[i] is log p(tokens[i]) under the distribution that it was drawn from, and
    versions[i] the number of optimizer steps behind the weights that drew it.

    finish_reason: "stop" (a stop id, which is the last of `tokens`) or "length" (cut at the limit).
    """

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: str
    text: str
    reward: float


@dataclass(frozen=True, kw_only=True)
class Group:
    """All rollouts of one problem."""

    problem: Problem
    rollouts: list[Rollout]
