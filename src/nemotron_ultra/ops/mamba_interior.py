"""norm(scan(silu(conv(x|B|C)), softplus(dt)) silu(z)): a Mamba-2 mixer between its projections, fused.

It walks the pack in slabs of a few chunks and keeps for the backward only its input, the scan's output, one
RMS per group and the state at each chunk border; convolution, decays and score blocks are computed again
there. Chunks are of 64 tokens at most: the result does not depend on it. Its operations are too small to be
shared among threads, so each thread walks documents of its own where the pack has enough of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, reduce
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from nemotron_ultra.ops.conv import ConvGrads, conv_rows
from nemotron_ultra.ops.norm import gated_norm_rows, gated_norm_rows_back, silu_slope
from nemotron_ultra.ops.scratch import recycled, scratch
from nemotron_ultra.ops.segments import Segments
from nemotron_ultra.ops.spread import spread, workers
from nemotron_ultra.ops.ssd_chunks import LONGEST_CHUNK, Decays, SlabScan, SmallGrads, chunk_plan


@dataclass(frozen=True)
class InteriorSizes:
    """Columns of the input are z (H P) | x (H P) | B (G N) | C (G N) | dt (H)."""

    heads: int
    head_dim: int
    groups: int
    state: int
    chunk: int
    eps: float
    dt_limit: tuple[float, float] = (0.0, math.inf)

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        return self.inner + 2 * self.groups * self.state


def mamba_interior(
    zxbcdt_TW: Tensor,
    conv_weight_CK: Tensor,
    conv_bias_C: Tensor | None,
    A_H: Tensor,
    D_H: Tensor,
    dt_bias_H: Tensor,
    norm_weight_D: Tensor,
    segments: Segments,
    sizes: InteriorSizes,
) -> Tensor:
    """[T, 2 H P + 2 G N + H] -> [T, H P]. Documents of the pack do not see each other. A is negative."""
    weights = (conv_weight_CK, conv_bias_C, A_H, D_H, dt_bias_H, norm_weight_D)
    return _Interior.apply(zxbcdt_TW.contiguous(), *weights, segments, sizes)


class _Weights(NamedTuple):
    conv_CK: Tensor
    conv_bias_C: Tensor | None
    A_H: Tensor
    D_H: Tensor
    dt_bias_H: Tensor
    norm_D: Tensor


class _Interior(torch.autograd.Function):
    @staticmethod
    def forward(ctx, zx, conv_weight, conv_bias, A, D, dt_bias, norm_weight, segments, sizes):
        weights = _Weights(conv_weight, conv_bias, A, D, dt_bias, norm_weight)
        shares = document_shares(tuple(segments.bounds), workers(zx.device))
        y_TD, out_TD = (recycled((len(zx), sizes.inner), zx) for _ in range(2))
        rstd_TG = zx.new_empty(len(zx), sizes.groups)
        states: list[Tensor | None] = [None] * len(shares)

        def walk(number: int) -> None:
            rows = shares[number].rows
            work = _Work(zx[rows], weights, shares[number].bounds, sizes)
            states[number] = work.forward(y_TD[rows], rstd_TG[rows], out_TD[rows])

        _walk_all(walk, len(shares), zx.device)
        ctx.save_for_backward(zx, *weights, y_TD, rstd_TG, *states)
        ctx.shares, ctx.sizes = shares, sizes
        return out_TD

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out):
        zx, *saved = ctx.saved_tensors
        weights, (y_TD, rstd_TG, *states) = _Weights(*saved[:6]), saved[6:]
        d_zx, shares = recycled(zx.shape, zx), ctx.shares
        grads: list[tuple[Tensor | None, ...]] = [()] * len(shares)

        def walk(number: int) -> None:
            rows = shares[number].rows
            work = _Work(zx[rows], weights, shares[number].bounds, ctx.sizes)
            grads[number] = work.backward(d_out[rows], y_TD[rows], rstd_TG[rows], states[number], d_zx[rows])

        _walk_all(walk, len(shares), zx.device)
        sums = [None if parts[0] is None else reduce(torch.add, parts) for parts in zip(*grads, strict=True)]
        return d_zx, *sums, None, None


class Share(NamedTuple):
    """Neighbouring documents that one thread walks: rows of the pack, bounds counted from their first."""

    rows: slice
    bounds: tuple[int, ...]


# All threads together walk a pack about 1 / 0.65 times as fast as one thread: two, measured.
WIDEST_SHARE = 0.65


@lru_cache(maxsize=32)
def document_shares(bounds: tuple[int, ...], count: int) -> tuple[Share, ...]:
    """At most `count` shares of about as many tokens each; one if no split is even enough."""
    total = bounds[-1]
    cuts = sorted({min(bounds, key=lambda b: abs(b * count - total * k)) for k in range(count + 1)})
    if max((b - a for a, b in pairwise(cuts)), default=0) > WIDEST_SHARE * total or not total:
        cuts = [0, total]
    return tuple(
        Share(slice(first, last), tuple(b - first for b in bounds if first <= b <= last))
        for first, last in pairwise(cuts)
    )


def _walk_all(walk: Callable[[int], None], shares: int, device: torch.device) -> None:
    if shares == 1:
        walk(0)  # here, where its operations may use all threads
    else:
        spread(walk, range(shares), device)


class _Work:
    """One share of the pack: its forward, its backward, and the views and decays that both compute."""

    def __init__(self, zx: Tensor, weights: _Weights, bounds: tuple[int, ...], sizes: InteriorSizes):
        chunk = max(1, min(sizes.chunk, LONGEST_CHUNK, len(zx)))
        self.plan = chunk_plan(bounds, chunk, zx.dtype, zx.device)
        self.weights, self.sizes, self.bounds, self.like = weights, sizes, bounds, zx
        self.taps = weights.conv_CK.T.contiguous()
        self.z, self.xbc, dt = self.columns(zx)
        self.raw_TH = dt + weights.dt_bias_H
        dt = F.softplus(self.raw_TH).clamp_(*sizes.dt_limit)
        self.decays = Decays.of(dt, weights.A_H, sizes.groups, self.plan)
        self.scan = SlabScan(self.plan, self.decays, weights.D_H, (sizes.head_dim, sizes.state))

    def forward(self, y_TD: Tensor, rstd_TG: Tensor, out_TD: Tensor) -> Tensor:
        """Writes the scan's output, the norm's 1 / RMS and the result -> states at the borders of chunks."""
        scan, sizes = self.scan, self.sizes
        shape = (self.plan.count + 1, sizes.groups, sizes.inner // sizes.groups, sizes.state)
        states = recycled(shape, self.like)
        scan.reset(0, states[0])
        for cut in scan.slabs():
            rows = self.rows(cut)
            x, B, C = self.scan_inputs(cut)
            y = self.whole_chunks(cut, y_TD)
            scan.forward(cut, x, B, C, states[cut.start : cut.stop + 1], self.by_head(y))
            if len(y) > rows.stop - rows.start:
                y_TD[rows] = y[: rows.stop - rows.start]
            gated_norm_rows(
                y_TD[rows], self.z[rows], self.weights.norm_D, sizes.eps, out_TD[rows], rstd_TG[rows]
            )
        return states

    def backward(self, d_out, y_TD, rstd_TG, states, d_zx) -> tuple[Tensor | None, ...]:
        """Writes the gradient of the input -> gradients of the weights, in their order."""
        weights, scan, small = self.weights, self.scan, SmallGrads.like(self.decays)
        d_norm, carry = torch.zeros_like(weights.norm_D), torch.zeros_like(states[0])
        conv = ConvGrads(self.taps, scan.slab_rows, weights.conv_bias_C is not None)
        d_z, d_xbc, d_raw = self.columns(d_zx)
        for cut in reversed(list(scan.slabs())):
            rows, n = self.rows(cut), cut.stop - cut.start
            x, B, C, slope = self.scan_inputs_and_slope(cut)
            d_gated, gate, gate_slope = gated_norm_rows_back(
                d_out[rows], y_TD[rows], self.z[rows], weights.norm_D, rstd_TG[rows], d_norm
            )
            dy = self.product_by_head(cut, d_gated, gate)
            torch.mul(d_gated.mul_(y_TD[rows]), gate_slope, out=d_z[rows])
            d_states = scan.buffer("d_states", n + 1, *states.shape[2:])
            d_states[n] = carry
            parts = scan.backward(cut, x, B, C, states[cut.start : cut.stop + 1], dy, d_states, small)
            carry.copy_(d_states[0])
            self.silu_back(parts, slope, conv.open(rows.stop - rows.start))
            conv.rows(self.xbc, rows.start, rows.stop, self.bounds, d_xbc[rows])
        d_dt, d_A, d_D = small.finish(self.decays, weights.A_H, self.plan)
        d_raw.copy_(self.softplus_back(d_dt))
        d_taps, d_bias = conv.finish()
        return d_taps.T, d_bias, d_A, d_D, d_raw.sum(0), d_norm

    def columns(self, zx: Tensor) -> tuple[Tensor, ...]:
        """z | x, B, C together | dt."""
        return zx.split([self.sizes.inner, self.sizes.channels, self.sizes.heads], -1)

    def rows(self, cut: slice) -> slice:
        return slice(cut.start * self.plan.chunk, min(cut.stop * self.plan.chunk, self.plan.total))

    def before_silu(self, cut: slice) -> Tensor:
        """Convolution of x, B, C before its activation [R, channels], 0 past the end of the pack."""
        rows, size = self.rows(cut), (cut.stop - cut.start) * self.plan.chunk
        count, bias = rows.stop - rows.start, self.weights.conv_bias_C
        before = scratch.take("mamba.before", (size, self.sizes.channels), self.like)
        conv_rows(self.xbc, rows.start, rows.stop, self.taps, bias, self.bounds, before[:count])
        before[count:] = 0
        return before

    def split(self, columns: Tensor) -> tuple[Tensor, Tensor]:
        """[R, channels] -> x [R, H P] and B, C together [n, Q, 2, G, N], as views."""
        s = self.sizes
        shape = (-1, self.plan.chunk, 2, s.groups, s.state)
        return columns[:, : s.inner], columns[:, s.inner :].view(shape)

    def split_buffers(self, rows: int) -> tuple[Tensor, Tensor]:
        """Dense homes of the two: x as it is, B and C group by group [2, n, G, Q, N]."""
        s, Q = self.sizes, self.plan.chunk
        x = scratch.take("mamba.x", (rows, s.inner), self.like)
        return x, scratch.take("mamba.BC", (2, rows // Q, s.groups, Q, s.state), self.like)

    def scan_inputs(self, cut: slice) -> tuple[Tensor, Tensor, Tensor]:
        """-> x [n, G, J, Q, P], B, C [n, G, Q, N]."""
        before = self.before_silu(cut)
        x, BC = self.split_buffers(len(before))
        for source, home in zip(self.split(before), (x, BC.permute(1, 3, 0, 2, 4)), strict=True):
            torch.ops.aten.silu.out(source, out=home)
        return self.by_head(x), BC[0], BC[1]

    def scan_inputs_and_slope(self, cut: slice) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`scan_inputs` and the slope of the SiLU [R, channels], from one exponential."""
        before = self.before_silu(cut)
        sigmoid = torch.sigmoid(before, out=scratch.take("mamba.sigmoid", before.shape, self.like))
        x, BC = self.split_buffers(len(before))
        homes = (x, BC.permute(1, 3, 0, 2, 4))
        for source, factor, home in zip(self.split(before), self.split(sigmoid), homes, strict=True):
            torch.mul(source, factor, out=home)
        return self.by_head(x), BC[0], BC[1], silu_slope(before, sigmoid, before)

    def by_head(self, tokens_RD: Tensor) -> Tensor:
        """[n Q, H P] seen as [n, G, J, Q, P]."""
        s = self.sizes
        view = tokens_RD.view(-1, self.plan.chunk, s.groups, s.heads // s.groups, s.head_dim)
        return view.permute(0, 2, 3, 1, 4)

    def whole_chunks(self, cut: slice, y_TD: Tensor) -> Tensor:
        """Rows of y to write to: scratch for the chunk that the end of the pack cuts short."""
        rows, size = self.rows(cut), (cut.stop - cut.start) * self.plan.chunk
        if rows.stop - rows.start == size:
            return y_TD[rows]
        return scratch.take("mamba.y", (size, self.sizes.inner), self.like)

    def product_by_head(self, cut: slice, d_gated: Tensor, gate: Tensor) -> Tensor:
        """Gradient of the scan's output [n, G, J, Q, P] = d_gated * gate, 0 past the end of the pack."""
        s, n, Q = self.sizes, cut.stop - cut.start, self.plan.chunk
        dy = self.scan.buffer("dy", n, s.heads // s.groups, Q, s.head_dim)
        if len(gate) == n * Q:
            torch.mul(self.by_head(d_gated), self.by_head(gate), out=dy)
        else:
            padded = scratch.take("mamba.y", (n * Q, s.inner), self.like).zero_()
            torch.mul(d_gated, gate, out=padded[: len(gate)])
            dy.copy_(self.by_head(padded))
        return dy

    def silu_back(self, parts: tuple[Tensor, Tensor, Tensor], slope: Tensor, out: Tensor) -> None:
        """Gradients of x, B, C -> before the activation, [rows, channels]."""
        whole = out if len(out) == len(slope) else scratch.take("mamba.d_before", slope.shape, self.like)
        x_slope, BC_slope = self.split(slope)
        x_out, BC_out = self.split(whole)
        dx = parts[0].permute(0, 3, 1, 2, 4)
        torch.mul(dx, _as(x_slope, dx), out=_as(x_out, dx))
        for which, grad in enumerate(parts[1:]):
            torch.mul(grad.transpose(1, 2), BC_slope[:, :, which], out=BC_out[:, :, which])
        if whole is not out:
            out.copy_(whole[: len(out)])

    def softplus_back(self, d_dt_TH: Tensor) -> Tensor:
        """Through the clamp and the softplus of dt."""
        low, high = self.sizes.dt_limit
        d_raw = d_dt_TH * torch.sigmoid(self.raw_TH)
        if low > 0 or high < math.inf:
            dt = F.softplus(self.raw_TH)
            d_raw *= (dt >= low) & (dt <= high)
        return d_raw


def _as(rows: Tensor, like: Tensor) -> Tensor:
    """[n Q, columns] with the shape of `like`, [n, Q, ...]."""
    return rows.unflatten(1, like.shape[2:]).unflatten(0, like.shape[:2])
