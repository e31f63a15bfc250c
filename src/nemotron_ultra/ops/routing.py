"""Sigmoid routing with a selection-only bias: choose by s + b, weigh by s (report 1.5, DeepSeek-V3 style).

The balance loss is the sequence-level one of the report, its top-k taken without the bias.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nemotron_ultra.ops.segments import Segments


def select_experts(
    scores_TE: Tensor, bias_E: Tensor | None, top_k: int, n_group: int = 1, topk_group: int = 1
) -> Tensor:
    """Indices [T, K] of the largest scores + bias, in no particular order.

    With n_group > 1 only the topk_group groups whose two largest corrected scores sum highest take part; the
    others count as -inf.
    """
    with torch.no_grad():
        choice_TE = scores_TE if bias_E is None else scores_TE + bias_E
        if topk_group < n_group:
            choice_TE = _drop_groups(choice_TE, n_group, topk_group)
        return choice_TE.topk(top_k, dim=-1, sorted=False).indices


def _drop_groups(choice_TE: Tensor, n_group: int, topk_group: int) -> Tensor:
    grouped = choice_TE.unflatten(-1, (n_group, -1))
    group_score = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
    kept = group_score.topk(topk_group, dim=-1, sorted=False).indices
    dropped = torch.ones_like(group_score, dtype=torch.bool).scatter_(-1, kept, False)
    return grouped.masked_fill(dropped[..., None], -torch.inf).flatten(-2)


def routing_weights(scores_TE: Tensor, indices_TK: Tensor, normalise: bool, factor: float) -> Tensor:
    """Scores of the chosen experts, divided by their sum + 1e-20 if `normalise`, times `factor`: [T, K]."""
    weights_TK = scores_TE.gather(-1, indices_TK)
    if normalise:
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
    return weights_TK * factor


def expert_counts(indices_TK: Tensor, experts: int) -> Tensor:
    """Tokens that chose each expert, int64 [E]."""
    return torch.bincount(indices_TK.flatten(), minlength=experts)


def balance_loss(scores_TE: Tensor, top_k: int, segments: Segments) -> Tensor:
    """sum over documents d of T_d * E / (k T_d^2) * sum_e count_de * sum_t p_te, with p = s / sum_e s.

    Token-weighted: divide by the tokens of the global batch. The counts come from the top-k of s alone (no
    bias) and carry no gradient. Equals the number of tokens when routing is perfectly even.
    """
    experts = scores_TE.shape[-1]
    with torch.no_grad():
        indices_TK = scores_TE.topk(top_k, dim=-1, sorted=False).indices
        cells = indices_TK + experts * segments.index_T[:, None]
        counts_dE = torch.bincount(cells.flatten(), minlength=segments.count * experts).view(-1, experts)
        lengths_d = torch.tensor(segments.lengths, device=scores_TE.device, dtype=scores_TE.dtype)
        factor_dE = counts_dE * (experts / (top_k * lengths_d[:, None]))
        factor_TE = factor_dE[segments.index_T]
    return ((scores_TE * factor_TE).sum(-1) / scores_TE.sum(-1)).sum()


def updated_bias(bias_E: Tensor, counts_E: Tensor, rate: float = 1e-3) -> Tensor:
    """bias + rate * sign(mean count - count), once per global batch; also for stacked layers [..., E].

    `counts_E` are the tokens per expert of the whole global batch, summed over all ranks.
    """
    counts_E = counts_E.to(bias_E.device, torch.float32)
    return bias_E + rate * torch.sign(counts_E.mean(-1, keepdim=True) - counts_E)
