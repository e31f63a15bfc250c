"""sum_t w_t * (logsumexp(h_t W^T) - h_t W^T[label_t]) with no [T, V] tensor held (report 1.6, shared head).

The head is applied to a chunk of tokens at a time; its gradient is finished before the next chunk overwrites
the logits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Bytes of one chunk of logits: large enough for an efficient product, small enough to stay out of the peak.
CHUNK_BYTES = 16 * 2**20


def linear_cross_entropy(
    hidden_TD: Tensor, head_VD: Tensor, labels_T: Tensor, weight_T: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(weighted sum of the negative log-likelihoods, nll_T detached, correct_T detached bool).

    The weights are constants. `correct` means that no logit is above the label's. Logits are float32 (float64
    for float64 input). Gradients of hidden and head are made in the forward when they will be needed; the
    backward runs once.
    """
    wants = torch.is_grad_enabled() and (hidden_TD.requires_grad or head_VD.requires_grad)
    return _LinearCrossEntropy.apply(hidden_TD, head_VD, labels_T, weight_T, wants)


def chunk_rows(head_VD: Tensor) -> int:
    """Tokens whose float32 logits fill CHUNK_BYTES."""
    return max(1, CHUNK_BYTES // (4 * head_VD.shape[0]))


def chunk_logits(hidden_nD: Tensor, head_VD: Tensor, buffer: Tensor) -> Tensor:
    """hidden W^T in float32 or float64, written to the first rows of `buffer` where no cast is due."""
    if hidden_nD.dtype == buffer.dtype:
        return torch.mm(hidden_nD, head_VD.T, out=buffer[: hidden_nD.shape[0]])
    return buffer[: hidden_nD.shape[0]].copy_(hidden_nD @ head_VD.T)


def softmax_(logits_nV: Tensor) -> Tensor:
    """Softmax over the last axis, in place. Its largest entry is exp(max - logsumexp), so no second sum is
    needed.

    One call takes about two thirds of the CPU time of maximum, difference, exponential and sum apart.
    """
    return torch.softmax(logits_nV, -1, out=logits_nV)


def logits_dtype(hidden_TD: Tensor) -> torch.dtype:
    return torch.promote_types(hidden_TD.dtype, torch.float32)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_TD: Tensor, head_VD: Tensor, labels_T: Tensor, weight_T: Tensor, wants: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype = logits_dtype(hidden_TD)
        head = head_VD.to(hidden_TD.dtype)
        rows = min(chunk_rows(head), hidden_TD.shape[0])
        buffer_nV = hidden_TD.new_empty(rows, head.shape[0], dtype=dtype)
        nll_T = hidden_TD.new_empty(hidden_TD.shape[0], dtype=dtype)
        correct_T = torch.empty_like(labels_T, dtype=torch.bool)
        dhidden_TD = torch.empty_like(hidden_TD) if wants else None
        dhead_VD = torch.zeros_like(head, dtype=dtype) if wants else None
        weight_T = weight_T.to(dtype)
        for a in range(0, hidden_TD.shape[0], rows):
            b = min(a + rows, hidden_TD.shape[0])
            logits_nV = chunk_logits(hidden_TD[a:b], head, buffer_nV)
            label_n1 = labels_T[a:b, None]
            label_logit_n1 = logits_nV.gather(1, label_n1)
            top_n1 = logits_nV.amax(1, keepdim=True)
            correct_T[a:b] = (label_logit_n1 >= top_n1)[:, 0]
            p_nV = softmax_(logits_nV)
            nll_T[a:b] = (top_n1 - p_nV.amax(1, keepdim=True).log() - label_logit_n1)[:, 0]
            if wants:
                w_n1 = weight_T[a:b, None]
                p_nV.mul_(w_n1).scatter_add_(1, label_n1, -w_n1)
                grad_nV = p_nV.to(hidden_TD.dtype)
                torch.mm(grad_nV, head, out=dhidden_TD[a:b])
                accumulate_head(dhead_VD, grad_nV, hidden_TD[a:b])
        ctx.grads = (dhidden_TD, dhead_VD)
        ctx.head_dtype = head_VD.dtype
        ctx.mark_non_differentiable(nll_T, correct_T)
        ctx.set_materialize_grads(False)
        return (nll_T * weight_T).sum(), nll_T, correct_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        assert ctx.grads is not None, "the gradients of linear_cross_entropy are handed out once"
        dhidden_TD, dhead_VD = ctx.grads
        ctx.grads = None
        if grad is None:
            return None, None, None, None, None
        if float(grad) != 1.0:
            dhidden_TD.mul_(grad)
            dhead_VD.mul_(grad)
        return dhidden_TD, dhead_VD.to(ctx.head_dtype), None, None, None


def accumulate_head(sum_VD: Tensor, grad_nV: Tensor, hidden_nD: Tensor) -> None:
    """sum += grad^T hidden."""
    if grad_nV.dtype == sum_VD.dtype:
        sum_VD.addmm_(grad_nV.T, hidden_nD)
    else:
        sum_VD += grad_nV.T @ hidden_nD
