"""y = x W^T + b with the three products of a layer in a low-precision format (report 2.2).

Inputs and gradients are rounded to bf16 as they enter, their operands are exact, sums are FP32. A weight's
operand is made once for each of its versions: all micro-batches of a step use it, forward and backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nemotron_ultra.config.precision import Nvfp4Config
from nemotron_ultra.ops.scratch import recycled
from nemotron_ultra.precision.formats import Bf16, Format, Mxfp8, Nvfp4, Operand, Source, multiply, padded
from nemotron_ultra.precision.state import PrecisionState


class QuantizedProduct:
    """(x [..., K], weight [N, K], bias [N] or None) -> [..., N] in the dtype of x; one object per module.

    K must be a multiple of the format's block. Tokens and N are padded with zeros where they are contracted.
    """

    def __init__(self, format: Format, state: PrecisionState):
        self.format, self.state = format, state
        self.source = Source()
        self.operands: tuple[Operand, Operand] | None = None

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if x.ndim == 2:  # the common case; its result is no view and may be written over
            return _Product.apply(x, weight, bias, self)
        return _Product.apply(x.flatten(0, -2), weight, bias, self).view(*x.shape[:-1], len(weight))

    def weight(self, weight_NK: Tensor) -> tuple[Operand, Operand]:
        """Operands for fprop and dgrad, [N rounded up to a block, K]."""
        if weight_NK.is_inference():
            return self._weight(weight_NK)
        if not self.source.is_still(weight_NK):
            self.operands, self.source = self._weight(weight_NK), Source(weight_NK)
        return self.operands

    def _weight(self, weight_NK: Tensor) -> tuple[Operand, Operand]:
        with torch.inference_mode(False), torch.no_grad():
            return self.format.weight(padded(weight_NK.detach(), self.format.block, 1))


class Nvfp4Product(QuantizedProduct):
    """NVFP4 in all three products; `options` may leave out the transform, stochastic rounding or tiles."""

    def __init__(self, options: Nvfp4Config | None = None, state: PrecisionState | None = None):
        state = state or PrecisionState()
        super().__init__(Nvfp4(options, state.tally), state)


class Mxfp8Product(QuantizedProduct):
    """MXFP8 in all three products."""

    def __init__(self, state: PrecisionState | None = None):
        state = state or PrecisionState()
        super().__init__(Mxfp8(state.tally), state)


class Bf16Product(QuantizedProduct):
    """Operands rounded to bf16 in all three products, results left in FP32."""

    def __init__(self, state: PrecisionState | None = None):
        super().__init__(Bf16(), state or PrecisionState())


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, product: QuantizedProduct
    ) -> Tensor:
        low_MK = x_MK.bfloat16()
        fprop, ctx.dgrad = product.weight(weight_NK)
        ctx.product, ctx.outputs = product, len(weight_NK)
        ctx.save_for_backward(low_MK)
        y_MN = _result((len(x_MK), len(weight_NK)), x_MK)
        bias_N = None if bias_N is None else bias_N.to(y_MN.dtype)
        return multiply(product.format.rows(low_MK), fprop.first(ctx.outputs), y_MN, bias_N).to(x_MK.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_MN: Tensor) -> tuple[Tensor | None, ...]:
        (low_MK,) = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        format, state = ctx.product.format, ctx.product.state
        low_dy_MN = padded(dy_MN, format.block if wants_weight else 1, format.block)
        dx = dweight = None
        if wants_x:
            dx = _result(low_MK.shape, dy_MN)
            multiply(format.gradient(low_dy_MN[: len(dy_MN)], state.generator), ctx.dgrad.T, dx)
            dx = dx.to(dy_MN.dtype)
        if wants_weight:
            by_token = format.gradient_by_token(low_dy_MN, state.generator).first(ctx.outputs)
            inputs = format.input_by_token(padded(low_MK, format.block, 1))
            shape = (ctx.outputs, low_MK.shape[1])
            dweight = multiply(by_token, inputs, dy_MN.new_empty(shape, dtype=torch.float32))
        return dx, dweight, dy_MN.sum(0) if wants_bias else None, None


def _result(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Uninitialised memory for a result, used again where it is large; not a view, since the next operation
    may write over it. float32 for float64, and on a CPU always, where operands and sums are float32.
    """
    wide = like.dtype == torch.float64 or like.device.type == "cpu"
    memory = recycled(shape, like.new_empty(0, dtype=torch.float32) if wide else like)
    fresh = torch.empty(0, dtype=memory.dtype, device=memory.device)
    return fresh.set_(memory.untyped_storage(), memory.storage_offset(), memory.shape, memory.stride())
