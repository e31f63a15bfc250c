"""RMSNorm with a learned weight, before every mixer and at the end of the stack."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nemotron_ultra.ops.norm import rms_norm


class RMSNorm(nn.Module):
    """RMS over the last axis, `weight` [width]."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)
