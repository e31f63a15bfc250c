"""Two-level scales of NVFP4 in the operation order of Transformer Engine, one float32 rounding an operation.

S = 2688 / A, s = E4M3(b * (S * fl(1/6))), e = 1 / (s * (1 / S)): A is the tensor's largest magnitude, b the
block's, s the stored scale, e what elements are multiplied by. Up to 2.13 it was s = E4M3((b / 6) * S).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from nemotron_ultra.ops.nvfp4_elements import LARGEST, power_of_two
from nemotron_ultra.ops.scratch import scratch

E4M3_LARGEST = 448.0
E4M3_SMALLEST_NORMAL = 2.0**-6
E4M3_MAGIC = 1.5 * 2**20  # its ulp is an eighth: three mantissa bits
FLOAT_MAX = torch.finfo(torch.float32).max
SIXTH = torch.tensor(1 / 6, dtype=torch.float32).item()


def round_e4m3_(x: Tensor) -> Tensor:
    """float32 to the nearest E4M3 number, ties to even, of magnitude 448 at most, in place; NaN stays."""
    x.clamp_(-E4M3_LARGEST, E4M3_LARGEST)
    step = power_of_two(x, E4M3_SMALLEST_NORMAL, 2.0**8, scratch.take("e4m3.step", x.shape, x))
    return x.add_(step, alpha=E4M3_MAGIC).sub_(step, alpha=E4M3_MAGIC)


def e4m3_bytes(scale: Tensor) -> Tensor:
    """E4M3 bits uint8 of exact E4M3 numbers."""
    return scale.to(torch.float8_e4m3fn).view(torch.uint8)


def e4m3_numbers(stored: Tensor) -> Tensor:
    """float32 numbers of E4M3 bits uint8."""
    return stored.view(torch.float8_e4m3fn).to(torch.float32)


def global_scale(amax: Tensor, scale_max: float) -> Tensor | float:
    """S = 6 * scale_max / A, at most the largest float; 1 for A = 0 and for A so large that S would be 0.

    One A of a CPU gives a number: a chain of operations on one element takes as long as one on thousands.
    """
    if amax.numel() == 1 and amax.device.type == "cpu":
        largest = amax.item()
        return single(min(LARGEST * scale_max / largest, FLOAT_MAX)) or 1.0 if largest else 1.0
    # Two tensors: a number over a tensor, or on a GPU a tensor over a number, is a product with a reciprocal.
    scale = torch.div(amax.new_full((), LARGEST * scale_max), amax).clamp_(max=FLOAT_MAX)
    return torch.where((amax == 0) | (scale == 0), torch.ones_like(scale), scale)


def single(x: float) -> float:
    """x rounded to float32; exactly so for a product or quotient of two float32 numbers kept in float64."""
    return float(np.float32(x))


def sixth_of(block_amax: Tensor) -> Tensor:
    """fl(b / 6), the division that older rules start with."""
    return torch.div(block_amax, block_amax.new_full((), LARGEST))


def block_scale(block_amax: Tensor, scale: Tensor | float, divide_first: bool) -> Tensor:
    """s [...] float32, exact E4M3 numbers, from b [...] and S that broadcasts to it."""
    if divide_first:
        return round_e4m3_(sixth_of(block_amax).mul_(scale))
    return round_e4m3_(block_amax * (scale * SIXTH if isinstance(scale, Tensor) else single(scale * SIXTH)))


def encode_scale(stored: Tensor, scale: Tensor | float) -> Tensor:
    """e = min(1 / (s * (1 / S)), largest float): from the rounded s; a block with s = 0 becomes 0 and +-6."""
    share = scale.reciprocal() if isinstance(scale, Tensor) else single(1 / scale)
    return (stored * share).reciprocal_().clamp_(max=FLOAT_MAX)
