"""A_i = R_i - mean_{j != i} R_j, or A_t = sg[log p_teacher - log p_prox]: how much better than expected.

Report 3.2 (group rewards), 3.3.1 equation 2 (teacher gap). The order is that of the published configs: shape
the reward, normalise, overwrite penalised tokens, clip. What differs: the standard deviation is of two passes
in float64, and where it is below a floor the advantage is not divided (one pass in float32 leaves 1e-4 where
equal rewards should leave 0, and the odd one out then gets an advantage of thousands).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nemotron_ultra.config.advantage import AdvantageConfig
from nemotron_ultra.errors import ConfigError, DataError, NonFiniteError
from nemotron_ultra.rl.rollout import Group

FINISH_REASONS = ("stop", "length")


@dataclass(frozen=True, kw_only=True)
class RolloutAdvantages:
    """One entry a rollout, in the order of the groups: advantage_B (float32), keep_B (bool, false: it leaves
    the loss), and the batch's metrics."""

    advantage_B: Tensor
    keep_B: Tensor
    metrics: dict[str, float]


def leave_one_out(
    rewards_B: Tensor | Sequence[float],
    group_B: Tensor | Sequence[int],
    *,
    std: bool = False,
    std_floor: float = 1e-3,
    eps: float = 1e-6,
    ddof: int = 1,
) -> Tensor:
    """A_i = R_i - mean of the others of its group; with `std` over (their standard deviation + eps).

    `group_B` holds any integers, equal within a group, in any order. Where the standard deviation is below
    `std_floor` (or there is one other only) A_i is not divided. Float32, or float64 if the rewards are.
    Errors: a group of one, rewards that are not finite, lengths that differ, a floor that is not above 0.
    Source: RLOO (arXiv 2402.14740); with std the published student_rlvr1.yaml.
    """
    return _normalized(rewards_B, group_B, True, std, std_floor, eps, ddof)


def group_normalized(
    rewards_B: Tensor | Sequence[float],
    group_B: Tensor | Sequence[int],
    *,
    std: bool = True,
    std_floor: float = 1e-3,
    eps: float = 1e-6,
    ddof: int = 1,
) -> Tensor:
    """A_i = R_i - mean of its group; with `std` over (the group's standard deviation + eps).

    Arguments, floor, dtype and errors as in `leave_one_out`. One group for all is batch normalisation.
    Source: GRPO (arXiv 2402.03300); without std Dr.GRPO (arXiv 2503.20783).
    """
    return _normalized(rewards_B, group_B, False, std, std_floor, eps, ddof)


def group_deviation(
    rewards_B: Tensor | Sequence[float],
    group_B: Tensor | Sequence[int],
    *,
    leave_one_out: bool = False,
    ddof: int = 1,
) -> tuple[Tensor, Tensor]:
    """(R_i - mean, standard deviation), both [B] in float64, of the whole group or of the others in it.

    Equal rewards give exactly 0. A standard deviation of no more than `ddof` values is 0.
    """
    rewards_B, index_B = _checked(rewards_B, group_B)
    deviation_B, std_B = torch.zeros_like(rewards_B), torch.zeros_like(rewards_B)
    for rows in _groups(index_B):
        count = len(rows) - 1 if leave_one_out else len(rows)
        # From the first reward on, so that equal rewards leave no residue.
        shifted_N = rewards_B[rows] - rewards_B[rows[0]]
        centred_N = shifted_N - shifted_N.mean()
        deviation_B[rows] = centred_N * (len(rows) / (len(rows) - 1)) if leave_one_out else centred_N
        if count > ddof:
            squares_N = _squares_of_others(shifted_N) if leave_one_out else centred_N.square().sum()
            std_B[rows] = (squares_N / (count - ddof)).sqrt()
    return deviation_B, std_B


def teacher_gap(teacher_T: Tensor, prox_T: Tensor, mask_T: Tensor) -> Tensor:
    """A = sg[log p_teacher - log p_prox] where mask is not 0, else 0; any one shape.

    Float32, or float64 if a log-prob is. What stands outside the mask is never read, NaN included.
    Source: report 3.3.1, equation 2.
    """
    _same_shape(teacher=teacher_T, prox=prox_T, mask=mask_T)
    gap_T = teacher_T.detach().double() - prox_T.detach().double()
    return torch.where(mask_T != 0, gap_T, 0.0).to(_dtype(teacher_T, prox_T))


def overwrite_penalized(advantage: Tensor, penalized: Tensor, *, value: float = -5.0) -> Tensor:
    """`advantage` with `value` where `penalized` (bool, same shape): tokens of an invalid tool call.

    After normalisation, before clipping. Source: invalid_tool_call_advantage -5 of the published configs.
    """
    _same_shape(advantage=advantage, penalized=penalized)
    if not math.isfinite(value):
        raise ConfigError("advantage of penalised tokens", got=value, allowed="a finite number")
    return torch.where(penalized.bool(), value, advantage)


def clip_advantage(
    advantage: Tensor, bound: float | None, mask: Tensor | None = None
) -> tuple[Tensor, float]:
    """(advantage within [-bound, bound], share that was outside); the share is over mask != 0 where given."""
    if bound is None:
        return advantage, 0.0
    if not bound > 0 or math.isinf(bound):
        raise ConfigError("advantage.clip", got=bound, allowed="a finite number > 0, or null for none")
    outside = advantage.abs() > bound
    if mask is not None:
        _same_shape(advantage=advantage, mask=mask)
        outside = outside[mask != 0]
    share = outside.double().mean().item() if outside.numel() else 0.0
    return advantage.clamp(-bound, bound), share


def overlong_filter(finish_reasons: Sequence[str]) -> Tensor:
    """keep_B: false for rollouts cut at the limit; they leave the loss but stay in their group's baseline.

    Source: Nemotron 3 Nano report (sequences that hit the limit without an end leave the loss).
    """
    for reason in finish_reasons:
        if reason not in FINISH_REASONS:
            raise DataError("finish reason of a rollout", got=reason, allowed=" or ".join(FINISH_REASONS))
    return torch.tensor([reason != "length" for reason in finish_reasons], dtype=torch.bool)


def overlong_penalty(
    lengths_B: Tensor | Sequence[int], max_length: int, buffer: int, *, factor: float = 1.0
) -> Tensor:
    """Added to the reward: 0 up to max_length - buffer tokens, then straight down to -factor at max_length.

    `lengths_B` counts an answer's tokens; beyond max_length it stays -factor. Float64.
    Errors: a buffer outside 1..max_length, a negative length. Source: DAPO (arXiv 2503.14476), equation 13.
    """
    if not 0 < buffer <= max_length:
        raise ConfigError(
            "advantage.overlong_buffer",
            got=buffer,
            allowed=f"1 to the longest answer, {max_length} tokens",
            do="lower it or raise rollout.max_new_tokens",
        )
    lengths_B = torch.as_tensor(lengths_B).double()
    if not (lengths_B >= 0).all():
        raise DataError("length of an answer", got=lengths_B.min().item(), allowed="0 or more tokens")
    return factor * ((max_length - buffer - lengths_B) / buffer).clamp(-1.0, 0.0)


def rollout_advantages(
    groups: Sequence[Group],
    config: AdvantageConfig,
    *,
    max_new_tokens: int | None = None,
    penalized_B: Tensor | None = None,
) -> RolloutAdvantages:
    """One advantage a rollout, from its group's rewards. overlong=penalty is measured against
    `max_new_tokens`; rollouts of `penalized_B` (bool) get -5 before the clip (see `overwrite_penalized`).

    Advantage metrics are over the rollouts that stay in the loss. Errors: no group, a group of one (it has
    nothing to be compared with), a reward that is not finite, teacher_gap (see `gap_advantages`).
    """
    if config.name == "teacher_gap":
        raise ConfigError("advantage of rewards", got=config.name, allowed="leave_one_out or group_mean")
    _check_groups(groups)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    sizes = torch.tensor([len(group.rollouts) for group in groups])
    group_B = torch.repeat_interleave(torch.arange(len(groups)), sizes)
    shaped_B = torch.tensor([rollout.reward for rollout in rollouts], dtype=torch.float64)
    metrics = reward_metrics(groups)
    if config.overlong == "penalty":
        if max_new_tokens is None:
            raise ConfigError("advantage.overlong=penalty", do="it needs the length of the longest answer")
        lengths = [len(rollout.tokens) for rollout in rollouts]
        penalty_B = overlong_penalty(lengths, max_new_tokens, config.overlong_buffer)
        shaped_B = shaped_B + penalty_B
        metrics["reward/overlong_penalty"] = penalty_B.mean().item()
    normalize = leave_one_out if config.name == "leave_one_out" else group_normalized
    raw_B = normalize(shaped_B, group_B, std=config.std, std_floor=config.std_floor)
    if penalized_B is not None:
        raw_B = overwrite_penalized(raw_B, penalized_B)
    keep_B = kept_rollouts(groups, config)
    advantage_B, share = clip_advantage(raw_B, config.clip, keep_B)
    metrics |= _spread(advantage_B[keep_B]) | {"advantage/clip_share": share}
    metrics["advantage/kept_share"] = keep_B.double().mean().item()
    return RolloutAdvantages(advantage_B=advantage_B.float(), keep_B=keep_B, metrics=metrics)


def gap_advantages(
    teacher_T: Tensor,
    prox_T: Tensor,
    mask_T: Tensor,
    config: AdvantageConfig,
    *,
    penalized_T: Tensor | None = None,
    domain_T: Tensor | None = None,
    domains: Sequence[str] = (),
) -> tuple[Tensor, dict[str, float]]:
    """(advantage_T, metrics) of distillation: the teacher gap, clipped. Any one shape for the tensors.

    Tokens of `penalized_T` (bool) get -5 before the clip (see `overwrite_penalized`). `domain_T` (index into
    `domains`) adds the gap's mean by domain, an estimate of -KL(student || teacher).
    Errors: a gap that is NaN, or infinite without a clip, at a masked-in token.
    """
    if config.name != "teacher_gap":
        raise ConfigError("advantage of a teacher's log-probs", got=config.name, allowed="teacher_gap")
    gap_T, inside_T = teacher_gap(teacher_T, prox_T, mask_T), mask_T != 0
    raw_T = gap_T if penalized_T is None else overwrite_penalized(gap_T, penalized_T.bool() & inside_T)
    advantage_T, share = clip_advantage(raw_T, config.clip, mask_T)
    wrong = (~advantage_T.isfinite()).sum().item()
    if wrong:
        raise NonFiniteError(
            "teacher's log-prob minus the proximal one", got=f"{wrong} tokens that are NaN or infinite"
        )
    gap_N, advantage_N = gap_T[inside_T].double(), advantage_T[inside_T].double()
    metrics = _spread(advantage_N) | {"advantage/clip_share": share}
    metrics |= {
        "advantage/abs_p99": _high(advantage_N.abs(), 0.99),
        "teacher/gap_mean": _mean(gap_N),
        "teacher/negative_share": _mean((gap_N < 0).double()),
    }
    if domain_T is not None:
        _same_shape(domain=domain_T, mask=mask_T)
        for i, name in enumerate(domains):
            of_domain_N = gap_N[domain_T[inside_T] == i]
            metrics |= {f"teacher/{name}/gap_mean": _mean(of_domain_N)} if len(of_domain_N) else {}
    return advantage_T, metrics


def kept_rollouts(groups: Sequence[Group], config: AdvantageConfig) -> Tensor:
    """keep_B of all rollouts in the order of the groups: false where overlong=filter takes one out."""
    keep_B = overlong_filter([rollout.finish_reason for group in groups for rollout in group.rollouts])
    return keep_B if config.overlong == "filter" else torch.ones_like(keep_B)


def reward_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Means of the environment's rewards (by domain too), and the shares of groups that teach nothing: equal
    rewards, of these all 0 and all 1. Works for groups of one."""
    rewards = [[rollout.reward for rollout in group.rollouts] for group in groups]
    flat = torch.tensor([reward for of_group in rewards for reward in of_group], dtype=torch.float64)
    equal = [of_group for of_group in rewards if min(of_group) == max(of_group)]
    metrics = {
        "reward/mean": _mean(flat),
        "reward/std": flat.std(unbiased=False).item(),
        "reward/zero_std_share": len(equal) / len(groups),
        "reward/all_zero_share": sum(of_group[0] == 0 for of_group in equal) / len(groups),
        "reward/all_one_share": sum(of_group[0] == 1 for of_group in equal) / len(groups),
    }
    by_domain: dict[str, list[float]] = {}
    for group, of_group in zip(groups, rewards, strict=True):
        by_domain.setdefault(group.problem.domain, []).extend(of_group)
    return metrics | {f"reward/{name}/mean": sum(r) / len(r) for name, r in sorted(by_domain.items())}


def _normalized(
    rewards_B: Tensor | Sequence[float],
    group_B: Tensor | Sequence[int],
    others: bool,
    std: bool,
    std_floor: float,
    eps: float,
    ddof: int,
) -> Tensor:
    if not std_floor > 0 or math.isinf(std_floor) or not 0 <= eps < math.inf or ddof < 0:
        raise ConfigError(
            "standard deviation of an advantage",
            got=f"std_floor {std_floor}, eps {eps}, ddof {ddof}",
            allowed="std_floor > 0, eps >= 0, ddof >= 0",
        )
    deviation_B, std_B = group_deviation(rewards_B, group_B, leave_one_out=others, ddof=ddof)
    if std:
        deviation_B = torch.where(std_B >= std_floor, deviation_B / (std_B + eps), deviation_B)
    return deviation_B.to(_dtype(rewards_B))


def _checked(rewards_B: Tensor | Sequence[float], group_B: Tensor | Sequence[int]) -> tuple[Tensor, Tensor]:
    """Rewards in float64 and group numbers 0, 1, ...; each group has at least two rewards, all finite."""
    # Python's numbers are float64 already; torch would take a list of them as float32.
    rewards_B = torch.as_tensor(rewards_B, dtype=torch.float64).detach()
    group_B = torch.as_tensor(group_B, device=rewards_B.device)
    if rewards_B.ndim != 1 or rewards_B.shape != group_B.shape:
        raise DataError(
            "rewards and groups", got=f"shapes {tuple(rewards_B.shape)} and {tuple(group_B.shape)}",
            allowed="one length, one dimension",
        )  # fmt: skip
    if not rewards_B.isfinite().all():
        row = (~rewards_B.isfinite()).nonzero()[0].item()
        raise DataError(f"reward of rollout {row}", got=rewards_B[row].item(), allowed="a finite number")
    names, index_B, counts = torch.unique(group_B, return_inverse=True, return_counts=True)
    if (counts < 2).any():
        raise _group_of_one(f"group {names[counts < 2][0].item()}")
    return rewards_B, index_B


def _check_groups(groups: Sequence[Group]) -> None:
    """The errors of `_checked` in the words of the run: which domain, which problem."""
    if not groups:
        raise DataError("a batch of rollouts", got="no group", allowed="at least one")
    for group in groups:
        name = f"domain {group.problem.domain}, problem {group.problem.index}"
        if len(group.rollouts) < 2:
            raise _group_of_one(name, len(group.rollouts))
        for i, rollout in enumerate(group.rollouts):
            if not math.isfinite(rollout.reward):
                raise DataError(
                    f"{name}: reward of rollout {i}", got=rollout.reward, allowed="a finite number"
                )


def _group_of_one(name: str, size: int = 1) -> ConfigError:
    return ConfigError(
        f"{name}: an advantage within a group",
        got=f"{size} rollout" + ("" if size == 1 else "s"),
        allowed="at least 2",
        do="raise rollout.group_size, or use advantage=teacher_gap, which has no group",
    )


def _groups(index_B: Tensor) -> Iterator[Tensor]:
    """Row numbers of each group."""
    counts = torch.bincount(index_B).tolist()
    return iter(torch.split(torch.argsort(index_B, stable=True), counts))


def _squares_of_others(shifted_N: Tensor) -> Tensor:
    """sum over j != i of (x_j - mean of the others)^2, pair by pair: no difference of large sums."""
    count = len(shifted_N) - 1
    others_NN = ~torch.eye(len(shifted_N), dtype=torch.bool, device=shifted_N.device)
    gap_NN = shifted_N[None, :] - shifted_N[:, None]
    mean_N = gap_NN.sum(1) / count
    return torch.where(others_NN, gap_NN - mean_N[:, None], 0.0).square().sum(1)


def _same_shape(**tensors: Tensor) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) > 1:
        raise DataError(" and ".join(shapes), got=f"shapes {shapes}", allowed="one shape")


def _dtype(*tensors: object) -> torch.dtype:
    double = any(isinstance(tensor, Tensor) and tensor.dtype == torch.float64 for tensor in tensors)
    return torch.float64 if double else torch.float32


def _spread(advantage_N: Tensor) -> dict[str, float]:
    if not len(advantage_N):
        return {f"advantage/{key}": 0.0 for key in ("mean", "std", "min", "max")}
    advantage_N = advantage_N.double()
    return {
        "advantage/mean": advantage_N.mean().item(),
        "advantage/std": advantage_N.std(unbiased=False).item(),
        "advantage/min": advantage_N.min().item(),
        "advantage/max": advantage_N.max().item(),
    }


def _mean(values_N: Tensor) -> float:
    return values_N.mean().item() if len(values_N) else 0.0


def _high(values_N: Tensor, share: float) -> float:
    """The smallest value that `share` of them do not exceed (torch.quantile refuses more than 16M values)."""
    return values_N.kthvalue(math.ceil(share * len(values_N))).values.item() if len(values_N) else 0.0
