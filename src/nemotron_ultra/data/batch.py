"""TokenBatch: packed `[T]` tensors with document boundaries; the one batch type of every trainer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class TokenBatch:
    """One micro-batch.

    labels_T[t] is the token that follows tokens_T[t] inside its document (0 where there is none: weight_T is
    0 there). cu_seqlens, int32 [documents + 1], runs from 0 to T.
    Log-probabilities and advantages are those of labels_T; version_T is the number of optimizer steps behind
    the weights that drew labels_T, -1 where no policy drew it.
    `stats` carries what a message or a page wants to say of the batch, such as document ids; nothing in it
    changes the mathematics.
    """

    tokens_T: Tensor
    labels_T: Tensor
    weight_T: Tensor
    cu_seqlens: Tensor
    behavior_logprob_T: Tensor | None = None
    proximal_logprob_T: Tensor | None = None
    advantage_T: Tensor | None = None
    version_T: Tensor | None = None
    stats: dict[str, Any] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return self.tokens_T.numel()

    @classmethod
    def from_documents(cls, documents: list[list[int]], **extra: Any) -> TokenBatch:
        """Pack whole documents; each one's last token has no label."""
        lengths = [len(d) for d in documents]
        tokens_T = torch.tensor([t for d in documents for t in d], dtype=torch.int64)
        labels_T = torch.tensor([t for d in documents for t in [*d[1:], 0]], dtype=torch.int64)
        weight_T = torch.tensor([w for n in lengths for w in [1.0] * (n - 1) + [0.0]], dtype=torch.float32)
        cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
        return cls(tokens_T=tokens_T, labels_T=labels_T, weight_T=weight_T, cu_seqlens=cu_seqlens, **extra)
