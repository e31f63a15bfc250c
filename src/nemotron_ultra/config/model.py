"""ModelConfig: sizes of the hybrid Mamba-2 / attention / LatentMoE stack and its layer pattern's grammar.

Field names are those of the Hugging Face `nemotron_h` config (report 2.1, Table 1); `config/hf.py` reads and
writes that file.
"""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import Field, model_validator

from nemotron_ultra.config.base import NonNegative, Positive, PositiveReal, Real, TokenIds, Whole, config

BLOCK_LETTERS = {"M": "mamba", "E": "moe", "*": "attention", "-": "mlp"}


@config
class ModelConfig:
    pattern: Annotated[str, Field(min_length=1)]
    """One letter per layer: M Mamba-2, E mixture of experts, * attention, - dense MLP."""
    vocab_size: Positive
    """Rows of the embedding and of the untied output head."""
    hidden_size: Positive
    """Width of the residual stream."""

    num_attention_heads: Positive = 1
    """Query heads of an attention layer."""
    num_key_value_heads: Positive = 1
    """Key and value heads; consecutive query heads share one."""
    head_dim: Positive = 128
    """Width of one attention head; heads x head_dim need not equal hidden_size."""

    mamba_num_heads: Positive = 1
    """Heads of a Mamba-2 mixer; its inner width is heads x mamba_head_dim."""
    mamba_head_dim: Positive = 64
    """Width of one Mamba-2 head."""
    ssm_state_size: Positive = 128
    """State columns per head (N)."""
    n_groups: Positive = 1
    """Groups that share B and C; also the groups of the gated RMSNorm."""
    conv_kernel: Annotated[Whole, Field(ge=2)] = 4
    """Width of the causal depthwise convolution."""
    chunk_size: Positive = 128
    """Chunk of the SSD scan; it changes rounding and speed, never the result."""
    use_conv_bias: bool = True
    """Bias of the depthwise convolution."""
    use_bias: bool = False
    """Bias of the Mamba-2 input and output projections."""
    time_step_min: PositiveReal = 0.001
    """Lower end of the log-uniform draw of the initial dt."""
    time_step_max: PositiveReal = 0.1
    """Upper end of the log-uniform draw of the initial dt."""
    time_step_floor: PositiveReal = 1e-4
    """Smallest initial dt."""
    time_step_limit: tuple[Real, Real] = (0.0, math.inf)
    """Clamp of dt after softplus, in training and inference alike."""

    intermediate_size: Positive = 1
    """Hidden width of a dense MLP layer."""
    mlp_bias: bool = False
    """Bias of the dense MLP, the shared expert and the latent projections (never of the routed experts)."""

    n_routed_experts: Positive = 1
    """Routed experts per MoE layer."""
    num_experts_per_tok: Positive = 1
    """Experts chosen per token (top-k)."""
    moe_intermediate_size: Positive = 1
    """Hidden width of one routed expert."""
    moe_shared_expert_intermediate_size: NonNegative = 0
    """Hidden width of the shared expert; 0 leaves it out."""
    moe_latent_size: NonNegative = 0
    """Width of the latent that routed experts work in (LatentMoE); 0 means plain MoE on hidden_size."""
    n_group: Positive = 1
    """Groups of experts for group-limited routing."""
    topk_group: Positive = 1
    """Groups kept per token."""
    norm_topk_prob: bool = True
    """Divide the chosen scores by their sum."""
    routed_scaling_factor: PositiveReal = 1.0
    """Factor on the routing weights, applied after normalisation."""

    num_nextn_predict_layers: NonNegative = 0
    """MTP modules stored in the checkpoint; 0 means no MTP."""
    mtp_pattern: str = "*E"
    """Layers inside one MTP module."""
    mtp_depths: NonNegative = 2
    """How many times the stored MTP module is applied, weights shared between depths (report 2.1)."""

    layer_norm_epsilon: PositiveReal = 1e-5
    """Epsilon of every RMSNorm."""
    initializer_range: PositiveReal = 0.02
    """Standard deviation of the initial weights."""
    rescale_prenorm_residual: bool = True
    """Divide the initial std of output projections by sqrt(number of layers)."""
    max_position_embeddings: Positive = 262144
    """Context length written to config.json; nothing in the model depends on it."""
    bos_token_id: NonNegative = 1
    """Beginning-of-sequence id."""
    eos_token_id: TokenIds = 2
    """End-of-document id, or several, as released configurations have them."""
    pad_token_id: NonNegative = 0
    """Padding id."""

    @property
    def num_layers(self) -> int:
        return len(self.pattern)

    @property
    def mamba_inner(self) -> int:
        return self.mamba_num_heads * self.mamba_head_dim

    @property
    def conv_dim(self) -> int:
        return self.mamba_inner + 2 * self.n_groups * self.ssm_state_size

    @property
    def expert_width(self) -> int:
        """Width that routed experts read and write: the latent, or hidden_size for a plain MoE."""
        return self.moe_latent_size or self.hidden_size

    @property
    def depths(self) -> int:
        """MTP depths that are really there: mtp_depths where the checkpoint stores a module, else 0."""
        return self.mtp_depths if self.num_nextn_predict_layers else 0

    @model_validator(mode="after")
    def _consistent(self) -> ModelConfig:
        problems = list(_problems(self))
        if problems:
            raise ValueError(" | ".join(problems))
        return self


def _problems(c: ModelConfig):
    for name, pattern in (("pattern", c.pattern), ("mtp_pattern", c.mtp_pattern)):
        unknown = sorted(set(pattern) - set(BLOCK_LETTERS))
        if unknown:
            yield f"{name}: unknown letter {', '.join(map(repr, unknown))} in {pattern!r}; allowed: M E * -"
    used = set(c.pattern) | (set(c.mtp_pattern) if c.num_nextn_predict_layers else set())
    if "*" in used and c.num_attention_heads % c.num_key_value_heads:
        yield (
            f"num_attention_heads: {c.num_attention_heads} is not divisible by "
            f"num_key_value_heads {c.num_key_value_heads}"
        )
    if "M" in used and c.mamba_num_heads % c.n_groups:
        yield f"mamba_num_heads: {c.mamba_num_heads} is not divisible by n_groups {c.n_groups}"
    if not c.time_step_limit[0] <= c.time_step_limit[1]:  # also false for nan
        yield f"time_step_limit: not a lower and an upper end: {list(c.time_step_limit)}"
    if "E" in used:
        yield from _moe_problems(c)


def _moe_problems(c: ModelConfig):
    if c.num_experts_per_tok > c.n_routed_experts:
        yield f"num_experts_per_tok: {c.num_experts_per_tok} is above n_routed_experts {c.n_routed_experts}"
    elif c.n_routed_experts % c.n_group:
        yield f"n_routed_experts: {c.n_routed_experts} is not divisible by n_group {c.n_group}"
    elif c.topk_group > c.n_group:
        yield f"topk_group: {c.topk_group} is above n_group {c.n_group}"
    elif c.num_experts_per_tok > c.topk_group * (c.n_routed_experts // c.n_group):
        yield (
            f"num_experts_per_tok: {c.num_experts_per_tok} is above the experts in topk_group "
            f"{c.topk_group} groups of {c.n_routed_experts // c.n_group}"
        )
