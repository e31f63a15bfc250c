"""Uniform noise for stochastic rounding: u_i = table_1[i + j] xor table_2[i + k], j and k from the generator.

On a CPU a draw for every element takes longer than all the rest of quantising. Table 1 holds all 2^20 places
in a random order: over j every u has the same share of each interval of length 2^-20, whatever table 2 holds,
and 2^40 pairs (j, k) keep calls apart. The tables are constants, the generator is the only state. A GPU draws
for every element.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from nemotron_ultra.ops.scratch import scratch

PLACES = 1 << 20
LONGEST = 1 << 19  # elements of one call
BITS = 21
ONE = 0x3F800000  # the bits of 1.0


def noise_like(v: Tensor, generator: torch.Generator | None) -> Tensor:
    """(n + 1/2) / 2^21 - 1/2, n uniform in 0..2^21 - 1, in the shape of v float32 (scratch memory)."""
    noise = scratch.take("nvfp4.noise", v.shape, v)
    bits = noise.view(torch.int32).view(-1)
    if v.device.type != "cpu" or bits.numel() > LONGEST:
        bits.random_(0, 1 << BITS, generator=generator)
        bits.bitwise_left_shift_(2).bitwise_or_(ONE | 2)
    else:
        first, second = _tables()
        j, k = torch.randint(0, PLACES, (2,), generator=generator).tolist()
        size = bits.numel()
        torch.bitwise_xor(first[j : j + size], second[k : k + size], out=bits)
    return noise.sub_(1.5)


@lru_cache(maxsize=1)
def _tables() -> tuple[Tensor, Tensor]:
    """int32 [2^20 + 2^19] each, cyclic: bits of floats in [1, 2), and bits to change in their mantissas."""
    fixed = torch.Generator().manual_seed(4)
    with torch.inference_mode(False):
        places = torch.randperm(PLACES, generator=fixed).mul_(2)
        places += torch.randint(0, 2, (PLACES,), generator=fixed)
        changes = torch.randint(0, 1 << BITS, (PLACES,), generator=fixed)
        first, second = places.mul_(4).add_(ONE | 2).to(torch.int32), changes.mul_(4).to(torch.int32)
        return torch.cat([first, first[:LONGEST]]), torch.cat([second, second[:LONGEST]])
