"""From a float tensor to E2M1 numbers and E4M3 scales: first maxima, then elements, in slabs of rows.

Blocks lie along rows of memory ([R, C / 16]) or down them ([R / 16, C]): the transpose is quantised without a
copy. Tiles of 16 x 16 are read as blocks down the rows whose scales repeat.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nemotron_ultra.ops import nvfp4_elements as elements
from nemotron_ultra.ops import nvfp4_scales as scales
from nemotron_ultra.ops.blocks import (
    block_maxima,
    float32_like,
    grid_rows,
    row_maxima_,
    scale_blocks,
    slabs,
)
from nemotron_ultra.ops.nvfp4_choice import four_over_six
from nemotron_ultra.ops.nvfp4_random import noise_like
from nemotron_ultra.ops.nvfp4_rules import BLOCK, Rules
from nemotron_ultra.ops.scratch import scratch

CHEAP_BLOCKS = 1 << 13


class Slices:
    """Which rows share one A: all of them, each for itself, or runs of `sizes` rows."""

    def __init__(self, row_scaled: bool = False, sizes: list[int] | None = None):
        self.row_scaled, self.sizes = row_scaled, sizes
        self.slice_of_row: Tensor | None = None

    def largest(self, grid: Tensor, step: int) -> Tensor:
        """A of each slice, [1], [R] or [E], from the maxima of blocks that are `step` rows high."""
        if self.row_scaled:
            return grid.amax(-1)
        if self.sizes is None:
            return grid.amax().view(1)
        empty = grid.new_zeros(len(self.sizes))
        return empty.scatter_reduce_(0, self._index(grid, step), grid.amax(-1), "amax")

    def spread(self, amax: Tensor, grid: Tensor, step: int) -> Tensor:
        """A in a shape that broadcasts to the grid."""
        if self.row_scaled:
            return amax[:, None]
        return amax if self.sizes is None else amax[self._index(grid, step)][:, None]

    def _index(self, grid: Tensor, step: int) -> Tensor:
        if self.slice_of_row is None:
            counts = torch.tensor([size // step for size in self.sizes], device=grid.device)
            self.slice_of_row = torch.repeat_interleave(counts, output_size=grid.shape[0])
        return self.slice_of_row


@dataclass(frozen=True)
class Draws:
    """Where stochastic rounding takes its bits from: given bytes like x, else the generator."""

    random_bits: Tensor | None = None
    generator: torch.Generator | None = None


@dataclass(frozen=True)
class Encoded:
    """scales float32: E4M3 numbers of the grid of blocks; amax of each slice; whether all of x is finite."""

    scales: Tensor
    amax: Tensor
    finite: bool


def encode(
    x: Tensor,
    out: Tensor,
    rules: Rules,
    down: bool,
    slices: Slices,
    draws: Draws,
    amax: Tensor | None = None,
    scaled: bool = True,
) -> Encoded:
    """Write E2M1 numbers of x [R, C], times their scales if `scaled`, to `out` [R, C]; x is contiguous."""
    down = down or rules.tile
    step = BLOCK if down else 1
    if x.numel() == 0:
        return _empty(x, rules, step, slices)
    grid = _maxima(x, rules, down)
    own = slices.largest(grid, step)
    finite, nan = math.isfinite((own if own.numel() == 1 else own.sum()).item()), None
    if not finite:  # maxima of the hardware do not see NaN
        nan = torch.isnan(x)
        x = x.masked_fill(nan, 0)
        grid = _maxima(x, rules, down)
        own = slices.largest(grid, step)
    largest = own if amax is None else amax
    of_block = slices.spread(largest, grid, step)
    scale = scales.global_scale(of_block, rules.scale_max)
    if rules.four_over_six:
        stored = four_over_six(x, out, grid, of_block, scale, rules, down, scaled)
    else:
        stored = scales.block_scale(grid, scale, rules.scale_rule == "te_2_13")
        factor = scales.encode_scale(stored, scale)
        saturate = not finite or amax is not None or _may_saturate(grid, stored)
        factor, back = (_along_memory(g, rules) for g in (factor, stored))
        _round(x, out, factor, back if scaled else None, rules, down, saturate, draws)
    if nan is not None:
        _nan_to_six_(out, nan, stored, rules, down, scaled)
    return Encoded(stored, largest, finite)


def _maxima(x: Tensor, rules: Rules, down: bool) -> Tensor:
    """Grid of block maxima, float32: [R, C / 16], [R / 16, C] or, for tiles, [R / 16, C / 16]."""
    grid = block_maxima(x, BLOCK, down)
    return row_maxima_(grid, BLOCK) if rules.tile else grid


def _round(
    x: Tensor,
    out: Tensor,
    factor: Tensor,
    back: Tensor | None,
    rules: Rules,
    down: bool,
    saturate: bool,
    draws: Draws,
) -> None:
    """out = E2M1(x * factor) * back, slab by slab."""
    for rows in slabs(x, BLOCK):
        source = x[rows]
        of_grid = grid_rows(rows, BLOCK, down)
        v = scratch.take("blocks.v", source.shape, float32_like(x))
        if x.dtype != torch.float32:
            source = v.copy_(source)
        scale_blocks(source, factor[of_grid], BLOCK, down, v)
        if rules.rounding == "nearest":
            elements.round_nearest_(v, saturate)
        elif draws.random_bits is not None:
            elements.round_with_bytes_(v, draws.random_bits[rows])
        else:
            elements.round_stochastic_(v, noise_like(v, draws.generator))
        if back is None:
            out[rows].copy_(v)
        else:
            scale_blocks(v, back[of_grid], BLOCK, down, out[rows])


def _may_saturate(grid: Tensor, stored: Tensor) -> bool:
    """Under a normal scale |v| < 6.4, which rounds to 6; a smaller one may be far below its block's."""
    if stored.numel() < CHEAP_BLOCKS or stored.device.type != "cpu":
        return True  # holding elements to 6 takes less time than looking
    return bool((stored.lt(scales.E4M3_SMALLEST_NORMAL) & grid.gt(0)).any())


def _along_memory(grid: Tensor, rules: Rules) -> Tensor:
    """A grid of tiles as one of blocks 16 rows high and one column wide, so that it is read along memory."""
    return grid.repeat_interleave(BLOCK, -1) if rules.tile else grid


def _nan_to_six_(out: Tensor, nan: Tensor, stored: Tensor, rules: Rules, down: bool, scaled: bool) -> None:
    six = torch.full(out.shape, elements.LARGEST, dtype=torch.float32, device=out.device)
    if scaled:
        scale_blocks(six.clone(), _along_memory(stored, rules), BLOCK, down, six)
    out.copy_(torch.where(nan, six.to(out.dtype), out))


def _empty(x: Tensor, rules: Rules, step: int, slices: Slices) -> Encoded:
    """Nothing to encode: no blocks, A = 0."""
    rows, columns = x.shape
    count = rows if slices.row_scaled else 1 if slices.sizes is None else len(slices.sizes)
    wide = columns // BLOCK if rules.tile or step == 1 else columns
    options = {"dtype": torch.float32, "device": x.device}
    return Encoded(torch.zeros(rows // step, wide, **options), torch.zeros(count, **options), True)
