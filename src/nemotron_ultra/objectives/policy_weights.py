"""w_t = prox / behav of a sampled token, without gradient: clamped (TIS), masked (IcePop) or masked by row.

Report 3.3.1 (c_t and m_t of equation 3). Every bound is tested on log w, before exp. A row is judged by its
geometric mean, never by the product of its weights, which shrinks with length (NVIDIA-NeMo/RL#2269).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nemotron_ultra.config.loss import PolicyGradientOptions


@dataclass
class BehaviorWeights:
    """Weights of B rows, [B, T] but for row_dropped_B1.

    value_BT multiplies the policy term: 1 where no option asks for a weight, 0 where keep_BT is False. raw_BT
    is prox / behav (or its row's mean) as it was, 1 where it is not finite, log_BT always the token's own
    log. below_BT, above_BT: outside the bounds.
    """

    value_BT: Tensor
    raw_BT: Tensor
    log_BT: Tensor
    finite_BT: Tensor
    keep_BT: Tensor
    below_BT: Tensor
    above_BT: Tensor
    row_dropped_B1: Tensor


def behavior_weights(
    prox_BT: Tensor, behav_BT: Tensor, mask_BT: Tensor, options: PolicyGradientOptions
) -> BehaviorWeights:
    """Weights by tis, icepop, sequence_mask and weight_level of `options`; log-probs in nats.

    Trained tokens (mask_BT > 0) whose log weight is not finite are masked where a weight is asked for.
    """
    trained_BT = mask_BT > 0
    log_BT = prox_BT.detach() - behav_BT.detach()
    finite_BT = trained_BT & log_BT.isfinite()
    log_BT = torch.where(finite_BT, log_BT, 0.0)
    log_row_B1 = row_mean(log_BT, mask_BT * finite_BT)
    level_BT = log_row_B1.expand_as(log_BT) if options.weight_level == "sequence" else log_BT
    raw_BT = level_BT.clamp(max=exp_limit(log_BT.dtype)).exp()
    value_BT = raw_BT if options.weighted else torch.ones_like(raw_BT)
    keep_BT = finite_BT if options.weighted else trained_BT
    below_BT, above_BT = _outside(level_BT, options.tis or options.icepop)
    if options.tis is not None:
        value_BT = torch.where(below_BT, options.tis[0], value_BT)
        value_BT = torch.where(above_BT, options.tis[1], value_BT)
    if options.icepop is not None:
        keep_BT = keep_BT & ~below_BT & ~above_BT
    row_below_B1, row_above_B1 = _outside(log_row_B1, options.sequence_mask)
    dropped_B1 = row_below_B1 | row_above_B1
    keep_BT = keep_BT & ~dropped_B1
    return BehaviorWeights(
        value_BT=torch.where(keep_BT, value_BT, 0.0),
        raw_BT=raw_BT,
        log_BT=log_BT,
        finite_BT=finite_BT,
        keep_BT=keep_BT,
        below_BT=trained_BT & (below_BT | row_below_B1),
        above_BT=trained_BT & (above_BT | row_above_B1),
        row_dropped_B1=dropped_B1,
    )


def rows_in_error(prox_BT: Tensor, behav_BT: Tensor, mask_BT: Tensor, threshold: float | None) -> Tensor:
    """[B, 1], True where the mean over trained tokens of exp|behav - prox| is above `threshold` (report 3.2).

    An infinite difference counts as such; one that is no number at all (inf - inf) is left out. False for
    rows without trained tokens.
    """
    gap_BT = (behav_BT - prox_BT).detach().abs()
    known_BT = (mask_BT > 0) & ~gap_BT.isnan()
    error_B1 = row_mean(torch.where(known_BT, gap_BT, 0.0).exp(), mask_BT * known_BT)
    return error_B1 > (math.inf if threshold is None else threshold)


def row_mean(x_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Weighted mean of each row, [B, 1]; 0 for a row without weight. x_BT must be finite where masked."""
    total_B1 = mask_BT.sum(1, keepdim=True)
    mean_B1 = torch.where(mask_BT > 0, x_BT * mask_BT, 0.0).sum(1, keepdim=True) / total_B1.clamp(min=1e-30)
    return torch.where(total_B1 > 0, mean_B1, 0.0)


def exp_limit(dtype: torch.dtype) -> float:
    """Largest log ratio that is taken for a number: exp of it, times another such, is still finite."""
    return math.log(torch.finfo(dtype).max) / 2


def _outside(log: Tensor, bounds: tuple[float, float] | None) -> tuple[Tensor, Tensor]:
    """(below, above) of bounds on exp(log), inclusive to within the rounding of log; None has none."""
    low, high = bounds if bounds is not None else (0.0, math.inf)
    low, high = (math.log(bound) if bound > 0 else -math.inf for bound in (low, high))
    slack = 4 * torch.finfo(log.dtype).eps
    return log < low - slack, log > high + slack
