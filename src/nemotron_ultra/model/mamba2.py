"""Mamba-2: out_proj(norm(scan(conv(x|B|C), dt) silu(z))), z | x | B | C | dt = in_proj(u) (report 2.1)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nemotron_ultra.config.model import ModelConfig
from nemotron_ultra.model.linear import Linear
from nemotron_ultra.ops.linear import linear
from nemotron_ultra.ops.mamba_interior import InteriorSizes, mamba_interior
from nemotron_ultra.ops.segments import Segments


class Projection(Linear):
    """Linear whose results, the widest of the model, lie in memory that the next layer or step uses again."""

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return linear(x, self.weight.to(x.dtype), bias)


class Mamba2Mixer(nn.Module):
    """[T, D] -> [T, D]. Nothing passes from one document of the pack to the next."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.sizes = InteriorSizes(
            heads=config.mamba_num_heads,
            head_dim=config.mamba_head_dim,
            groups=config.n_groups,
            state=config.ssm_state_size,
            chunk=config.chunk_size,
            eps=config.layer_norm_epsilon,
            dt_limit=config.time_step_limit,
        )
        inner, heads = config.mamba_inner, config.mamba_num_heads
        self.in_proj = Projection(config.hidden_size, inner + config.conv_dim + heads, bias=config.use_bias)
        self.conv1d = nn.Conv1d(
            config.conv_dim,
            config.conv_dim,
            config.conv_kernel,
            groups=config.conv_dim,
            bias=config.use_conv_bias,
        )
        self.A_log = nn.Parameter(torch.zeros(heads))
        self.D = nn.Parameter(torch.ones(heads))
        self.dt_bias = nn.Parameter(torch.ones(heads))
        self.norm = nn.Module()
        self.norm.weight = nn.Parameter(torch.ones(inner))
        self.out_proj = Projection(inner, config.hidden_size, bias=config.use_bias)

    def forward(self, x_TD: Tensor, segments: Segments) -> Tensor:
        zxbcdt_TW = self.in_proj(x_TD)
        dtype = torch.promote_types(zxbcdt_TW.dtype, torch.float32)
        bias = None if self.conv1d.bias is None else self.conv1d.bias.to(dtype)
        y_TD = mamba_interior(
            zxbcdt_TW.to(dtype),
            self.conv1d.weight.squeeze(1).to(dtype),
            bias,
            -torch.exp(self.A_log.to(dtype)),
            self.D.to(dtype),
            self.dt_bias.to(dtype),
            self.norm.weight.to(dtype),
            segments,
            self.sizes,
        )
        return self.out_proj(y_TD.to(x_TD.dtype))
