"""Greedy goldens come out the same with drafts; models without an MTP module get one of random weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nemotron_ultra import HybridLM, load_model
from nemotron_ultra.generation import generate
from nemotron_ultra.generation.drafter import Drafter

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])


def case(golden: Path, name: str, key: str, dtype: torch.dtype) -> tuple[HybridLM, dict[str, torch.Tensor]]:
    """Skips where this set lacks the case or the key (the small copies have no decoding)."""
    folder = golden / "model" / name
    tensors = load_file(folder / "golden.safetensors") if folder.is_dir() else {}
    if key not in tensors:
        pytest.skip(f"no {key} of case {name} in this set")
    model = load_model(folder, dtype=dtype)
    if model.mtp is None:
        wider = HybridLM(replace(model.config, num_nextn_predict_layers=1, mtp_pattern="*E"), dtype=dtype)
        missing, unexpected = wider.load_state_dict(model.state_dict(), strict=False)
        assert not unexpected and all(name.startswith("mtp.") for name in missing)
        model = wider
    return model, tensors


@DTYPES
@pytest.mark.parametrize("drafts", [1, 3, 7])
def test_greedy_tokens(golden, drafts, dtype):
    model, tensors = case(golden, "a_hybrid_latent", "generate.prompt", dtype)
    prompt_BS = tensors["generate.prompt"]
    expected_BS = tensors["generate.sequences"][:, prompt_BS.shape[1] :]
    found = generate(model, prompt_BS.tolist(), expected_BS.shape[1], draft_tokens=drafts)
    assert [completion.tokens for completion in found] == expected_BS.tolist()
    logprob_BSV = tensors["generate.step_logits"].double().log_softmax(-1)
    expected = logprob_BSV.gather(-1, expected_BS[..., None])[..., 0]
    logprobs = torch.tensor([completion.logprobs for completion in found])
    assert (logprobs.double() - expected).abs().max() < 1e-4


@DTYPES
@pytest.mark.parametrize("drafts", [1, 3, 7])
def test_greedy_tokens_of_prompts_of_different_lengths(golden, drafts, dtype):
    model, tensors = case(golden, "e_padded", "left.generate", dtype)
    real_BS = tensors["left.attention_mask"].bool()
    prompts = [ids[real].tolist() for ids, real in zip(tensors["left.input_ids"], real_BS, strict=True)]
    expected = tensors["left.generate"][:, real_BS.shape[1] :].tolist()
    found = generate(model, prompts, len(expected[0]), draft_tokens=drafts)
    assert [completion.tokens for completion in found] == expected


@DTYPES
def test_the_first_draft_is_the_golden_depth_one(golden, dtype):
    """After each beginning of a golden row, one draft and what the backbone says itself."""
    model, tensors = case(golden, "m_mtp", "mtp.input_ids", dtype)
    for ids, drafts_SV in zip(
        tensors["mtp.input_ids"].tolist(), tensors["mtp.depth1.logits_f64"], strict=True
    ):
        for place in range(1, len(ids) - 1):
            assert first_draft(model, ids[: place + 1], ids[place + 1]) == int(drafts_SV[place].argmax())


def first_draft(model: HybridLM, ids: list[int], after: int) -> int:
    """What a drafter says comes after the prompt `ids` and the token `after`."""
    prompt_T = torch.tensor(ids)
    hidden_TD, _ = model.prefill(prompt_T, None, len(ids), every=True)
    drafter = Drafter(model, 1, 64, model.config.vocab_size)
    drafter.admitted([prompt_T], [hidden_TD], torch.tensor([0]))
    drafter.saw(0, hidden_TD[None, -1:], torch.tensor([[after]]), [1])
    return int(drafter.draft(1, drafter.waiting(), lambda logits_BV, number: logits_BV.argmax(-1)))
