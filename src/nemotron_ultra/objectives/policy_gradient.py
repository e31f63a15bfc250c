"""J = mean_t w_t min(r_t A_t, clip(r_t, 1 - low, 1 + high) A_t), w = prox / behav (report 3.2, 3.3.1).

w is clamped or masked (`policy_weights`), r = theta / prox, loss = -J + coefficient * KL(theta, reference).
What the report leaves open is an option, and the public recipes are presets (configs/loss). Masking never
changes a denominator.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from nemotron_ultra.config.loss import PolicyGradientOptions
from nemotron_ultra.data.batch import TokenBatch
from nemotron_ultra.errors import ConfigError, DataError
from nemotron_ultra.model.hybrid import ModelOutput
from nemotron_ultra.objectives import policy_metrics
from nemotron_ultra.objectives.policy_metrics import Terms
from nemotron_ultra.objectives.policy_weights import (
    BehaviorWeights,
    behavior_weights,
    exp_limit,
    row_mean,
    rows_in_error,
)
from nemotron_ultra.ops.logprob import token_logprob

__all__ = ["PolicyGradient", "PolicyGradientOptions", "kl_estimate", "policy_gradient_loss"]


def policy_gradient_loss(
    curr_BT: Tensor,
    prox_BT: Tensor | None,
    behav_BT: Tensor | None,
    mask_BT: Tensor,
    advantage_BT: Tensor,
    options: PolicyGradientOptions,
    *,
    ref_BT: Tensor | None = None,
    entropy_BT: Tensor | None = None,
    counts: dict[str, float] | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """(loss, metrics) of B responses; column t holds the log-probability of one sampled token, in nats.

    mask_BT is 1 (or another weight) on trained tokens and 0 elsewhere, where all else may be anything. Only
    curr_BT is differentiated. prox_BT may be None where ratio is forced or none (theta stands in), behav_BT
    where no option reads it. counts: {"response_tokens", "rows"} of the global batch, and metrics are sums
    that add up; None takes this batch's own and finishes the metrics.

    Tokens whose log-probabilities, advantage or ratio are not finite are masked; but NaN in curr_BT is a
    broken model and makes the loss NaN. Raises DataError where shapes differ, ConfigError where an input that
    an option needs is missing.
    """
    x = _Tokens.of(
        _alike(curr=curr_BT, prox=prox_BT, behav=behav_BT, mask=mask_BT, advantage=advantage_BT, ref=ref_BT),
        options,
    )
    totals = counts if counts is not None else x.counts()
    log_ratio_BT = _log_ratio(x, options)
    gain_BT, clipped = _gain(x.curr_BT, log_ratio_BT, x.advantage_BT, options)
    loss_BT = torch.where(x.kept_BT, -x.weights.value_BT * gain_BT, 0.0)
    extra = {} if entropy_BT is None else {"pg/entropy": entropy_BT.detach()}
    if options.kl_coefficient > 0:
        kl_BT, extra["pg/reference_kl"] = _reference_kl(x, options)
        loss_BT = loss_BT + options.kl_coefficient * kl_BT
    loss = _reduce(loss_BT, x.mask_BT, totals, options) + x.broken
    terms = Terms(
        mask_BT=x.mask_BT,
        finite_BT=x.finite_BT,
        kept_BT=x.kept_BT,
        row_dropped_BT=(x.weights.row_dropped_B1 | x.error_B1).expand_as(x.kept_BT),
        ratio_BT=log_ratio_BT.detach().exp(),
        clipped=clipped,
        weights=x.weights,
        advantage_BT=x.advantage_BT,
        log_prox_curr_BT=x.given["prox"] - x.curr_BT.detach(),
    )
    metrics = {"loss": loss.detach()} | policy_metrics.measure(terms, totals["response_tokens"], extra)
    return loss, metrics if counts is not None else policy_metrics.finish(metrics)


def kl_estimate(
    curr_BT: Tensor, ref_BT: Tensor, kind: str = "k3", clamp: tuple[float, float] | None = None
) -> Tensor:
    """KL(theta, reference) at each sampled token, in nats, of shape [B, T]; d = log ref - log theta.

    k1 = -d, k2 = d^2 / 2, k3 = exp(d) - 1 - d (Schulman, Approximating KL divergence). clamp bounds |d| and
    the size of the estimate.
    """
    d_BT = ref_BT - curr_BT
    if clamp is not None:
        d_BT = d_BT.clamp(-clamp[0], clamp[0])
    choices = {"k1": lambda: -d_BT, "k2": lambda: d_BT.square() / 2, "k3": lambda: d_BT.expm1() - d_BT}
    kl_BT = choices[kind]()
    return kl_BT if clamp is None else kl_BT.clamp(-clamp[1], clamp[1])


class PolicyGradient:
    """The reinforcement-learning objective: each document of a batch is one response.

    Raises ConfigError for a KL term: a batch carries no reference log-probabilities.
    """

    mtp_depths = 0

    def __init__(self, options: PolicyGradientOptions):
        if options.kl_coefficient > 0:
            raise ConfigError(
                "loss.kl_coefficient: batches carry no reference log-probabilities",
                got=options.kl_coefficient,
                allowed=0,
            )
        self.options = options

    def count(self, batch: TokenBatch) -> dict[str, float]:
        """{"response_tokens": sum of weights, "rows": documents}, before any masking."""
        rows = batch.cu_seqlens.numel() - 1
        return {"response_tokens": float(batch.weight_T.double().sum()), "rows": float(rows)}

    def __call__(
        self, output: ModelOutput, batch: TokenBatch, counts: dict[str, float]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Metrics: loss and `pg/*`, sums that add up. The head is applied where weight_T > 0 only."""
        index_n = (batch.weight_T > 0).nonzero()[:, 0]
        hidden_nD, labels_n = output.hidden_TD[index_n], batch.labels_T[index_n]
        # without trained tokens: an empty tensor, but still differentiable
        curr_n = token_logprob(hidden_nD, output.head_VD, labels_n) if len(index_n) else hidden_nD.sum(1)
        rows = _Rows(output.segments.index_T[index_n], output.segments.count)

        def padded(x_T: Tensor | None) -> Tensor | None:
            return None if x_T is None else rows.pad(x_T[index_n])

        if batch.advantage_T is None:
            raise DataError("a batch without advantages", do="set its advantage_T")
        return policy_gradient_loss(
            rows.pad(curr_n),
            padded(batch.proximal_logprob_T),
            padded(batch.behavior_logprob_T),
            rows.pad(batch.weight_T[index_n]),
            rows.pad(batch.advantage_T[index_n]),
            self.options,
            counts=counts,
        )

    def finish(self, metrics: dict[str, float]) -> dict[str, float]:
        """Metrics of the global batch from the combined sums of its micro-batches."""
        return policy_metrics.finish(metrics)


class _Rows:
    """[n] trained tokens of a pack as rows by document, in order, padded on the right with 0."""

    def __init__(self, row_n: Tensor, rows: int):
        lengths_B = torch.bincount(row_n, minlength=rows)
        starts_B = lengths_B.cumsum(0) - lengths_B
        self.row_n = row_n
        self.column_n = torch.arange(len(row_n), device=row_n.device) - starts_B[row_n]
        self.shape = (rows, max(1, int(lengths_B.max())))

    def pad(self, x_n: Tensor) -> Tensor:
        return x_n.new_zeros(self.shape).index_put((self.row_n, self.column_n), x_n)


def _alike(**tensors: Tensor | None) -> dict[str, Tensor]:
    """Those that are given, in one dtype of at least float32; DataError unless all have the shape of curr."""
    given = {name: x_BT for name, x_BT in tensors.items() if x_BT is not None}
    shape = given["curr"].shape
    if len(shape) != 2 or any(x_BT.shape != shape for x_BT in given.values()):
        found = ", ".join(f"{name} {list(x_BT.shape)}" for name, x_BT in given.items())
        raise DataError("policy gradient: shapes differ", got=found, allowed="one shape [rows, tokens]")
    dtype = reduce(torch.promote_types, (x_BT.dtype for x_BT in given.values()), torch.float32)
    return {name: x_BT.to(dtype) for name, x_BT in given.items()}


@dataclass
class _Tokens:
    """What the loss reads of each token, [B, T]; curr_BT alone is differentiated.

    anchor_BT stands below the ratio and above the weight: theta itself where the ratio is forced, else prox.
    curr_BT and anchor_BT are 0 outside finite_BT and no advantage is infinite, so that no backward multiplies
    0 by infinity.
    broken is NaN where a trained curr is NaN, else 0.
    """

    given: dict[str, Tensor]
    curr_BT: Tensor
    anchor_BT: Tensor
    advantage_BT: Tensor
    mask_BT: Tensor
    finite_BT: Tensor
    kept_BT: Tensor
    error_B1: Tensor
    weights: BehaviorWeights
    broken: Tensor

    @classmethod
    def of(cls, given: dict[str, Tensor], options: PolicyGradientOptions) -> _Tokens:
        _check_present(given, options)
        curr_BT, mask_BT, advantage_BT = given["curr"], given["mask"], given["advantage"].detach()
        theta_BT, trained_BT = curr_BT.detach(), mask_BT > 0
        prox_BT = given.get("prox", theta_BT).detach()
        behav_BT = given.get("behav", prox_BT).detach()
        anchor_BT = theta_BT if options.ratio == "forced" else prox_BT
        weights = behavior_weights(anchor_BT, behav_BT, mask_BT, options)
        error_B1 = rows_in_error(prox_BT, behav_BT, mask_BT, options.row_error)
        finite_BT = trained_BT & theta_BT.isfinite() & advantage_BT.isfinite()
        if options.ratio in ("token", "sequence"):
            finite_BT &= _has_ratio(theta_BT - prox_BT, advantage_BT, options)
        if options.weighted:
            finite_BT &= weights.finite_BT
        known_BT = finite_BT & prox_BT.isfinite()
        return cls(
            given=given | {"prox": torch.where(known_BT, prox_BT, theta_BT), "behav": behav_BT},
            curr_BT=torch.where(finite_BT, curr_BT, 0.0),
            anchor_BT=torch.where(finite_BT, anchor_BT, 0.0),
            advantage_BT=torch.where(trained_BT & advantage_BT.isfinite(), advantage_BT, 0.0),
            mask_BT=mask_BT,
            finite_BT=finite_BT,
            kept_BT=finite_BT & weights.keep_BT & ~error_B1,
            error_B1=error_B1,
            weights=weights,
            broken=torch.where(trained_BT & theta_BT.isnan(), theta_BT, 0.0).sum(),
        )

    def counts(self) -> dict[str, float]:
        """This batch's own denominators."""
        return {"response_tokens": float(self.mask_BT.double().sum()), "rows": float(len(self.mask_BT))}


def _check_present(given: dict[str, Tensor], options: PolicyGradientOptions) -> None:
    if "prox" not in given and options.ratio in ("token", "sequence"):
        raise ConfigError(
            f"loss.ratio: {options.ratio} needs the log-probabilities of prox",
            do="score the batch with the learner first, or use ratio=forced",
        )
    reads_behav = options.weighted or options.row_error is not None or options.kl_gradient == "behavior"
    if "behav" not in given and reads_behav:
        raise ConfigError(
            "loss: tis, icepop, sequence_mask, row_error and kl_gradient=behavior need the log-probabilities "
            "of behav",
            do="hand in what the sampler returned, or set them to null",
        )
    if "ref" not in given and options.kl_coefficient > 0:
        raise ConfigError(
            "loss.kl_coefficient: above 0 it needs the log-probabilities of a reference",
            got=options.kl_coefficient,
        )


def _log_ratio(x: _Tokens, options: PolicyGradientOptions) -> Tensor:
    """log of the ratio, with its gradient; for ratio none that of the forced ratio, for the metrics."""
    if options.ratio in ("forced", "none"):
        return x.curr_BT - x.curr_BT.detach()
    log_ratio_BT = x.curr_BT - x.anchor_BT
    if options.ratio == "sequence":
        log_ratio_BT = row_mean(log_ratio_BT, x.mask_BT * x.finite_BT).expand_as(log_ratio_BT)
    return log_ratio_BT.clamp(max=exp_limit(log_ratio_BT.dtype))


def _has_ratio(log_BT: Tensor, advantage_BT: Tensor, options: PolicyGradientOptions) -> Tensor:
    """Where the ratio is a number, or larger than any but bounded by a clip; a ratio near 0 is a number."""
    if options.cispo:
        bounded_BT = torch.ones_like(log_BT, dtype=torch.bool)
    else:
        up, down = options.clip is not None, options.dual_clip is not None
        bounded_BT = torch.where(advantage_BT > 0, up, down) | (advantage_BT == 0)
    return log_BT.isfinite() & (bounded_BT | (log_BT < exp_limit(log_BT.dtype)))


def _gain(
    curr_BT: Tensor, log_ratio_BT: Tensor, advantage_BT: Tensor, options: PolicyGradientOptions
) -> tuple[Tensor, dict[str, Tensor]]:
    """(what a token adds to the objective before its weight, where which bound was active)."""
    never_BT = torch.zeros_like(advantage_BT, dtype=torch.bool)
    clipped = {"low": never_BT, "high": never_BT, "dual": never_BT}
    if options.ratio == "none":
        return curr_BT * advantage_BT, clipped
    ratio_BT = log_ratio_BT.exp()
    low, high = _clip_bounds(options)
    below_BT, above_BT = ratio_BT.detach() < low, ratio_BT.detach() > high
    bounded_BT = ratio_BT.clamp(low, high)
    if options.cispo:
        return bounded_BT.detach() * advantage_BT * curr_BT, {
            "low": below_BT,
            "high": above_BT,
            "dual": never_BT,
        }
    gain_BT = torch.minimum(ratio_BT * advantage_BT, bounded_BT * advantage_BT)
    clipped["low"], clipped["high"] = below_BT & (advantage_BT < 0), above_BT & (advantage_BT > 0)
    if options.dual_clip is not None:
        floor_BT = torch.where(advantage_BT < 0, options.dual_clip * advantage_BT, -math.inf)
        clipped["dual"] = gain_BT.detach() < floor_BT
        gain_BT = torch.maximum(gain_BT, floor_BT)
    return gain_BT, clipped


def _clip_bounds(options: PolicyGradientOptions) -> tuple[float, float]:
    if options.cispo_cap is not None:
        return 0.0, options.cispo_cap
    return (0.0, math.inf) if options.clip is None else (1 - options.clip[0], 1 + options.clip[1])


def _reference_kl(x: _Tokens, options: PolicyGradientOptions) -> tuple[Tensor, Tensor]:
    """(KL term of each token with its gradient factor, the estimate alone without gradient)."""
    live_BT, ref_BT = x.given["curr"], x.given["ref"].detach()
    theta_BT = live_BT.detach()
    bases = {"prox": x.given["prox"], "behavior": x.given["behav"]}
    base_BT = bases.get(options.kl_gradient, theta_BT)
    size_BT = kl_estimate(theta_BT, ref_BT, options.kl, options.kl_clamp) * (theta_BT - base_BT).exp()
    known_BT = (x.mask_BT > 0) & ~x.error_B1 & (ref_BT - theta_BT).isfinite() & size_BT.isfinite()
    live_BT, ref_BT, base_BT = (torch.where(known_BT, y_BT, 0.0) for y_BT in (live_BT, ref_BT, base_BT))
    estimate_BT = kl_estimate(live_BT, ref_BT, options.kl, options.kl_clamp)
    factor = 1.0 if options.kl_gradient == "direct" else (live_BT - base_BT).exp()
    return torch.where(known_BT, estimate_BT * factor, 0.0), estimate_BT.detach()


def _reduce(
    loss_BT: Tensor, mask_BT: Tensor, counts: dict[str, float], options: PolicyGradientOptions
) -> Tensor:
    """Sum over the batch divided by counts of the whole global batch: micro-batches add up."""
    if options.reduction == "token_mean":
        return (loss_BT * mask_BT).sum() * _inverse(counts["response_tokens"])
    if options.reduction == "row_mean":
        return row_mean(loss_BT, mask_BT).sum() * _inverse(counts["rows"])
    assert options.row_length is not None
    return (loss_BT * mask_BT).sum() * _inverse(counts["rows"] * options.row_length)


def _inverse(count: float) -> float:
    """1 / count, or 0 for a batch without trained tokens."""
    return 1.0 / count if count > 0 else 0.0
