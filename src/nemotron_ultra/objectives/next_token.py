"""CE / N + (scale / J) sum_k CE_k / N_k + coefficient * balance / tokens (report 1.5, 1.6).

Labels and weights of depth k are those of the batch rolled left k places inside each document. All
denominators are those of the whole global batch, so losses and metrics of micro-batches add up.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nemotron_ultra.data.batch import TokenBatch
from nemotron_ultra.model.hybrid import ModelOutput
from nemotron_ultra.ops.cross_entropy import linear_cross_entropy, logits_dtype
from nemotron_ultra.ops.segments import Segments


class NextToken:
    """The pretraining and fine-tuning objective.

    mtp_loss_scale is shared by all depths; mtp_depths bounds the depths that are used.
    """

    def __init__(self, mtp_loss_scale: float = 0.1, balance_coefficient: float = 1e-4, mtp_depths: int = 7):
        self.mtp_loss_scale = mtp_loss_scale
        self.balance_coefficient = balance_coefficient
        self.mtp_depths = mtp_depths

    def count(self, batch: TokenBatch) -> dict[str, float]:
        """{"loss": sum of weights, "mtp_k": sum of the weights of depth k, "tokens": tokens}."""
        segments = Segments(batch.num_tokens, batch.cu_seqlens, batch.tokens_T.device)
        weight_T = batch.weight_T.double()
        counts = {"loss": float(weight_T.sum()), "tokens": float(batch.num_tokens)}
        for k in range(1, self.mtp_depths + 1):
            counts[f"mtp_{k}"] = float(segments.roll_left(weight_T, k).sum())
        return counts

    def __call__(
        self, output: ModelOutput, batch: TokenBatch, counts: dict[str, float]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Metrics: loss (CE alone), mtp_k/loss, mtp_k/accept (share of argmax hits), balance_loss."""
        depths = 0 if output.mtp_hidden_JTD is None else output.mtp_hidden_JTD.shape[0]
        names = ["loss", *(f"mtp_{k}" for k in range(1, depths + 1))]
        hidden = output.hidden_TD
        if depths:
            hidden = torch.cat([hidden, output.mtp_hidden_JTD.flatten(0, 1)])
        roll = output.segments.roll_left
        labels_T = torch.cat([roll(batch.labels_T, k) for k in range(depths + 1)])
        weight_T = batch.weight_T.to(logits_dtype(hidden))
        weights = [roll(weight_T, k) * _inverse(counts[name]) for k, name in enumerate(names)]
        scales = [1.0, *[self.mtp_loss_scale / max(1, depths)] * depths]
        weight_T = torch.cat([w * s for w, s in zip(weights, scales, strict=True)])
        loss, nll_T, correct_T = _cross_entropy(hidden, output.head_VD, labels_T, weight_T)
        metrics = {}
        for name, weight, nll, hit in zip(
            names, weights, nll_T.chunk(len(names)), correct_T.chunk(len(names)), strict=True
        ):
            key = name if name == "loss" else f"{name}/loss"
            metrics[key] = (nll * weight).sum()
            if name != "loss":
                metrics[f"{name}/accept"] = (hit * weight).sum()
        balance = output.router.balance_loss
        if balance is not None:
            balance = balance * _inverse(counts["tokens"])
            metrics["balance_loss"] = balance.detach()
            loss = loss + self.balance_coefficient * balance
        return loss, metrics

    def finish(self, metrics: dict[str, float]) -> dict[str, float]:
        """As they are: all of them are means already."""
        return metrics


def total_counts(objective: NextToken, batches: Sequence[TokenBatch]) -> dict[str, float]:
    """The denominators of `batches` together."""
    counts: dict[str, float] = {}
    for batch in batches:
        for name, value in objective.count(batch).items():
            counts[name] = counts.get(name, 0.0) + value
    return counts


def pooled(parts: Sequence[tuple[dict[str, float], dict[str, float]]]) -> dict[str, float]:
    """Metrics of several sets of batches, each given with its counts, as if they had been one set."""
    if len(parts) == 1:
        return parts[0][0]
    found = {}
    for name in dict.fromkeys(name for metrics, _ in parts for name in metrics):
        head = name.split("/")[0]
        key = head if head in parts[0][1] else "tokens"
        sums = [metrics.get(name, 0.0) * counts[key] for metrics, counts in parts]
        found[name] = sum(sums) * _inverse(sum(counts[key] for _, counts in parts))
    return found


def _cross_entropy(
    hidden_TD: Tensor, head_VD: Tensor, labels_T: Tensor, weight_T: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """As linear_cross_entropy; where most weights are 0, as in fine-tuning, the head skips those tokens."""
    index_n = weight_T.nonzero()[:, 0]
    if not 0 < 2 * len(index_n) <= len(weight_T):
        return linear_cross_entropy(hidden_TD, head_VD, labels_T, weight_T)
    loss, nll_n, correct_n = linear_cross_entropy(
        hidden_TD[index_n], head_VD, labels_T[index_n], weight_T[index_n]
    )
    empty_T = torch.zeros_like(weight_T)
    return loss, empty_T.index_copy(0, index_n, nll_n), empty_T.index_copy(0, index_n, correct_n.to(empty_T))


def _inverse(count: float) -> float:
    """1 / count, or 0 for a depth that no document reaches."""
    return 1.0 / count if count > 0 else 0.0
