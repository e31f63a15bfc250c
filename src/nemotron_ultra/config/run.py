"""RunConfig: everything that one run used, composed by Hydra from `recipes/` and `configs/` and checked here.

The types of single fields live beside this file; each has a folder of options under `configs/`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from nemotron_ultra.config.advantage import AdvantageConfig
from nemotron_ultra.config.base import Whole, config
from nemotron_ultra.config.data import DataConfig
from nemotron_ultra.config.loss import PolicyGradientOptions
from nemotron_ultra.config.model import ModelConfig
from nemotron_ultra.config.optim import OptimConfig, ScheduleConfig
from nemotron_ultra.config.parallel import ClusterConfig, ParallelConfig
from nemotron_ultra.config.policy import config_modules, shape_problems
from nemotron_ultra.config.precision import PrecisionConfig, gradient_problems
from nemotron_ultra.config.rollout import RolloutConfig
from nemotron_ultra.config.runtime import EngineConfig, LogConfig
from nemotron_ultra.config.stages import stage_problems
from nemotron_ultra.config.tasks import TasksConfig
from nemotron_ultra.config.teachers import TeachersConfig
from nemotron_ultra.config.trainer import TrainerConfig


@config
class RunOptions:
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Folder of the run under `dir`; the same name again resumes it."""
    dir: str = "runs"
    """Folder that holds all runs."""
    seed: Annotated[Whole, Field(ge=0)] = 1234
    """Seed of initialisation and data order."""
    resume: Literal["auto", "never", "must"] = "auto"
    """auto: continue if the run exists; never: refuse if it exists; must: refuse if it does not."""
    allow_config_change: bool = False
    """Resume although the model or data configuration differs from the one the run was started with."""
    from_: str | None = None
    """Run folder (its newest checkpoint) or folder of weights in the Hugging Face layout to start from; null
    means a fresh initialisation."""


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
    tasks: TasksConfig | None = None
    """Verifiable tasks by domain: what SFT, GRPO and MOPD learn."""
    rollout: RolloutConfig | None = None
    """What the student writes between two optimizer steps (GRPO, MOPD)."""
    loss: PolicyGradientOptions | None = None
    """Policy-gradient loss of GRPO and MOPD."""
    advantage: AdvantageConfig | None = None
    """From rewards or a teacher's log-probs to advantages (GRPO, MOPD)."""
    teachers: TeachersConfig | None = None
    """Which run teaches which domain (MOPD)."""

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one global batch."""
        return self.trainer.global_batch_size * self.data.sequence_length

    @property
    def total_tokens(self) -> int:
        """Tokens of the whole run."""
        return self.trainer.steps * self.tokens_per_step

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        problems = [
            *_schedule_problems(self),
            *_layout_problems(self),
            *_precision_problems(self),
            *stage_problems(self),
        ]
        if problems:
            raise ValueError(" | ".join(problems))
        return self


def _schedule_problems(c: RunConfig):
    if c.schedule.total_tokens is None and c.schedule.needs > c.total_tokens:
        yield (
            f"schedule.warmup_tokens: warmup + decay take {c.schedule.needs:g} tokens, the run has "
            f"{c.total_tokens:g} (trainer.steps {c.trainer.steps} x {c.tokens_per_step:,}); raise "
            "trainer.steps, or lower schedule.warmup_tokens or decay_tokens"
        )
    for key, value in (("min_lr", c.schedule.min_lr), ("initial_lr", c.schedule.initial_lr)):
        if value > c.optim.lr:
            yield f"schedule.{key}: {value:g} is above the peak optim.lr {c.optim.lr:g}"
    for alternate in c.data.alternates:
        if c.tokens_per_step % alternate.sequence_length:
            yield (
                f"data.alternates: a step of {c.tokens_per_step:,} tokens is not a whole number of rows of "
                f"{alternate.sequence_length:,}"
            )


def _precision_problems(c: RunConfig):
    found = [
        *gradient_problems(c.precision, mtp=bool(c.model.depths)),
        *shape_problems(config_modules(c.model), c.precision, c.model),
    ]
    yield from (f"precision.{problem}" for problem in found)


def _layout_problems(c: RunConfig):
    gpus, p = c.cluster.gpus, c.parallel
    if not gpus:
        if p.smallest_world > 1:
            yield f"parallel: the layout needs {p.smallest_world} ranks, but cluster.gpus_per_node is 0"
        return
    if gpus % p.model_ranks or gpus % p.smallest_world:
        yield (
            f"parallel: {gpus} GPUs (cluster.nodes x gpus_per_node) are not a multiple of "
            f"tensor x pipeline x context = {p.model_ranks} and of "
            f"pipeline x max(tensor x context, expert x expert_tensor) = {p.smallest_world}"
        )
    else:
        rows = c.trainer.micro_batch_size * (gpus // p.model_ranks)
        if c.trainer.global_batch_size % rows:
            yield (
                f"trainer.global_batch_size: {c.trainer.global_batch_size} is not a multiple of "
                f"micro_batch_size {c.trainer.micro_batch_size} x data-parallel ranks {gpus // p.model_ranks}"
            )
    if c.model.mamba_num_heads % p.tensor or c.model.n_groups % p.tensor:
        yield (
            f"parallel.tensor: {p.tensor} does not divide model.mamba_num_heads {c.model.mamba_num_heads} "
            f"and model.n_groups {c.model.n_groups}"
        )
    if c.model.n_routed_experts % p.expert:
        yield f"parallel.expert: {p.expert} does not divide model.n_routed_experts {c.model.n_routed_experts}"
