"""Cached decoding against the golden cases: logits of prefill and steps, cache contents, greedy tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nemotron_ultra import HybridLM, load_model
from nemotron_ultra.generation import generate
from nemotron_ultra.model.cache import Cache
from nemotron_ultra.model.hybrid import apply_head

BOUND = {torch.float32: 1e-4, torch.float64: 1e-9}
DTYPES = pytest.mark.parametrize("dtype", list(BOUND), ids=["fp32", "fp64"])


def case(golden: Path, name: str, key: str) -> tuple[Path, dict[str, torch.Tensor]]:
    """The folder and tensors of a case; skips where this set lacks it (the small copies have no decoding)."""
    path = golden / "model" / name
    if not path.is_dir():
        pytest.skip(f"no case {name} in this set")
    tensors = load_file(path / "golden.safetensors")
    if key not in tensors:
        pytest.skip(f"case {name} of this set has no {key}")
    return path, tensors


def close(actual: torch.Tensor, expected: torch.Tensor, bound: float) -> None:
    assert (actual.double() - expected.double()).abs().max() <= bound


def prefilled(model: HybridLM, ids_BS: torch.Tensor, capacity: int) -> tuple[torch.Tensor, Cache]:
    rows, length = ids_BS.shape
    bounds = torch.arange(rows + 1, dtype=torch.int32) * length
    return model.prefill(ids_BS.flatten(), bounds, capacity)


@DTYPES
def test_prefill_and_steps(golden, dtype):
    path, tensors = case(golden, "f_decode", "decode.input_ids")
    model, ids_BS = load_model(path, dtype=dtype), tensors["decode.input_ids"]
    first, (_, last) = int(tensors["decode.prefill_len"]), ids_BS.shape
    hidden_BD, cache = prefilled(model, ids_BS[:, :first], last)
    logits = [apply_head(hidden_BD, model.lm_head.weight)]
    for place in range(first, last):
        logits.append(apply_head(model.step(ids_BS[:, place], cache), model.lm_head.weight))
    logits_BSV = torch.stack(logits, 1)
    close(logits_BSV, tensors["decode.full_logits_f64"][:, first - 1 :], BOUND[dtype])
    close(logits_BSV[:, 0], tensors["decode.prefill_logits"][:, -1], 1e-4)
    close(logits_BSV[:, 1:], tensors["decode.step_logits"], 1e-4)


@DTYPES
def test_prefill_and_one_multi_token_step(golden, dtype):
    """After half of its tokens is kept, the rest comes again."""
    path, tensors = case(golden, "f_decode", "decode.input_ids")
    model, ids_BS = load_model(path, dtype=dtype), tensors["decode.input_ids"]
    first, (rows, last) = int(tensors["decode.prefill_len"]), ids_BS.shape
    _, cache = prefilled(model, ids_BS[:, :first], last)
    for begin, keep in ((first, 6), (first + 6, last - first - 6)):
        logits_BKV = apply_head(model.extend(ids_BS[:, begin:], cache), model.lm_head.weight)
        cache.commit([keep] * rows)
        close(logits_BKV, tensors["decode.full_logits_f64"][:, begin:], BOUND[dtype])
        close(logits_BKV, tensors["decode.chunked_logits"][:, begin:], 1e-4)


def test_cache_contents(golden):
    path, tensors = case(golden, "f_decode", "decode.input_ids")
    model, ids_BS = load_model(path), tensors["decode.input_ids"]
    first, (_, last) = int(tensors["decode.prefill_len"]), ids_BS.shape
    _, cache = prefilled(model, ids_BS[:, :first], last)
    check_cache(cache, tensors, "decode.cache_prefill.", first)
    for place in range(first, last):
        model.step(ids_BS[:, place], cache)
    check_cache(cache, tensors, "decode.cache_end.", last)


def check_cache(cache: Cache, tensors: dict[str, torch.Tensor], prefix: str, length: int) -> None:
    """The peer's window holds one input more than a convolution needs from before."""
    assert cache.length_B.tolist() == [length] * cache.size
    expected = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
    assert expected
    for key, value in expected.items():
        layer, what = key.split(".")
        state = cache.layers[int(layer)]
        if what == "conv_state":
            actual, value = state.window_BKC.mT, value[..., 1:]
        elif what == "ssm_state":
            actual = state.ssm_BGNX.transpose(2, 3).reshape(value.shape)
        else:
            actual = (state.key_BGSP if what == "key" else state.value_BGSP)[:, :, :length]
        close(actual, value, 5e-5 * value.abs().max().item())


@DTYPES
def test_greedy_tokens(golden, dtype):
    path, tensors = case(golden, "a_hybrid_latent", "generate.prompt")
    model, prompt_BS = load_model(path, dtype=dtype), tensors["generate.prompt"]
    expected_BS = tensors["generate.sequences"][:, prompt_BS.shape[1] :]
    found = generate(model, prompt_BS.tolist(), expected_BS.shape[1])
    assert [completion.tokens for completion in found] == expected_BS.tolist()
    logprob_BSV = tensors["generate.step_logits"].double().log_softmax(-1)
    expected = logprob_BSV.gather(-1, expected_BS[..., None])[..., 0]
    close(torch.tensor([completion.logprobs for completion in found]), expected, 1e-4)


@DTYPES
def test_greedy_tokens_of_prompts_of_different_lengths(golden, dtype):
    """The peer pads on the left; here the prompts are packed without padding."""
    path, tensors = case(golden, "e_padded", "left.generate")
    model, real_BS = load_model(path, dtype=dtype), tensors["left.attention_mask"].bool()
    prompts = [ids[real].tolist() for ids, real in zip(tensors["left.input_ids"], real_BS, strict=True)]
    expected = tensors["left.generate"][:, real_BS.shape[1] :].tolist()
    found = generate(model, prompts, len(expected[0]))
    assert [completion.tokens for completion in found] == expected
