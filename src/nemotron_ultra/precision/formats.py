"""Operands of the three products of a layer, format by format (TE's NVFP4BlockScaling, report 2.2).

    fprop  Y  = X W^T     X  in rows, nearest              W  in tiles, nearest
    dgrad  dX = dY W      dY in rows, stochastic           W  the same codes as in fprop
    wgrad  dW = dY^T X    dY along tokens, Hadamard then stochastic; X along tokens, Hadamard then nearest

An operand is a matrix of code x scale, exact in bf16, and the factor that its tensor scale adds to the FP32
result. Both copies of dY draw random bits of their own. On a CPU the exact numbers are multiplied in float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from nemotron_ultra.config.precision import Nvfp4Config
from nemotron_ultra.ops import mxfp8, nvfp4
from nemotron_ultra.ops.scratch import scratch

_FLOAT = torch.empty(0)


class Operand(NamedTuple):
    """values [rows, contraction]; factor: FP32 scalar, or None for 1. The matrix is factor x values."""

    values: Tensor
    factor: Tensor | None = None

    @property
    def T(self) -> Operand:
        return Operand(self.values.T, self.factor)

    def first(self, rows: int) -> Operand:
        return Operand(self.values[:rows], self.factor)


class Format(Protocol):
    """How one format makes operands. Arguments are bf16 matrices whose sides are multiples of `block`."""

    block: int

    def rows(self, x_MK: Tensor) -> Operand:
        """X for fprop, blocks along K."""
        ...

    def weight(self, weight_NK: Tensor) -> tuple[Operand, Operand]:
        """W for fprop [N, K] and for dgrad [N, K] (blocks along N), of any stored dtype."""
        ...

    def gradient(self, dy_MN: Tensor, generator: torch.Generator) -> Operand:
        """dY for dgrad, blocks along N."""
        ...

    def gradient_by_token(self, dy_MN: Tensor, generator: torch.Generator) -> Operand:
        """dY^T [N, M] for wgrad, blocks along M."""
        ...

    def input_by_token(self, x_MK: Tensor) -> Operand:
        """X^T [K, M] for wgrad, blocks along M."""
        ...


class Nvfp4:
    """E2M1 elements, an E4M3 scale per 16, an FP32 scale per tensor."""

    block = 16

    def __init__(self, options: Nvfp4Config | None = None, tally: nvfp4.Tally | None = None):
        self.options = options or Nvfp4Config()
        self.tally = tally
        self.rht = self.options.hadamard != "none"
        self.stochastic = self.options.stochastic_rounding != "none"
        # The codes reach 6, and the E4M3 scales 448, or 256 where four-over-six may take half as much again.
        self.largest = 6.0 * (256 if self.options.scale_rule.startswith("four_over_six") else 448)

    def rows(self, x_MK: Tensor) -> Operand:
        return self._operand(x_MK)

    def weight(self, weight_NK: Tensor) -> tuple[Operand, Operand]:
        weight_NK = weight_NK.detach().bfloat16()
        if self.options.weight_block == "16x16":
            operand = self._operand(weight_NK, block="16x16")
            return operand, operand
        return self._operand(weight_NK), self._operand(weight_NK, axis=-2)

    def gradient(self, dy_MN: Tensor, generator: torch.Generator) -> Operand:
        return self._gradient(dy_MN, generator)

    def gradient_by_token(self, dy_MN: Tensor, generator: torch.Generator) -> Operand:
        return self._gradient(dy_MN, generator, axis=-2, rht=self.rht).T

    def input_by_token(self, x_MK: Tensor) -> Operand:
        return self._operand(x_MK, axis=-2, rht=self.rht).T

    def _gradient(self, dy: Tensor, generator: torch.Generator, **how: Any) -> Operand:
        if self.stochastic:
            how |= {"rounding": "stochastic", "generator": generator}
        return self._operand(dy, **how)

    def _operand(self, x: Tensor, **how: Any) -> Operand:
        values, amax = nvfp4.operand(wide(x), scale_rule=self.options.scale_rule, tally=self.tally, **how)
        return Operand(values, amax[0] / self.largest)


class Mxfp8:
    """E4M3 elements and a power of two per 32 along the contraction, both nearest; no tensor scale."""

    block = 32

    def __init__(self, tally: nvfp4.Tally | None = None):
        self.tally = tally

    def rows(self, x_MK: Tensor) -> Operand:
        return Operand(mxfp8.operand(wide(x_MK), tally=self.tally))

    def weight(self, weight_NK: Tensor) -> tuple[Operand, Operand]:
        weight_NK = weight_NK.detach().bfloat16()
        return self.rows(weight_NK), self.input_by_token(weight_NK).T

    def gradient(self, dy_MN: Tensor, generator: torch.Generator) -> Operand:
        return self.rows(dy_MN)

    def gradient_by_token(self, dy_MN: Tensor, generator: torch.Generator) -> Operand:
        return self.input_by_token(dy_MN)

    def input_by_token(self, x_MK: Tensor) -> Operand:
        return Operand(mxfp8.operand(wide(x_MK), axis=-2, tally=self.tally)).T


class Bf16:
    """Operands rounded to bf16."""

    block = 1

    def rows(self, x_MK: Tensor) -> Operand:
        return Operand(x_MK.float() if x_MK.device.type == "cpu" else x_MK)

    def weight(self, weight_NK: Tensor) -> tuple[Operand, Operand]:
        operand = self.rows(weight_NK.detach().bfloat16())
        return operand, operand

    def gradient(self, dy_MN: Tensor, generator: torch.Generator) -> Operand:
        return self.rows(dy_MN)

    def gradient_by_token(self, dy_MN: Tensor, generator: torch.Generator) -> Operand:
        return self.rows(dy_MN).T

    def input_by_token(self, x_MK: Tensor) -> Operand:
        return self.rows(x_MK).T


class Source:
    """The weight, at one version, that an operand was made of.

    It holds the memory, so that no other weight can come to lie there. Writing through `.data` counts no
    version and goes unseen.
    """

    def __init__(self, weight: Tensor | None = None):
        self.memory = None if weight is None else weight.detach()
        self.version = -1 if weight is None else weight._version

    def is_still(self, weight: Tensor) -> bool:
        if self.memory is None or self.version != weight._version or self.memory.dtype != weight.dtype:
            return False
        layouts = ((t.data_ptr(), t.shape, t.stride()) for t in (self.memory, weight))
        return next(layouts) == next(layouts)

    def __deepcopy__(self, memo: dict) -> Source:
        return Source()  # a copied weight counts its versions from 0 again


def wide(x_bf16: Tensor) -> Tensor:
    """x in the dtype that operands are multiplied in: bf16 holds them exactly, a CPU is faster in float32."""
    if x_bf16.device.type != "cpu":
        return x_bf16
    return scratch.take("operand.wide", x_bf16.shape, _FLOAT).copy_(x_bf16)


def padded(x: Tensor, rows: int, columns: int) -> Tensor:
    """x in bf16, with zeros below and to the right up to multiples of `rows` and `columns`."""
    height, width = (-(-size // block) * block for size, block in zip(x.shape, (rows, columns), strict=True))
    if x.shape == (height, width):
        return x.bfloat16()
    y = torch.zeros(height, width, dtype=torch.bfloat16, device=x.device)
    y[: x.shape[0], : x.shape[1]] = x
    return y


def multiply(a: Operand, b: Operand, out: Tensor, bias: Tensor | None = None) -> Tensor:
    """out [M, N] = a [M, K] times b [N, K]^T, summed in FP32, then the factors, then the bias."""
    alpha = _alpha(a, b)
    if out.device.type == "cpu":
        base, beta = (out, 0) if bias is None else (bias, 1)
        return torch.addmm(base, a.values, b.values.T, beta=beta, alpha=float(alpha), out=out)
    y = torch.mm(a.values, b.values.T, out_dtype=torch.float32)
    y = y if isinstance(alpha, float) else y.mul_(alpha)
    return out.copy_(y if bias is None else y.add_(bias))


def _alpha(a: Operand, b: Operand) -> Tensor | float:
    factors = [operand.factor for operand in (a, b) if operand.factor is not None]
    if not factors:
        return 1.0
    if factors[0].device.type == "cpu":
        alpha = 1.0
        for factor in factors:
            alpha *= float(factor)
        return alpha
    return factors[0] if len(factors) == 1 else factors[0] * factors[1]
