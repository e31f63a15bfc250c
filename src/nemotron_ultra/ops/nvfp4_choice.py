"""Four-over-six: each block is encoded with its maximum at 6 and at 4, and the smaller error wins, 6 on a tie.

s6 = E4M3((b / 6) * S), s4 = E4M3(1.5 * (b / 6) * S), S = 6 * bound / A (arXiv 2512.02010; report 5.2). The error is of
((code * s) * A) / (6 * bound) in float32, summed in element order; 16 x 16 tiles add their rows by halves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nemotron_ultra.ops import nvfp4_scales as scales
from nemotron_ultra.ops.nvfp4_elements import round_nearest_

BLOCK = scales.BLOCK


def four_over_six(
    x: Tensor, grid: Tensor, amax: Tensor, scale: Tensor, rules: Any, down: bool
) -> tuple[Tensor, Tensor]:
    """-> E2M1 numbers like x [..., R, C] and the scales of the grid, both float32."""
    tile = rules.block == "16x16"
    x = x.mT.contiguous() if down and not tile else x  # blocks along the last axis from here on
    grid, amax, scale = (t.mT if down and not tile and t.ndim > 1 else t for t in (grid, amax, scale))
    base = scales.sixth_of(grid).mul_(scale)
    squared = rules.scale_rule.endswith("mse")
    largest = x.new_full((), scales.LARGEST * rules.scale_max)
    tried = []
    for factor in (1.0, 1.5):
        stored = scales.round_e4m3_(base * factor)
        encode = scales.encode_scale(stored, scale)
        blocks = x.unflatten(-1, (-1, BLOCK))
        v = round_nearest_(blocks * _per_row(encode, tile))
        decoded = (v * _per_row(stored, tile)).mul_(_per_row(amax, tile)).div_(largest)
        difference = decoded.sub_(blocks)
        error = difference.square_() if squared else difference.abs_()
        tried.append((v, stored, _total(error, tile)))
    (six, stored_six, error_six), (four, stored_four, error_four) = tried
    take_four = error_four < error_six
    chosen = torch.where(_per_row(take_four, tile), four, six).flatten(-2)
    stored = torch.where(take_four, stored_four, stored_six)
    return (chosen.mT, stored.mT) if down and not tile else (chosen, stored)


def _per_row(grid: Tensor, tile: bool) -> Tensor:
    """A number per block, or per tensor, in a shape that broadcasts to [..., R, C / 16, 16]."""
    if grid.ndim < 2:
        return grid
    rows = grid.repeat_interleave(BLOCK, -2) if tile else grid
    return rows[..., None]


def _total(error: Tensor, tile: bool) -> Tensor:
    """Sums over 16 elements in their order, [..., R, C / 16]; for tiles then over 16 rows, 8 + 8, 4 + 4, ..."""
    total = error[..., 0].clone()
    for place in range(1, BLOCK):
        total += error[..., place]
    if not tile:
        return total
    rows = total.unflatten(-2, (-1, BLOCK))
    for half in (8, 4, 2, 1):
        rows = rows[..., :half, :] + rows[..., half : 2 * half, :]
    return rows.squeeze(-2)
