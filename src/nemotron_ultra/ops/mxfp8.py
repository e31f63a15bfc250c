"""x = element * scale: E4M3 elements, an E8M0 scale 2^ceil(log2(b / 448)) per 32 elements (OCP MX).

b is the largest magnitude of the block; elements are rounded to nearest, ties to even, and held to 448. There
is no tensor scale. Maxima do not see NaN, which stays NaN; an infinity becomes +-448 under the largest scale.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from nemotron_ultra.errors import ConfigError
from nemotron_ultra.ops import nvfp4_scales as scales
from nemotron_ultra.ops.blocks import block_maxima, float32_like, grid_rows, scale_blocks, slabs
from nemotron_ultra.ops.scratch import recycled, scratch

BLOCK = 32
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MANTISSA = 23  # bits of a float32
LARGEST_BYTE = 254  # 2^127; 255 would be NaN


class Counter(Protocol):
    def add(self, count: int) -> None: ...


@dataclass(frozen=True, kw_only=True)
class MXFP8Tensor:
    """elements uint8 [R, C] (E4M3 bits), scales uint8 [R, C / 32] (E8M0: 2^(byte - 127)).

    ConfigError for parts that do not fit.
    """

    elements: Tensor
    scales: Tensor
    shape: tuple[int, int]
    nonfinite: int = 0

    def __post_init__(self) -> None:
        rows, columns = self.shape
        for name, shape in (("elements", (rows, columns)), ("scales", (rows, columns // BLOCK))):
            part = getattr(self, name)
            if part.dtype != torch.uint8 or tuple(part.shape) != shape or columns % BLOCK:
                raise ConfigError(
                    f"MXFP8Tensor.{name} does not fit a matrix of shape {self.shape}",
                    got=f"{part.dtype} {tuple(part.shape)}",
                    allowed=f"torch.uint8 {shape}, columns a multiple of 32",
                    do="build it with mxfp8.quantize",
                )

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """element * scale [R, C], exact in float32, then cast."""
        numbers = scales.e4m3_numbers(self.elements).unflatten(-1, (-1, BLOCK))
        return numbers.mul_(_power(self.scales.to(torch.int32))[..., None]).flatten(-2).to(dtype)


@torch.no_grad()
def quantize(x: Tensor) -> MXFP8Tensor:
    """x [R, C] float32, bfloat16 or float16 -> elements and scales, blocks along the last axis.

    ConfigError for another dtype or rank, or a C that is not a multiple of 32.
    """
    _check(x, -1)
    if x.numel() == 0:
        empty = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
        return MXFP8Tensor(elements=empty, scales=empty[:, : x.shape[1] // BLOCK], shape=tuple(x.shape))
    source = x.to(torch.float32).contiguous()
    byte, finite = _scale_bytes(source, False)
    scaled = torch.empty_like(source)
    scale_blocks(source, _power(LARGEST_BYTE - byte), BLOCK, False, scaled)
    return MXFP8Tensor(
        elements=scales.e4m3_bytes(scaled.clamp_(-scales.E4M3_LARGEST, scales.E4M3_LARGEST)),
        scales=byte.to(torch.uint8),
        shape=tuple(x.shape),
        nonfinite=0 if finite else _count(x),
    )


@torch.no_grad()
def operand(x: Tensor, axis: int = -1, tally: Counter | None = None) -> Tensor:
    """element * scale of x [R, C], in its shape, dtype and layout, for emulated products: exact numbers.

    axis: that of the contraction, -1, or -2 for quantize(x.T) turned back, without a copy of x.T (x may also
    be a transpose). tally counts NaN and infinities. Carries no gradient. ConfigError as in `quantize`.
    """
    _check(x, axis)
    if not x.is_contiguous() and x.T.is_contiguous():
        return operand(x.T, -3 - axis, tally).T
    source, down = x.contiguous(), axis == -2
    values = recycled(source.shape, source)
    if x.numel() == 0:
        return values
    byte, finite = _scale_bytes(source, down)
    if tally is not None and not finite:
        tally.add(_count(x))
    factor, back = _power(LARGEST_BYTE - byte), _power(byte)
    for rows in slabs(source, BLOCK):
        part, of_grid = source[rows], grid_rows(rows, BLOCK, down)
        v = scratch.take("blocks.v", part.shape, float32_like(x))
        part = part if x.dtype == torch.float32 else v.copy_(part)
        scale_blocks(part, factor[of_grid], BLOCK, down, v)
        scale_blocks(scales.round_e4m3_(v), back[of_grid], BLOCK, down, values[rows])
    return values


def _scale_bytes(x: Tensor, down: bool) -> tuple[Tensor, bool]:
    """E8M0 bytes of the grid, int32, and whether all of x is finite."""
    grid = block_maxima(x, BLOCK, down)
    finite = math.isfinite(grid.amax().item())
    if not finite:
        grid = block_maxima(x.masked_fill(x.isnan(), 0), BLOCK, down)
    # The quotient is a power of two only if b / 448 is one. Adding all mantissa bits rounds its exponent up.
    bits = torch.div(grid, grid.new_full((), scales.E4M3_LARGEST)).view(torch.int32)
    byte = ((bits + ((1 << MANTISSA) - 1)) >> MANTISSA).clamp_(max=LARGEST_BYTE)
    return byte.masked_fill_(bits <= 1 << (MANTISSA - 1), 0), finite  # up to 2^-127


def _power(byte: Tensor) -> Tensor:
    """2^(byte - 127), float32: the exponent of a float32, but that 2^-127 is subnormal."""
    bits = (byte << MANTISSA).masked_fill_(byte == 0, 1 << (MANTISSA - 1))
    return bits.view(torch.float32)


def _count(x: Tensor) -> int:
    return int((~torch.isfinite(x)).sum())


def _check(x: Tensor, axis: int) -> None:
    if x.dtype not in DTYPES or x.ndim != 2 or axis not in (-1, -2):
        raise ConfigError(
            "mxfp8: takes one matrix",
            got=f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}, axis {axis}",
            allowed="[R, C] of float32, bfloat16 or float16, axis -1 or -2",
        )
    size, name = x.shape[axis], {-2: "rows", -1: "columns"}[axis]
    if size % BLOCK:
        raise ConfigError(
            f"mxfp8: the {name} are not a multiple of 32, the size of a block",
            got=f"{size} {name} in shape {tuple(x.shape)}",
            allowed=f"{size // BLOCK * BLOCK or BLOCK} or {-(-size // BLOCK) * BLOCK}",
            do="change the layer's width, pad with zeros, or keep this layer in bf16",
        )
