"""Every case of golden/model but decoding, within its measured bounds, in float32 and float64."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from nemotron_ultra import HybridLM, TokenBatch, load_model
from nemotron_ultra.objectives.next_token import NextToken

FULL = [
    "a_hybrid_latent",
    "b_moe_groups",
    "b2_moe_nonorm",
    "b3_top1_norm",
    "c_mamba",
    "c2_mamba_short",
    "d_attention",
    "g_dt_limit",
    "h_bias",
]
LOGITS = {torch.float32: 1e-4, torch.float64: 1e-9}


class Case:
    """A golden folder. NEMOTRON_ULTRA_GOLDEN may name another set of the same layout."""

    def __init__(self, golden: Path, name: str):
        self.path = golden / "model" / name
        if not self.path.is_dir():
            pytest.skip(f"no case {name} in this set")
        self.tensors = load_file(self.path / "golden.safetensors")

    def __getitem__(self, key: str) -> torch.Tensor:
        return self.tensors[key]

    def model(self, dtype: torch.dtype = torch.float32) -> HybridLM:
        return load_model(self.path, dtype=dtype)

    def under(self, prefix: str) -> dict[str, torch.Tensor]:
        return {k.removeprefix(prefix): v for k, v in self.tensors.items() if k.startswith(prefix)}


def close(actual: torch.Tensor, expected: torch.Tensor, atol: float, what: str = "") -> None:
    difference = (
        (actual.detach().double() - expected.double()).abs().max().item() if expected.numel() else 0.0
    )
    assert difference <= atol, f"{what}: off by {difference:.3g}, allowed {atol:.3g}"


def documents(
    ids_BS: torch.Tensor, labels_BS: torch.Tensor, real_BS: torch.Tensor | None = None
) -> TokenBatch:
    """Rows as documents. `labels_BS` are the peer's: shifted inside the loss, -100 where there is none."""
    real_BS = torch.ones_like(ids_BS, dtype=torch.bool) if real_BS is None else real_BS
    batch = TokenBatch.from_documents([ids[real].tolist() for ids, real in zip(ids_BS, real_BS, strict=True)])
    labelled_T = torch.cat(
        [F.pad((y[r] != -100)[1:], (0, 1)) for y, r in zip(labels_BS, real_BS, strict=True)]
    )
    return replace(batch, weight_T=batch.weight_T * labelled_T)


def check_gradients(model: HybridLM, expected: dict[str, torch.Tensor]) -> None:
    assert expected
    parameters = dict(model.named_parameters())
    for name, grad in expected.items():
        close(parameters[name].grad, grad, 2e-4 * grad.abs().max().item() + 1e-6, name)


def loss_of(model: HybridLM, batch: TokenBatch, scale: float = 0.0, depths: int = 0):
    objective = NextToken(mtp_loss_scale=scale, balance_coefficient=0.0)
    output = model(batch.tokens_T, batch.cu_seqlens, mtp_depths=depths, trace=True)
    return output, *objective(output, batch, objective.count(batch))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("name", FULL)
def test_logits_and_loss(golden, name, dtype):
    case = Case(golden, name)
    ids_BS = case["full.input_ids"]
    model = case.model(dtype)
    close(model.logits(ids_BS), case["full.logits_f64"], LOGITS[dtype], "logits")
    _, loss, _ = loss_of(model, documents(ids_BS, case["full.labels"]))
    close(loss, case["full.loss_f64"], 1e-5, "loss")


@pytest.mark.parametrize("name", FULL)
def test_hidden_states_router_and_gradients(golden, name):
    case = Case(golden, name)
    model = case.model()
    output, loss, _ = loss_of(model, documents(case["full.input_ids"], case["full.labels"]))
    for i, hidden in enumerate(output.trace.hidden):
        check_hidden(hidden, case[f"full.hidden.{i}"], f"hidden.{i}")
    check_hidden(output.hidden_TD, case["full.final_hidden"], "final_hidden")
    check_router(output.trace.router, case.under("full.router."))
    loss.backward()
    check_gradients(model, case.under("full.grad."))


def check_hidden(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    close(actual, expected.flatten(0, -2), 5e-5 * expected.abs().max().item(), what)


def check_router(traces: dict, expected: dict[str, torch.Tensor]) -> None:
    bounds = {"weights": ("weights_TK", 2e-5), "gate_out": ("gate_out_TE", 1e-4)}
    for key, value in expected.items():
        layer, what = key.split(".")
        trace = traces[f"backbone.layers.{layer}.mixer"]
        if what == "indices":
            assert torch.equal(trace.indices_TK, value), key
        else:
            field, bound = bounds[what]
            close(getattr(trace, field), value, bound, key)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side(golden, side):
    case = Case(golden, "e_padded")
    mask_BS = case[f"{side}.attention_mask"]
    logits_BSV = case.model().logits(case[f"{side}.input_ids"], mask_BS)
    real_BS = mask_BS.bool()
    close(logits_BSV[real_BS], case[f"{side}.logits"][real_BS], 1e-4)
    assert logits_BSV[~real_BS].abs().max() == 0
    for row, real_S in enumerate(real_BS):
        close(logits_BSV[row][real_S], case[f"row{row}.logits"][0], 1e-4, f"row{row}")


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batch_computes_its_real_tokens(golden, side):
    """The peer's loss of left padding also counts what padding guesses of the first token; ours does not."""
    case = Case(golden, "e_padded")
    model, real_BS = case.model(), case[f"{side}.attention_mask"].bool()
    batch = documents(case[f"{side}.input_ids"], case[f"{side}.labels"], real_BS)
    output, loss, _ = loss_of(model, batch)
    for i, hidden in enumerate(output.trace.hidden):
        expected = case[f"{side}.hidden.{i}"]
        close(hidden, expected[real_BS], 5e-5 * expected.abs().max().item(), f"hidden.{i}")
    flat = real_BS.flatten()
    check_router(output.trace.router, {k: v[flat] for k, v in case.under(f"{side}.router.").items()})
    close(loss, case["right.loss"], 1e-5, "loss")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_packed_logits_equal_documents_alone(golden, dtype):
    case = Case(golden, "i_packed")
    output = case.model(dtype)(case["packed.input_ids"][0], case["packed.cu_seqlens"])
    close(output.logits_TV, case["packed.logits_f64"][0], LOGITS[dtype])


def test_packed_training(golden):
    case = Case(golden, "i_packed")
    bounds, model = case["packed.cu_seqlens"].tolist(), case.model()
    ids = case["packed.input_ids"][0].tolist()
    batch = TokenBatch.from_documents([ids[a:b] for a, b in pairwise(bounds)])
    output, loss, _ = loss_of(model, batch)
    close(loss, case["packed.loss"], 1e-5, "loss")
    for i, hidden in enumerate(output.trace.hidden):
        check_hidden(hidden, case[f"packed.hidden.{i}"], f"hidden.{i}")
    check_router(output.trace.router, case.under("packed.router."))
    loss.backward()
    check_gradients(model, case.under("packed.grad."))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_mtp_depths(golden, dtype):
    case = Case(golden, "m_mtp")
    depths, ids_BS = int(case["mtp.depths"]), case["mtp.input_ids"]
    batch, model = documents(ids_BS, ids_BS), case.model(dtype)
    output, loss, metrics = loss_of(model, batch, float(case["mtp.loss_scale"]), depths)
    for k in range(1, depths + 1):
        valid = ids_BS.shape[1] - k
        hidden = output.mtp_hidden_JTD[k - 1].unflatten(0, ids_BS.shape)[:, :valid]
        expected = case[f"mtp.depth{k}.hidden"]
        close(hidden, expected, 5e-5 * expected.abs().max().item(), f"depth {k} hidden")
        logits = output.mtp_logits_JTV[k - 1].unflatten(0, ids_BS.shape)[:, :valid]
        close(logits, case[f"mtp.depth{k}.logits_f64"], LOGITS[dtype], f"depth {k} logits")
        close(metrics[f"mtp_{k}/loss"], case[f"mtp.depth{k}.ce"], 1e-5, f"depth {k} loss")
        trace = output.trace.router[f"mtp.layers.1.mixer#{k}"]
        assert torch.equal(trace.indices_TK, case[f"mtp.depth{k}.router.1.indices"]), f"depth {k} router"
    check_hidden(output.hidden_TD, case["mtp.final_hidden"], "final_hidden")
    close(output.logits_TV, case["mtp.main_logits"].flatten(0, 1), 1e-4, "main logits")
    close(metrics["loss"], case["mtp.main_ce"], 1e-5, "main loss")
    close(loss, case["mtp.total_loss"], 1e-5, "total loss")
    if dtype == torch.float32:
        loss.backward()
        check_gradients(model, case.under("mtp.grad."))


def test_dt_limit_is_the_configs_and_nothing_else(golden):
    case = Case(golden, "g_dt_limit")
    logits = case.model().logits(case["full.input_ids"])
    for other in ("full.logits_hf_default_clamp", "full.logits_no_clamp"):
        assert (logits - case[other]).abs().max() > 1e-3, other


def test_the_golden_set_is_whole(golden):
    if os.environ.get("NEMOTRON_ULTRA_GOLDEN"):
        pytest.skip("another set was asked for")
    names = {p.name for p in (golden / "model").iterdir()}
    small = {"a_hybrid_latent", "c2_mamba_short", "d_attention", "i_packed", "m_mtp"}
    whole = {*FULL, "e_padded", "i_packed", "m_mtp"} - {"b3_top1_norm"}
    assert names >= (small if golden == Path(__file__).parent / "data" else whole)
