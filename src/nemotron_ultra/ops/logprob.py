"""log p(label_t) = h_t W^T[label_t] - logsumexp(h_t W^T), differentiable, the head applied in chunks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nemotron_ultra.ops.cross_entropy import (
    accumulate_head,
    chunk_logits,
    chunk_rows,
    logits_dtype,
    softmax_,
)


def token_logprob(hidden_TD: Tensor, head_VD: Tensor, labels_T: Tensor) -> Tensor:
    """Log-probability of each label, [T] float32 (float64 for float64 input), at temperature 1.

    The backward computes the logits a second time, so that neither pass holds [T, V].
    """
    return _TokenLogprob.apply(hidden_TD, head_VD, labels_T)


class _TokenLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_TD: Tensor, head_VD: Tensor, labels_T: Tensor) -> Tensor:
        head = head_VD.to(hidden_TD.dtype)
        rows = min(chunk_rows(head), hidden_TD.shape[0])
        buffer_nV = hidden_TD.new_empty(rows, head.shape[0], dtype=logits_dtype(hidden_TD))
        label_logit_T = buffer_nV.new_empty(hidden_TD.shape[0])
        lse_T = torch.empty_like(label_logit_T)
        for a in range(0, hidden_TD.shape[0], rows):
            b = min(a + rows, hidden_TD.shape[0])
            logits_nV = chunk_logits(hidden_TD[a:b], head, buffer_nV)
            label_logit_T[a:b] = logits_nV.gather(1, labels_T[a:b, None])[:, 0]
            top_n1 = logits_nV.amax(1, keepdim=True)
            lse_T[a:b] = (top_n1 - softmax_(logits_nV).amax(1, keepdim=True).log())[:, 0]
        ctx.save_for_backward(hidden_TD, head_VD, labels_T)
        return label_logit_T - lse_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TD, head_VD, labels_T = ctx.saved_tensors
        head = head_VD.to(hidden_TD.dtype)
        rows, dtype = min(chunk_rows(head), hidden_TD.shape[0]), logits_dtype(hidden_TD)
        buffer_nV = hidden_TD.new_empty(rows, head.shape[0], dtype=dtype)
        dhidden_TD = torch.empty_like(hidden_TD)
        dhead_VD = torch.zeros_like(head, dtype=dtype)
        for a in range(0, hidden_TD.shape[0], rows):
            b = min(a + rows, hidden_TD.shape[0])
            grad_n1 = grad_T[a:b, None]
            p_nV = softmax_(chunk_logits(hidden_TD[a:b], head, buffer_nV))
            dlogits_nV = p_nV.mul_(-grad_n1).scatter_add_(1, labels_T[a:b, None], grad_n1).to(hidden_TD.dtype)
            torch.mm(dlogits_nV, head, out=dhidden_TD[a:b])
            accumulate_head(dhead_VD, dlogits_nV, hidden_TD[a:b])
        return dhidden_TD, dhead_VD.to(head_VD.dtype), None
