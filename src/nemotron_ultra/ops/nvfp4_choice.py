"""Four-over-six: a block is encoded with its maximum at 6 and at 4; the smaller error wins, 6 on a tie.

s6 = E4M3((b / 6) * S), s4 = E4M3(1.5 * (b / 6) * S), S = 6 * bound / A (arXiv 2512.02010; report 5.2). The
error is of ((code * s) * A) / (6 * bound) in float32, absolute or squared, summed in element order; tiles of
16 x 16 add their rows by halves.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nemotron_ultra.ops import nvfp4_scales as scales
from nemotron_ultra.ops.nvfp4_elements import round_nearest_
from nemotron_ultra.ops.nvfp4_rules import BLOCK, Rules


def four_over_six(
    x: Tensor,
    out: Tensor,
    grid: Tensor,
    amax: Tensor,
    scale: Tensor | float,
    rules: Rules,
    down: bool,
    scaled: bool,
) -> Tensor:
    """Write E2M1 numbers of x [R, C], times their scales if `scaled`, to `out`; -> scales of the grid."""
    if down and not rules.tile:
        turned = (t.mT if isinstance(t, Tensor) and t.ndim > 1 else t for t in (grid, amax, scale))
        return four_over_six(x.mT, out.mT, *turned, rules, False, scaled).mT
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    base = scales.sixth_of(grid).mul_(scale)
    largest = base.new_full((), scales.LARGEST * rules.scale_max)
    tried = []
    for factor in (1.0, 1.5):
        stored = scales.round_e4m3_(base * factor)
        encode, back, of_tensor = (
            _per_row(t, rules.tile) for t in (scales.encode_scale(stored, scale), stored, amax)
        )
        v = round_nearest_(blocks * encode)
        product = v * back
        difference = (product * of_tensor).div_(largest).sub_(blocks)
        error = difference.square_() if rules.scale_rule.endswith("mse") else difference.abs_()
        tried.append((product if scaled else v, stored, _total(error, rules.tile)))
    (six, stored_six, error_six), (four, stored_four, error_four) = tried
    take_four = error_four < error_six
    out.copy_(torch.where(_per_row(take_four, rules.tile), four, six).flatten(-2))
    return torch.where(take_four, stored_four, stored_six)


def _per_row(grid: Tensor, tile: bool) -> Tensor:
    """A number per block, or one for all, in a shape that broadcasts to [R, C / 16, 16]."""
    if grid.ndim < 2:
        return grid
    return (grid.repeat_interleave(BLOCK, 0) if tile else grid)[..., None]


def _total(error: Tensor, tile: bool) -> Tensor:
    """[R, C / 16, 16] summed over 16 elements in their order; for tiles then 16 rows: 8 + 8, 4 + 4, ..."""
    total = error[..., 0].clone()
    for place in range(1, BLOCK):
        total += error[..., place]
    if not tile:
        return total
    rows = total.unflatten(0, (-1, BLOCK))
    for half in (8, 4, 2, 1):
        rows = rows[:, :half] + rows[:, half : 2 * half]
    return rows.squeeze(1)
