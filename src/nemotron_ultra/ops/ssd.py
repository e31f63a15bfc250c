"""S_t = exp(dt_t A) S_{t-1} + dt_t x_t B_t^T, y_t = S_t C_t + D x_t: the Mamba-2 scan, in chunks (SSD)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def ssd_scan(
    x_BLHP: Tensor,
    dt_BLH: Tensor,
    A_H: Tensor,
    B_BLGN: Tensor,
    C_BLGN: Tensor,
    D_H: Tensor | None = None,
    dt_bias_H: Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    initial_state_BHPN: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 128,
) -> tuple[Tensor, Tensor]:
    """Chunked scan -> (y [B, L, H, P], final state [B or docs, H, P, N])."""
    batch, length, heads, width = x_BLHP.shape
    dt = dt_BLH if dt_bias_H is None else dt_BLH + dt_bias_H
    dt = F.softplus(dt).clamp(*dt_limit)
    share = heads // B_BLGN.shape[2]
    B, C = B_BLGN.repeat_interleave(share, 2), C_BLGN.repeat_interleave(share, 2)
    bounds = [0, length] if cu_seqlens is None else cu_seqlens.tolist()
    outputs, finals = [], []
    for doc, (first, last) in enumerate(zip(bounds, bounds[1:], strict=False)):
        state = x_BLHP.new_zeros(batch, heads, width, B.shape[-1])
        if initial_state_BHPN is not None:
            state = initial_state_BHPN if cu_seqlens is None else initial_state_BHPN[doc : doc + 1]
        for start in range(first, last, min(chunk_size, 64)):
            cut = slice(start, min(start + min(chunk_size, 64), last))
            y, state = _chunk(x_BLHP[:, cut], dt[:, cut], A_H, B[:, cut], C[:, cut], state)
            outputs.append(y)
        finals.append(state)
    y = torch.cat(outputs, 1)
    return (y if D_H is None else y + D_H[:, None] * x_BLHP), torch.cat(finals)


def _chunk(x, dt, A, B, C, state):
    sums = (dt * A).cumsum(1)  # log of the decay since the chunk's start
    causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()[..., None]
    decay = torch.where(causal, sums[:, :, None] - sums[:, None], 0).exp() * causal
    scores = torch.einsum("bihn,bjhn->bijh", C, B) * decay * dt[:, None]
    y = torch.einsum("bijh,bjhp->bihp", scores, x) + torch.einsum("bihn,bhpn,bih->bihp", C, state, sums.exp())
    to_end = (sums[:, -1:] - sums).exp() * dt
    state = state * sums[:, -1].exp()[..., None, None] + torch.einsum("bjhp,bjhn,bjh->bhpn", x, B, to_end)
    return y, state
