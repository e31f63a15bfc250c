"""y_t = sum_k w_tk * down_k relu(up_k x_t)^2 over the experts that token t chose (report 1.5).

Rows are sorted by expert, one product per expert and matrix writes into a slice, and the weighted sum back to
tokens is one pass. The backward is written by hand: only relu(up x) is kept, and the weights enter where rows
are narrow.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from nemotron_ultra.ops.spread import spread


class Dispatch(NamedTuple):
    """token_N: token of each sorted row; place_TK: sorted row of each choice; sizes: rows of each expert."""

    token_N: Tensor
    place_TK: Tensor
    sizes: list[int]


def dispatch(indices_TK: Tensor, experts: int) -> Dispatch:
    """Sort the T x K choices by expert (stable, so rows of one expert keep token order)."""
    flat_N = indices_TK.flatten()
    order_N = torch.argsort(flat_N, stable=True)
    place_N = torch.empty_like(order_N)
    place_N[order_N] = torch.arange(order_N.numel(), device=order_N.device)
    sizes = torch.bincount(flat_N, minlength=experts).tolist()
    token_N = order_N.div(indices_TK.shape[1], rounding_mode="floor")
    return Dispatch(token_N, place_N.view_as(indices_TK), sizes)


def routed_experts(
    x_TL: Tensor, indices_TK: Tensor, weights_TK: Tensor, up_EFL: Tensor, down_ELF: Tensor
) -> Tensor:
    """Weighted sum of the chosen experts' outputs, [T, L] in x's dtype.

    Gradients reach x, the weights and both expert stacks. Experts without tokens cost nothing and get zero
    gradients.
    """
    return _RoutedExperts.apply(x_TL, weights_TK.to(x_TL.dtype), up_EFL, down_ELF, indices_TK)


def _combine(rows_NL: Tensor, place_TK: Tensor, weights_TK: Tensor | None) -> Tensor:
    """sum_k w_tk rows[place_tk]: gather, weigh and add in one pass."""
    return F.embedding_bag(place_TK, rows_NL, per_sample_weights=weights_TK, mode="sum")


class _RoutedExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TL: Tensor, weights_TK: Tensor, up_EFL: Tensor, down_ELF: Tensor, indices_TK: Tensor
    ) -> Tensor:
        experts, hidden, _ = up_EFL.shape
        token_N, place_TK, sizes = plan = dispatch(indices_TK, experts)
        dtype = x_TL.dtype
        rows_NL = x_TL.index_select(0, token_N)
        relu_NF = x_TL.new_empty(rows_NL.shape[0], hidden)
        y_NL = torch.empty_like(rows_NL)
        parts = (rows_NL.split(sizes), relu_NF.split(sizes), y_NL.split(sizes), up_EFL.mT, down_ELF.mT)

        def expert(part: tuple[Tensor, ...]) -> None:
            rows, relu, y, up_LF, down_FL = part
            if rows.shape[0]:
                torch.mm(rows, up_LF.to(dtype), out=relu).relu_()
                torch.mm(relu.square(), down_FL.to(dtype), out=y)

        spread(expert, zip(*parts, strict=True), x_TL.device)
        ctx.plan = plan
        ctx.save_for_backward(x_TL, weights_TK, up_EFL, down_ELF, relu_NF)
        return _combine(y_NL, place_TK, weights_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TL: Tensor) -> tuple[Tensor | None, ...]:
        x_TL, weights_TK, up_EFL, down_ELF, relu_NF = ctx.saved_tensors
        token_N, place_TK, sizes = ctx.plan
        dtype = x_TL.dtype
        # With p = relu * (g down): dw = rowsum(relu p), d(up x) = 2 w p, so 2w multiplies the narrow rows.
        weight_N1 = torch.empty_like(weights_TK).view(-1, 1)
        weight_N1[place_TK.view(-1)] = weights_TK.reshape(-1, 1)
        grad_NL = grad_TL.index_select(0, token_N)
        weighted_grad_NL = grad_NL * weight_N1
        weighted_rows_NL = x_TL.index_select(0, token_N).mul_(weight_N1.mul_(2))
        dup_EFL = torch.empty_like(up_EFL, dtype=dtype)
        ddown_ELF = torch.empty_like(down_ELF, dtype=dtype)
        dweight_N = grad_TL.new_empty(grad_NL.shape[0])
        drows_NL = torch.empty_like(grad_NL)
        sorted_rows = (relu_NF, grad_NL, weighted_grad_NL, weighted_rows_NL, drows_NL, dweight_N)
        parts = (*(x.split(sizes) for x in sorted_rows), up_EFL, down_ELF, dup_EFL, ddown_ELF)

        def expert(part: tuple[Tensor, ...]) -> None:
            relu, g, weighted_g, weighted_rows, drows, dweight, up, down, dup, ddown = part
            p = torch.mm(g, down.to(dtype)).mul_(relu)
            torch.mm(p.T, weighted_rows, out=dup)
            torch.mm(p, up.to(dtype), out=drows)
            torch.sum(p.mul_(relu), -1, out=dweight)
            torch.mm(weighted_g.T, torch.square(relu, out=p), out=ddown)

        spread(expert, zip(*parts, strict=True), x_TL.device)
        dx_TL = _combine(drows_NL, place_TK, weights_TK * 2)
        dweights_TK = dweight_N[place_TK.view(-1)].view_as(weights_TK)
        return dx_TL, dweights_TK, dup_EFL.to(up_EFL.dtype), ddown_ELF.to(down_ELF.dtype), None


def relu_squared(x: Tensor) -> Tensor:
    """relu(x)^2, written over x; keeps only its output, which the next product keeps anyway."""
    return _ReluSquared.apply(x)


class _ReluSquared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.relu_().square_()
        ctx.mark_dirty(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        # d relu(x)^2 = 2 relu(x) = 2 sqrt(y)
        return torch.sqrt(y).mul_(grad).mul_(2)
