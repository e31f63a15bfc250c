"""The cache: prefill and steps equal the full forward, whatever is copied, dropped or moved in between."""

from __future__ import annotations

import copy

import pytest
import torch

from micro import micro_batches, micro_engine, micro_model, step, weights
from nemotron_ultra.errors import DataError
from nemotron_ultra.model.cache import Cache
from nemotron_ultra.model.hybrid import HybridLM

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
    _, cache = prefill(model, rows, 12)
    for number in range(5):
        hidden_BD, rows = advance(model, cache, rows, number)
        assert cache.mask_BS is None
    check(model, hidden_BD, rows)


def test_select_repeats_and_leaves_out_rows():
    model, rows = micro_model(torch.float64), tokens(3, 8, 21)
    hidden_BD, cache = prefill(model, rows, 30)
    index_B = torch.tensor([2, 0, 2, 2])
    wide, rows = cache.select(index_B), [rows[i] for i in index_B]
    for number in range(4):
        hidden_BD, rows = advance(model, wide, rows, number)
    check(model, hidden_BD, rows)
    assert cache.size == 3 and cache.length_B.tolist() == [3, 8, 21]


def test_copies_share_nothing():
    model, rows = micro_model(), tokens(9)
    _, cache = prefill(model, rows, 30)
    before = copy.deepcopy([layer for layer in cache.layers if layer is not None])
    wide = cache.select(torch.tensor([0, 0]))
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
def test_bytes_of_a_slot(dtype):
    model, rows = micro_model(dtype), tokens(4, 6)
    c, (_, cache) = model.config, prefill(model, rows, 10)
    keys = 2 * c.num_key_value_heads * c.head_dim * 10
    mamba = c.conv_dim * (c.conv_kernel - 1) + c.mamba_inner * c.ssm_state_size
    assert cache.nbytes == 2 * dtype.itemsize * (keys + mamba)


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
