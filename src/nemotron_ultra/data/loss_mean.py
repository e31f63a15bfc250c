"""The mean that a fine-tuning loss is: over all trained tokens, or inside each conversation first.

tokens          sum_c sum_t ce_ct / sum_c n_c
conversations   1/C sum_c (1/n_c) sum_t ce_ct     n_c trained tokens of c, C conversations with some

Super's second stage is the latter (its report, section 3.1): long inputs with short answers keep their say.
Both are a weight per token, divided by the sum of the weights of the global batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from nemotron_ultra.config.trainer import TrainerConfig
from nemotron_ultra.data.batch import TokenBatch


@dataclass(frozen=True, kw_only=True)
class LossMean:
    """`over` from step number `after` on (the first step is 0), before that over tokens."""

    over: Literal["tokens", "conversations"] = "tokens"
    after: int = 0

    @classmethod
    def of(cls, trainer: TrainerConfig) -> LossMean:
        """As trainer.loss_mean and trainer.loss_mean_after say."""
        return cls(over=trainer.loss_mean, after=trainer.loss_mean_after)

    def __call__(self, batches: Sequence[TokenBatch], step: int) -> list[TokenBatch]:
        """The micro-batches of a step with the weights of its mean."""
        if self.over == "tokens" or step < self.after:
            return list(batches)
        return [mean_inside_conversations(batch) for batch in batches]


def mean_inside_conversations(batch: TokenBatch) -> TokenBatch:
    """Weights that sum to 1 inside each document, or stay 0 where nothing of it is trained.

    An MTP depth, whose weights are these rolled inside the document, has the same mean as long as a document
    has its first `depth` labels untrained, as one that begins with a prompt does.
    """
    lengths = batch.cu_seqlens.diff().long()
    document_T = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    total_D = torch.zeros(len(lengths), dtype=torch.float64)
    total_D.index_add_(0, document_T, batch.weight_T.double())
    weight_T = batch.weight_T.double() / total_D.clamp_min(torch.finfo(torch.float32).tiny)[document_T]
    return replace(batch, weight_T=weight_T.to(batch.weight_T.dtype))
