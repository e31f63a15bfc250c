"""RolloutConfig: what the student writes between two optimizer steps, how old it may be (report 3.2, 3.3)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from nemotron_ultra.config.base import NonNegative, Positive, PositiveReal, Whole, config


@config
class RolloutConfig:
    prompts_per_step: Positive
    """Problems per optimizer step."""
    group_size: Positive
    """Rollouts per problem; advantages are relative to their group."""
    max_new_tokens: Positive
    """Longest answer; one that reaches it counts as truncated."""
    temperature: PositiveReal = 1.0
    """Temperature of the draws; log-probs of rollouts are at this temperature too."""
    max_age: Annotated[Whole, Field(ge=0, le=1)] = 0
    """Versions that a rollout may be behind the weights it trains: 0 generates and trains in turn, 1
    generates the next batch beside the training of this one."""
    generator: Literal["sampler", "vllm"] = "sampler"
    """What draws the tokens: sampler, the reference, on the learner's device; vllm, for GPUs, needs the extra
    `vllm` and computes without the precision policy."""
    draft_tokens: NonNegative = 0
    """Tokens that the MTP module drafts each round (report 3.6.1: 5); the sampler's drafts change speed,
    never a token."""
    max_slots: Positive = 256
    """Rollouts that are generated at once; it changes speed and memory, never a token."""
    long_prompts: Literal["error", "skip"] = "error"
    """A prompt without room for max_new_tokens in data.sequence_length: stop, or draw another problem."""

    @property
    def rollouts_per_step(self) -> int:
        """Rows of one global batch."""
        return self.prompts_per_step * self.group_size
