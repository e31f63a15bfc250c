"""What a policy-gradient step says of itself, as sums that add up over micro-batches.

Names `pg/sum/*` are raw sums that `finish` turns into ratios; `*/min` and `*/max` combine by min and max; all
others are already divided by the trained tokens of the global batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nemotron_ultra.objectives.policy_weights import BehaviorWeights, exp_limit

_SUM = "pg/sum/"


@dataclass
class Terms:
    """Detached values of one batch, [B, T].

    mask_BT: weight of each token, 0 where it is not trained. finite_BT: trained and computable; only there
    does a mean read the numbers. kept_BT: what gives a gradient. clipped: low, high, dual -> where.
    """

    mask_BT: Tensor
    finite_BT: Tensor
    kept_BT: Tensor
    row_dropped_BT: Tensor
    ratio_BT: Tensor
    clipped: dict[str, Tensor]
    weights: BehaviorWeights
    advantage_BT: Tensor
    log_prox_curr_BT: Tensor


def measure(terms: Terms, tokens: float, extra: dict[str, Tensor]) -> dict[str, Tensor]:
    """Metrics of one micro-batch; `tokens` counts the trained tokens of the global batch.

    extra: further names with values [B, T] whose mean over the trained tokens is wanted.
    """
    mask_BT, finite_BT, weights = terms.mask_BT, terms.finite_BT, terms.weights
    trained_BT = mask_BT > 0
    lost_BT = trained_BT & ~terms.kept_BT
    inverse = 1.0 / tokens if tokens > 0 else 0.0

    def total(x_BT: Tensor) -> Tensor:
        return torch.where(finite_BT, x_BT * mask_BT, 0.0).sum()

    def count(where_BT: Tensor) -> Tensor:
        return torch.where(where_BT & trained_BT, mask_BT, 0.0).sum()

    log_BT = weights.log_BT
    means = {
        "pg/ratio": total(terms.ratio_BT),
        **{f"pg/clip/{name}": count(where_BT & finite_BT) for name, where_BT in terms.clipped.items()},
        "pg/weight/raw": total(weights.raw_BT),
        "pg/weight": total(weights.value_BT),
        "pg/weight/below": count(weights.below_BT),
        "pg/weight/above": count(weights.above_BT),
        "pg/masked": count(lost_BT),
        "pg/masked/nonfinite": count(~finite_BT),
        "pg/masked/rows": count(terms.row_dropped_BT),
        "pg/advantage": total(terms.advantage_BT),
        "pg/ppo_kl": total(terms.log_prox_curr_BT),
        "pg/behavior_kl/k1": total(-log_BT),
        "pg/behavior_kl/k3": total(log_BT.clamp(max=exp_limit(log_BT.dtype)).expm1() - log_BT),
        **{name: torch.where(trained_BT, x_BT * mask_BT, 0.0).sum() for name, x_BT in extra.items()},
    }
    weight_BT = torch.where(terms.kept_BT, weights.value_BT, 0.0)
    positive_BT, negative_BT = terms.advantage_BT > 0, terms.advantage_BT < 0
    sums = {
        "tokens": count(trained_BT),
        "kept": count(terms.kept_BT),
        "weight": total(weight_BT),
        "weight_square": total(weight_BT.square()),
        "positive": count(positive_BT),
        "negative": count(negative_BT),
        "masked_positive": count(positive_BT & lost_BT),
        "masked_negative": count(negative_BT & lost_BT),
    }
    return (
        {name: value * inverse for name, value in means.items()}
        | {_SUM + name: value for name, value in sums.items()}
        | {
            "pg/ratio/min": _all_and(terms.ratio_BT, finite_BT, math.inf).amin(),
            "pg/ratio/max": _all_and(terms.ratio_BT, finite_BT, -math.inf).amax(),
        }
    )


def finish(metrics: Mapping[str, float]) -> dict[str, float]:
    """The ratios of a whole global batch; names that are not raw sums pass through.

    pg/ess is (sum w)^2 / (n sum w^2), 1 for equal weights; pg/masked/positive the share of the tokens of
    positive advantage that give nothing; pg/all_masked is 1, a warning, where no token gives a gradient.
    """
    values = {name: float(value) for name, value in metrics.items()}
    sums = {name.removeprefix(_SUM): value for name, value in values.items() if name.startswith(_SUM)}
    done = {
        name: value
        for name, value in values.items()
        if not name.startswith(_SUM) and not (name.endswith(("/min", "/max")) and math.isinf(value))
    }
    if not sums:
        return done
    done["pg/ess"] = _share(sums["weight"] ** 2, sums["tokens"] * sums["weight_square"])
    for name in ("positive", "negative"):
        done[f"pg/masked/{name}"] = _share(sums[f"masked_{name}"], sums[name])
    done["pg/all_masked"] = float(sums["kept"] == 0)
    return done


def _all_and(x_BT: Tensor, where_BT: Tensor, fill: float) -> Tensor:
    """The numbers of x_BT where wanted and `fill`, also of a batch without any token."""
    return torch.cat([torch.where(where_BT, x_BT, fill).flatten(), x_BT.new_full((1,), fill)])


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0
