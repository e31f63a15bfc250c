"""y = x W^T + b, output and input gradient in recycled memory: for the wide projections of long packs."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nemotron_ultra.ops.scratch import recycled


def linear(x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """x [T, D], weight [O, D], bias [O] or None, all of one dtype -> [T, O]."""
    return _Linear.apply(x_TD, weight_OD, bias_O)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        out = recycled((len(x), len(weight)), x)
        return torch.mm(x, weight.T, out=out) if bias is None else torch.addmm(bias, x, weight.T, out=out)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        dx = torch.mm(dy, weight, out=recycled(x.shape, x)) if wants_x else None
        d_weight = torch.mm(dy.T, x) if wants_weight else None
        return dx, d_weight, dy.sum(0) if wants_bias else None
