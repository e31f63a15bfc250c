"""Mamba-2: out_proj(norm(scan(conv(x|B|C), dt) silu(z))), z | x | B | C | dt = in_proj(u) (report 2.1)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nemotron_ultra.config.model import ModelConfig
from nemotron_ultra.model.cache import Cache, MambaState
from nemotron_ultra.model.linear import Linear, Product
from nemotron_ultra.ops.conv import causal_conv_silu_window
from nemotron_ultra.ops.linear import linear
from nemotron_ultra.ops.mamba_interior import InteriorSizes, mamba_interior
from nemotron_ultra.ops.norm import gated_rms_norm
from nemotron_ultra.ops.segments import Segments
from nemotron_ultra.ops.ssd import ssd_scan
from nemotron_ultra.ops.step import conv_extend, conv_step, ssd_extend, ssd_step


def recycling_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


class Projection(Linear):
    """Linear whose results, the widest of the model, lie in memory that the next layer or step uses again."""

    product: Product = staticmethod(recycling_product)


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

    def prefill(self, x_TD: Tensor, segments: Segments, state: MambaState, cache: Cache) -> Tensor:
        """`forward` by separate functions, each document continuing its row of `state`, which moves on."""
        z_TD, xbc_TC, dt_TH = self._columns(x_TD)
        weight_CK, bias_C = self._conv_weights(xbc_TC.dtype)
        rows, s = slice(0, segments.count), self.sizes
        window_BKC = state.window_BKC[rows]
        xbc_TC, window = causal_conv_silu_window(xbc_TC, weight_CK, bias_C, segments, window_BKC.mT)
        window_BKC.copy_(window.mT)
        x, B, C = self._scan_inputs(xbc_TC)
        A_H, D_H, dt_bias_H = self._head_weights(z_TD.dtype)
        initial = None
        if any(cache.lengths):
            initial = state.ssm.load(rows).transpose(2, 3).reshape(-1, s.heads, s.head_dim, s.state)
        y, ssm_BHPN = ssd_scan(
            x[None],
            dt_TH[None],
            A_H,
            B[None],
            C[None],
            D_H,
            dt_bias_H,
            s.dt_limit,
            initial_state_BHPN=initial,
            cu_seqlens=segments.cu_seqlens,
            chunk_size=s.chunk,
        )
        ssm_BGNX = ssm_BHPN.flatten(1, 2).unflatten(1, (s.groups, -1)).transpose(2, 3)
        state.ssm.store(rows, ssm_BGNX, cache.length_B)
        return self._out(y[0], z_TD, x_TD.dtype)

    def step(self, x_BD: Tensor, state: MambaState, cache: Cache) -> Tensor:
        """The next token of every row, [B, D] -> [B, D]; `state` moves on by it."""
        z_BD, xbc_BC, dt_BH = self._columns(x_BD)
        weight_CK, bias_C = self._conv_weights(xbc_BC.dtype)
        rows = slice(0, cache.size)
        x, B, C = self._scan_inputs(conv_step(xbc_BC, state.window_BKC[rows], weight_CK.T, bias_C))
        A_H, D_H, dt_bias_H = self._head_weights(z_BD.dtype)
        dt_BH = F.softplus(dt_BH + dt_bias_H).clamp_(*self.sizes.dt_limit)
        ssm_BGNX = state.ssm.load(rows)
        y_BHP = ssd_step(x, dt_BH, A_H, B, C, D_H, ssm_BGNX)
        state.ssm.store(rows, ssm_BGNX, cache.length_B)
        return self._out(y_BHP, z_BD, x_BD.dtype)

    def extend(self, x_BKD: Tensor, state: MambaState, cache: Cache) -> Tensor:
        """The next K tokens of every row, [B, K, D] -> [B, K, D]; `state` waits for `Cache.commit`."""
        shape = x_BKD.shape[:2]
        z_TD, xbc_TC, dt_TH = self._columns(x_BKD.flatten(0, 1))
        weight_CK, bias_C = self._conv_weights(xbc_TC.dtype)
        rows = slice(0, cache.size)
        window_BKC, xbc_BKC = state.window_BKC[rows], xbc_TC.unflatten(0, shape)
        xbc_BKC, full_BTC = conv_extend(xbc_BKC, window_BKC, weight_CK.T, bias_C)
        x, B, C = self._scan_inputs(xbc_BKC)
        A_H, D_H, dt_bias_H = self._head_weights(z_TD.dtype)
        dt_BKH = F.softplus(dt_TH + dt_bias_H).clamp_(*self.sizes.dt_limit).unflatten(0, shape)
        y_BKHP, tokens = ssd_extend(x, dt_BKH, A_H, B, C, D_H, state.ssm.load(rows))
        state.pending = (full_BTC, tokens)
        return self._out(y_BKHP.flatten(0, 1), z_TD, x_BKD.dtype).unflatten(0, shape)

    def _columns(self, x_TD: Tensor) -> tuple[Tensor, ...]:
        """z | x, B, C together | dt, in float32 or float64."""
        zxbcdt_TW = self.in_proj(x_TD)
        zxbcdt_TW = zxbcdt_TW.to(torch.promote_types(zxbcdt_TW.dtype, torch.float32))
        return zxbcdt_TW.split([self.sizes.inner, self.sizes.channels, self.sizes.heads], -1)

    def _scan_inputs(self, xbc_TC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """-> x [..., H, P], B and C [..., G, N]."""
        s = self.sizes
        x, B, C = xbc_TC.split([s.inner, s.groups * s.state, s.groups * s.state], -1)
        return (
            x.unflatten(-1, (s.heads, s.head_dim)),
            B.unflatten(-1, (s.groups, s.state)),
            C.unflatten(-1, (s.groups, s.state)),
        )

    def _conv_weights(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        bias = None if self.conv1d.bias is None else self.conv1d.bias.to(dtype)
        return self.conv1d.weight.squeeze(1).to(dtype), bias

    def _head_weights(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """A (negative), D and the bias of dt."""
        return -torch.exp(self.A_log.to(dtype)), self.D.to(dtype), self.dt_bias.to(dtype)

    def _out(self, y_THP: Tensor, z_TD: Tensor, dtype: torch.dtype) -> Tensor:
        y_TD = gated_rms_norm(y_THP.flatten(1), z_TD, self.norm.weight, self.sizes.eps, self.sizes.groups)
        return self.out_proj(y_TD.to(dtype))
