"""Zeros whose memory the system gives when it is first written: a cache with many slots starts at once."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

ALIGNED = 64  # bytes


def late_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """`torch.zeros`; on a CPU pages that are never touched take no memory and no time."""
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    raw = torch.from_numpy(np.zeros(size + ALIGNED, dtype=np.uint8))
    begin = -raw.data_ptr() % ALIGNED
    return raw[begin : begin + size].view(dtype).view(shape)
