"""The cache: prefill and steps equal the full forward, whatever is copied, dropped or moved in between."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch

from micro import micro_batches, micro_engine, micro_model, step, weights
from nemotron_ultra.errors import ConfigError, DataError
from nemotron_ultra.model.cache import Cache
from nemotron_ultra.model.hybrid import HybridLM
from nemotron_ultra.ops.segments import Segments

BOUND = {torch.float32: 1e-4, torch.float64: 1e-9}
LENGTHS = (1, 2, 3, 5, 19, 40)  # shorter than the convolution's window, longer than a chunk


def tokens(*lengths: int, seed: int = 0) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 64, (length,), generator=draw) for length in lengths]


def prefill(model: HybridLM, rows: list[torch.Tensor], capacity: int) -> tuple[torch.Tensor, Cache]:
    bounds = torch.tensor([0, *map(len, rows)]).cumsum(0).to(torch.int32)
    return model.prefill(torch.cat(rows), bounds, capacity)


@torch.no_grad()
def last_hidden(model: HybridLM, row: torch.Tensor) -> torch.Tensor:
    return model(row, mtp_depths=0).hidden_TD[-1]


def check(model: HybridLM, hidden_BD: torch.Tensor, rows: list[torch.Tensor]) -> None:
    expected_BD = torch.stack([last_hidden(model, row) for row in rows])
    bound = BOUND[model.lm_head.weight.dtype]
    assert hidden_BD.shape == expected_BD.shape
    assert (hidden_BD - expected_BD).abs().max() < bound


def advance(model: HybridLM, cache: Cache, rows: list[torch.Tensor], seed: int):
    """One token more in every row -> (hidden [B, D], rows)."""
    (new_B,) = tokens(len(rows), seed=seed)
    hidden_BD = model.step(new_B, cache)
    return hidden_BD, [torch.cat([row, new_B[b : b + 1]]) for b, row in enumerate(rows)]


@pytest.mark.parametrize("dtype", list(BOUND), ids=["fp32", "fp64"])
@pytest.mark.parametrize(
    "changes", [{}, {"pattern": "M", "conv_kernel": 2}, {"pattern": "*"}, {"pattern": "E-"}]
)
def test_prefill_and_steps_equal_the_full_forward(changes, dtype):
    model, rows = micro_model(dtype, **changes), tokens(*LENGTHS)
    hidden_BD, cache = prefill(model, rows, 60)
    check(model, hidden_BD, rows)
    for number in range(20):
        hidden_BD, rows = advance(model, cache, rows, number)
        check(model, hidden_BD, rows)
    assert cache.length_B.tolist() == [length + 20 for length in LENGTHS]


def test_dt_limit_and_biases_hold_in_steps_too():
    model = micro_model(torch.float64, time_step_limit=(0.02, 0.05), use_bias=True, mlp_bias=True)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    rows = tokens(*LENGTHS)
    hidden_BD, cache = prefill(model, rows, 50)
    for number in range(5):
        hidden_BD, rows = advance(model, cache, rows, number)
    check(model, hidden_BD, rows)


def test_uniform_lengths_need_no_mask():
    model, rows = micro_model(torch.float64), tokens(7, 7, 7)
    _, cache = prefill(model, rows, 13)
    for number in range(5):
        hidden_BD, rows = advance(model, cache, rows, number)
    check(model, hidden_BD, rows)
    cache.open([1, 1, 1])
    assert cache.mask_BKS is None


def test_select_repeats_and_leaves_out_rows():
    model, rows = micro_model(torch.float64), tokens(3, 8, 21)
    hidden_BD, cache = prefill(model, rows, 30)
    index_B = torch.tensor([2, 0, 2, 2])
    wide, rows = cache.select(index_B, model.config), [rows[i] for i in index_B]
    for number in range(4):
        hidden_BD, rows = advance(model, wide, rows, number)
    check(model, hidden_BD, rows)
    assert cache.size == 3 and cache.length_B.tolist() == [3, 8, 21]


def test_copies_share_nothing():
    model, rows = micro_model(), tokens(9)
    _, cache = prefill(model, rows, 30)
    before = copy.deepcopy([layer for layer in cache.layers if layer is not None])
    wide = cache.select(torch.tensor([0, 0]), model.config)
    advance(model, wide, rows * 2, 0)
    after = [layer for layer in cache.layers if layer is not None]
    for old, new in zip(before, after, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(old.tensors(), new.tensors(), strict=True))


@pytest.mark.parametrize("seed", range(6))
def test_rows_that_end_leave_the_others_as_they_were(seed):
    """Random rows end at random times; what remains is compared with full forwards at every step."""
    model, rows = micro_model(torch.float64), tokens(*LENGTHS, 4, 4, seed=seed)
    _, cache = prefill(model, rows, 60)
    draw = torch.Generator().manual_seed(seed)
    for number in range(12):
        hidden_BD, rows = advance(model, cache, rows, 100 * seed + number)
        check(model, hidden_BD, rows)
        gone_B = torch.rand(len(rows), generator=draw) < 0.25
        order_B = cache.drop(gone_B)
        assert sorted(order_B.tolist()) == (~gone_B).nonzero()[:, 0].tolist()
        rows = [rows[i] for i in order_B]
        assert cache.length_B.tolist() == [len(row) for row in rows]
        if not rows:
            return


def test_only_rows_that_fill_holes_are_copied():
    """Rows 1 and 2 end: the last two take their places, row 0 and 3 stay where they are."""
    model, rows = micro_model(), tokens(4, 4, 4, 4, 4, 4)
    _, cache = prefill(model, rows, 9)
    key_BGSP = cache.layers[2].key_BGSP
    at, kept = key_BGSP.data_ptr(), key_BGSP.clone()
    order_B = cache.drop(torch.tensor([False, True, True, False, False, False]))
    assert order_B.tolist() == [0, 4, 5, 3] and cache.size == 4
    assert cache.layers[2].key_BGSP.data_ptr() == at
    assert torch.equal(key_BGSP[:4], kept[order_B])


@pytest.mark.parametrize("dtype", list(BOUND), ids=["fp32", "fp64"])
@pytest.mark.parametrize(("ssm_format", "size"), [("fp32", None), ("fp16_sr", 2), ("int8_sr", 1 + 4 / 16)])
def test_bytes_of_a_slot(dtype, ssm_format, size):
    """`size`: bytes of a number of the SSM state; 16 of them share a scale of 4 bytes."""
    model = micro_model(dtype)
    c, cache = model.config, model.new_cache(3, 10, ssm_format)
    keys = 2 * c.num_key_value_heads * c.head_dim * 10 + c.conv_dim * (c.conv_kernel - 1)
    expected = dtype.itemsize * keys + (size or dtype.itemsize) * c.mamba_inner * c.ssm_state_size
    assert Cache.bytes_per_slot(c, 10, ssm_format, dtype) == expected
    assert cache.nbytes == 3 * expected
    mtp = model.new_cache(2, 10, pattern=c.mtp_pattern)
    assert mtp.nbytes == 2 * Cache.bytes_per_slot(c, 10, dtype=dtype, pattern=c.mtp_pattern)


def test_more_slots_than_memory_is_an_error_before_allocation():
    config = micro_model().config
    each = Cache.bytes_per_slot(config, 1 << 20)
    with pytest.raises(ConfigError, match=rf"slots.*1000000 slots x {each:,} bytes.*bytes are free on cpu"):
        Cache.empty(config, 1_000_000, 1 << 20)
    with pytest.raises(ConfigError, match=r"ssm_format.*got 'fp8'.*fp32, fp16_sr, int8_sr"):
        Cache.empty(config, 1, 8, ssm_format="fp8")
    with pytest.raises(ConfigError, match=r"int8_sr.*ssm_state_size 192"):
        Cache.empty(micro_model(ssm_state_size=192).config, 1, 8, ssm_format="int8_sr")


def extend(model: HybridLM, cache: Cache, rows: list[torch.Tensor], count: int, keep: list[int], seed: int):
    """`count` tokens for every row, of which keep[b] stay; each token's hidden state is checked."""
    new_BK = torch.stack(tokens(*[count] * len(rows), seed=seed))
    hidden_BKD = model.extend(new_BK, cache)
    for k in range(count):
        check(model, hidden_BKD[:, k], [torch.cat([row, new_BK[b, : k + 1]]) for b, row in enumerate(rows)])
    cache.commit(keep)
    return [torch.cat([row, new_BK[b, : keep[b]]]) for b, row in enumerate(rows)]


@pytest.mark.parametrize("dtype", list(BOUND), ids=["fp32", "fp64"])
@pytest.mark.parametrize("changes", [{}, {"pattern": "M", "conv_kernel": 2, "use_conv_bias": False}])
def test_extend_and_commit_equal_the_full_forward(changes, dtype):
    """Rows keep different numbers of their tokens, none and all among them, steps and extends mixed."""
    model, rows = micro_model(dtype, **changes), tokens(*LENGTHS)
    _, cache = prefill(model, rows, 70)
    rows = extend(model, cache, rows, 5, [0, 1, 2, 3, 4, 5], 1)
    hidden_BD, rows = advance(model, cache, rows, 2)
    check(model, hidden_BD, rows)
    rows = extend(model, cache, rows, 2, [2, 0, 2, 1, 0, 0], 3)
    rows = extend(model, cache, rows, 1, [1, 0, 1, 1, 1, 0], 4)
    hidden_BD, rows = advance(model, cache, rows, 5)
    check(model, hidden_BD, rows)
    assert cache.lengths == cache.length_B.tolist() == [len(row) for row in rows]


@pytest.mark.parametrize("dtype", list(BOUND), ids=["fp32", "fp64"])
@pytest.mark.parametrize("cuts", [(1,), (2, 3), (16, 17, 33), (30,)])
def test_a_prompt_in_chunks_equals_the_prompt_at_once(cuts, dtype):
    """Three rows whose chunks begin and end anywhere, then steps and an extend."""
    model, rows = micro_model(dtype), tokens(40, 45, 38)
    bounds, cache = [0, *cuts, None], None
    for begin, end in pairwise(bounds):
        parts = [row[begin:end] for row in rows]
        cu_seqlens = torch.tensor([0, *map(len, parts)]).cumsum(0).to(torch.int32)
        hidden_BD, cache = model.prefill(torch.cat(parts), cu_seqlens, cache or 60)
        check(model, hidden_BD, [row[:end] for row in rows])
    hidden_BD, rows = advance(model, cache, rows, 0)
    check(model, hidden_BD, rows)
    extend(model, cache, rows, 3, [3, 1, 0], 7)


@pytest.mark.parametrize("seed", range(4))
def test_rows_come_and_go(seed):
    """Four slots; rows are admitted where one is free, dropped at random, and always equal full forwards."""
    model, draw = micro_model(torch.float64), torch.Generator().manual_seed(seed)
    cache, rows = model.new_cache(4, 60), []
    for number in range(14):
        new = tokens(*torch.randint(1, 20, (cache.free,), generator=draw).tolist(), seed=100 * seed + number)
        if new:
            _, prompts = prefill(model, new, 20)
            index_B = torch.randint(len(new), (len(new),), generator=draw)
            cache.admit(prompts, index_B)
            rows += [new[i] for i in index_B]
        hidden_BD, rows = advance(model, cache, rows, number)
        check(model, hidden_BD, rows)
        order_B = cache.drop(torch.rand(len(rows), generator=draw) < 0.4)
        rows = [rows[i] for i in order_B]
        assert cache.lengths == cache.length_B.tolist() == [len(row) for row in rows]


@pytest.mark.parametrize(("ssm_format", "bound"), [("fp16_sr", 0.02), ("int8_sr", 0.2)])
def test_states_of_fewer_bits_are_near_and_do_not_feel_their_company(ssm_format, bound):
    model, rows = micro_model(), tokens(7, 12, 7)
    _, prompts = prefill(model, rows, 12)
    wide, alone = model.new_cache(4, 40, ssm_format), model.new_cache(1, 40, ssm_format)
    wide.admit(prompts, torch.tensor([0, 1, 2]))
    alone.admit(prompts, torch.tensor([1]))
    for number in range(10):
        hidden_BD, rows = advance(model, wide, rows, number)
        (hidden_D,) = model.step(rows[1][-1:], alone)
        assert (hidden_D - hidden_BD[1]).abs().max() < 1e-4
    gap_BD = hidden_BD - torch.stack([last_hidden(model, row) for row in rows])
    assert 0 < gap_BD.abs().max() < bound


def test_the_mtp_module_in_steps_equals_the_forward():
    """Depth 1 over a prompt in two pieces and an extend, and then depth 2 on what depth 1 gave."""
    model, (row,) = micro_model(torch.float64), tokens(24)
    with torch.no_grad():
        output = model(row, mtp_depths=2)
        ahead_TD = [model.backbone.embeddings(row[k:]) for k in (1, 2)]
    hidden = output.hidden_TD
    for depth, expected_TD in enumerate(output.mtp_hidden_JTD, 1):
        cache = model.new_cache(1, 24, pattern=model.config.mtp_pattern)
        cache.admit_new(1)
        e_TD, last = ahead_TD[depth - 1], 24 - depth
        parts = [
            model.mtp.prefill(hidden[a:b], e_TD[a:b], Segments(b - a), cache, depth)
            for a, b in ((0, 9), (9, 15))
        ]
        parts += list(model.mtp.extend(hidden[None, 15:last], e_TD[None, 15:], cache, depth))
        cache.commit([last - 15])
        hidden = torch.cat(parts)
        assert (hidden - expected_TD[:last]).abs().max() < 1e-9


def test_weights_of_sixteen_bits_have_a_float32_state():
    model, rows = micro_model(torch.bfloat16), tokens(*LENGTHS)
    hidden_BD, cache = prefill(model, rows, 50)
    hidden_BD, rows = advance(model, cache, rows, 0)
    assert hidden_BD.dtype == torch.float32
    assert all(t.dtype == torch.float32 for s in cache.layers if s is not None for t in s.tensors())
    expected_BD = torch.stack([last_hidden(model, row) for row in rows])
    assert (hidden_BD - expected_BD).abs().max() < 1e-4


def test_a_prompt_or_a_step_beyond_the_capacity_is_an_error():
    model, rows = micro_model(), tokens(3, 6)
    with pytest.raises(DataError, match=r"6 tokens.*at most 5"):
        prefill(model, rows, 5)
    _, cache = prefill(model, rows, 7)
    advance(model, cache, rows, 0)
    with pytest.raises(DataError, match=r"8 tokens.*at most 7"):
        advance(model, cache, rows, 1)


def test_a_training_step_after_decoding_is_what_it_was_without():
    batches = micro_batches(2)
    plain, mixed = micro_engine(), micro_engine()
    rows = tokens(5, 9)
    _, cache = prefill(mixed.model, rows, 20)
    advance(mixed.model, cache, rows, 0)
    step(plain, batches), step(mixed, batches)
    for name, tensor in weights(plain.model).items():
        assert torch.equal(tensor, weights(mixed.model)[name]), name
