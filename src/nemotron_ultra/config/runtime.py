"""EngineConfig and LogConfig: what executes a step, with which kernels and threads, and where metrics go."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from nemotron_ultra.config.base import config


@config
class EngineConfig:
    name: Literal["torch", "megatron"] = "torch"
    """torch: the reference on one machine; megatron: megatron-core on a cluster."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the torch engine; auto takes CUDA where there is one."""
    threads: Annotated[int, Field(ge=0)] = 0
    """CPU threads of torch; 0 leaves torch's choice."""
    recompute: bool = False
    """Recompute each block's activations in the backward."""


@config
class LogConfig:
    every: Annotated[int, Field(gt=0)] = 1
    """Steps between step lines on the screen (metrics.jsonl gets every step)."""
    sinks: list[Literal["wandb", "tensorboard"]] = Field(default_factory=list)
    """Further places for metrics; metrics.jsonl is always written."""
    wandb_project: str = "nemotron-ultra"
    """Project of the wandb sink."""
    wandb_mode: Literal["online", "offline"] = "offline"
    """offline writes into the run folder, for `wandb sync` later."""
