"""AdvantageConfig: how rewards or a teacher's log-probs become advantages (report 3.2 and 3.3.1)."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from nemotron_ultra.config.base import NonNegative, PositiveReal, config


@config
class AdvantageConfig:
    name: Literal["leave_one_out", "group_mean", "teacher_gap"] = "leave_one_out"
    """leave_one_out: reward minus the mean of the group's others; group_mean: reward minus the group's mean;
    teacher_gap: the teacher's log-prob minus the proximal policy's, a token."""
    std: bool = False
    """Divide by a standard deviation: of the others (leave_one_out) or of the group (group_mean)."""
    std_floor: PositiveReal = 1e-3
    """Where the standard deviation is smaller, the advantage is not divided."""
    clip: PositiveReal | None = 20.0
    """Largest magnitude of an advantage, after everything else; null turns it off."""
    overlong: Literal["keep", "filter", "penalty"] = "keep"
    """Answers cut at the limit: keep them, filter them out of the loss, or lower the reward of those near it
    (DAPO's soft penalty)."""
    overlong_buffer: NonNegative = 0
    """Tokens before the limit over which the penalty grows from 0 to 1 (overlong=penalty)."""

    @model_validator(mode="after")
    def _fits(self) -> AdvantageConfig:
        if self.overlong == "penalty" and not self.overlong_buffer:
            raise ValueError("overlong_buffer: overlong=penalty needs at least 1 token")
        if self.overlong_buffer and self.overlong != "penalty":
            raise ValueError(
                f"overlong_buffer: {self.overlong_buffer} has no effect with overlong={self.overlong}; "
                "use overlong=penalty or 0"
            )
        if self.name == "teacher_gap" and self.std:
            raise ValueError("std: true has no effect with name=teacher_gap, which has no group; use false")
        if self.name == "teacher_gap" and self.overlong == "penalty":
            raise ValueError("overlong: penalty has no effect with name=teacher_gap; use keep or filter")
        return self
