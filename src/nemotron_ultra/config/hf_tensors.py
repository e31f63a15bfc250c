"""The tensors of a checkpoint, from the config alone: name, shape, and whether the release keeps it in fp32.

Ultra: 51,023 hub tensors, 1,121,049,257,984 bytes in bf16 with fp32 correction biases, the `total_size` of
the released model.safetensors.index.json.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from nemotron_ultra.config.model import ModelConfig


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of our state dict. `experts` > 0: its first dimension is as many tensors on disk."""

    name: str
    shape: tuple[int, ...]
    fp32: bool = False
    experts: int = 0

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def stored_tensors(self) -> int:
        return self.experts or 1

    @property
    def stored_bytes(self) -> int:
        """Bytes in the release's formats: bf16, fp32 for the selection bias."""
        return self.numel * (4 if self.fp32 else 2)

    def hub(self) -> Iterator[TensorSpec]:
        """The tensors as a checkpoint on the hub stores them: one per expert, in order."""
        if not self.experts:
            yield self
            return
        stem, _, kind = self.name.rpartition(".")
        for expert in range(self.experts):
            yield TensorSpec(f"{stem}.{expert}.{kind}.weight", self.shape[1:], self.fp32)


def state_tensors(c: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor of the model's state dict, experts stacked: embeddings, layers, norm_f, head, MTP."""
    yield TensorSpec("backbone.embeddings.weight", (c.vocab_size, c.hidden_size))
    for i, letter in enumerate(c.pattern):
        yield from _named(f"backbone.layers.{i}.", layer_tensors(c, letter))
    yield TensorSpec("backbone.norm_f.weight", (c.hidden_size,))
    yield TensorSpec("lm_head.weight", (c.vocab_size, c.hidden_size))
    for module in range(c.num_nextn_predict_layers):
        yield from mtp_tensors(c, module)


def hub_tensors(c: ModelConfig) -> Iterator[TensorSpec]:
    """Every tensor as stored on the hub, experts one by one."""
    for spec in state_tensors(c):
        yield from spec.hub()


def mtp_tensors(c: ModelConfig, module: int = 0) -> Iterator[TensorSpec]:
    """One stored MTP module; layer index = module x len(mtp_pattern) + position."""
    width, first = c.hidden_size, module * len(c.mtp_pattern)
    last = first + len(c.mtp_pattern) - 1
    yield TensorSpec(f"mtp.layers.{first}.enorm.weight", (width,))
    yield TensorSpec(f"mtp.layers.{first}.hnorm.weight", (width,))
    yield TensorSpec(f"mtp.layers.{first}.eh_proj.weight", (width, 2 * width))
    for position, letter in enumerate(c.mtp_pattern):
        yield from _named(f"mtp.layers.{first + position}.", layer_tensors(c, letter))
    yield TensorSpec(f"mtp.layers.{last}.final_layernorm.weight", (width,))


def layer_tensors(c: ModelConfig, letter: str) -> list[TensorSpec]:
    """Tensors of one layer, named inside the layer: its norm and its mixer."""
    mixer = {"M": _mamba, "*": _attention, "E": _moe, "-": _mlp}[letter](c)
    return [TensorSpec("norm.weight", (c.hidden_size,)), *_named("mixer.", mixer)]


def _named(prefix: str, specs) -> list[TensorSpec]:
    return [replace(spec, name=prefix + spec.name) for spec in specs]


def _linear(name: str, rows: int, columns: int, bias: bool = False) -> list[TensorSpec]:
    specs = [TensorSpec(f"{name}.weight", (rows, columns))]
    return [*specs, TensorSpec(f"{name}.bias", (rows,))] if bias else specs


def _mamba(c: ModelConfig) -> list[TensorSpec]:
    heads, inner = c.mamba_num_heads, c.mamba_inner
    conv = [TensorSpec("conv1d.weight", (c.conv_dim, 1, c.conv_kernel))]
    if c.use_conv_bias:
        conv.append(TensorSpec("conv1d.bias", (c.conv_dim,)))
    return [
        *_linear("in_proj", inner + c.conv_dim + heads, c.hidden_size, c.use_bias),
        *conv,
        *(TensorSpec(name, (heads,)) for name in ("A_log", "D", "dt_bias")),
        TensorSpec("norm.weight", (inner,)),
        *_linear("out_proj", c.hidden_size, inner, c.use_bias),
    ]


def _attention(c: ModelConfig) -> list[TensorSpec]:
    query, key = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    return [
        *_linear("q_proj", query, c.hidden_size),
        *_linear("k_proj", key, c.hidden_size),
        *_linear("v_proj", key, c.hidden_size),
        *_linear("o_proj", c.hidden_size, query),
    ]


def _mlp(c: ModelConfig, width: int | None = None, prefix: str = "") -> list[TensorSpec]:
    hidden = c.intermediate_size if width is None else width
    return [
        *_linear(f"{prefix}up_proj", hidden, c.hidden_size, c.mlp_bias),
        *_linear(f"{prefix}down_proj", c.hidden_size, hidden, c.mlp_bias),
    ]


def _moe(c: ModelConfig) -> list[TensorSpec]:
    experts, hidden, width = c.n_routed_experts, c.moe_intermediate_size, c.expert_width
    specs = [
        TensorSpec("gate.weight", (experts, c.hidden_size)),
        TensorSpec("gate.e_score_correction_bias", (experts,), fp32=True),
        TensorSpec("experts.up_proj", (experts, hidden, width), experts=experts),
        TensorSpec("experts.down_proj", (experts, width, hidden), experts=experts),
    ]
    if c.moe_latent_size:
        specs += _linear("fc1_latent_proj", width, c.hidden_size, c.mlp_bias)
        specs += _linear("fc2_latent_proj", c.hidden_size, width, c.mlp_bias)
    if c.moe_shared_expert_intermediate_size:
        specs += _mlp(c, c.moe_shared_expert_intermediate_size, "shared_experts.")
    return specs
