"""The policy-gradient loss: what theory says of it, edges, bad input, and the objective on packed batches."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from micro import joined, micro_batches, micro_engine, micro_model
from nemotron_ultra.config.compose import options as option_files
from nemotron_ultra.data.batch import TokenBatch
from nemotron_ultra.errors import ConfigError, DataError
from nemotron_ultra.objectives.policy_gradient import (
    PolicyGradient,
    PolicyGradientOptions,
    kl_estimate,
    policy_gradient_loss,
)
from nemotron_ultra.objectives.policy_metrics import finish
from nemotron_ultra.objectives.policy_weights import behavior_weights, rows_in_error

preset = PolicyGradientOptions.preset
PPO = PolicyGradientOptions(icepop=None)


def rows(count: int = 8, length: int = 13, drift: float = 0.4, seed: int = 0, dtype=torch.float32):
    """(curr, prox, behav, mask, advantage) of one shape; row 0 has a single trained token."""
    draw = torch.Generator().manual_seed(seed)

    def normal() -> torch.Tensor:
        return torch.randn(count, length, generator=draw, dtype=dtype)

    prox_BT = -normal().abs() - 0.5
    mask_BT = (torch.rand(count, length, generator=draw) > 0.3).to(dtype)
    mask_BT[0], mask_BT[0, 3] = 0, 1
    return prox_BT + drift * normal(), prox_BT, prox_BT + drift * normal(), mask_BT, normal()


def run(x, options, **extra):
    """(loss, gradient of curr, metrics)."""
    curr_BT = x[0].clone().requires_grad_()
    loss, metrics = policy_gradient_loss(curr_BT, *x[1:], options, **extra)
    loss.backward()
    return loss.detach(), curr_BT.grad, metrics


def test_forced_ratio_has_the_gradient_of_reinforce():
    x = rows()
    _, forced, metrics = run(x, PolicyGradientOptions(ratio="forced", icepop=None))
    _, reinforce, _ = run(x, preset("reinforce"))
    torch.testing.assert_close(forced, reinforce)
    torch.testing.assert_close(forced, -x[3] * x[4] / x[3].sum())
    assert metrics["pg/ratio/min"] == metrics["pg/ratio/max"] == 1


def test_the_forms_of_mopd_agree_on_policy_where_no_weight_is_out_of_bounds():
    curr_BT, _, behav_BT, mask_BT, gap_BT = rows(drift=0.1)
    x = (curr_BT, curr_BT, behav_BT, mask_BT, gap_BT)
    paper, recipe, reinforce = (run(x, preset(f"mopd_{name}")) for name in ("paper", "recipe", "reinforce"))
    torch.testing.assert_close(paper[0], recipe[0])
    torch.testing.assert_close(paper[1], recipe[1])
    torch.testing.assert_close(paper[1], reinforce[1])


def test_recipe_and_paper_differ_in_the_tokens_out_of_bounds_only():
    curr_BT, _, behav_BT, mask_BT, gap_BT = rows(drift=1.0)
    x = (curr_BT, curr_BT, behav_BT, mask_BT, gap_BT)
    paper = run(x, preset("mopd_paper", icepop=(0.2, 5)))[1]
    recipe = run(x, preset("mopd_recipe", row_error=None))[1]
    weight_BT = (curr_BT - behav_BT).exp()
    outside_BT = ((weight_BT < 0.2) | (weight_BT > 5)) & (mask_BT > 0)
    torch.testing.assert_close(paper[~outside_BT], recipe[~outside_BT])
    assert outside_BT.any() and not paper[outside_BT].any() and recipe[outside_BT].all()


def test_sequence_ratio_spreads_the_gradient_over_the_row():
    x = rows()
    _, gradient, metrics = run(x, preset("gspo", clip=(0.9, 9)))
    curr_BT, prox_BT, _, mask_BT, advantage_BT = x
    tokens_B1 = mask_BT.sum(1, keepdim=True)
    ratio_B1 = (((curr_BT - prox_BT) * mask_BT).sum(1, keepdim=True) / tokens_B1).exp()
    mean_B1 = (advantage_BT * mask_BT).sum(1, keepdim=True) / tokens_B1
    torch.testing.assert_close(gradient, -ratio_B1 * mean_B1 * mask_BT / tokens_B1 / len(mask_BT))
    assert metrics["pg/ratio/max"] == pytest.approx(ratio_B1.max().item())


def test_clip_stops_the_gradient_on_the_side_that_the_advantage_rewards():
    prox_BT, ones_BT = torch.full((1, 4), -2.0), torch.ones(1, 4)
    curr_BT = prox_BT + torch.tensor([[1.5, 1.5, 0.5, 0.5]]).log()
    x = (curr_BT, prox_BT, prox_BT, ones_BT, torch.tensor([[1.0, -1.0, 1.0, -1.0]]))
    _, gradient, metrics = run(x, PPO)
    assert (gradient != 0).tolist() == [[False, True, True, False]]
    assert metrics["pg/clip/high"] == metrics["pg/clip/low"] == 0.25


def test_dual_clip_bounds_terms_of_negative_advantage_only():
    prox_BT, ones_BT = torch.full((1, 2), -3.0), torch.ones(1, 2)
    x = (prox_BT + math.log(10), prox_BT, prox_BT, ones_BT, torch.tensor([[-1.0, 1.0]]))
    loss, gradient, metrics = run(x, replace(PPO, dual_clip=3.0))
    assert loss.item() == pytest.approx((3 - 1.2) / 2) and not gradient.any()
    assert metrics["pg/clip/dual"] == 0.5


def test_cispo_keeps_the_gradient_of_clipped_tokens():
    x = rows(drift=1.0)
    _, gradient, metrics = run(x, preset("cispo"))
    weight_BT = (x[0] - x[1]).exp().clamp(max=1.28)
    torch.testing.assert_close(gradient, -weight_BT * x[4] * x[3] / x[3].sum())
    assert metrics["pg/clip/high"] > 0
    capped = run(x, preset("cispo", clip=None, cispo_cap=1.28))[1]
    torch.testing.assert_close(capped, gradient)


@pytest.mark.parametrize("w", [0.5, 5.0])
def test_icepop_bounds_are_inclusive(w):
    zero_BT = torch.zeros(1, 1)
    weights = behavior_weights(zero_BT + math.log(w), zero_BT, zero_BT + 1, PolicyGradientOptions())
    assert weights.keep_BT.all() and weights.value_BT.item() == pytest.approx(w)
    beyond = math.log(w) * (1 + 1e-6)
    assert not behavior_weights(zero_BT + beyond, zero_BT, zero_BT + 1, PolicyGradientOptions()).keep_BT.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bound", [0.2, 0.5, 0.9, 1.1, 5.0])
def test_bounds_are_inclusive_whatever_rounding_does(bound, dtype):
    """The logarithm of a rounded 0.9, and the mean over a row of equal numbers, are off by an ulp."""
    ones_BT = torch.ones(3, 33, dtype=dtype)
    behav_BT = -ones_BT * torch.tensor([[0.0], [0.3], [2.0]], dtype=dtype)
    inclusive = replace(PPO, sequence_mask=(bound, bound)), replace(PPO, icepop=(bound, bound))
    for options in inclusive:
        assert behavior_weights(behav_BT + (bound * ones_BT).log(), behav_BT, ones_BT, options).keep_BT.all()


EXTREME = [PPO, replace(PPO, dual_clip=3.0), preset("cispo", clip=(0.2, 0.28)), preset("gspo")]


@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
@pytest.mark.parametrize("log_ratio", [-80.0, 80.0])
@pytest.mark.parametrize("options", EXTREME)
def test_a_ratio_near_0_and_one_that_is_clipped_are_numbers(options, log_ratio, advantage):
    """Float32 gives what float64 gives, unless a huge ratio is not clipped: then it is masked."""
    ones_BT = torch.ones(1, 1)
    prox_BT = -ones_BT if log_ratio < 0 else -81 * ones_BT
    x = (prox_BT + log_ratio, prox_BT, prox_BT, ones_BT, advantage * ones_BT)
    single, double = run(x, options), run([y.double() for y in x], options)
    if double[0] > 1e9:
        assert single[0] == 0 and single[1] == 0 and single[2]["pg/masked"] == 1
    else:
        torch.testing.assert_close(single[0], double[0].float())
        torch.testing.assert_close(single[1], double[1].float())
        assert single[2]["pg/masked"] == 0


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_counts_where_the_reference_excludes_a_token(kind):
    curr_BT, ones_BT = -torch.ones(1, 2), torch.ones(1, 2)
    options = replace(PPO, kl=kind, kl_coefficient=0.1)
    for dtype in (torch.float32, torch.float64):
        ref_BT = torch.tensor([[-91.0, -1.0]], dtype=dtype)
        x = (curr_BT, curr_BT, curr_BT, ones_BT, 0 * ones_BT)
        loss, gradient, metrics = run(x, options, ref_BT=ref_BT)
        assert loss == pytest.approx(0.1 * 10 / 2) and metrics["pg/reference_kl"] == pytest.approx(5)
        assert gradient[0, 0].item() == pytest.approx(0.1 * 10 / 2)


def test_k3_of_nearly_equal_policies_is_not_rounding():
    curr_BT, prox_BT, behav_BT, mask_BT, advantage_BT = rows(drift=1e-3)
    wanted_BT = (prox_BT.double() - behav_BT.double()).square() / 2
    torch.testing.assert_close(kl_estimate(behav_BT, prox_BT).double(), wanted_BT, rtol=1e-2, atol=1e-9)
    k3 = run((curr_BT, prox_BT, behav_BT, mask_BT, advantage_BT), PolicyGradientOptions())[2]
    assert k3["pg/behavior_kl/k3"] == pytest.approx(wanted_BT[mask_BT > 0].mean().item(), rel=1e-2)


def test_divergence_from_behav_is_of_tokens_whatever_the_level_of_the_weight():
    x, options = rows(drift=0.5), replace(PPO, icepop=(0.9, 1.1))
    token = run(x, options)[2]
    sequence = run(x, replace(options, weight_level="sequence"))[2]
    assert token["pg/weight/raw"] != pytest.approx(sequence["pg/weight/raw"])
    for kind in ("k1", "k3"):
        assert token[f"pg/behavior_kl/{kind}"] == sequence[f"pg/behavior_kl/{kind}"]


def test_tokens_without_a_weight_count_as_masked_by_the_sign_of_their_advantage():
    zero_BT, behav_BT = torch.zeros(1, 4), torch.tensor([[0.0, -math.inf, 0.0, -math.inf]])
    advantage_BT = torch.tensor([[1.0, 1.0, -1.0, 1.0]])
    metrics = run((zero_BT, zero_BT, behav_BT, zero_BT + 1, advantage_BT), PolicyGradientOptions())[2]
    assert metrics["pg/masked/positive"] == pytest.approx(2 / 3) and metrics["pg/masked/negative"] == 0
    assert metrics["pg/masked/nonfinite"] == 0.5


@pytest.mark.parametrize("length", [4, 4000])
def test_a_row_is_judged_by_its_geometric_mean_whatever_its_length(length):
    ones_BT = torch.ones(2, length)
    log_BT = torch.tensor([[0.09], [0.11]]).expand(2, length).clone()
    log_BT[:, ::2] += 0.5
    log_BT[:, 1::2] -= 0.5
    options = replace(PPO, sequence_mask=(0.9, math.exp(0.1)))
    weights = behavior_weights(log_BT, 0 * ones_BT, ones_BT, options)
    assert weights.row_dropped_B1.tolist() == [[False], [True]]
    torch.testing.assert_close(weights.value_BT, log_BT.exp() * torch.tensor([[1.0], [0.0]]))


def test_row_error_drops_rows_above_its_threshold():
    gap_BT = torch.tensor([[0.0, 2.0], [0.0, 3.001], [0.0, 9.0]]).clamp(min=1).log()
    gap_BT[2, 1] = -math.inf
    mask_BT = torch.ones(3, 2)
    assert rows_in_error(gap_BT, 0 * mask_BT, mask_BT, 2.0).tolist() == [[False], [True], [True]]
    assert rows_in_error(0 * mask_BT, gap_BT, mask_BT, 1.5 + 1e-6)[0].tolist() == [False]
    assert not rows_in_error(gap_BT, 0 * mask_BT, 0 * mask_BT, 2.0).any()
    assert not rows_in_error(gap_BT, 0 * mask_BT, mask_BT, None).any()


SPLITS = {
    "paper": PolicyGradientOptions(),
    "ultra_rlvr": preset("ultra_rlvr"),
    "gspo": preset("gspo", sequence_mask=(0.8, 1.25)),
    "dr_grpo": preset("dr_grpo", row_length=13),
    "cispo": preset("cispo", icepop=(0.5, 2)),
    "kl": PolicyGradientOptions(kl_coefficient=0.1, reduction="row_mean"),
}


@pytest.mark.parametrize("name", SPLITS)
def test_one_batch_of_8_rows_is_8_of_one(name):
    x, options = rows(drift=0.6), SPLITS[name]
    ref_BT, entropy_BT = x[1] - 0.1, x[4].abs()
    whole = run(x, options, ref_BT=ref_BT, entropy_BT=entropy_BT)
    counts = {"response_tokens": x[3].sum().item(), "rows": 8.0}
    totals: dict[str, float] = {}
    gradients = []
    for i in range(8):
        part = [y[i : i + 1] for y in x]
        extra = {"ref_BT": ref_BT[i : i + 1], "entropy_BT": entropy_BT[i : i + 1]}
        _, gradient, metrics = run(part, options, counts=counts, **extra)
        gradients.append(gradient)
        for key, value in metrics.items():
            combine = {"min": min, "max": max}.get(key.rsplit("/")[-1], lambda a, b: a + b)
            totals[key] = combine(totals[key], value.item()) if key in totals else value.item()
    torch.testing.assert_close(torch.cat(gradients), whole[1])
    assert finish(totals) == pytest.approx(whole[2], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", [*option_files("loss"), "kl"])
def test_all_tokens_masked_is_zero_with_a_warning(name):
    curr_BT, prox_BT, _, mask_BT, advantage_BT = rows()
    options = SPLITS["kl"] if name == "kl" else preset(name)
    nan_BT = torch.full_like(curr_BT, math.nan)
    loss, gradient, metrics = run(
        (nan_BT, nan_BT, nan_BT, 0 * mask_BT, nan_BT), options, ref_BT=nan_BT, entropy_BT=nan_BT
    )
    assert loss == 0 and not gradient.any() and metrics["pg/all_masked"] == 1
    assert all(map(math.isfinite, metrics.values()))
    rejected = run((curr_BT, prox_BT, prox_BT - 9, mask_BT, advantage_BT), PolicyGradientOptions())
    assert rejected[0] == 0 and not rejected[1].any()
    assert rejected[2]["pg/masked"] == rejected[2]["pg/all_masked"] == rejected[2]["pg/masked/positive"] == 1


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0)])
@pytest.mark.parametrize("name", option_files("loss"))
def test_a_batch_without_any_token_is_zero(name, shape):
    loss, gradient, metrics = run([torch.zeros(shape)] * 5, preset(name))
    assert loss == 0 and gradient.shape == shape and metrics["pg/all_masked"] == 1
    assert all(map(math.isfinite, metrics.values()))


@pytest.mark.parametrize("bad", [-math.inf, math.inf, math.nan])
@pytest.mark.parametrize("which", ["prox", "behav", "advantage"])
@pytest.mark.parametrize("name", option_files("loss"))
def test_values_that_are_not_finite_are_masked(name, which, bad):
    x = [y.clone() for y in rows()]
    options = replace(preset(name), row_error=None)
    index = ("curr", "prox", "behav", "mask", "advantage").index(which)
    token = tuple(x[3].nonzero()[-1].tolist())
    x[index][token] = bad
    loss, gradient, metrics = run(x, options, ref_BT=x[1])
    assert loss.isfinite() and gradient.isfinite().all() and all(map(math.isfinite, metrics.values()))
    if which == "advantage":
        assert gradient[token] == 0 and metrics["pg/masked/nonfinite"] == pytest.approx(1 / x[3].sum().item())


@pytest.mark.parametrize("bad", [-math.inf, -1e4])
@pytest.mark.parametrize("name", [*option_files("loss"), "kl"])
def test_a_token_that_theta_excludes_makes_no_nan(name, bad):
    x = [y.clone() for y in rows()]
    token = tuple(x[3].nonzero()[-1].tolist())
    x[0][token] = bad
    options = SPLITS["kl"] if name == "kl" else replace(preset(name), row_error=None)
    loss, gradient, metrics = run(x, options, ref_BT=x[1])
    assert loss.isfinite() and gradient.isfinite().all() and all(map(math.isfinite, metrics.values()))


def test_a_broken_model_is_not_masked_away():
    x = [y.clone() for y in rows()]
    x[0][tuple(x[3].nonzero()[-1].tolist())] = math.nan
    assert policy_gradient_loss(*x, preset("ultra_rlvr"))[0].isnan()


def test_what_stands_outside_the_mask_changes_nothing():
    x = rows()
    dirty = [torch.where(x[3] > 0, y, math.nan) for y in x]
    dirty[3] = x[3]
    for options in SPLITS.values():
        clean, soiled = (run(y, options, ref_BT=y[1], entropy_BT=y[4]) for y in (x, dirty))
        torch.testing.assert_close(soiled[0], clean[0])
        torch.testing.assert_close(soiled[1], clean[1])
        assert soiled[2] == pytest.approx(clean[2])


@pytest.mark.parametrize("name", SPLITS)
def test_float64_in_float64_out(name):
    x = rows(dtype=torch.float64)
    loss, gradient, _ = run(x, SPLITS[name], ref_BT=x[1])
    assert loss.dtype == gradient.dtype == torch.float64
    curr_BT = x[0].requires_grad_()
    step = 1e-6 * torch.randn(x[0].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    if name in ("paper", "gspo", "dr_grpo"):  # elsewhere a factor without gradient depends on theta
        up, down = (policy_gradient_loss(curr_BT + s * step, *x[1:], SPLITS[name])[0] for s in (1, -1))
        assert ((up - down) / 2).item() == pytest.approx((gradient * step).sum().item(), rel=1e-5, abs=1e-13)


def test_masking_leaves_the_denominator():
    _, prox_BT, _, mask_BT, advantage_BT = rows()
    behav_BT = torch.where(torch.arange(13) % 2 == 0, prox_BT, prox_BT - 9)
    _, gradient, metrics = run((prox_BT, prox_BT, behav_BT, mask_BT, advantage_BT), PolicyGradientOptions())
    kept_BT = (torch.arange(13) % 2 == 0) * mask_BT
    torch.testing.assert_close(gradient, -advantage_BT * kept_BT / mask_BT.sum())
    assert (
        metrics["pg/weight/above"] == metrics["pg/masked"] == pytest.approx(1 - kept_BT.sum() / mask_BT.sum())
    )
    assert metrics["pg/ess"] == pytest.approx((kept_BT.sum() / mask_BT.sum()).item())


def test_reductions():
    mask_BT = torch.tensor([[1.0, 1, 1], [1, 0, 0], [0, 0, 0]])
    x = (0 * mask_BT, 0 * mask_BT, 0 * mask_BT, mask_BT, torch.tensor([[1.0, 2, 3], [10, 7, 7], [7, 7, 7]]))
    means = {"token_mean": 16 / 4, "row_mean": (2 + 10 + 0) / 3, "row_sum": 16 / (3 * 5)}
    for reduction, mean in means.items():
        row_length = 5 if reduction == "row_sum" else None
        options = replace(PPO, reduction=reduction, row_length=row_length)
        assert policy_gradient_loss(*x, options)[0].item() == pytest.approx(-mean)


def test_score_term_of_the_kl_gradient():
    """d/dtheta [k exp(theta - sg theta)] = k' + k: the gradient of an expectation under theta."""
    curr_BT, ref_BT = rows()[:2]
    for kind in ("k1", "k2", "k3"):
        leaf_BT = curr_BT.clone().requires_grad_()
        kl_estimate(leaf_BT, ref_BT, kind).sum().backward()
        x = (curr_BT, curr_BT, curr_BT, torch.ones_like(curr_BT), 0 * curr_BT)
        base = {"kl": kind, "kl_coefficient": 0.5, "kl_clamp": None}
        direct = run(x, replace(PPO, kl_gradient="direct", **base), ref_BT=ref_BT)[1]
        score = run(x, replace(PPO, kl_gradient="score", **base), ref_BT=ref_BT)[1]
        torch.testing.assert_close(direct, 0.5 * leaf_BT.grad / curr_BT.numel())
        extra_BT = 0.5 * kl_estimate(curr_BT, ref_BT, kind) / curr_BT.numel()
        torch.testing.assert_close(score, direct + extra_BT)


def test_a_dropped_row_has_no_kl_term_a_masked_token_has():
    zero_BT, ones_BT = torch.zeros(3, 1), torch.ones(3, 1)
    behav_BT = torch.tensor([[0.0], [-1.0], [-3.0]])  # kept, masked by IcePop, dropped with its row
    options = PolicyGradientOptions(icepop=(0.5, 2), row_error=5, kl="k1", kl_coefficient=1)
    x = (zero_BT, zero_BT, behav_BT, ones_BT, zero_BT)
    loss, gradient, metrics = run(x, options, ref_BT=zero_BT - 1)
    assert loss.item() == pytest.approx(2 / 3) and (gradient != 0).tolist() == [[True], [True], [False]]
    assert metrics["pg/masked/rows"] == pytest.approx(1 / 3)


def test_shapes_that_differ_and_missing_inputs_are_one_clear_error():
    curr_BT, prox_BT, behav_BT, mask_BT, advantage_BT = rows()
    with pytest.raises(DataError, match=r"shapes differ.*curr \[8, 13\].*advantage \[8, 1\]"):
        policy_gradient_loss(curr_BT, prox_BT, behav_BT, mask_BT, advantage_BT[:, :1], PPO)
    with pytest.raises(ConfigError, match="ratio: token needs"):
        policy_gradient_loss(curr_BT, None, behav_BT, mask_BT, advantage_BT, PPO)
    with pytest.raises(ConfigError, match=r"icepop.* need the log-probabilities of behav"):
        policy_gradient_loss(curr_BT, prox_BT, None, mask_BT, advantage_BT, PolicyGradientOptions())
    with pytest.raises(ConfigError, match=r"kl_coefficient.* reference"):
        policy_gradient_loss(curr_BT, prox_BT, behav_BT, mask_BT, advantage_BT, SPLITS["kl"])
    with pytest.raises(ConfigError, match="kl_coefficient"):
        PolicyGradient(SPLITS["kl"])
    loss, _ = policy_gradient_loss(curr_BT, None, None, mask_BT, advantage_BT, preset("reinforce"))
    assert loss.isfinite()


def responses(count: int, seed: int = 0) -> list[TokenBatch]:
    """Micro-batches whose documents begin with a prompt (weight 0); the last one has no trained token."""
    draw = torch.Generator().manual_seed(seed)
    batches = micro_batches(count, seed)
    for i, batch in enumerate(batches):
        weight_T = batch.weight_T * (torch.rand(batch.num_tokens, generator=draw) > 0.4)
        batches[i] = with_policies(batch, weight_T if i < count - 1 or count == 1 else 0 * weight_T, draw)
    return batches


def with_policies(batch: TokenBatch, weight_T: torch.Tensor, draw: torch.Generator) -> TokenBatch:
    prox_T, behav_T, advantage_T = torch.randn(3, batch.num_tokens, generator=draw)
    return replace(
        batch,
        weight_T=weight_T,
        proximal_logprob_T=-4 + 0.3 * prox_T,
        behavior_logprob_T=-4 + 0.3 * behav_T,
        advantage_T=advantage_T,
    )


@pytest.mark.parametrize("name", ["mopd_paper", "gspo", "ultra_rlvr"])
def test_packed_objective_is_the_padded_function(name):
    model, (batch,) = micro_model(torch.float64), responses(1)
    objective = PolicyGradient(preset(name))
    output = model(batch.tokens_T, batch.cu_seqlens, mtp_depths=0)
    # the head is not applied where nothing is trained, so no label is read there
    labelled = replace(batch, labels_T=torch.where(batch.weight_T > 0, batch.labels_T, 10**9))
    loss, metrics = objective(output, labelled, objective.count(batch))
    logprob_T = output.logits_TV.log_softmax(-1).gather(1, batch.labels_T[:, None])[:, 0]
    columns = (
        logprob_T,
        batch.proximal_logprob_T,
        batch.behavior_logprob_T,
        batch.weight_T,
        batch.advantage_T,
    )
    bounds = batch.cu_seqlens.tolist()
    padded = [torch.nn.utils.rnn.pad_sequence([x[a:b] for a, b in pairwise(bounds)], True) for x in columns]
    wanted, shares = policy_gradient_loss(*padded, preset(name))
    torch.testing.assert_close(loss, wanted)
    assert objective.finish(metrics) == pytest.approx(shares)
    for ours, theirs in zip(
        *(torch.autograd.grad(x, output.hidden_TD, retain_graph=True) for x in (loss, wanted)), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_micro_batches_add_up_in_the_engine():
    batches, objective = responses(4), PolicyGradient(PolicyGradientOptions(reduction="row_mean"))
    one, four = micro_engine(clip=0.0), micro_engine(clip=0.0)
    whole = with_rl(joined(batches), batches)
    totals = [one.forward_backward([whole], objective), four.forward_backward(batches, objective)]
    assert totals[0] == pytest.approx(totals[1], rel=1e-4, abs=1e-6)
    norms = [engine.optimizer_step()["grad_norm"] for engine in (one, four)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5) and norms[0] > 0


def with_rl(batch: TokenBatch, parts: list[TokenBatch]) -> TokenBatch:
    names = ("proximal_logprob_T", "behavior_logprob_T", "advantage_T")
    return replace(batch, **{name: torch.cat([getattr(part, name) for part in parts]) for name in names})


def test_a_batch_without_trained_tokens_trains_nothing():
    batch = replace(responses(1)[0], weight_T=torch.zeros(responses(1)[0].num_tokens))
    engine = micro_engine()
    metrics = engine.forward_backward([batch], PolicyGradient(preset("grpo")))
    assert metrics["loss"] == 0 and metrics["pg/all_masked"] == 1 and "pg/ratio/min" not in metrics
    assert engine.optimizer_step()["grad_norm"] == 0


def test_learning_raises_the_probability_of_what_was_good():
    """Plain REINFORCE on one batch: after some steps rewarded tokens are likelier, punished ones less."""
    (batch,) = responses(1)
    batch = replace(batch, advantage_T=batch.advantage_T.sign())
    engine, objective = micro_engine(lr=3e-3), PolicyGradient(preset("reinforce"))
    before_T = engine.logprob(batch)
    for _ in range(5):
        engine.forward_backward([batch], objective)
        engine.optimizer_step()
    gain_T = (engine.logprob(batch) - before_T) * batch.advantage_T * batch.weight_T
    assert gain_T.sum() > 0
