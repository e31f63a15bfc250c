"""y_t = silu(b + sum_k w_k x_{t-K+1+k}): Mamba-2's causal depthwise convolution, reset at document starts.

Tokens stay the outer axis, so each tap is one fused multiply-add over rows shifted by a view, without a copy.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from nemotron_ultra.ops.scratch import scratch
from nemotron_ultra.ops.segments import Segments

SLAB_ELEMENTS = 1 << 17


def causal_conv_silu(
    x_TC: Tensor, weight_CK: Tensor, bias_C: Tensor | None, segments: Segments, initial: Tensor | None = None
) -> Tensor:
    """x [T, C], weight [C, K], bias [C] or None, initial window [docs, C, K-1] or None (zeros) -> [T, C]."""
    if initial is not None:
        return causal_conv_silu_window(x_TC, weight_CK, bias_C, segments, initial)[0]
    return _apply(x_TC, weight_CK, bias_C, segments.bounds)


def causal_conv_silu_window(
    x_TC: Tensor, weight_CK: Tensor, bias_C: Tensor | None, segments: Segments, initial: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`causal_conv_silu`, and each document's last K-1 inputs [docs, C, K-1]: the next initial window."""
    before = weight_CK.shape[1] - 1
    if initial is None:
        initial = x_TC.new_zeros(segments.count, x_TC.shape[1], before)
    pieces, bounds = [], [0]
    for document, (first, last) in enumerate(pairwise(segments.bounds)):
        pieces += [initial[document].T, x_TC[first:last]]
        bounds.append(bounds[-1] + before + last - first)
    whole_TC = torch.cat(pieces)
    y_TC = _apply(whole_TC, weight_CK, bias_C, bounds)
    kept = torch.arange(segments.total, device=x_TC.device) + before * (segments.index_T + 1)
    window = torch.stack([whole_TC[end - before : end].T for end in bounds[1:]])
    return y_TC[kept], window


def _apply(x_TC: Tensor, weight_CK: Tensor, bias_C: Tensor | None, bounds: list[int]) -> Tensor:
    dtype = torch.promote_types(x_TC.dtype, torch.float32)
    bias = None if bias_C is None else bias_C.to(dtype)
    return _ConvSilu.apply(x_TC.to(dtype), weight_CK.to(dtype), bias, bounds).to(x_TC.dtype)


class _ConvSilu(torch.autograd.Function):
    """Saves only x; the pre-activation is computed again in the backward."""

    @staticmethod
    def forward(ctx, x_TC, weight_CK, bias_C, bounds):
        ctx.save_for_backward(x_TC, weight_CK, bias_C)
        ctx.bounds = bounds
        taps_KC = weight_CK.T.contiguous()
        out_TC = torch.empty(x_TC.shape, dtype=x_TC.dtype, device=x_TC.device)
        for first, last in _slabs(x_TC):
            rows = out_TC[first:last]
            conv_rows(x_TC, first, last, taps_KC, bias_C, bounds, rows)
            F.silu(rows, inplace=True)
        return out_TC

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out_TC):
        x_TC, weight_CK, bias_C = ctx.saved_tensors
        taps_KC = weight_CK.T.contiguous()
        dx_TC = torch.empty(x_TC.shape, dtype=x_TC.dtype, device=x_TC.device)
        grads = ConvGrads(taps_KC, _slabs(x_TC)[0][1], bias_C is not None)
        for first, last in reversed(_slabs(x_TC)):
            before = scratch.take("conv.before", (last - first, x_TC.shape[1]), x_TC)
            conv_rows(x_TC, first, last, taps_KC, bias_C, ctx.bounds, before)
            d_before = grads.open(last - first)
            torch.ops.aten.silu_backward.grad_input(d_out_TC[first:last], before, grad_input=d_before)
            grads.rows(x_TC, first, last, ctx.bounds, dx_TC[first:last])
        d_taps_KC, d_bias = grads.finish()
        return dx_TC, d_taps_KC.T, d_bias, None


def _slabs(x_TC: Tensor) -> list[tuple[int, int]]:
    rows = max(256, SLAB_ELEMENTS // x_TC.shape[1])
    return [(first, min(first + rows, len(x_TC))) for first in range(0, len(x_TC), rows)] or [(0, 0)]


def documents_between(bounds: Sequence[int], first: int, last: int) -> Iterator[tuple[int, int]]:
    """Bounds of the documents that have tokens in rows first..last-1."""
    document = bisect_right(bounds, first) - 1
    while document + 1 < len(bounds) and bounds[document] < last:
        yield bounds[document], bounds[document + 1]
        document += 1


def conv_rows(x_TC, first: int, last: int, taps_KC, bias_C, bounds: Sequence[int], out: Tensor) -> None:
    """Convolution before its activation, rows first..last-1 of the pack, into `out` [last - first, C]."""
    taps = len(taps_KC)
    if bias_C is None:
        torch.mul(x_TC[first:last], taps_KC[-1], out=out)
    else:
        torch.addcmul(bias_C, x_TC[first:last], taps_KC[-1], out=out)
    for begin, end in documents_between(bounds, first, last):
        for back in range(1, taps):
            low, high = max(first, begin + back), min(last, end)
            if low < high:
                out[low - first : high - first].addcmul_(
                    x_TC[low - back : high - back], taps_KC[taps - 1 - back]
                )


class ConvGrads:
    """Gradients of the convolution, fed from the last rows of the pack to the first."""

    piece = 256  # rows at a time, so that the running sums stay in cache

    def __init__(self, taps_KC: Tensor, slab: int, has_bias: bool):
        self.taps_KC, self.slab = taps_KC, slab
        taps, channels = taps_KC.shape
        self.window = scratch.take("conv.window", (taps - 1, channels), taps_KC)
        self.sums = scratch.take("conv.sums", (taps, self.piece, channels), taps_KC).zero_()
        self.bias = taps_KC.new_zeros(channels) if has_bias else None
        self.d_before: Tensor | None = None

    def open(self, rows: int) -> Tensor:
        """[rows, C], to be filled with the gradient before the activation."""
        ahead, channels = self.window.shape
        if self.d_before is not None:
            assert self.slab >= ahead, "a slab must hold the window of the rows before it"
            self.window.copy_(self.d_before[:ahead])
        self.d_before = scratch.take("conv.d_before", (self.slab + ahead, channels), self.taps_KC)
        self.d_before[rows : rows + ahead] = self.window
        return self.d_before[:rows]

    def rows(self, x_TC: Tensor, first: int, last: int, bounds: Sequence[int], dx: Tensor) -> None:
        """Adds to the sums of the taps and writes the gradient of rows first..last-1 into `dx`."""
        if self.bias is not None:
            self.bias += self.d_before[: last - first].sum(0)
        for low in range(first, last, self.piece):
            high = min(low + self.piece, last)
            here = slice(low - first, high - first)
            self._piece(x_TC, (low, high), bounds, self.d_before[low - first :], dx[here])

    def _piece(
        self, x_TC: Tensor, span: tuple[int, int], bounds: Sequence[int], d: Tensor, dx: Tensor
    ) -> None:
        first, last = span
        self.sums[-1, : last - first].addcmul_(d[: last - first], x_TC[first:last])
        torch.mul(d[: last - first], self.taps_KC[-1], out=dx)
        for document in documents_between(bounds, first, last):
            for back in range(1, len(self.taps_KC)):
                self._tap(x_TC, back, span, document, d, dx)

    def _tap(self, x_TC, back: int, span: tuple[int, int], document: tuple[int, int], d, dx) -> None:
        (first, last), (begin, end) = span, document
        tap = len(self.taps_KC) - 1 - back
        low, high = max(first, begin), min(last, end - back)
        if low < high:
            ahead = d[low - first + back : high - first + back]
            dx[low - first : high - first].addcmul_(ahead, self.taps_KC[tap])
        low, high = max(first, begin + back), min(last, end)
        if low < high:
            rows = slice(low - first, high - first)
            self.sums[tap, rows].addcmul_(d[rows], x_TC[low - back : high - back])

    def finish(self) -> tuple[Tensor, Tensor | None]:
        """-> gradients of the taps [K, C] and of the bias."""
        return self.sums.sum(1), self.bias
