"""The compiled decode step against the functions of torch, and when it has to stand back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from drafting import agreeing_model
from micro import micro_model
from nemotron_ultra.config.precision import PrecisionConfig, PrecisionRule
from nemotron_ultra.errors import BackendError, DataError
from nemotron_ultra.generation import Sampler, generate
from nemotron_ultra.generation.drafter import Drafter
from nemotron_ultra.model.cache import Cache
from nemotron_ultra.model.draft import Drafts, Pairs
from nemotron_ultra.model.hybrid import HybridLM, apply_head
from nemotron_ultra.model.latent_moe import Experts
from nemotron_ultra.model.linear import Linear, plain_product
from nemotron_ultra.ops import decode_kernels as kernels
from nemotron_ultra.precision.apply import apply_policy

WIDE = dict(
    hidden_size=64, mamba_num_heads=6, mamba_head_dim=12, ssm_state_size=20, n_groups=3, conv_kernel=3
)
CHANGES = [
    {},
    WIDE | {"pattern": "M*M"},
    {"pattern": "MEE", "n_routed_experts": 12, "num_experts_per_tok": 5, "norm_topk_prob": False},
    {"pattern": "E*", "moe_latent_size": 0, "moe_shared_expert_intermediate_size": 0},
    {"pattern": "*-", "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 10},
    {"use_bias": True, "mlp_bias": True, "time_step_limit": (0.02, 0.05)},
    {"pattern": "ME", "n_routed_experts": 8, "n_group": 4, "topk_group": 2},  # E by torch, M compiled
]

needs_compiler = pytest.mark.skipif(kernels.library() is None, reason="no C compiler here")


@pytest.fixture
def torch_only(monkeypatch):
    """Call it to decode without the kernels from then on."""

    def leave() -> None:
        monkeypatch.setattr(kernels, "library", lambda: None)

    return leave


def drawn(**changes) -> HybridLM:
    """Every parameter away from 0 and 1, corrections of the router too."""
    model, draw = micro_model(**changes), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.ndim == 1 and "A_log" not in name:
                tensor.add_(torch.randn(tensor.shape, generator=draw) * 0.2)
    return model


def run(model: HybridLM, rows: int) -> tuple[list[torch.Tensor], Cache]:
    """Hidden states of steps and extends on prompts of different lengths."""
    lengths = [1 + 3 * row % 7 for row in range(rows)]
    draw = torch.Generator().manual_seed(rows)
    tokens_T = torch.randint(3, 64, (sum(lengths),), generator=draw)
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    _, cache = model.prefill(tokens_T, bounds, 30)
    found = [model.step(torch.randint(3, 64, (rows,), generator=draw), cache)]
    found.append(model.extend(torch.randint(3, 64, (rows, 4), generator=draw), cache))
    cache.commit([row % 5 for row in range(rows)])
    found += [model.step(torch.randint(3, 64, (rows,), generator=draw), cache) for _ in range(4)]
    return found, cache


@needs_compiler
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("rows", [1, 2, 9])
@pytest.mark.parametrize("changes", CHANGES, ids=lambda c: c.get("pattern", "all"))
def test_same_as_torch(changes, rows, threads, torch_only):
    model, before = drawn(**changes), torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        found, cache = run(model, rows)
    finally:
        torch.set_num_threads(before)
    assert any(fast for _, _, fast in cache.plan.segments)
    torch_only()
    expected, plain = run(model, rows)
    assert plain.plan is None
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() < 2e-5 * max(1.0, other.abs().max().item())


@needs_compiler
def test_the_head_of_few_rows():
    model = drawn(vocab_size=67)
    for rows in (1, 3, 8):
        hidden_BD = torch.randn(rows, 32, generator=torch.Generator().manual_seed(rows))
        assert torch.allclose(
            model.next_logits(hidden_BD), apply_head(hidden_BD, model.lm_head.weight), atol=1e-5
        )


@needs_compiler
@pytest.mark.parametrize("usable", [67, 50, 3])
def test_greedy_ids_with_their_logprobs(usable):
    model = drawn(vocab_size=67)
    hidden_BD = torch.randn(9, 32, generator=torch.Generator().manual_seed(usable))
    logits_BV = apply_head(hidden_BD, model.lm_head.weight).detach()
    token_B, logprob_B, model_B = model.likeliest(hidden_BD, usable)
    assert torch.equal(token_B, logits_BV[:, :usable].argmax(-1))
    for found_B, ids in ((logprob_B, usable), (model_B, 67)):
        expected_B = logits_BV[:, :ids].log_softmax(-1).gather(1, token_B[:, None])[:, 0]
        assert torch.allclose(found_B, expected_B, atol=1e-5)


def rounded(x: Tensor) -> Tensor:
    """As bytes with a scale for each row hold it."""
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
    return (x / scale).round() * scale


def rounded_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return plain_product(rounded(x), rounded(weight), bias)


def rounded_experts(
    x_TL: Tensor, indices_TK: Tensor, weights_TK: Tensor, up_EFL: Tensor, down_ELF: Tensor
) -> Tensor:
    h_TKF = torch.einsum("tl,tkfl->tkf", rounded(x_TL), rounded(up_EFL)[indices_TK]).relu() ** 2
    y_TKL = torch.einsum("tkf,tklf->tkl", rounded(h_TKF), rounded(down_ELF)[indices_TK])
    return (weights_TK[..., None] * y_TKL).sum(1)


def rounding_model(**changes) -> HybridLM:
    """Its MTP module and head round weights and activations, all but the router."""
    model = agreeing_model(torch.float32, **changes)
    for module in model.mtp.modules():
        if type(module) is Linear:
            module.product = rounded_product
        if isinstance(module, Experts):
            module.run = rounded_experts
    model.next_logits = lambda hidden_BD: rounded_product(hidden_BD, model.lm_head.weight, None)
    return model


@needs_compiler
@torch.no_grad()
@pytest.mark.parametrize(
    ("rows", "changes"),
    [
        (1, {}),
        (3, {"mtp_pattern": "*-*"}),
        (7, {"vocab_size": 131}),
        (2, {"hidden_size": 80, "moe_latent_size": 24, "vocab_size": 65, "mlp_bias": True}),
        (1, {"moe_shared_expert_intermediate_size": 0, "moe_latent_size": 0, "mlp_bias": True}),
    ],
)
def test_drafts_in_one_call_are_those_one_by_one(rows, changes):
    """Rows take in different numbers of pairs; what they draft is forgotten."""
    caches = []
    for model in (agreeing_model(torch.float32, **changes), rounding_model(**changes)):
        draw, drafter = torch.Generator().manual_seed(rows), Drafter(model, rows, 300, 64)
        drafter.cache.admit_new(rows)
        drafter.behind, found = [[] for _ in range(rows)], []
        for number in range(1, 9):
            hidden_BKD = torch.randn(rows, 4, model.config.hidden_size, generator=draw)
            token_BK = torch.randint(64, (rows, 4), generator=draw)
            drafter.saw(0, hidden_BKD, token_BK, [1 + (row + number) % 4 for row in range(rows)])
            found.append(drafter.draft(number, drafter.waiting()))
        caches.append((drafter.cache, found))
    (one, drafts), (other, expected) = caches
    assert all(map(torch.equal, drafts, expected))
    assert one.lengths == other.lengths == one.length_B.tolist()
    for row, length in enumerate(one.lengths):
        for a, b in zip(one.layers[0].tensors(), other.layers[0].tensors(), strict=True):
            assert torch.allclose(a[row, :, :length], b[row, :, :length], atol=1e-5)


@needs_compiler
@pytest.mark.parametrize(("rows", "usable"), [(1, 64), (3, 40)])
def test_verified_in_one_call_as_step_by_step(rows, usable):
    """Drafts that are likeliest and drafts that are not: hidden states, ids, what stays, and the cache."""
    model = drawn()
    caches = [run(model, rows)[1] for _ in range(2)]
    pending_B = torch.arange(5, 5 + rows)
    greedy_BK = _greedy(model, pending_B, run(model, rows)[1], usable)
    for row in range(1, rows):
        greedy_BK[row, row] = (greedy_BK[row, row] + 1) % usable
    tokens_BK = torch.cat([pending_B[:, None], greedy_BK], 1)
    found = model.verify(tokens_BK, caches[0], usable)
    hidden_BKD = model.extend(tokens_BK, caches[1])
    expected = model.likeliest(hidden_BKD.flatten(0, 1), usable)
    assert found.keep_B.tolist() == [4, 2, 3][:rows]
    caches[1].commit(found.keep_B)
    assert torch.equal(found.hidden_MD, hidden_BKD.flatten(0, 1))
    assert all(map(torch.equal, (found.token_M, found.logprob_M, found.model_logprob_M), expected))
    _same(*caches)


def _greedy(model: HybridLM, pending_B: Tensor, cache: Cache, usable: int) -> Tensor:
    """The next three ids of each row."""
    found = []
    for _ in range(3):
        pending_B = model.likeliest(model.step(pending_B, cache), usable)[0]
        found.append(pending_B)
    return torch.stack(found, 1)


def _same(one: Cache, other: Cache) -> None:
    assert one.lengths == other.lengths == one.length_B.tolist() == other.length_B.tolist()
    for state, source in zip(one.layers, other.layers, strict=True):
        for a, b in zip(*(s.tensors() if s else [] for s in (state, source)), strict=True):
            assert torch.equal(a, b)


@needs_compiler
@pytest.mark.parametrize("token", [-1, 64, 1 << 40])
def test_an_id_that_the_model_does_not_have_changes_nothing(token):
    model = drawn()
    _, cache = run(model, 2)
    _, untouched = run(model, 2)
    wrong_B = torch.tensor([3, token])
    for call in (
        lambda: model.step(wrong_B, cache),
        lambda: model.extend(wrong_B[:, None], cache),
        lambda: model.verify(torch.stack([wrong_B, wrong_B], 1), cache, 64),
    ):
        with pytest.raises(DataError, match=f"no id of this model; got {token}"):
            call()
    _same(cache, untouched)
    model.step(torch.tensor([3, 4]), cache)


@needs_compiler
@pytest.mark.parametrize("lengths", [[1], [7, 3, 5], [250], [60, 9, 60, 60]])
def test_short_prompts_are_read_as_long_ones(lengths):
    """`read` by the compiled layers beside `prefill`: hidden states, and those of a second piece."""
    model, count = drawn(), sum(lengths)
    tokens_T = torch.randint(64, (count,), generator=torch.Generator().manual_seed(count))
    bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    expected_TD, expected = model.prefill(tokens_T, bounds, max(lengths) + 4, every=True)
    found_TD, cache = model.read(tokens_T, lengths, max(lengths) + 4, every=True)
    last_BD, _ = model.read(tokens_T, lengths, max(lengths))
    assert cache.plan is not None and expected.plan is None
    assert torch.allclose(found_TD, expected_TD, atol=2e-5)
    assert torch.allclose(last_BD, expected_TD[bounds[1:].long() - 1], atol=2e-5)
    more_T = torch.arange(4 * len(lengths))
    found_BD, _ = model.read(more_T, [4] * len(lengths), cache)
    bounds = torch.arange(len(lengths) + 1, dtype=torch.int32) * 4
    assert torch.allclose(found_BD, model.prefill(more_T, bounds, expected)[0], atol=2e-5)
    assert cache.lengths == expected.lengths == [length + 4 for length in lengths]


@needs_compiler
@torch.no_grad()
@pytest.mark.parametrize("part", ["lm_head", "mtp.layers.0.mixer.v_proj", "mtp.layers.1.mixer.experts"])
def test_drafts_follow_new_weights(part):
    """Weights changed in place between two rounds: what is drafted then, new weights alone draft."""
    models = [drawn(), drawn()]
    makers = [Drafts(model, 64) for model in models]
    draw = torch.Generator().manual_seed(3)
    pairs = torch.randn(2, 4, 32, generator=draw), torch.randint(64, (2, 4), generator=draw)

    def drafted(number: int) -> tuple[Tensor, Cache]:
        cache = models[number].new_cache(2, 60, pattern=models[number].config.mtp_pattern)
        cache.admit_new(2)
        return makers[number].run(cache, Pairs.of(*pairs, [4, 3]), 6), cache

    before, _ = drafted(0)
    for model in models:
        for name, weight in model.named_parameters():
            if name.startswith(part):
                weight.mul_(-300)
    (found, cache), (expected, other) = drafted(0), drafted(1)
    assert torch.equal(found, expected) and not torch.equal(found, before)
    for a, b in zip(cache.layers[0].tensors(), other.layers[0].tensors(), strict=True):
        assert torch.equal(a[:, :, :3], b[:, :, :3])


@needs_compiler
def test_new_weights_are_used_at_once_wherever_they_lie():
    """Values copied in between two steps, and a parameter whose memory is another one."""
    model, other = drawn(), micro_model()
    other.init_weights(9)
    _, cache = run(model, 2)
    _, reference = run(other, 2)
    model.load_state_dict(other.state_dict())
    moved = model.backbone.layers[0].mixer.in_proj.weight
    moved.data = moved.data.clone()
    tokens_B = torch.tensor([5, 9])
    for state, source in zip(cache.layers, reference.layers, strict=True):
        for home, tensor in zip(*(s.tensors() if s else [] for s in (state, source)), strict=True):
            home.copy_(tensor)
    assert torch.equal(model.step(tokens_B, cache), other.step(tokens_B, reference))


def _assigned(model: HybridLM, other: HybridLM) -> None:
    model.load_state_dict({name: t.clone() for name, t in other.state_dict().items()}, assign=True)


def _layer(model: HybridLM, other: HybridLM) -> None:
    model.backbone.layers[2] = other.backbone.layers[2]


def _mixer(model: HybridLM, other: HybridLM) -> None:
    model.backbone.layers[0].mixer = other.backbone.layers[0].mixer


def _parameter(model: HybridLM, other: HybridLM) -> None:
    model.backbone.layers[1].mixer.in_proj.weight = other.backbone.layers[1].mixer.in_proj.weight


def _product(model: HybridLM, other: HybridLM) -> None:
    model.backbone.layers[0].mixer.in_proj.product = lambda x, weight, bias: 2 * (x @ weight.T)


@needs_compiler
@torch.no_grad()
@pytest.mark.parametrize("replace", [_assigned, _layer, _mixer, _parameter, _product])
def test_what_is_replaced_under_a_live_cache_is_used(replace):
    model, other = micro_model(pattern="MM*E"), micro_model(pattern="MM*E")
    other.init_weights(9)
    _, cache = run(model, 2)
    _, copy = run(model, 2)
    replace(model, other)
    copy.plan = None  # it knows nothing of before
    tokens_B = torch.tensor([5, 9])
    plain_B = micro_model(pattern="MM*E").step(tokens_B, run(micro_model(pattern="MM*E"), 2)[1])
    found_B = model.step(tokens_B, cache)
    assert torch.equal(found_B, model.step(tokens_B, copy)) and not torch.equal(found_B, plain_B)


@needs_compiler
@torch.no_grad()
def test_a_replaced_head_is_drafted_with():
    model, other = drawn(), drawn()
    maker, draw = Drafts(model, 64), torch.Generator().manual_seed(3)
    pairs = torch.randn(1, 2, 32, generator=draw), torch.randint(64, (1, 2), generator=draw)

    def drafted(maker: Drafts) -> Tensor:
        cache = model.new_cache(1, 60, pattern=model.config.mtp_pattern)
        cache.admit_new(1)
        return maker.run(cache, Pairs.of(*pairs, [2]), 6)

    before = drafted(maker)
    for one in (model, other):
        one.lm_head.weight = torch.nn.Parameter(one.lm_head.weight.roll(3, 0))
    assert torch.equal(drafted(maker), drafted(Drafts(other, 64)))
    assert not torch.equal(before, drafted(maker))


@needs_compiler
def test_models_made_for_inference_alone_draft_too():
    with torch.inference_mode():
        model = micro_model()
    plain, drafted = (generate(model, [[1, 2, 3]], 6, draft_tokens=k)[0].tokens for k in (0, 3))
    assert plain == drafted


@needs_compiler
@pytest.mark.parametrize(
    "changes",
    [
        {"pattern": "M", "mamba_num_heads": 300, "mamba_head_dim": 1, "n_groups": 1, "ssm_state_size": 4},
        {"pattern": "M", "mtp_pattern": "-" * 140},
    ],
    ids=["many heads in a group", "many layers of a module"],
)
def test_sizes_beyond_what_kernels_hold_at_once(changes, torch_only):
    model = agreeing_model(torch.float32, **changes)
    found = [generate(model, [[1, 2, 3], [4]], 12, draft_tokens=k) for k in (0, 3)]
    torch_only()
    for some in found:
        for one, other in zip(some, generate(model, [[1, 2, 3], [4]], 12), strict=True):
            assert one.tokens == other.tokens
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


@needs_compiler
def test_weights_loaded_where_changes_are_not_counted_are_drafted_with():
    with torch.inference_mode():
        model, other = agreeing_model(torch.float32), agreeing_model(torch.float32)
        other.lm_head.weight.copy_(other.lm_head.weight.roll(3, 0))
        sampler, fresh = (Sampler(one, draft_tokens=3) for one in (model, other))
        sampler.generate([[5, 6]], max_new_tokens=40, temperature=0.0)
        sampler.load_weights(other.state_dict().items(), 1)
        for one in (sampler, fresh):
            one.generate([[5, 6]], max_new_tokens=40, temperature=0.0)
    assert sampler.stats["accepted"] == fresh.stats["accepted"] > 0


@needs_compiler
def test_numbers_that_are_none_are_never_the_largest():
    """Logits of one row: x times a column, where a weight that is NaN makes one."""
    weight_VD = torch.full((200, 4), -1.0)
    weight_VD[0], weight_VD[64], weight_VD[64 + 16] = 0, torch.nan, 5
    token_B, *_ = kernels.likeliest(torch.ones(1, 4), weight_VD, 200)
    assert token_B.tolist() == [80]


@needs_compiler
def test_a_head_in_another_dtype_is_left_to_torch():
    """Also where its memory is that of the head before."""
    model = micro_model()
    _, cache = run(model, 2)
    head = model.lm_head.weight
    memory = head.data
    head.data = memory.view(torch.bfloat16)[:, :32]
    assert head.data_ptr() == memory.data_ptr()
    assert model.verify(torch.tensor([[1], [2]]), cache, 64) is None


@pytest.mark.parametrize("lengths", [[4, 1], [150, 151]])
def test_a_prompt_with_an_unknown_id_leaves_the_cache_as_it_was(lengths):
    model = micro_model()
    cache = model.new_cache(2, 200)
    cache.admit_new(2)
    tokens_T = torch.ones(sum(lengths), dtype=torch.int64)
    tokens_T[-1] = 99
    with pytest.raises((DataError, IndexError)):
        model.read(tokens_T, lengths, cache)
    tokens_T[-1] = 9
    assert model.read(tokens_T, lengths, cache)[1].lengths == lengths


@needs_compiler
def test_float64_and_small_states_are_left_to_torch():
    _, cache = run(micro_model(torch.float64), 2)
    assert [fast for *_, fast in cache.plan.segments] == [False]
    model = micro_model()
    half = model.new_cache(1, 9, "fp16_sr")
    half.admit_new(1)
    model.step(torch.tensor([5]), half)
    assert half.plan.segments == [(0, 1, False), (1, 5, True)]


@needs_compiler
def test_a_precision_policy_keeps_its_products(torch_only):
    """Routed experts in MXFP8: those layers run by themselves, and results are those of torch."""
    changes = {"moe_latent_size": 32, "moe_intermediate_size": 32}
    precision = PrecisionConfig(
        name="experts", default="fp32", rules=[PrecisionRule(match="*.experts", format="mxfp8")]
    )
    model, plain = drawn(**changes), drawn(**changes)
    for one in (model, plain):
        for name, parameter in one.named_parameters():
            parameter.data.mul_(8 if "mixer.experts" in name or "fc" in name else 1)
    apply_policy(model, precision)
    found, cache = run(model, 3)
    assert cache.plan.segments == [(0, 1, True), (1, 2, False), (2, 4, True), (4, 5, False)]
    assert (found[-1] - run(plain, 3)[0][-1]).abs().max() > 1e-4
    torch_only()
    assert (found[-1] - run(model, 3)[0][-1]).abs().max() < 0.05  # roundings to 8 bits may fall otherwise


def test_without_a_compiler_and_with_the_switch_torch_decodes(monkeypatch):
    for name, value in ((kernels.SWITCH, "torch"), ("PATH", "")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            patch.delenv("CC", raising=False)
            kernels.library.cache_clear()
            assert kernels.library() is None
            assert len(generate(micro_model(), [[5, 6]], 3)[0].tokens) == 3
    kernels.library.cache_clear()


@needs_compiler
def test_a_compiler_that_fails_is_a_warning(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kernels, "FLAGS", ("-no-such-flag",))
    kernels.library.cache_clear()
    with pytest.warns(UserWarning, match="decoding uses torch: decode.c did not compile.*no-such-flag"):
        assert kernels.library() is None
    kernels.library.cache_clear()
    assert list((tmp_path / "nemotron_ultra").iterdir()) == []


def test_a_misspelt_switch_is_an_error(monkeypatch):
    monkeypatch.setenv(kernels.SWITCH, "trch")
    kernels.library.cache_clear()
    with pytest.raises(BackendError, match="NEMOTRON_ULTRA_DECODE; got 'trch'; allowed: compiled, torch"):
        kernels.library()
    kernels.library.cache_clear()
