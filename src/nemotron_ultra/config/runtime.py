"""EngineConfig and LogConfig: what executes a step, with which kernels and threads, and where metrics go."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from nemotron_ultra.config.base import NonNegative, Positive, config


@config
class MegatronConfig:
    distributed_optimizer: bool = True
    """Shard the optimizer state over data-parallel ranks."""
    overlap_grad_reduce: bool = True
    """Reduce gradients while the backward goes on."""
    overlap_param_gather: bool = True
    """Gather updated weights while the next forward goes on."""
    grad_buckets: NonNegative = 0
    """Buckets of the gradient reduction; 0 leaves megatron-core's choice."""
    pad_buckets: bool = False
    """Pad the buckets for network bandwidth."""
    dispatcher: Literal["alltoall", "allgather", "hybridep"] = "alltoall"
    """Token dispatcher of the experts; hybridep is the flex dispatcher with the HybridEP backend."""
    dispatcher_sms: NonNegative = 0
    """Streaming multiprocessors given to the dispatcher; 0 leaves its choice."""
    expert_ranks_per_nvlink: NonNegative = 0
    """Expert-parallel ranks in one NVLink domain; 0 leaves it to the dispatcher."""
    grouped_gemm: bool = True
    """One grouped product for all local experts."""
    fused_permute: bool = True
    """Fused permutation of tokens to experts."""
    fused_squared_relu: bool = True
    """Fused routing weight and squared ReLU."""
    fused_cross_entropy: bool = True
    """megatron-core's fused vocabulary-parallel cross entropy."""
    attention_backend: Literal["auto", "flash", "fused", "unfused"] = "auto"
    """Kernel of the attention."""
    cuda_graphs: list[Literal["mamba", "attn", "moe_router"]] = Field(default_factory=list)
    """Parts of a layer that run as CUDA graphs."""
    offload: list[Literal["moe_act"]] = Field(default_factory=list)
    """Activations that are moved to the host between forward and backward."""
    recompute: list[Literal["moe", "layernorm", "core_attn", "moe_act"]] = Field(default_factory=list)
    """Parts whose activations are computed again in the backward."""
    manual_gc: bool = False
    """Run Python's garbage collector at fixed steps, so that all ranks pause together."""
    async_checkpoint: bool = False
    """Write checkpoints from a separate process while training goes on."""


@config
class EngineConfig:
    name: Literal["torch", "megatron"] = "torch"
    """torch: the reference on one machine; megatron: megatron-core on a cluster."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the torch engine; auto takes CUDA where there is one."""
    threads: NonNegative = 0
    """CPU threads of torch; 0 leaves torch's choice."""
    recompute: bool = False
    """Recompute each block's activations in the backward."""
    megatron: MegatronConfig | None = None
    """Options of the megatron engine; null with the torch engine."""

    @model_validator(mode="after")
    def _options_of_this_engine(self) -> EngineConfig:
        if self.megatron is not None and self.name == "torch":
            raise ValueError(
                "megatron: these options have no effect with name=torch; use engine=megatron or null"
            )
        return self


@config
class LogConfig:
    every: Positive = 1
    """Steps between step lines on the screen (metrics.jsonl gets every step)."""
    sinks: list[Literal["wandb", "tensorboard"]] = Field(default_factory=list)
    """Further places for metrics; metrics.jsonl is always written."""
    wandb_project: str = "nemotron-ultra"
    """Project of the wandb sink."""
    wandb_mode: Literal["online", "offline"] = "offline"
    """offline writes into the run folder, for `wandb sync` later."""
