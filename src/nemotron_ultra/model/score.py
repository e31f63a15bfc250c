"""log p(label_t | tokens up to t) of given tokens, without gradients: anchors of RL, teachers, evaluation."""

from __future__ import annotations

import torch
from torch import Tensor

from nemotron_ultra.model.hybrid import HybridLM
from nemotron_ultra.ops.logprob import token_logprob


@torch.no_grad()
def score(model: HybridLM, tokens_T: Tensor, labels_T: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """Log-probability of each label, [T] float32 (float64 for such a model), at temperature 1.

    `labels_T[t]` follows `tokens_T[t]` in its document; `cu_seqlens` int32 [documents + 1], None for one.
    """
    output = model(tokens_T, cu_seqlens, mtp_depths=0, balance=False)
    return token_logprob(output.hidden_TD, output.head_VD, labels_T)
