"""Uniform noise in (-1/2, 1/2) for stochastic rounding."""

from __future__ import annotations

import torch
from torch import Tensor

from nemotron_ultra.ops.scratch import scratch


def noise_like(v: Tensor, generator: torch.Generator | None) -> Tensor:
    """(k + 1/2) / 2^21 - 1/2, k uniform, float32 scratch memory."""
    noise = scratch.take("nvfp4.noise", v.shape, v)
    noise.uniform_(generator=generator)
    return noise.mul_(2**21).floor_().add_(0.5).mul_(2.0**-21).sub_(0.5)
