"""ParallelConfig and ClusterConfig: the mesh a recipe was written for (report 2.5 for long context)."""

from __future__ import annotations

from pydantic import model_validator

from nemotron_ultra.config.base import NonNegative, Positive, PositiveReal, config


@config
class ParallelConfig:
    tensor: Positive = 1
    """Tensor-parallel ranks."""
    pipeline: Positive = 1
    """Pipeline stages."""
    context: Positive = 1
    """Context-parallel ranks."""
    expert: Positive = 1
    """Expert-parallel ranks."""
    expert_tensor: Positive = 1
    """Tensor-parallel ranks inside one expert."""
    sequence: bool = False
    """Sequence parallelism along with tensor parallelism."""

    @property
    def model_ranks(self) -> int:
        """Ranks that hold one copy of the dense weights and one row's tokens: tensor x pipeline x context."""
        return self.tensor * self.pipeline * self.context

    @property
    def smallest_world(self) -> int:
        """Fewest ranks that fit the layout: pipeline x max(tensor x context, expert x expert_tensor)."""
        return self.pipeline * max(self.tensor * self.context, self.expert * self.expert_tensor)

    @model_validator(mode="after")
    def _sequence_needs_tensor(self) -> ParallelConfig:
        if self.sequence and self.tensor == 1:
            raise ValueError("sequence: true has no effect with tensor 1; raise tensor or turn it off")
        return self


@config
class ClusterConfig:
    nodes: Positive = 1
    """Machines."""
    gpus_per_node: NonNegative = 0
    """GPUs per machine that the recipe needs; 0 means it runs on a CPU too."""
    gpu: str | None = None
    """Kind of GPU that the recipe was written for."""
    segment: NonNegative = 0
    """Nodes that must share one network or NVLink block (Slurm --segment); 0 leaves it to the scheduler."""
    walltime_hours: PositiveReal | None = None
    """Longest time of one job; the next job of the chain resumes. null means no limit."""

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node
