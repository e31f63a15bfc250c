"""RunConfig: everything that one run used, composed by Hydra from `recipes/` and `configs/` and checked here.

The types of single fields live beside this file; each has a folder of options under `configs/`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from nemotron_ultra.config.base import config
from nemotron_ultra.config.data import DataConfig
from nemotron_ultra.config.model import ModelConfig
from nemotron_ultra.config.optim import OptimConfig, ScheduleConfig
from nemotron_ultra.config.parallel import ClusterConfig, ParallelConfig
from nemotron_ultra.config.precision import PrecisionConfig
from nemotron_ultra.config.runtime import EngineConfig, LogConfig
from nemotron_ultra.config.trainer import TrainerConfig


@config
class RunOptions:
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Folder of the run under `dir`; the same name again resumes it."""
    dir: str = "runs"
    """Folder that holds all runs."""
    seed: int = 1234
    """Seed of initialisation and data order."""
    resume: Literal["auto", "never", "must"] = "auto"
    """auto: continue if the run exists; never: refuse if it exists; must: refuse if it does not."""
    allow_config_change: bool = False
    """Resume although the model or data configuration differs from the one the run was started with."""
    init_from: str | None = None
    """Folder of weights in the Hugging Face layout to start from, in place of a fresh initialisation."""


@config
class RunConfig:
    recipe: str
    """Name of the recipe that was composed."""
    run: RunOptions
    """Name, place, seed and resume behaviour of the run."""
    model: ModelConfig
    """Sizes and layer pattern of the model."""
    data: DataConfig
    """Sources, tokenizer, blend and sequence length."""
    trainer: TrainerConfig
    """Length, batch, loss scales, validation and checkpoints."""
    optim: OptimConfig
    """Optimizer and gradient clipping."""
    schedule: ScheduleConfig
    """Learning rate over tokens."""
    precision: PrecisionConfig
    """Formats of weights, products and gradients by layer."""
    parallel: ParallelConfig
    """How the model is spread over devices."""
    engine: EngineConfig
    """What runs the step: torch here, megatron on a cluster."""
    cluster: ClusterConfig
    """Nodes and devices that the recipe was written for."""
    log: LogConfig
    """Where metrics go and how often."""
