"""y_t = silu(b + sum_k w_k x_{t-K+1+k}): the causal depthwise convolution of Mamba-2, reset at document starts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from nemotron_ultra.ops.segments import Segments


def causal_conv_silu(
    x_TC: Tensor, weight_CK: Tensor, bias_C: Tensor | None, segments: Segments, initial: Tensor | None = None
) -> Tensor:
    """x [T, C], weight [C, K], bias [C] or None, initial window [docs, C, K-1] or None -> [T, C]."""
    return causal_conv_silu_window(x_TC, weight_CK, bias_C, segments, initial)[0]


def causal_conv_silu_window(
    x_TC: Tensor, weight_CK: Tensor, bias_C: Tensor | None, segments: Segments, initial: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`causal_conv_silu` and the last K-1 inputs of each document, [docs, C, K-1]."""
    width = weight_CK.shape[1]
    outputs, windows = [], []
    for doc, (first, last) in enumerate(zip(segments.bounds, segments.bounds[1:], strict=False)):
        before = initial[doc] if initial is not None else x_TC.new_zeros(x_TC.shape[1], width - 1)
        full = torch.cat([before, x_TC[first:last].T], 1)
        out = F.conv1d(full[None], weight_CK[:, None], bias_C, groups=x_TC.shape[1])[0]
        outputs.append(F.silu(out).T)
        windows.append(full[:, full.shape[1] - (width - 1) :])
    return torch.cat(outputs), torch.stack(windows)
