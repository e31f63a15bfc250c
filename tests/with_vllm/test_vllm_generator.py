"""vLLM's generator keeps the contract of generators: run by name in an environment with vLLM (docs/vllm.md).

On a machine without a GPU vLLM's CPU build does it, with experts patched in for the tests.
"""

from __future__ import annotations

import os

import pytest
import torch
from cpu_relu2 import allow_relu2_experts, no_prefill_checkpoints

from generator_contract import CONTRACT, PROMPTS, Check, contract_model, distance, expected, greedy, tokens
from nemotron_ultra import load_model
from nemotron_ultra.errors import BackendError, ConfigError, DataError
from nemotron_ultra.generation import Sampler
from nemotron_ultra.generation.base import Request
from nemotron_ultra.generation.sampling import RowOptions, heated
from nemotron_ultra.generation.vllm_generator import VLLMGenerator, VLLMOptions
from nemotron_ultra.model.hybrid import HybridLM

pytestmark = pytest.mark.vllm
QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
SMALL = dict(max_tokens=1024, max_slots=32, dtype="float32", cache_bytes=1 << 28, eager=True)


def on_cpu() -> bool:
    """Asked first by every test: vLLM reads the environment when it is imported."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    return pytest.importorskip("vllm.platforms").current_platform.is_cpu()


def engine(model: HybridLM, **changes) -> VLLMGenerator:
    if on_cpu():
        allow_relu2_experts()
    return VLLMGenerator.of(model, VLLMOptions(**SMALL | changes))


@pytest.fixture(scope="module")
def hybrid() -> VLLMGenerator:
    """One engine for all checks, which `fresh` gives its first weights back.

    vLLM has one engine in a process at a time: the tests that start others come after those with `fresh`.
    """
    generator = engine(contract_model())
    yield generator
    generator.close()


@pytest.fixture
def fresh(hybrid: VLLMGenerator) -> VLLMGenerator:
    if hybrid.version:
        hybrid.load_weights(contract_model().state_dict().items(), 0)
    return hybrid


@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
def test_contract(check: Check, fresh: VLLMGenerator):
    check(fresh, contract_model())


def test_tokens_and_logprobs_of_the_sampler(fresh: VLLMGenerator):
    """The two generators, greedy, before and after new weights."""
    model = contract_model()
    for version, seed in ((0, 7), (1, 21), (2, 22)):
        model.init_weights(seed)
        if version:
            fresh.load_weights(model.state_dict().items(), version)
        ours = Sampler(model).generate(PROMPTS, max_new_tokens=64, temperature=0.0)
        theirs = fresh.generate(PROMPTS, max_new_tokens=64, temperature=0.0)
        assert tokens(ours) == tokens(theirs)
        gaps = [distance(b.logprobs, torch.tensor(a.logprobs)) for a, b in zip(ours, theirs, strict=True)]
        print(f"version {version}: largest log-prob difference {max(gaps):.1e}")
        assert max(gaps) < 1e-5


CUTS = [{"top_k": 3}, {"top_p": 0.2}, {"min_p": 0.6}, {"top_k": 12, "top_p": 0.5, "min_p": 0.3}]


@pytest.mark.parametrize("cuts", CUTS, ids=lambda cuts: "-".join(cuts))
@torch.no_grad()
def test_truncated_draws_as_the_sampler_defines_them(fresh: VLLMGenerator, cuts):
    model = contract_model()
    found = fresh.generate(PROMPTS, max_new_tokens=24, temperature=0.5, **cuts)
    for prompt, one in zip(PROMPTS, found, strict=True):
        options = RowOptions.of([Request(prompt=(), max_new_tokens=1, temperature=0.5, **cuts)] * 24, "cpu")
        logits_TV = model(torch.tensor(prompt + one.tokens), mtp_depths=0).logits_TV[len(prompt) - 1 : -1]
        logprob_TV = heated(logits_TV.double(), options).log_softmax(-1)
        assert distance(one.logprobs, logprob_TV.gather(1, torch.tensor(one.tokens)[:, None])[:, 0]) < 1e-5
        assert distance(one.model_logprobs, expected(model, prompt, one.tokens)) < 1e-5


def test_ids_beyond_the_vocabulary_are_never_drawn(fresh: VLLMGenerator):
    model, fresh.vocab_size = contract_model(), 10
    try:
        found = fresh.generate(PROMPTS, max_new_tokens=20, temperature=1.0)
    finally:
        fresh.vocab_size = 64
    for prompt, one in zip(PROMPTS, found, strict=True):
        assert set(one.tokens) <= set(range(10))
        plain = expected(model, prompt, one.tokens)
        ids = torch.tensor(prompt + one.tokens)
        logprob_TV = model(ids, mtp_depths=0).logits_TV.detach().double().log_softmax(-1)
        mass_T = logprob_TV[len(prompt) - 1 : -1, :10].logsumexp(-1)
        assert distance(one.logprobs, plain - mass_T) < 1e-5 > distance(one.model_logprobs, plain)


def test_prompts_that_no_forward_holds_together(fresh: VLLMGenerator):
    """40 x 200 tokens; on a GPU some are read in pieces. The same tokens as alone."""
    source = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, 64, (40, 200), generator=source).tolist()
    together = fresh.generate(prompts, max_new_tokens=8)
    for number in (0, 19, 39):
        (alone,) = fresh.generate([prompts[number]], max_new_tokens=8, seeds=[number])
        assert alone.tokens == together[number].tokens
        wanted = expected(contract_model(), prompts[number], alone.tokens)
        assert distance(together[number].logprobs, wanted) < 1e-5


def test_the_longest_prompt_that_fits(fresh: VLLMGenerator):
    (full,) = fresh.generate([[5] * 1000], max_new_tokens=24, temperature=0.7)
    assert distance(full.model_logprobs, expected(contract_model(), [5] * 1000, full.tokens)) < 1e-5
    with pytest.raises(DataError, match=r"prompt 0: longer.*1001 prompt tokens, max_new_tokens 24.*1024"):
        fresh.generate([[5] * 1001], max_new_tokens=24)
    with pytest.raises(ConfigError, match=r"temperature.*got 0.001.*0.01 and more"):
        fresh.generate([[5]], max_new_tokens=2, temperature=0.001)


def test_cached_beginnings_are_of_the_weights_in_use():
    """Prompts that share 600 tokens: read once per version, and never with states of older weights."""
    begin = torch.randint(3, 64, (600,), generator=torch.Generator().manual_seed(0)).tolist()
    prompts = [[*begin, i, i + 1] for i in range(3, 9)]
    model, cached = contract_model(), {"prefix_caching": True}
    if on_cpu():
        no_prefill_checkpoints()
        flags = {"enable_prefix_caching": True, "enable_chunked_prefill": True, "mamba_cache_mode": "align"}
        cached = {"engine": flags}
    generator = engine(model, **cached)
    for version, seed in ((0, 7), (1, 8)):
        model.init_weights(seed)
        if version:
            generator.load_weights(model.state_dict().items(), version)
        generator.generate(prompts[:1], max_new_tokens=2, temperature=0.0)
        assert generator.stats["prefill_tokens"] == 602  # nothing of it was there
        found = generator.generate(prompts, max_new_tokens=8, temperature=0.0)
        print(f"version {version}: {generator.stats['prefill_tokens']} of {6 * 602} prompt tokens were read")
        assert generator.stats["prefill_tokens"] < 3 * 602
        assert tokens(found) == [greedy(model, prompt, 8) for prompt in prompts]
    generator.close()


def test_drafts_leave_greedy_tokens_and_logprobs():
    """And the drafter gets the new weights too: weights with which it is always right make it so."""
    model = contract_model(pattern="*E-*")
    generator = engine(model, draft_tokens=2)
    for version in range(2):
        if version:
            agree(model)
            generator.load_weights(model.state_dict().items(), version)
        found = generator.generate(PROMPTS, max_new_tokens=30, temperature=0.0)
        assert tokens(found) == [greedy(model, prompt, 30) for prompt in PROMPTS]
        for prompt, one in zip(PROMPTS, found, strict=True):
            assert distance(one.logprobs, expected(model, prompt, one.tokens)) < 1e-5
        share = generator.stats["accepted"] / generator.stats["drafted"]
        print(f"version {version}: {share:.2f} of the drafts accepted")
        assert share > 0.9 if version else share < 0.5
    generator.close()


@torch.no_grad()
def agree(model: HybridLM) -> None:
    """The next id depends on the last one alone, and the MTP module computes just that."""
    state = model.state_dict()
    for name, tensor in state.items():
        if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj", "fc2_latent_proj.weight")):
            tensor.zero_()
    width = model.config.hidden_size
    state["mtp.layers.0.eh_proj.weight"].copy_(torch.eye(width, 2 * width))
    state["backbone.embeddings.weight"].mul_(50)  # beside which the norms' epsilon is nothing


def test_an_engine_in_a_process_of_its_own():
    """Without experts: what the tests patch in for the CPU does not reach other processes."""
    model = contract_model(pattern="M*-M")
    generator = engine(model, own_process=True)
    for version in range(2):
        if version:
            model.init_weights(8)
            generator.load_weights(model.state_dict().items(), version)
        found = generator.generate(PROMPTS, max_new_tokens=12, temperature=0.0)
        assert tokens(found) == [greedy(model, prompt, 12) for prompt in PROMPTS]
        assert {v for c in found for v in c.versions} == {version}
    generator.close()


def test_a_model_without_shared_experts():
    model = contract_model(moe_shared_expert_intermediate_size=0, moe_latent_size=0, n_group=2, topk_group=1)
    generator = engine(model)
    found = generator.generate(PROMPTS, max_new_tokens=12, temperature=0.0)
    assert tokens(found) == [greedy(model, prompt, 12) for prompt in PROMPTS]
    generator.close()


@pytest.mark.parametrize("options", [{"draft_tokens": 2}, {"prefix_caching": True}], ids=str)
def test_what_needs_older_mamba_states_is_refused_on_the_cpu(options):
    if not on_cpu():
        pytest.skip("GPU kernels keep several Mamba states of a request")
    with pytest.raises(BackendError, match=f"{next(iter(options))}: vLLM's CPU build"):
        engine(contract_model(), **options)


def test_an_engine_that_cannot_start_is_one_error(tmp_path):
    from nemotron_ultra import save_model

    save_model(contract_model(pattern="M*"), tmp_path / "model")
    assert load_model(tmp_path / "model").config.pattern == "M*"
    (tmp_path / "model" / "model.safetensors").unlink()
    with pytest.raises(BackendError, match="vLLM did not start on"):
        VLLMGenerator(tmp_path / "model", VLLMOptions(**SMALL))
