"""One token per row: y_t from x_t and a state that is updated in place, for the three operations with memory.

They compute what `conv`, `ssd` and `attention` compute over whole documents, without gradients.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def conv_step(x_BC: Tensor, window: list[Tensor], taps_KC: Tensor, bias_C: Tensor | None) -> Tensor:
    """silu(b + sum_k w_k x_{t-K+1+k}) [B, C]. `window`: the K - 1 inputs before, oldest first, [>= B, C].

    The oldest is overwritten with x and moves to the end of the list.
    """
    rows = len(x_BC)
    y_BC = x_BC * taps_KC[-1] if bias_C is None else torch.addcmul(bias_C, x_BC, taps_KC[-1])
    for tap_C, before in zip(taps_KC, window, strict=False):
        y_BC.addcmul_(before[:rows], tap_C)
    oldest = window.pop(0)
    oldest[:rows].copy_(x_BC)
    window.append(oldest)
    return F.silu(y_BC, inplace=True)


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


def attention_step(q_BHP: Tensor, key_BGSP: Tensor, value_BGSP: Tensor, mask_BS: Tensor | None) -> Tensor:
    """softmax(q k^T / sqrt(P)) v [B, H, P] over the S keys of each row, or those where `mask_BS` is true."""
    q_BGJP = q_BHP.unflatten(1, (key_BGSP.shape[1], -1))  # heads of a group as queries of one head
    mask = None if mask_BS is None else mask_BS[:, None, None, :]
    return F.scaled_dot_product_attention(q_BGJP, key_BGSP, value_BGSP, attn_mask=mask).flatten(1, 2)
