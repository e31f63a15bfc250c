"""S_t = exp(dt_t A) S_{t-1} + dt_t x_t B_t^T, y_t = S_t C_t + D x_t: the Mamba-2 scan, in chunks (SSD).

Source: Dao and Gu 2024, "Transformers are SSMs", Listing 1. The algebra of the chunks and its gradient are in
`ssd_chunks.py`; a mixer in training uses them through `mamba_interior.py`.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from nemotron_ultra.ops.ssd_chunks import LONGEST_CHUNK, ChunkPlan, Decays, SlabScan, SmallGrads, chunk_plan


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
    """Scan of any length -> (y [B, L, H, P], final state [B, H, P, N]), differentiable once in every input.

    dt is raw: bias, softplus and the clamp to `dt_limit` happen here. A is negative. Head h reads group
    h // (H / G). With `cu_seqlens` [docs + 1], B is 1 and there is one state per document, [docs, H, P, N].
    float64 in, float64 out; else everything is computed in float32. `chunk_size` only changes rounding:
    chunks longer than 64 are slower on a CPU, so 64 is the longest used.
    """
    batch, length, heads, width = x_BLHP.shape
    assert heads % B_BLGN.shape[2] == 0, f"{heads} heads do not share {B_BLGN.shape[2]} groups evenly"
    assert cu_seqlens is None or batch == 1, "cu_seqlens describes one packed row"
    dtype = torch.promote_types(x_BLHP.dtype, torch.float32)
    bounds = [row * length for row in range(batch + 1)] if cu_seqlens is None else cu_seqlens.tolist()
    longest = max((b - a for a, b in pairwise(bounds)), default=1)
    chunk = max(1, min(chunk_size, LONGEST_CHUNK, longest))
    dt = dt_BLH.to(dtype) if dt_bias_H is None else dt_BLH.to(dtype) + dt_bias_H.to(dtype)
    dt = F.softplus(dt).clamp(*dt_limit)
    rows, padded = _aligned(bounds, chunk, x_BLHP.device)
    flat = [_spread(t.flatten(0, 1).to(dtype), rows, padded[-1]) for t in (x_BLHP, dt, B_BLGN, C_BLGN)]
    plan = chunk_plan(tuple(padded), chunk, dtype, x_BLHP.device)
    D = torch.zeros_like(A_H) if D_H is None else D_H
    initial = None if initial_state_BHPN is None else initial_state_BHPN.to(dtype)
    y, final = _Scan.apply(flat[0], flat[1], A_H.to(dtype), flat[2], flat[3], D.to(dtype), initial, plan)
    y = y if rows is None else y[rows]
    return y.view(batch, length, heads, width).to(x_BLHP.dtype), final


def _aligned(bounds: list[int], chunk: int, device: torch.device) -> tuple[Tensor | None, list[int]]:
    """Rows and bounds of the pack with every document padded to whole chunks; rows None: it already is."""
    padded = [0]
    for first, last in pairwise(bounds):
        padded.append(padded[-1] + -(-(last - first) // chunk) * chunk)
    if padded == bounds:
        return None, padded
    shift = torch.tensor(padded[:-1]) - torch.tensor(bounds[:-1])
    rows = torch.arange(bounds[-1]) + torch.repeat_interleave(shift, torch.tensor(bounds).diff())
    return rows.to(device), padded


def _spread(values: Tensor, rows: Tensor | None, total: int) -> Tensor:
    """Padding is 0: a token with dt = 0 neither decays the state nor adds to it."""
    return values if rows is None else values.new_zeros(total, *values.shape[1:]).index_copy(0, rows, values)


class _Scan(torch.autograd.Function):
    """Saves the inputs and the state at each chunk border; recomputes everything else."""

    @staticmethod
    def forward(ctx, x_THP, dt_TH, A_H, B_TGN, C_TGN, D_H, initial, plan: ChunkPlan):
        heads, P = x_THP.shape[1:]
        groups, N = B_TGN.shape[1:]
        documents = len(plan.bounds) - 1
        decays = Decays.of(dt_TH, A_H, groups, plan)
        scan = SlabScan(plan, decays, D_H, (P, N))
        scan.final = x_THP.new_zeros(documents, groups, heads // groups * P, N)
        scan.initial = None if initial is None else initial.reshape(scan.final.shape)
        states = x_THP.new_empty(plan.count + 1, *scan.final.shape[1:])
        y_THP = torch.empty(x_THP.shape, dtype=x_THP.dtype, device=x_THP.device)
        scan.reset(0, states[0])
        for cut in scan.slabs():
            x, B, C = _slab(scan, cut, x_THP, B_TGN, C_TGN)
            scan.forward(cut, x, B, C, states[cut.start : cut.stop + 1], scan.heads(cut, y_THP))
        final = scan.final.view(documents, heads, P, N)
        ctx.save_for_backward(x_THP, dt_TH, A_H, B_TGN, C_TGN, D_H, states, final)
        ctx.plan, ctx.has_initial = plan, initial is not None
        return y_THP, final

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_THP, d_final):
        x_THP, dt_TH, A_H, B_TGN, C_TGN, D_H, states, final = ctx.saved_tensors
        plan, groups = ctx.plan, B_TGN.shape[1]
        decays = Decays.of(dt_TH, A_H, groups, plan)
        scan = SlabScan(plan, decays, D_H, (x_THP.shape[2], B_TGN.shape[2]))
        scan.d_final = d_final.reshape(len(final), *states.shape[1:])
        scan.d_initial = torch.zeros_like(scan.d_final)
        small = SmallGrads.like(decays)
        dx, dB, dC = torch.empty_like(x_THP), torch.empty_like(B_TGN), torch.empty_like(C_TGN)
        carry = torch.zeros_like(states[0])
        for cut in reversed(list(scan.slabs())):
            x, B, C = _slab(scan, cut, x_THP, B_TGN, C_TGN)
            n = cut.stop - cut.start
            dy = scan.buffer("dy", n, scan.J, scan.Q, scan.P).copy_(scan.heads(cut, dy_THP))
            d_states = scan.buffer("d_states", n + 1, *states.shape[2:])
            d_states[n] = carry
            parts = scan.backward(cut, x, B, C, states[cut.start : cut.stop + 1], dy, d_states, small)
            scan.heads(cut, dx).copy_(parts[0])
            scan.groups(cut, dB).copy_(parts[1])
            scan.groups(cut, dC).copy_(parts[2])
            carry.copy_(d_states[0])
        scan.d_initial[0] = carry
        d_dt, dA, dD = small.finish(decays, A_H, plan)
        d_initial = scan.d_initial.view(final.shape) if ctx.has_initial else None
        return dx, d_dt, dA, dB, dC, dD, d_initial, None


def _slab(
    scan: SlabScan, cut: slice, x_THP: Tensor, B_TGN: Tensor, C_TGN: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """x as a view; B and C copied group by group, as the batched products want them."""
    B, C = (scan.groups(cut, t) for t in (B_TGN, C_TGN))
    n, _, Q, N = B.shape
    return scan.heads(cut, x_THP), scan.buffer("B", n, Q, N).copy_(B), scan.buffer("C", n, Q, N).copy_(C)
