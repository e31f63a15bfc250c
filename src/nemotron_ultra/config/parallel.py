"""ParallelConfig and ClusterConfig: the mesh a recipe was written for."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from nemotron_ultra.config.base import config

Size = Annotated[int, Field(gt=0)]


@config
class ParallelConfig:
    tensor: Size = 1
    """Tensor-parallel ranks."""
    pipeline: Size = 1
    """Pipeline stages."""
    context: Size = 1
    """Context-parallel ranks."""
    expert: Size = 1
    """Expert-parallel ranks."""
    expert_tensor: Size = 1
    """Tensor-parallel ranks inside one expert."""
    sequence: bool = False
    """Sequence parallelism along with tensor parallelism."""


@config
class ClusterConfig:
    nodes: Size = 1
    """Machines."""
    gpus_per_node: Annotated[int, Field(ge=0)] = 0
    """GPUs per machine that the recipe needs; 0 means it runs on a CPU too."""
    gpu: str | None = None
    """Kind of GPU that the recipe was written for."""

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node
