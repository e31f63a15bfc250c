"""E2M1: sign, magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6. Rounding in place on float32, codes, packing.

The step between neighbours is p / 2, p = 2^floor(log2 |v|) held to [1, 4]. Adding and then taking away
1.5 * 2^22 * p leaves v rounded to that step, ties to even, in two passes over memory.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from nemotron_ultra.ops.scratch import scratch

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
LARGEST = 6.0
EXPONENT = 0x7F800000
# An ulp of this many p is p / 2: what is added to it is rounded to that step.
MAGIC = 1.5 * 2**22


def power_of_two(v: Tensor, least: float, most: float, out: Tensor) -> Tensor:
    """2^floor(log2 |v|) held to [least, most], float32, without a logarithm; NaN and infinity give `most`."""
    torch.bitwise_and(v.view(torch.int32), EXPONENT, out=out.view(torch.int32))
    return out.clamp_(least, most)


def round_nearest_(v: Tensor, saturate: bool = True) -> Tensor:
    """Nearest E2M1 value, ties to the even code, in place. `saturate=False` where |v| < 7 is known.

    A negative v may become +0; the sign of its code comes from elsewhere (`packed_codes`).
    """
    step = power_of_two(v, 1, 4, scratch.take("nvfp4.step", v.shape, v))
    v.add_(step, alpha=MAGIC).sub_(step, alpha=MAGIC)
    return v.clamp_(-LARGEST, LARGEST) if saturate else v


def round_stochastic_(v: Tensor, noise: Tensor) -> Tensor:
    """v + noise * step to nearest, in place: up with a probability that is v's place between its neighbours.

    noise: uniform in (-1/2, 1/2), of at most 22 bits, so that a value of the grid stays where it is.
    """
    step = power_of_two(v, 1, 4, scratch.take("nvfp4.step", v.shape, v))
    v.addcmul_(noise, step, value=0.5)
    return v.add_(step, alpha=MAGIC).sub_(step, alpha=MAGIC).clamp_(-LARGEST, LARGEST)


def round_with_bytes_(v: Tensor, random_bits: Tensor) -> Tensor:
    """Stochastic rounding with 8 random bits an element, as the hardware has them: up if 256 f + byte >= 256.

    f is v's place between its neighbours, so P(up) = floor(256 f) / 256 over all bytes. random_bits uint8.
    """
    magnitude = v.abs().clamp_(max=LARGEST)
    step = power_of_two(magnitude, 1, 4, torch.empty_like(v)).mul_(0.5)
    magnitude.addcmul_(random_bits.to(torch.float32), step, value=1 / 256)
    step = power_of_two(magnitude, 1, 4, step).mul_(0.5)
    magnitude.div_(step).floor_().mul_(step).clamp_(max=LARGEST)
    return v.copy_(torch.copysign(magnitude, v))


def packed_codes(elements: Tensor, signed: Tensor) -> Tensor:
    """Exact E2M1 numbers float32 [R, K] -> bytes [R, K / 2], element 2j in the low half of byte j.

    The sign bits are those of `signed` float32, so that -0.0 and small negative numbers have code 8.
    """
    if elements.numel() == 0:
        return torch.empty(
            elements.shape[0], elements.shape[1] // 2, dtype=torch.uint8, device=elements.device
        )
    magnitude = torch.abs(elements, out=scratch.take("blocks.v", elements.shape, elements))
    spare = scratch.take("nvfp4.step", elements.shape, elements)
    # 0.75 in the place of 0.5 makes exponent and upper mantissa bit count the grid: 253 to 259.
    torch.maximum(magnitude, torch.mul(magnitude, 1.5, out=spare).clamp_(max=0.75), out=magnitude)
    code, sign = magnitude.view(torch.int32), spare.view(torch.int32)
    code.bitwise_right_shift_(22).sub_(252).clamp_(min=0)
    code |= torch.bitwise_right_shift(signed.view(torch.int32), 28, out=sign).bitwise_and_(8)
    pairs = code.view(torch.int64)
    low = torch.bitwise_right_shift(pairs, 28, out=sign.view(torch.int64)).bitwise_or_(pairs)
    return low.bitwise_and_(255).to(torch.uint8)


def unpack(packed: Tensor) -> Tensor:
    """Bytes [..., K / 2] -> codes [..., K] uint8."""
    return torch.stack([packed.bitwise_and(15), packed.bitwise_right_shift(4)], -1).flatten(-2)


def decode(code: Tensor) -> Tensor:
    """Codes uint8 -> float32 numbers, code 8 -> -0.0."""
    return _numbers(code.device).index_select(0, code.flatten().to(torch.int32)).view(code.shape)


@lru_cache(maxsize=8)
def _numbers(device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)], dtype=torch.float32).to(device)
