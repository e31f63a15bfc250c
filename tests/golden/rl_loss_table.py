"""Which of our options stand for a peer's loss in golden/rl, and which losses none can express, and why."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from conftest import golden_root
from nemotron_ultra.objectives.policy_gradient import PolicyGradientOptions


def rl_root() -> Path:
    """The folder of RL cases: of the set that was asked for, else the shared one, else the small copy."""
    asked = Path(os.environ.get("NEMOTRON_ULTRA_GOLDEN", "/nowhere")) / "rl"
    shared = golden_root() / "rl"
    small = Path(__file__).parent / "data" / "rl"
    return next((folder for folder in (asked, shared) if (folder / "inputs.safetensors").is_file()), small)


ROOT = rl_root()
INPUTS = load_file(ROOT / "inputs.safetensors")


class Case:
    """One case in one scenario: case["mask"] is an input."""

    def __init__(self, peer: str, record: dict):
        self.peer, self.name, self.scenario = peer, record["case"], record["scenario"]
        self.kwargs, self.metrics, self.feeds = record["kwargs"], record["metrics"], record["inputs"]
        self.outputs = record["outputs"]
        self.key = f"{peer}/{self.name}"

    def __getitem__(self, name: str) -> Tensor:
        return INPUTS[f"{self.scenario}/{name}"]

    def expected(self) -> dict[str, Tensor]:
        stored = load_file(ROOT / f"{self.peer}.safetensors")
        return {name: stored[key] for name, key in self.outputs.items()}

    @property
    def mask(self) -> Tensor:
        return self["mask"]

    @property
    def advantage(self) -> Tensor:
        """By the peer's record: a named input, or teacher - prox."""
        name = self.feeds.get("advantages", "adv_tok")
        return self["teacher"] - self["prox"] if name.startswith("teacher") else self[name]

    @property
    def behav(self) -> Tensor:
        return self[self.feeds.get("behav") or "behav"]


def cases() -> list[Case]:
    return [
        Case(path.name.removesuffix(".cases.json"), record)
        for path in sorted(ROOT.glob("*.cases.json"))
        for record in json.loads(path.read_text())["cases"]
    ]


def rows_with_tokens(case: Case, expected: dict[str, Tensor]) -> float:
    """verl and OpenRLHF leave rows without trained tokens out of the mean over rows, we (as NeMo-RL and TRL)
    count every row: in such a batch theirs is ours times rows / rows with tokens."""
    return len(case.mask) / (case.mask.sum(1) > 0).sum().item()


def tokens_kept(case: Case, expected: dict[str, Tensor]) -> float:
    """verl's rejection shrinks the denominator of the token mean, ours is counted before any masking."""
    return case.mask.sum().item() / max(expected["mask_out"].sum().item(), 1)


@dataclass
class Form:
    """How our function stands for a peer's: options, other inputs, and what differs from it by a factor."""

    options: PolicyGradientOptions | Callable[[Case], PolicyGradientOptions]
    scale: Callable[[Case, dict[str, Tensor]], float] | None = None
    advantage: Callable[[Case], Tensor] | None = None
    prox: str = "prox"
    ref: str = "ref"
    gradient: bool = True


preset = PolicyGradientOptions.preset


def ppo(**changes) -> PolicyGradientOptions:
    return PolicyGradientOptions(**{"clip": (0.2, 0.2), "icepop": None} | changes)


def gspo_mean_over(reduction: str, **changes) -> PolicyGradientOptions:
    return ppo(ratio="sequence", reduction=reduction, **changes)


def row_sum(**changes) -> Callable[[Case], PolicyGradientOptions]:
    """Dr.GRPO's constant: the longest response of the scenario, as the peers took it."""
    return lambda case: ppo(reduction="row_sum", row_length=case.mask.shape[1], **changes)


ROW_MEAN = {"reduction": "row_mean"}
KL = {"kl_coefficient": 0.1}
K3_OF_TRL = ROW_MEAN | {"kl_coefficient": 0.04, "kl_clamp": None}
EPS_DAPO = (0.2, 0.28)
RECIPE = Form(preset("mopd_recipe", row_error=None))  # the peer's filter stands outside its loss
PAPER = Form(preset("mopd_paper", icepop=(0.5, 5.0), clip=(0.2, 0.2)))
PAPER_WIDE = Form(preset("mopd_paper", icepop=(0.2, 5.0), clip=EPS_DAPO))

TABLE: dict[str, Form] = {
    # NVIDIA-NeMo/RL
    "nemo_rl/ppo_clip_sym": Form(ppo()),
    "nemo_rl/ppo_clip_seqmean": Form(ppo(**ROW_MEAN)),
    "nemo_rl/dapo_clip_higher": Form(preset("dapo")),
    "nemo_rl/dual_clip_c3": Form(ppo(dual_clip=3.0)),
    "nemo_rl/kl_k1_b0.1": Form(ppo(kl="k1", **KL)),
    "nemo_rl/kl_k2_b0.1": Form(ppo(kl="k2", **KL)),
    "nemo_rl/kl_k3_b0.1": Form(ppo(kl="k3", **KL)),
    "nemo_rl/kl_k3_onpolicy_approx": Form(ppo(kl="k3", kl_gradient="behavior", **KL)),
    "nemo_rl/decoupled_is_untruncated": Form(ppo(tis=(0.0, math.inf))),
    "nemo_rl/tis_max2": Form(preset("grpo", clip=(0.2, 0.2))),
    "nemo_rl/tis_0.2_5": Form(ppo(tis=(0.2, 5.0))),
    "nemo_rl/icepop_0.5_5": Form(ppo(icepop=(0.5, 5.0))),
    "nemo_rl/icepop_0.5_2": Form(ppo(icepop=(0.5, 2.0))),
    "nemo_rl/icepop_inclusive_lower": Form(ppo(icepop=(1.0, 5.0))),
    "nemo_rl/seq_mask_tis_0.9_1.1": Form(ppo(sequence_mask=(0.9, 1.1))),
    "nemo_rl/gspo_3e-4_4e-4": Form(preset("gspo")),
    "nemo_rl/gspo_wide": Form(gspo_mean_over("row_mean")),
    "nemo_rl/cispo": Form(preset("cispo")),
    "nemo_rl/cispo_icepop": Form(preset("cispo", clip=EPS_DAPO, icepop=(0.5, 5.0))),
    "nemo_rl/reinforce": Form(preset("reinforce")),
    "nemo_rl/force_on_policy_tis_0.2_5": Form(preset("ultra_rlvr", row_error=None)),
    "nemo_rl/MOPD_eq3_icepop_0.5_5_eps0.2": PAPER,
    "nemo_rl/MOPD_eq3_icepop_0.2_5_eps0.2_0.28": PAPER_WIDE,
    "nemo_rl/MOPD_docs_reinforce_icepop": Form(preset("mopd_reinforce")),
    "nemo_rl/MOPD_public_recipe_tis": RECIPE,
    # verl
    "verl/ppo_vanilla_token-mean": Form(ppo(dual_clip=3.0)),
    "verl/ppo_vanilla_seq-mean-token-sum": Form(
        ppo(dual_clip=3.0, reduction="row_sum", row_length=1), rows_with_tokens
    ),
    "verl/ppo_vanilla_seq-mean-token-mean": Form(ppo(dual_clip=3.0, **ROW_MEAN), rows_with_tokens),
    "verl/ppo_vanilla_seq-mean-token-sum-norm": Form(row_sum(dual_clip=3.0), rows_with_tokens),
    "verl/dapo_vanilla": Form(preset("dapo", dual_clip=10.0)),
    "verl/gspo": Form(preset("gspo"), rows_with_tokens),
    # the peer's gradient is straight through: equal to ours only where a row has one advantage, as in GSPO
    "verl/gspo_wide": Form(gspo_mean_over("row_mean"), rows_with_tokens, gradient=False),
    "verl/cispo": Form(preset("cispo")),
    "verl/decoupled_token_tis2": Form(ppo(tis=(0.0, 2.0))),
    "verl/decoupled_token_icepop_0.5_5": Form(ppo(icepop=(0.5, 5.0))),
    # the peer's bounds are on behav / prox
    "verl/decoupled_geo_rs_token_tis": Form(
        ppo(tis=(0.0, 2.0), sequence_mask=(1 / 1.1, 1 / 0.9)), tokens_kept
    ),
    "verl/MOPD_eq3_icepop_0.5_5_eps0.2": PAPER,
    "verl/MOPD_eq3_icepop_0.2_5_eps0.2_0.28": PAPER_WIDE,
    # AReaL
    "areal/ppo_no_rejection": Form(ppo()),
    "areal/dapo_clip_higher": Form(preset("dapo")),
    "areal/dual_clip_c3": Form(ppo(dual_clip=3.0)),
    "areal/decoupled_mask_cap5": Form(ppo(icepop=(0.0, 5.0))),
    "areal/decoupled_icepop_0.5_5": Form(ppo(icepop=(0.5, 5.0))),
    "areal/decoupled_tis_clamp2": Form(ppo(tis=(0.0, 2.0))),
    "areal/decoupled_seq_mask_geo": Form(ppo(icepop=(0.9, 1.1), weight_level="sequence")),
    # log(w)^2 / 2 <= 1 / 2
    "areal/decoupled_token_k2_mask": Form(ppo(icepop=(math.exp(-1), math.exp(1)))),
    "areal/gspo_wide": Form(gspo_mean_over("token_mean")),
    "areal/gspo_3e-4_4e-4": Form(gspo_mean_over("token_mean", clip=(3e-4, 4e-4))),
    "areal/MOPD_eq3_icepop_0.5_5_eps0.2": PAPER,
    "areal/MOPD_eq3_icepop_0.2_5_eps0.2_0.28": PAPER_WIDE,
    # theta / behav with gradient times sg(teacher - theta): an unclipped ratio around behav
    "areal/distill_rl0.0_kd1.0": Form(
        ppo(clip=None), prox="behav", advantage=lambda case: case["teacher"] - case["curr"]
    ),
    # + .005 mean(theta - teacher): k1 to the teacher as reference
    "areal/distill_rl1.0_kd0.005": Form(
        ppo(kl="k1", kl_coefficient=0.005, kl_gradient="direct", kl_clamp=None), ref="teacher"
    ),
    # TRL
    "trl/grpo_tok": Form(ppo(**ROW_MEAN)),
    "trl/bnpo_tok": Form(ppo()),
    "trl/dapo_tok": Form(ppo()),
    "trl/dr_grpo_tok": Form(lambda case: preset("dr_grpo", row_length=case.kwargs["maxlen"])),
    "trl/dapo_clip_higher": Form(preset("dapo")),
    "trl/dapo_delta_twosided": Form(ppo(dual_clip=3.0)),
    "trl/grpo_kl_b0.04": Form(ppo(kl_gradient="direct", **K3_OF_TRL)),
    "trl/grpo_kl_biascorr": Form(ppo(kl_gradient="prox", **K3_OF_TRL)),
    "trl/gspo_wide": Form(gspo_mean_over("row_mean")),
    "trl/gspo_3e-4_4e-4": Form(preset("gspo")),
    "trl/cispo_max5": Form(preset("cispo", clip=None, cispo_cap=5.0)),
    "trl/luspo": Form(gspo_mean_over("row_sum", row_length=1)),  # mean over rows times their length
    "trl/dapo_token_truncate2": Form(ppo(tis=(0.0, 2.0))),
    "trl/dapo_token_mask_0.5_5": Form(ppo(icepop=(0.5, 5.0))),
    "trl/MOPD_eq3_icepop_0.5_5_eps0.2": PAPER,
    # OpenRLHF
    "openrlhf/ppo": Form(ppo()),
    "openrlhf/ppo_seqmean": Form(ppo(**ROW_MEAN), rows_with_tokens),
    "openrlhf/dapo": Form(preset("dapo")),
    "openrlhf/dual_clip3": Form(ppo(dual_clip=3.0)),
    "openrlhf/gspo": Form(gspo_mean_over("row_mean"), rows_with_tokens),
    "openrlhf/tis_0.5_5": Form(ppo(tis=(0.5, 5.0))),
    "openrlhf/icepop_0.5_5": Form(ppo(icepop=(0.5, 5.0))),
    "openrlhf/seq-mask-tis_0.5_5": Form(ppo(sequence_mask=(0.5, 5.0))),
    "openrlhf/MOPD_eq3_icepop_0.5_5_eps0.2": PAPER,
    # slime
    "slime/ppo": Form(ppo()),
    "slime/dapo": Form(preset("dapo")),
    "slime/dual3": Form(ppo(dual_clip=3.0)),
    "slime/cispo": Form(preset("cispo")),
    "slime/gspo": Form(gspo_mean_over("token_mean")),
    "slime/tis_0_2": Form(ppo(tis=(0.0, 2.0))),
    "slime/icepop_0.5_5": Form(ppo(icepop=(0.5, 5.0))),
    "slime/MOPD_eq3_icepop_0.5_5_eps0.2": PAPER,
    # prime-rl: cross-entropy is REINFORCE with advantage 1
    "prime_rl/ce": Form(preset("reinforce"), advantage=lambda case: torch.ones_like(case.mask)),
}

PRODUCT = "weighs a row by the product of its weights, which shrinks with length (NVIDIA-NeMo/RL#2269)"
SHRINKS = "masks by another measure, without a weight, and takes what it masks out of the denominator"
VOCABULARY = "a distance of whole distributions over the vocabulary: not a policy-gradient loss"
TRUST = "another trust region, by the difference of probabilities; no recipe of the report has it"
LEFT_OUT = {
    "nemo_rl/gspo_seqsum_is": PRODUCT,
    "nemo_rl/distill_full_vocab_forward": VOCABULARY,
    "nemo_rl/distill_full_vocab_reverse": VOCABULARY,
    "nemo_rl/distill_full_vocab_mixed": VOCABULARY,
    "verl/geo_mean_gmpo": "clips the log ratio of each token inside a geometric mean (GMPO)",
    "verl/dppo_tv": TRUST,
    "verl/dppo_kl": TRUST,
    "verl/decoupled_seq_tis2": PRODUCT,
    "verl/decoupled_seq_is_rs": PRODUCT,
    "verl/is_weights_sequence_2": PRODUCT,
    "verl/decoupled_token_mask_k1": SHRINKS,
    "verl/decoupled_k3_rs": SHRINKS + "; where it masks every token, see test_all_tokens_rejected",
    "verl/decoupled_token_tis2_batchnorm": "divides the weights by their mean over the batch",
    "verl/kl_penalty_abs": "|k1| is no estimate of a KL divergence",
    "areal/decoupled_seq_k3_mask": "masks rows by the mean of k3; ours go by the geometric mean or row_error",
    "areal/sapo": "a soft gate in place of the clip (SAPO)",
    "areal/prox_approx_v7": "estimates prox from versions; here the learner always scores it",
    "areal/prox_approx_v8": "as prox_approx_v7",
    "areal/prox_approx_v9": "as prox_approx_v7",
    "areal/m2po_mask_0.04": "masks by the second moment of the whole batch (M2PO)",
    "trl/sapo_tok": "a soft gate in place of the clip (SAPO)",
    "trl/dapo_sequence_mask_3": PRODUCT,
    "trl/gkd_jsd_beta0.0": VOCABULARY,
    "trl/gkd_jsd_beta0.1": VOCABULARY,
    "trl/gkd_jsd_beta0.5": VOCABULARY,
    "trl/gkd_jsd_beta1.0": VOCABULARY,
    "slime/opsm_mask_1e-4": "masks rows of negative advantage by their KL (OPSM)",
    "prime_rl/dppo_default": TRUST,
    "prime_rl/ipo_0.2": TRUST,
    "prime_rl/ref_kl_opd": "the advantage is of the live policy, with a one-sided trust region",
}
