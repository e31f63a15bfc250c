"""OptimConfig and ScheduleConfig: AdamW, clipping, and the learning rate as a function of consumed tokens."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from nemotron_ultra.config.base import Fraction, NonNegativeReal, PositiveReal, config


@config
class OptimConfig:
    name: Literal["adamw"] = "adamw"
    """Optimizer."""
    lr: PositiveReal
    """Peak learning rate."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """Decay rates of the first and second moment."""
    eps: PositiveReal = 1e-8
    """Added to the root of the second moment."""
    weight_decay: NonNegativeReal = 0.1
    """Decoupled weight decay; vectors (norms, biases, A_log, D, dt_bias) are exempt."""
    clip: NonNegativeReal = 1.0
    """Largest global gradient norm; 0 turns clipping off."""


@config
class ScheduleConfig:
    name: Literal["wsd", "cosine", "constant"]
    """wsd: warmup, stable, minus-sqrt decay; cosine; constant after warmup."""
    warmup_tokens: NonNegativeReal = 0
    """Tokens of the linear warmup."""
    decay_tokens: NonNegativeReal = 0
    """Tokens of the final decay (wsd)."""
    total_tokens: PositiveReal | None = None
    """Tokens at which the schedule ends; null means the length of the run."""
    initial_lr: NonNegativeReal = 0.0
    """Learning rate at the first token of the warmup."""
    min_lr: NonNegativeReal = 0.0
    """Learning rate at the end of the decay."""

    @property
    def needs(self) -> float:
        """Tokens that warmup and decay take together."""
        return self.warmup_tokens + (self.decay_tokens if self.name == "wsd" else 0)

    @model_validator(mode="after")
    def _fits(self) -> ScheduleConfig:
        if self.total_tokens is not None and self.needs > self.total_tokens:
            raise ValueError(
                f"total_tokens: {self.total_tokens:g} is below warmup_tokens + decay_tokens = {self.needs:g}"
            )
        if self.decay_tokens and self.name != "wsd":
            raise ValueError(
                f"decay_tokens: {self.decay_tokens:g} has no effect with name={self.name}; use wsd or 0"
            )
        return self
