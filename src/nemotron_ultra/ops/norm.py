"""RMS(x; w) = w x / sqrt(mean(x^2) + eps), and Mamba-2's grouped form of y silu(z): the norm comes after the gate."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last axis; statistics in float32 at least, one cast back. x [..., D], weight [D] -> [..., D]."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    wide = x.to(dtype)
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * rstd * weight.to(dtype)).to(x.dtype)


def gated_rms_norm(y_TD: Tensor, z_TD: Tensor, weight_D: Tensor, eps: float, groups: int) -> Tensor:
    """RMSNorm of y silu(z) in `groups` equal parts of the last axis. y, z [..., D], weight [D] -> [..., D]."""
    dtype = torch.promote_types(y_TD.dtype, torch.float32)
    v = y_TD.to(dtype) * F.silu(z_TD.to(dtype))
    v_g = v.unflatten(-1, (groups, -1))
    v_g = v_g * torch.rsqrt(v_g.square().mean(-1, keepdim=True) + eps)
    return (v_g.flatten(-2) * weight_D.to(dtype)).to(y_TD.dtype)
