"""A few tokens per row: y from x and a remembered state, for the three operations with memory.

They compute what `conv`, `ssd` and `attention` compute over whole documents, without gradients. One token
moves the state at once; of K tokens the state takes in the first keep_B[b] afterwards, by `*_commit`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


def conv_step(x_BC: Tensor, window_BKC: Tensor, taps_KC: Tensor, bias_C: Tensor | None) -> Tensor:
    """silu(b + sum_k w_k x_{t-K+1+k}) [B, C]. `window`: the K - 1 inputs before, oldest first; x joins it."""
    full_BKC = torch.cat([window_BKC, x_BC[:, None]], 1)
    y_BC = (full_BKC * taps_KC).sum(1)
    window_BKC.copy_(full_BKC[:, 1:])
    return F.silu(y_BC if bias_C is None else y_BC.add_(bias_C), inplace=True)


def conv_extend(
    x_BKC: Tensor, window_BWC: Tensor, taps_KC: Tensor, bias_C: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`conv_step` of several tokens -> [B, K, C], and window and tokens together, for `conv_commit`."""
    full_BTC = torch.cat([window_BWC, x_BKC], 1)
    tokens = x_BKC.shape[1]
    y_BKC = full_BTC[:, :tokens] * taps_KC[0]
    for place, tap_C in enumerate(taps_KC[1:], 1):
        y_BKC.addcmul_(full_BTC[:, place : place + tokens], tap_C)
    return F.silu(y_BKC if bias_C is None else y_BKC.add_(bias_C), inplace=True), full_BTC


def conv_commit(full_BTC: Tensor, keep_B: Tensor, window_BWC: Tensor) -> None:
    """The window after the first keep_B[b] tokens."""
    places_BW = keep_B[:, None] + torch.arange(window_BWC.shape[1], device=keep_B.device)
    window_BWC.copy_(full_BTC.gather(1, places_BW[..., None].expand_as(window_BWC)))


def ssd_step(
    x_BHP: Tensor, dt_BH: Tensor, A_H: Tensor, B_BGN: Tensor, C_BGN: Tensor, D_H: Tensor, state_BGNX: Tensor
) -> Tensor:
    """S = exp(dt A) S + B (dt x)^T in place, y = C S + D x [B, H, P]. dt is after its clamp, A negative.

    Heads of a group lie side by side in the state's last axis, X = H / G * P: as [H, P, N] the product with C
    takes ten times as long.
    """
    batch, groups, columns, width = state_BGNX.shape
    row = (batch, groups, 1, width)
    decay_BHP = torch.exp(dt_BH * A_H)[..., None].expand_as(x_BHP)
    state_BGNX.mul_(decay_BHP.reshape(row)).addcmul_(B_BGN[..., None], (x_BHP * dt_BH[..., None]).view(row))
    y = torch.bmm(C_BGN.reshape(-1, 1, columns), state_BGNX.view(-1, columns, width))
    return y.view(x_BHP.shape).addcmul_(x_BHP, D_H[:, None])


class SsdTokens(NamedTuple):
    """What the state has not yet taken in: dt x, B, and log decay from before the first token to each one."""

    u_BKHP: Tensor
    B_BKGN: Tensor
    log_BKH: Tensor


def ssd_extend(
    x_BKHP: Tensor,
    dt_BKH: Tensor,
    A_H: Tensor,
    B_BKGN: Tensor,
    C_BKGN: Tensor,
    D_H: Tensor,
    state_BGNX: Tensor,
) -> tuple[Tensor, SsdTokens]:
    """`ssd_step` of several tokens -> y [B, K, H, P]; the state is read once and stays as it is.

    y_j = exp(l_j) C_j S + sum_{i <= j} exp(l_j - l_i) (C_j B_i) dt_i x_i + D x_j, l_j = sum_{i <= j} dt_i A.
    """
    batch, tokens, heads, width = x_BKHP.shape
    groups = state_BGNX.shape[1]
    log_BKH = (dt_BKH * A_H).cumsum(1)
    u_BKHP = x_BKHP * dt_BKH[..., None]
    C_BGKN = C_BKGN.transpose(1, 2)
    y = (C_BGKN @ state_BGNX).view(batch, groups, tokens, heads // groups, width)
    y_BKHP = y.permute(0, 2, 1, 3, 4).flatten(2, 3) * log_BKH.exp()[..., None]
    between_BHKK = (log_BKH[:, :, None] - log_BKH[:, None]).permute(0, 3, 1, 2)
    later = torch.ones(tokens, tokens, dtype=torch.bool, device=x_BKHP.device).triu(1)
    decay_BHKK = between_BHKK.masked_fill(later, -torch.inf).exp()
    scores_BGKK = C_BGKN @ B_BKGN.permute(0, 2, 3, 1)
    mixed_BHKK = scores_BGKK.repeat_interleave(heads // groups, 1) * decay_BHKK
    y_BKHP = y_BKHP + (mixed_BHKK @ u_BKHP.transpose(1, 2)).transpose(1, 2)
    return y_BKHP.addcmul_(x_BKHP, D_H[:, None]), SsdTokens(u_BKHP, B_BKGN, log_BKH)


def ssd_commit(tokens: SsdTokens, keep_B: Tensor, state_BGNX: Tensor) -> None:
    """The state takes in the first keep_B[b] tokens of row b, in place; 0 leaves it as it was."""
    u_BKHP, B_BKGN, log_BKH = tokens
    batch, count, heads, _ = u_BKHP.shape
    groups, columns, width = state_BGNX.shape[1:]
    kept_BK = torch.arange(count, device=keep_B.device) < keep_B[:, None]
    last_B11 = (keep_B - 1).clamp_(min=0)[:, None, None].expand(-1, 1, heads)
    end_B1H = log_BKH.gather(1, last_B11).masked_fill(~kept_BK[:, :1, None], 0.0)
    weight_BKH = (end_B1H - log_BKH).masked_fill(~kept_BK[..., None], -torch.inf).exp()
    u_BGKX = (u_BKHP * weight_BKH[..., None]).view(batch, count, groups, width).transpose(1, 2)
    decay_BHP = end_B1H.exp()[:, 0, :, None].expand(-1, -1, u_BKHP.shape[3])
    state_BGNX.mul_(decay_BHP.reshape(batch, groups, 1, width))
    flat = state_BGNX.view(-1, columns, width)
    flat.baddbmm_(B_BKGN.permute(0, 2, 3, 1).reshape(-1, columns, count), u_BGKX.reshape(-1, count, width))


def attention_extend(q_BKHP: Tensor, key_BGSP: Tensor, value_BGSP: Tensor, mask_BKS: Tensor | None) -> Tensor:
    """softmax(q k^T / sqrt(P)) v [B, K, H, P] over the S keys of each row, or those where `mask` is true."""
    tokens, groups = q_BKHP.shape[1], key_BGSP.shape[1]
    q_BGJKP = q_BKHP.unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4)
    shared = q_BGJKP.shape[2]  # heads of a group are queries of one head
    mask = None if mask_BKS is None else mask_BKS.repeat(1, shared, 1)[:, None]
    y = F.scaled_dot_product_attention(q_BGJKP.flatten(2, 3), key_BGSP, value_BGSP, attn_mask=mask)
    return y.unflatten(2, (shared, tokens)).permute(0, 3, 1, 2, 4).flatten(2, 3)
