"""OptimConfig and ScheduleConfig: AdamW, clipping, and the learning rate as a function of consumed tokens."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from nemotron_ultra.config.base import config


@config
class OptimConfig:
    name: Literal["adamw"] = "adamw"
    """Optimizer."""
    lr: Annotated[float, Field(gt=0)]
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of the first and second moment."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the root of the second moment."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Decoupled weight decay; vectors (norms, biases, A_log, D, dt_bias) are exempt."""
    clip: Annotated[float, Field(ge=0)] = 1.0
    """Largest global gradient norm; 0 turns clipping off."""


@config
class ScheduleConfig:
    name: Literal["wsd", "cosine", "constant"]
    """wsd: warmup, stable, minus-sqrt decay; cosine; constant after warmup."""
    warmup_tokens: Annotated[float, Field(ge=0)] = 0
    """Tokens of the linear warmup."""
    decay_tokens: Annotated[float, Field(ge=0)] = 0
    """Tokens of the final decay (wsd)."""
    total_tokens: Annotated[float, Field(gt=0)] | None = None
    """Tokens at which the schedule ends; null means the length of the run."""
    initial_lr: Annotated[float, Field(ge=0)] = 0.0
    """Learning rate at the first token of the warmup."""
    min_lr: Annotated[float, Field(ge=0)] = 0.0
    """Learning rate at the end of the decay."""
