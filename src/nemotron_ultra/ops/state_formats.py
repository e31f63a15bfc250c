"""The SSM state between tokens in 16 or 8 bits, rounded so that its mean is kept (report 5.3, Table 16).

    float16  h = truncate(x + r * 2^-13 ulp), r of 13 random bits
    int8     q = clamp(floor(x e + u), -127, 127), u of 24 random bits, e = 127 / max |x| of 128 in a row

FlashInfer's forms, bit for bit with its random words. Round to nearest is there for comparison: the report
finds that it makes answers 11 % longer, stochastic rounding 1 to 2 %.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nemotron_ultra.errors import ConfigError

BLOCK = 128
LEVELS = 127.0
FLOOR = 1e-30
HALF_SMALLEST = 2.0**-14  # normal
DROPPED = 13  # mantissa bits that float32 has beyond float16
UNIFORM_BITS = 24


class Int8State(NamedTuple):
    """codes int8 [..., N]; scale float32 [..., N / 128]: what a code is multiplied by."""

    codes: Tensor
    scale: Tensor

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        blocks = self.codes.unflatten(-1, (self.scale.shape[-1], -1)).to(torch.float32)
        return (blocks * self.scale[..., None]).flatten(-2).to(dtype)


@torch.no_grad()
def to_int8(
    state: Tensor,
    rounding: str = "stochastic",
    random_bits: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Int8State:
    """state [..., N] -> codes and a scale per 128 along N; N below 128 is one block.

    rounding: "stochastic" (24 low bits of `random_bits`, of any integer dtype, else of the generator) or
    "nearest", ties to even. ConfigError for another word, an N above 128 that is not a multiple of it, or
    bits that do not fit.
    """
    _check(state, rounding, random_bits)
    width = state.shape[-1]
    if width > BLOCK and width % BLOCK:
        raise ConfigError(
            "int8 state: the state axis does not divide into blocks",
            got=f"{width} in shape {tuple(state.shape)}",
            allowed="at most 128, or a multiple of 128",
            do="store this state as float16",
        )
    blocks = state.to(torch.float32).unflatten(-1, (-1, min(width, BLOCK)))
    amax = blocks.abs().amax(-1)
    encode = amax.clamp_(min=FLOOR).reciprocal_().mul_(LEVELS)
    scaled = blocks * encode[..., None]
    if rounding == "nearest":
        scaled.round_()
    else:
        bits = _random(state, random_bits, generator) & ((1 << UNIFORM_BITS) - 1)
        scaled.add_((bits.to(torch.float32) * 2.0**-UNIFORM_BITS).view(scaled.shape)).floor_()
    codes = scaled.clamp_(-LEVELS, LEVELS).to(torch.int8).flatten(-2)
    return Int8State(codes, encode.reciprocal_())


@torch.no_grad()
def to_float16(
    state: Tensor,
    rounding: str = "stochastic",
    random_bits: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """state [...] -> float16 [...].

    rounding: "stochastic" (13 low bits of `random_bits`, of any integer dtype, else of the generator) or
    "nearest". Stochastic rounding flushes to zero what is below 2^-14, the smallest normal float16, as the
    software form does. Infinities and NaN stay. ConfigError as in `to_int8`.
    """
    _check(state, rounding, random_bits)
    x = state.to(torch.float32)
    if rounding == "nearest":
        return x.to(torch.float16)
    bits = x.contiguous().view(torch.int32)
    random = _random(state, random_bits, generator).bitwise_and((1 << DROPPED) - 1).to(torch.int32)
    moved = (bits + random).bitwise_and_(-1 << DROPPED).view(torch.float32)
    moved.mul_(moved.abs() >= HALF_SMALLEST)
    return torch.where(torch.isfinite(x), moved, x).to(torch.float16)


def _random(state: Tensor, random_bits: Tensor | None, generator: torch.Generator | None) -> Tensor:
    if random_bits is not None:
        return random_bits
    words = torch.empty(state.shape, dtype=torch.int32, device=state.device)
    return words.random_(generator=generator)


def _check(state: Tensor, rounding: str, random_bits: Tensor | None) -> None:
    if rounding not in ("nearest", "stochastic"):
        raise ConfigError("state: unknown rounding", got=repr(rounding), allowed="nearest, stochastic")
    if not state.is_floating_point() or state.ndim == 0:
        raise ConfigError("state: takes numbers with a state axis", got=f"{state.dtype} {tuple(state.shape)}")
    if random_bits is not None and (random_bits.shape != state.shape or random_bits.is_floating_point()):
        raise ConfigError(
            "state: random_bits do not fit",
            got=f"{random_bits.dtype} {tuple(random_bits.shape)}",
            allowed=f"integers {tuple(state.shape)}",
        )
