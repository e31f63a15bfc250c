"""What each row is drawn from: softmax(logits / temperature), cut by min_p, then top_k, then top_p.

The mass that is cut off is shared out among what stays, after each cut. Rows of one batch may differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nemotron_ultra.generation.base import Request
from nemotron_ultra.generation.draw import draw, draw_scaled
from nemotron_ultra.model.hybrid import HybridLM

MOST = 1 << 62  # of top_k: a number that a tensor holds


@dataclass(frozen=True)
class RowOptions:
    """How each row of a batch is drawn. greedy_B: rows of temperature 0, for which temperature_B1 has 1.

    cuts: whether any row is cut. plain: every row is drawn at temperature 1 or greedily, and none is cut.
    """

    temperature_B1: Tensor
    greedy_B: Tensor
    top_p_B1: Tensor
    top_k_B1: Tensor
    min_p_B1: Tensor
    cuts: bool
    plain: bool
    all_greedy: bool
    any_greedy: bool

    @classmethod
    def of(cls, requests: Sequence[Request], device: torch.device | str) -> RowOptions:
        def column(values: list[float], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)[:, None]

        greedy = [not r.temperature for r in requests]
        cuts = any((r.top_p < 1 or r.top_k or r.min_p) and r.temperature for r in requests)
        return cls(
            column([r.temperature or 1.0 for r in requests], torch.float64),
            torch.tensor(greedy, dtype=torch.bool, device=device),
            column([r.top_p for r in requests], torch.float64),
            column([min(r.top_k, MOST) for r in requests], torch.int64),
            column([r.min_p for r in requests], torch.float64),
            cuts=cuts,
            plain=not cuts and all(r.temperature in (0, 1) for r in requests),
            all_greedy=all(greedy),
            any_greedy=any(greedy),
        )


def heated(logits_BV: Tensor, options: RowOptions) -> Tensor:
    """logits / temperature, -inf for ids that are cut: the softmax is what a row is drawn from.

    Rows of temperature 0 keep their logits.
    """
    scaled_BV = logits_BV / options.temperature_B1.to(logits_BV.dtype)
    return cut(scaled_BV, options) if options.cuts else scaled_BV


def cut(scaled_BV: Tensor, options: RowOptions) -> Tensor:
    """-inf for what min_p, top_k and top_p leave out; of equally likely ids the smaller ones stay."""
    sorted_BV, ids_BV = scaled_BV.sort(dim=-1, descending=True, stable=True)
    odds_BV = (sorted_BV - sorted_BV[:, :1]).double().exp()
    rank_V = torch.arange(scaled_BV.shape[1], device=scaled_BV.device)
    kept_BV = odds_BV >= options.min_p_B1
    kept_BV &= (options.top_k_B1 == 0) | (rank_V < options.top_k_B1)
    odds_BV = odds_BV * kept_BV
    before_BV = odds_BV.cumsum(-1) - odds_BV
    full_B1 = options.top_p_B1 >= 1
    kept_BV &= full_B1 | (before_BV < options.top_p_B1 * odds_BV.sum(-1, keepdim=True))
    kept_BV |= options.greedy_B[:, None]
    kept_BV[:, 0] = True
    return scaled_BV.masked_fill(~torch.zeros_like(kept_BV).scatter_(1, ids_BV, kept_BV), -torch.inf)


def sample(
    model: HybridLM, hidden_MD: Tensor, vocab_size: int, options: RowOptions, numbers: Callable[[], list]
) -> tuple[Tensor, Tensor, Tensor]:
    """`next_tokens` after hidden states; numbers(): a uniform number for each row, asked if any is drawn."""
    found = model.likeliest(hidden_MD, vocab_size) if options.all_greedy else None
    if found is not None:
        return found
    uniform_M = torch.tensor(numbers(), dtype=torch.float64, device=hidden_MD.device).flatten()
    return next_tokens(model.next_logits(hidden_MD), vocab_size, options, uniform_M)


def next_tokens(
    logits_BV: Tensor, vocab_size: int, options: RowOptions, uniform_B: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """-> token [B], its log-probability under what it was drawn from, and that under the model, [B] each.

    Only ids below `vocab_size` are drawn; the model's log-probability is over all ids.
    """
    usable_BV = logits_BV[:, :vocab_size]
    if options.all_greedy:
        token_B, logprob_B = draw(usable_BV, 0.0, uniform_B)
    else:
        token_B, logprob_B = draw_scaled(heated(usable_BV, options), uniform_B)
    if options.any_greedy and not options.all_greedy:
        best_B, best_logprob_B = draw(usable_BV, 0.0, uniform_B)
        token_B = torch.where(options.greedy_B, best_B, token_B)
        logprob_B = torch.where(options.greedy_B, best_logprob_B.double(), logprob_B)
    if options.plain and vocab_size == logits_BV.shape[1]:
        return token_B, logprob_B, logprob_B
    return token_B, logprob_B, model_logprobs(logits_BV, token_B)


def model_logprobs(logits_BV: Tensor, token_B: Tensor) -> Tensor:
    """Log-probabilities of the tokens under softmax(logits)."""
    return logits_BV.gather(1, token_B[:, None])[:, 0] - logits_BV.logsumexp(-1)
