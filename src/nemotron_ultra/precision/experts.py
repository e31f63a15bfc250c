"""y_t = sum_k w_tk * down_k relu(up_k x_t)^2 with every expert's products in a low-precision format.

Each expert's slice of rows and each matrix has a tensor scale of its own, as in a grouped product (report
2.2). Slices are padded with zero rows to whole blocks when the tokens are sorted. What the hardware keeps
between products is bf16, and so is what is kept here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from nemotron_ultra.ops.experts import dispatch
from nemotron_ultra.ops.scratch import scratch
from nemotron_ultra.ops.spread import spread
from nemotron_ultra.precision.formats import Format, Operand, Source, multiply
from nemotron_ultra.precision.state import PrecisionState

Operands = list[tuple[Operand, Operand]]


class QuantizedExperts:
    """Takes the place of `ops.experts.routed_experts`, one object per module.

    Both widths, L and F, must be multiples of the format's block.
    """

    def __init__(self, format: Format, state: PrecisionState):
        self.format, self.state = format, state
        self.sources = (Source(), Source())
        self.operands: tuple[Operands, Operands] | None = None

    def __call__(
        self, x_TL: Tensor, indices_TK: Tensor, weights_TK: Tensor, up_EFL: Tensor, down_ELF: Tensor
    ) -> Tensor:
        block = self.format.block if torch.is_grad_enabled() else 1  # only wgrad contracts tokens
        plan = plan_rows(indices_TK, len(up_EFL), block)
        # On a CPU operands and sums are float32, whatever the dtype of activations.
        wide_TL = x_TL.float() if x_TL.device.type == "cpu" else x_TL
        weights_TK = weights_TK.to(wide_TL.dtype)
        return _QuantizedExperts.apply(wide_TL, weights_TK, up_EFL, down_ELF, plan, self).to(x_TL.dtype)

    def weights(self, up_EFL: Tensor, down_ELF: Tensor) -> tuple[Operands, Operands]:
        """For each expert the operands for fprop and dgrad of its two matrices."""
        if up_EFL.is_inference() or down_ELF.is_inference():
            return self._weights(up_EFL), self._weights(down_ELF)
        if not (self.sources[0].is_still(up_EFL) and self.sources[1].is_still(down_ELF)):
            self.operands = (self._weights(up_EFL), self._weights(down_ELF))
            self.sources = (Source(up_EFL), Source(down_ELF))
        return self.operands

    def _weights(self, weight_ENK: Tensor) -> Operands:
        with torch.inference_mode(False), torch.no_grad():
            return [self.format.weight(weight_NK) for weight_NK in weight_ENK.detach()]


class _Plan(NamedTuple):
    """token_N: token of each row, 0 in padding; padding_P: rows that are padding; place_TK: row of a choice;
    sizes: rows of each expert, padding included.
    """

    token_N: Tensor
    padding_P: Tensor
    place_TK: Tensor
    sizes: list[int]


def plan_rows(indices_TK: Tensor, experts: int, block: int) -> _Plan:
    """Sort the choices by expert, each expert's slice at the start of whole blocks."""
    token_N, place_TK, sizes = dispatch(indices_TK, experts)
    device = token_N.device
    sizes_E = torch.tensor(sizes, device=device)
    wide_E = (sizes_E + block - 1) // block * block
    shift_E = (wide_E - sizes_E).cumsum(0) - (wide_E - sizes_E)
    place_TK = place_TK + shift_E[indices_TK]
    total = int(wide_E.sum())
    padded_N = torch.zeros(total, dtype=token_N.dtype, device=device)
    rows_N = place_TK.flatten()
    tokens_N = torch.arange(len(indices_TK), device=device).repeat_interleave(indices_TK.shape[1])
    padded_N[rows_N] = tokens_N
    real_N = torch.zeros(total, dtype=torch.bool, device=device)
    real_N[rows_N] = True
    return _Plan(padded_N, (~real_N).nonzero().squeeze(1), place_TK, wide_E.tolist())


def sorted_rows(x_TL: Tensor, plan: _Plan) -> Tensor:
    return x_TL.index_select(0, plan.token_N).index_fill_(0, plan.padding_P, 0)


def _combine(rows_NL: Tensor, place_TK: Tensor, weights_TK: Tensor | None = None) -> Tensor:
    """sum_k w_tk rows[place_tk]: gather, weigh and add in one pass."""
    return F.embedding_bag(place_TK, rows_NL, per_sample_weights=weights_TK, mode="sum")


class _QuantizedExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TL: Tensor,
        weights_TK: Tensor,
        up_EFL: Tensor,
        down_ELF: Tensor,
        plan: _Plan,
        owner: QuantizedExperts,
    ) -> Tensor:
        format, hidden = owner.format, up_EFL.shape[1]
        low_TL = x_TL.bfloat16()
        ups, downs = owner.weights(up_EFL, down_ELF)
        rows_NL = sorted_rows(low_TL, plan)
        relu_NF = rows_NL.new_empty(len(rows_NL), hidden)
        y_NL = torch.empty_like(rows_NL, dtype=x_TL.dtype)
        parts = (rows_NL.split(plan.sizes), relu_NF.split(plan.sizes), y_NL.split(plan.sizes), ups, downs)

        def expert(part: tuple[Any, ...]) -> None:
            rows, relu, y, (up, _), (down, _) = part
            if len(rows):
                wide = scratch.take("experts.up", relu.shape, y)
                relu.copy_(multiply(format.rows(rows), up, wide).relu_())
                multiply(format.rows(relu.square()), down, y)

        spread(expert, zip(*parts, strict=True), x_TL.device)
        ctx.plan, ctx.owner, ctx.weights = plan, owner, (ups, downs)
        ctx.save_for_backward(rows_NL, weights_TK, relu_NF, y_NL)
        return _combine(y_NL, plan.place_TK, weights_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TL: Tensor) -> tuple[Tensor | None, ...]:
        rows_NL, weights_TK, relu_NF, y_NL = ctx.saved_tensors
        plan, format, state = ctx.plan, ctx.owner.format, ctx.owner.state
        experts, hidden, width = len(plan.sizes), relu_NF.shape[1], rows_NL.shape[1]
        weight_N1 = weights_TK.new_zeros(len(rows_NL), 1)
        weight_N1[plan.place_TK.flatten()] = weights_TK.reshape(-1, 1)
        grad_NL = sorted_rows(grad_TL, plan)
        dweight_N = torch.linalg.vecdot(grad_NL, y_NL)
        low_NL = grad_NL.mul_(weight_N1).bfloat16()
        drows_NL = grad_NL
        dup_EFL = grad_TL.new_zeros(experts, hidden, width, dtype=torch.float32)
        ddown_ELF = grad_TL.new_zeros(experts, width, hidden, dtype=torch.float32)
        split = (x.split(plan.sizes) for x in (rows_NL, relu_NF, low_NL, drows_NL))
        parts = (*split, *ctx.weights, dup_EFL, ddown_ELF, state.seeds(experts))

        def expert(part: tuple[Any, ...]) -> None:
            rows, relu, g, drows, (_, up), (_, down), dup, ddown, seed = part
            if not len(rows):
                return
            draw = torch.Generator(rows.device).manual_seed(seed)
            dh = scratch.take("experts.up", relu.shape, drows)
            multiply(format.gradient(g, draw), down.T, dh)
            h = format.input_by_token(relu.square())
            multiply(format.gradient_by_token(g, draw), h, ddown)
            # d relu(u)^2 = 2 relu(u)
            du = dh.mul_(relu).mul_(2).bfloat16()
            multiply(format.gradient(du, draw), up.T, drows)
            multiply(format.gradient_by_token(du, draw), format.input_by_token(rows), dup)

        spread(expert, zip(*parts, strict=True), grad_TL.device)
        dx_TL = _combine(drows_NL, plan.place_TK)
        dweights_TK = dweight_N[plan.place_TK.flatten()].view_as(weights_TK)
        return dx_TL, dweights_TK, dup_EFL, ddown_ELF, None, None
