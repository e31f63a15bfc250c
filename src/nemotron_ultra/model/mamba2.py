"""Mamba-2 mixer: out_proj(norm(scan(conv(x, B, C), dt) silu(z))) with z | x | B | C | dt = in_proj(u) (report 2.1)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nemotron_ultra.config.model import ModelConfig
from nemotron_ultra.ops.conv import causal_conv_silu
from nemotron_ultra.ops.norm import gated_rms_norm
from nemotron_ultra.ops.segments import Segments
from nemotron_ultra.ops.ssd import ssd_scan


class Mamba2Mixer(nn.Module):
    """[T, D] -> [T, D]. Nothing passes from one document of the pack to the next."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        inner, heads = config.mamba_inner, config.mamba_num_heads
        self.in_proj = nn.Linear(config.hidden_size, inner + config.conv_dim + heads, bias=config.use_bias)
        self.conv1d = nn.Conv1d(
            config.conv_dim,
            config.conv_dim,
            config.conv_kernel,
            groups=config.conv_dim,
            bias=config.use_conv_bias,
        )
        self.A_log = nn.Parameter(torch.log(torch.arange(1.0, heads + 1)))
        self.D = nn.Parameter(torch.ones(heads))
        self.dt_bias = nn.Parameter(torch.ones(heads))
        self.norm = nn.Module()
        self.norm.weight = nn.Parameter(torch.ones(inner))
        self.out_proj = nn.Linear(inner, config.hidden_size, bias=config.use_bias)

    def forward(self, x_TD: Tensor, segments: Segments) -> Tensor:
        c, dtype = self.config, x_TD.dtype
        inner, state = c.mamba_inner, c.n_groups * c.ssm_state_size
        zx = _linear(self.in_proj, x_TD)
        z_TD, xbc_TC, dt_TH = zx.split([inner, c.conv_dim, c.mamba_num_heads], -1)
        bias = None if self.conv1d.bias is None else self.conv1d.bias.to(dtype)
        xbc_TC = causal_conv_silu(xbc_TC, self.conv1d.weight.squeeze(1).to(dtype), bias, segments)
        x, B, C = xbc_TC.split([inner, state, state], -1)
        y, _ = ssd_scan(
            x.unflatten(-1, (c.mamba_num_heads, -1))[None],
            dt_TH[None],
            -torch.exp(self.A_log.to(dtype)),
            B.unflatten(-1, (c.n_groups, -1))[None],
            C.unflatten(-1, (c.n_groups, -1))[None],
            self.D.to(dtype),
            self.dt_bias.to(dtype),
            c.time_step_limit,
            cu_seqlens=segments.cu_seqlens,
            chunk_size=c.chunk_size,
        )
        y_TD = gated_rms_norm(y[0].flatten(-2), z_TD, self.norm.weight, c.layer_norm_epsilon, c.n_groups)
        return _linear(self.out_proj, y_TD)


def _linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """The projection in the dtype of x: weights stored in bf16 are upcast for this product only."""
    bias = None if layer.bias is None else layer.bias.to(x.dtype)
    return F.linear(x, layer.weight.to(x.dtype), bias)
