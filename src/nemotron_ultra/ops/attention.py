"""softmax(q k^T / sqrt(P)) v, causal inside each document, grouped heads, no positions (report 1.3).

torch's scaled_dot_product_attention does the work on rectangles. Documents of one length are rows of one
rectangle; others are padded on the right into rectangles of similar length, where a causal query cannot see
the padding.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from nemotron_ultra.ops.segments import Segments

# A document joins a rectangle while it fills at least this share of a row: bounds the wasted products.
MIN_FILL = 0.8


def causal_attention(q_THP: Tensor, k_TGP: Tensor, v_TGP: Tensor, segments: Segments) -> Tensor:
    """Attention of each document to itself, scale P^-0.5; consecutive query heads share a key/value head.

    q [T, H, P], k and v [T, G, P] with H a multiple of G; returns [T, H, P] in q's dtype.
    """
    length = segments.uniform_length
    if length is not None:
        return _rectangle(q_THP, k_TGP, v_TGP, length)
    rectangles, back_T = _layout(tuple(segments.lengths), str(segments.device))
    flat = [x.flatten(1) for x in (q_THP, k_TGP, v_TGP)]
    outputs = []
    for rows_BS in rectangles:
        parts = (F.embedding(rows_BS.flatten(), x) for x in flat)
        q, k, v = (p.view(-1, *x.shape[1:]) for p, x in zip(parts, (q_THP, k_TGP, v_TGP), strict=True))
        outputs.append(_rectangle(q, k, v, rows_BS.shape[1]).flatten(1))
    return F.embedding(back_T, torch.cat(outputs)).view_as(q_THP)


def _rectangle(q_THP: Tensor, k_TGP: Tensor, v_TGP: Tensor, length: int) -> Tensor:
    """Rows of `length` tokens each; T is a multiple of it."""
    q, k, v = (x.unflatten(0, (-1, length)).transpose(1, 2) for x in (q_THP, k_TGP, v_TGP))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return y.transpose(1, 2).flatten(0, 1)


@lru_cache(maxsize=16)
def _layout(lengths: tuple[int, ...], device: str) -> tuple[list[Tensor], Tensor]:
    """(token numbers [B, S] of each rectangle, place of each token in the rectangles laid end to end).

    Padding repeats the document's last token; its outputs are not read back, so its gradient is zero.
    """
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    by_length = sorted(range(len(lengths)), key=lambda d: -lengths[d])
    groups: list[list[int]] = []
    for d in by_length:
        if groups and lengths[d] >= MIN_FILL * lengths[groups[-1][0]]:
            groups[-1].append(d)
        else:
            groups.append([d])
    back_T = torch.empty(starts[-1], dtype=torch.int64)
    rectangles, offset = [], 0
    for group in groups:
        width = lengths[group[0]]
        rows_BS = torch.empty(len(group), width, dtype=torch.int64)
        for row, d in enumerate(group):
            first, last = starts[d], starts[d + 1]
            rows_BS[row] = torch.arange(first, first + width).clamp_(max=last - 1)
            back_T[first:last] = torch.arange(lengths[d]) + (offset + row * width)
        rectangles.append(rows_BS.to(device))
        offset += rows_BS.numel()
    return rectangles, back_T.to(device)
