"""Blocks of equal size along rows of memory, or down them: maxima of each, and a factor for each.

[R, C] with blocks of `width` along the rows has a grid [R, C / width] of one number each, down the rows
[R / width, C]. No transpose is copied for either.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from nemotron_ultra.ops.scratch import scratch

SLAB_ELEMENTS = 1 << 19


def slabs(x: Tensor, width: int) -> Iterator[slice]:
    """Slices of the rows of x [R, C], of whole blocks and about SLAB_ELEMENTS: they stay in a cache."""
    if x.numel() <= SLAB_ELEMENTS:
        yield slice(0, x.shape[0])
        return
    height = max(1, SLAB_ELEMENTS // (x.shape[1] * width)) * width
    for first in range(0, x.shape[0], height):
        yield slice(first, min(first + height, x.shape[0]))


def block_maxima(x: Tensor, width: int, down: bool) -> Tensor:
    """Grid of the largest magnitudes in blocks of x [R, C], float32; a NaN makes its block NaN."""
    parts = []
    for rows in slabs(x, width):
        part = x[rows]
        magnitude = scratch.take("blocks.v", part.shape, float32_like(x))
        if x.dtype == torch.float32:
            torch.abs(part, out=magnitude)
        else:
            magnitude.copy_(part).abs_()
        if down:
            parts.append(magnitude.view(-1, width, x.shape[1]).amax(1))
        else:
            parts.append(row_maxima_(magnitude, width))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def row_maxima_(magnitude: Tensor, width: int) -> Tensor:
    """[R, C] -> [R, C / width] maxima of `width` (a power of two) neighbours; magnitude is overwritten.

    Halves against halves, then shifted views: a third of the time of a reduction over short rows.
    """
    blocks, half = magnitude.view(-1, width), width // 2
    left = scratch.take("blocks.half", (blocks.shape[0], half), magnitude).view(-1)
    torch.maximum(blocks[:, :half], blocks[:, half:], out=left.view(-1, half))
    right = magnitude.view(-1)[: left.numel()]
    shift = half // 2
    while shift:
        torch.maximum(left[:-shift], left[shift:], out=right[:-shift])
        left, right, shift = right, left, shift // 2
    return left[::half].clone(memory_format=torch.contiguous_format).view(magnitude.shape[0], -1)


def scale_blocks(x: Tensor, grid: Tensor, width: int, down: bool, out: Tensor) -> None:
    """out = x times the number of its block; x and out [R, C], contiguous."""
    blocks = (-1, width, x.shape[1]) if down else (-1, width)
    grid = grid.unsqueeze(1) if down else grid.reshape(-1, 1)
    torch.mul(x.view(blocks), grid, out=out.view(blocks))


def grid_rows(rows: slice, width: int, down: bool) -> slice:
    """The rows of the grid that belong to a slab."""
    return slice(rows.start // width, rows.stop // width) if down else rows


def float32_like(x: Tensor) -> Tensor:
    """A float32 tensor on the device of x, to take scratch memory like it."""
    return x if x.dtype == torch.float32 else torch.empty(0, dtype=torch.float32, device=x.device)
