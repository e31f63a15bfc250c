"""Every case of golden/rl about losses, ratios, masks, weights and KL, against what the peers gave for it.

rl_loss_table.TABLE says which of our options stand for a peer's loss, CHECKS does so for cases that give no
loss, LEFT_OUT lists those that no option of ours can express, with the reason. Advantages are in
test_rl_advantage.py. A case that is nowhere fails.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable

import pytest
import torch
from rl_loss_table import (
    LEFT_OUT,
    PAPER,
    PRODUCT,
    ROOT,
    TABLE,
    Case,
    Form,
    cases,
    gspo_mean_over,
    ppo,
    preset,
)
from test_rl_advantage import LEFT_OUT as ADVANTAGE_LEFT_OUT
from test_rl_advantage import TABLE as ADVANTAGE_TABLE
from torch import Tensor

from nemotron_ultra.objectives.policy_gradient import (
    PolicyGradientOptions,
    kl_estimate,
    policy_gradient_loss,
)
from nemotron_ultra.objectives.policy_weights import BehaviorWeights, behavior_weights, rows_in_error


def kl_with_clamp(case: Case) -> dict[str, Tensor]:
    clamp = (case.kwargs["input_clamp_value"], case.kwargs["output_clamp_value"])
    return {"kl": kl_estimate(case["curr"], case["ref"], case.kwargs["kl_type"], clamp)}


def kl_of_slime(case: Case) -> dict[str, Tensor]:
    kind = case.kwargs["kl_loss_type"].replace("low_var_kl", "k3")
    clamp = (20.0, 10.0) if case.name.endswith("low_var_kl") else None
    return {"kl": kl_estimate(case["curr"], case["ref"], kind, clamp)}


def kl_of_verl(case: Case) -> dict[str, Tensor]:
    curr_BT = case["curr"].clone().requires_grad_()
    kl_BT = kl_estimate(curr_BT, case["ref"], case.kwargs["kl_penalty"])
    (kl_BT * case.mask).sum().backward()
    return {"kl": kl_BT.detach(), "grad_of_masked_sum": curr_BT.grad}


def row_filter(case: Case) -> dict[str, Tensor]:
    threshold = case.kwargs["seq_logprob_error_threshold"]
    dropped_B1 = rows_in_error(case["prox"], case["behav"], case.mask, threshold)
    return {"sample_mask": (~dropped_B1[:, 0]).float(), "num_masked_seqs": float(dropped_B1.sum())}


def truncated_weights(case: Case) -> dict[str, Tensor | float]:
    threshold = case.kwargs["rollout_is_threshold"]
    options = ppo(tis=(0.0, threshold))
    weights = behavior_weights(case["prox"], case["behav"], case.mask, options)
    metrics = evaluate(case, Form(options))[2]
    return {
        "is_weights": weights.value_BT,
        "rollout_is_mean": metrics["pg/weight"],
        "rollout_is_ratio_fraction_high": metrics["pg/weight/above"],
        "rollout_is_eff_sample_size": metrics["pg/ess"],
    }


def gaps(case: Case) -> dict[str, float]:
    metrics = evaluate(case, Form(ppo()))[2]
    k1, k3 = metrics["pg/behavior_kl/k1"], metrics["pg/behavior_kl/k3"]
    names = {"verl": {"kl": k1, "k3_kl": k3}, "tinker_cookbook": {"optim/kl_sample_train_v1": k1}}
    return names[case.peer]


CHECKS: dict[str, Callable[[Case], dict]] = {
    **{f"nemo_rl/calculate_kl_{kind}_clamp20_10": kl_with_clamp for kind in ("k1", "k2", "k3")},
    **{f"nemo_rl_seqmask/seq_logprob_error_mask_{t}": row_filter for t in ("None", "1.1", "1.5", "2.0")},
    **{f"verl/kl_penalty_{kind}": kl_of_verl for kind in ("k1", "k2", "k3")},
    "verl/offpolicy_metrics": gaps,
    "verl/is_weights_token_2": truncated_weights,
    **{f"slime/approx_kl_{kind}": kl_of_slime for kind in ("k1", "k2", "k3", "low_var_kl")},
    "tinker_cookbook/kl_sample_train": gaps,
}


def evaluate(
    case: Case, form: Form, dtype: torch.dtype = torch.float32, mask_BT: Tensor | None = None
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """(loss, gradient, metrics) of ours on the inputs of a case."""
    options = form.options if isinstance(form.options, PolicyGradientOptions) else form.options(case)
    curr_BT = case["curr"].clone().to(dtype).requires_grad_()
    advantage_BT = case.advantage if form.advantage is None else form.advantage(case)
    inputs = (case[form.prox], case.behav, case.mask if mask_BT is None else mask_BT, advantage_BT)
    loss, metrics = policy_gradient_loss(
        curr_BT, *(x.to(dtype) for x in inputs), options, ref_BT=case[form.ref].to(dtype)
    )
    loss.backward()
    return loss.detach(), curr_BT.grad, metrics


METRICS: dict[str, Callable[[dict[str, float]], float]] = {
    "probs_ratio": lambda m: m["pg/ratio"],
    "probs_ratio_min": lambda m: m["pg/ratio/min"],
    "probs_ratio_max": lambda m: m["pg/ratio/max"],
    "gen_kl_error": lambda m: m["pg/behavior_kl/k3"],
    "is_oob_ratio": lambda m: m["pg/weight/below"] + m["pg/weight/above"],
    "actor/ppo_kl": lambda m: m["pg/ppo_kl"],
    "actor/pg_clipfrac": lambda m: m["pg/clip/low"] + m["pg/clip/high"],
    "actor/pg_clipfrac_lower": lambda m: m["pg/clip/dual"],
    "rollout_corr/kl": lambda m: m["pg/behavior_kl/k1"],
    "rollout_corr/k3_kl": lambda m: m["pg/behavior_kl/k3"],
    "rollout_corr/rollout_is_mean": lambda m: m["pg/weight"],
    "rollout_corr/rollout_is_eff_sample_size": lambda m: m["pg/ess"],
    "rollout_corr/rollout_is_oob_ratio": lambda m: m["pg/masked"],
    "clip_ratio/low_mean": lambda m: m["pg/clip/low"],
    "clip_ratio/high_mean": lambda m: m["pg/clip/high"],
    "filtered_fraction": lambda m: m["pg/weight/below"] + m["pg/weight/above"],
}


RATIO = ("probs_ratio", "probs_ratio_min", "probs_ratio_max")
# The peer's number is of something else: log theta in place of the ratio, rows in place of tokens, the
# smaller mask that its rejection leaves, or the estimator of the case in place of k3.
OTHER_MEANING = {
    "nemo_rl/reinforce": RATIO,
    "nemo_rl/MOPD_docs_reinforce_icepop": RATIO,
    "nemo_rl/seq_mask_tis_0.9_1.1": ("is_oob_ratio",),
    "nemo_rl/kl_k1_b0.1": ("gen_kl_error",),
    "nemo_rl/kl_k2_b0.1": ("gen_kl_error",),
    "verl/decoupled_geo_rs_token_tis": tuple(METRICS),
}


def listed(names: Iterable[str]) -> list[Case]:
    return [case for case in cases() if case.key in names]


def label(case: Case) -> str:
    return f"{case.key}/{case.scenario}"


def close(actual: Tensor | float, wanted: Tensor | float, rtol: float = 1e-5, what: str = "") -> None:
    actual, wanted = (torch.as_tensor(x).double() for x in (actual, wanted))
    torch.testing.assert_close(actual, wanted, rtol=rtol, atol=1e-6, msg=lambda text: f"{what}: {text}")


def test_every_case_is_expressed_or_left_out_with_its_reason():
    ours = {case.key for case in cases()} - set(ADVANTAGE_TABLE) - set(ADVANTAGE_LEFT_OUT)
    known = [set(TABLE), set(CHECKS), set(LEFT_OUT)]
    assert ours - set.union(*known) == set()
    assert len(set.union(*known)) == sum(map(len, known)) and all(LEFT_OUT.values())


@pytest.mark.parametrize("case", listed(TABLE), ids=label)
def test_loss_and_gradient(case):
    form, expected = TABLE[case.key], case.expected()
    loss, gradient, metrics = evaluate(case, form)
    scale = form.scale(case, expected) if form.scale else 1.0
    if not expected["loss"].isfinite():  # a peer's 0 / 0
        expected["loss"] = torch.zeros(())
    close(loss * scale, expected["loss"], what="loss")
    if form.gradient:
        close(gradient * scale, expected["grad_curr"], rtol=0, what="gradient")
    assert metrics["loss"] == loss.item() and metrics["pg/all_masked"] in (0.0, 1.0)


@pytest.mark.parametrize("case", listed(TABLE), ids=label)
def test_counts_and_shares(case):
    metrics = evaluate(case, TABLE[case.key])[2]
    for name, ours in METRICS.items():
        if name in case.metrics and name not in OTHER_MEANING.get(case.key, ()):
            close(ours(metrics), case.metrics[name], what=name)


def with_output(name: str) -> list[Case]:
    return [case for case in listed(TABLE) if name in case.outputs]


@pytest.mark.parametrize("case", with_output("is_weights"), ids=label)
def test_weights_of_verl(case):
    weights, expected = weights_of(case), case.expected()
    if case.name == "decoupled_geo_rs_token_tis":  # its weights are those before the rejection of rows
        assert torch.equal(weights.keep_BT, expected["mask_out"] > 0)
        close(weights.value_BT, expected["is_weights"] * expected["mask_out"])
    else:
        close(weights.value_BT, expected["is_weights"])


@pytest.mark.parametrize("case", with_output("behave_mask"), ids=label)
def test_weights_of_areal(case):
    weights, expected = weights_of(case), case.expected()
    assert torch.equal(weights.keep_BT, expected["behave_mask"] > 0)
    close(weights.value_BT, expected["behave_imp_weight"] * expected["behave_mask"])


@pytest.mark.parametrize("case", with_output("clip_mask"), ids=label)
def test_clipped_tokens_of_areal(case):
    """The peer counts those that its weight keeps."""
    expected = case.expected()
    kept_BT = case.mask * expected.get("behave_mask", torch.ones(()))
    metrics = evaluate(case, TABLE[case.key], mask_BT=kept_BT)[2]
    clipped = (metrics["pg/clip/low"] + metrics["pg/clip/high"]) * kept_BT.sum()
    close(clipped, expected["clip_mask"].sum())
    close(metrics["pg/clip/dual"] * kept_BT.sum(), expected["dual_clip_mask"].sum())


def weights_of(case: Case) -> BehaviorWeights:
    return behavior_weights(case["prox"], case["behav"], case.mask, TABLE[case.key].options)


@pytest.mark.parametrize("case", listed(CHECKS), ids=label)
def test_kl_weights_and_row_filter(case):
    expected = case.expected() | case.metrics
    for name, ours in CHECKS[case.key](case).items():
        close(ours, expected[name], what=name)


@pytest.mark.parametrize("case", listed({"nemo_rl/MOPD_eq3_icepop_0.5_5_eps0.2"}), ids=label)
def test_equation_3_term_by_term(case):
    """Token by token in Python's float64, and its gradient: -m c A r / N where the unclipped term counts."""
    loss, gradient, _ = evaluate(case, PAPER, torch.float64)
    total, count, wanted = 0.0, case.mask.sum().item(), torch.zeros_like(gradient)
    for i, j in case.mask.nonzero().tolist():
        theta, prox, behav, teacher = (
            case[name][i, j].item() for name in ("curr", "prox", "behav", "teacher")
        )
        r, c, a = math.exp(theta - prox), math.exp(prox - behav), teacher - prox
        m = 1.0 if 0.5 <= c <= 5.0 else 0.0
        total -= m * c * min(r * a, min(max(r, 0.8), 1.2) * a) / count
        wanted[i, j] = -m * c * a * r / count if r * a <= min(max(r, 0.8), 1.2) * a else 0.0
    assert loss.dtype == gradient.dtype == torch.float64
    assert loss.item() == pytest.approx(total, rel=1e-7, abs=1e-9)  # the teacher's gap is taken in float32
    torch.testing.assert_close(gradient, wanted, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("case", listed({"verl/decoupled_k3_rs"}), ids=label)
def test_all_tokens_rejected(case):
    """Where the peer's filter rejects every token its loss is NaN (0 / 0): ours is 0 with a warning."""
    if case.expected()["mask_out"].any():
        pytest.skip("the peer keeps some tokens here")
    loss, gradient, metrics = evaluate(case, Form(ppo(row_error=1e-3)))
    assert loss == 0 and not gradient.any()
    assert metrics["pg/masked"] == metrics["pg/masked/rows"] == metrics["pg/all_masked"] == 1


def unit_values() -> list[dict]:
    path = ROOT / "unit_test_values.json"
    return json.loads(path.read_text()) if path.is_file() else []


UNIT = {
    "ppo_clipping": ppo(),
    "dual_clip_c3": ppo(dual_clip=3.0),
    "gspo": gspo_mean_over("row_mean"),
    "tis_max.8_token": ppo(tis=(0.0, 0.8)),
    "icepop_.5_5": ppo(icepop=(0.5, 5.0)),
    "reinforce": preset("reinforce"),
    "force_on_policy": ppo(ratio="forced"),
    "cispo": ppo(cispo=True),
    "force_tis_2": ppo(ratio="forced", tis=(0.0, 2.0)),
    "force_tis_.5_2": ppo(ratio="forced", tis=(0.5, 2.0)),
}
UNIT_LEFT_OUT = {"gspo_is": PRODUCT, "tis_max.8_sequence": PRODUCT}


@pytest.mark.parametrize("record", unit_values(), ids=lambda record: record["name"])
def test_values_of_the_peers_own_unit_tests(record):
    name, x = record["name"], {k: v for k, v in record["inputs"].items() if k != "threshold"}
    if name in UNIT_LEFT_OUT:
        pytest.skip(UNIT_LEFT_OUT[name])
    x = {key: torch.tensor([value], dtype=torch.float32) for key, value in x.items()}
    if name.startswith("kl_"):
        clamp = (20.0, 10.0) if name.endswith("clamp20_10") else None
        close(
            kl_estimate(x["logprobs"], x["reference"], name[3:5], clamp)[0],
            torch.tensor(record["value_run_here"]),
        )
    elif name == "verl_icepop_weights":
        ones, raw = torch.ones(1, 3), x["raw_weights"].log()
        loss, metrics = policy_gradient_loss(
            0 * raw, raw, 0 * raw, ones, ones, ppo(ratio="none", clip=None, icepop=(0.5, 5.0))
        )
        wanted = record["expected_in_test"]
        weights = behavior_weights(raw, 0 * raw, ones, ppo(icepop=(0.5, 5.0)))
        close(weights.value_BT[0], torch.tensor(wanted["weights"]))
        close(metrics["pg/masked"], wanted["oob_ratio"])
        close(metrics["pg/ess"], wanted["ess_fraction"])
    else:
        curr_BT, mask_BT = x["curr"].requires_grad_(), torch.ones(1, 3)
        loss, metrics = policy_gradient_loss(
            curr_BT, x["prox"], x.get("behav"), mask_BT, x["adv"], UNIT[name]
        )
        loss.backward()
        close(loss.detach(), record["value_run_here"])
        close(curr_BT.grad[0], torch.tensor(record["grad_run_here"]))
        if record["is_oob_ratio"] is not None:
            close(metrics["pg/weight/below"] + metrics["pg/weight/above"], record["is_oob_ratio"])


# Forms of cross_check.json: each peer named there for a form must be given the same options here.
def test_peers_that_agree_are_given_the_same_options():
    path = ROOT / "cross_check.json"
    if not path.is_file():
        pytest.skip("not in this set")
    for form, scenarios in json.loads(path.read_text()).items():
        peers = {name.replace(":", "/") for values in scenarios.values() for name in values if ":" in name}
        options = {TABLE[name].options for name in peers - {"verl/dapo_vanilla"}}
        assert len(options) <= 1, form
