"""NVFP4: operands equal stored tensors, layouts, slices, numbers that are not finite, bad input."""

from __future__ import annotations

import pytest
import torch

from nemotron_ultra.errors import ConfigError
from nemotron_ultra.ops import blocks, nvfp4
from nemotron_ultra.ops import nvfp4_elements as elements

INF, NAN = float("inf"), float("nan")


def data(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator)
    return x * torch.exp2(torch.randint(-12, 3, shape, generator=generator))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("block", ["1x16", "16x16"])
@pytest.mark.parametrize("rule", ["te", "te_2_13", "four_over_six_mae", "four_over_six_mse"])
def test_operand_is_code_times_scale(dtype, block, rule):
    x = data(48, 96).to(dtype)
    q = nvfp4.quantize(x, block=block, scale_rule=rule)
    values, amax = nvfp4.operand(x, block=block, scale_rule=rule)
    assert values.dtype == dtype and torch.equal(values.float(), q.values())
    assert torch.equal(amax, q.amax) and amax == x.abs().max()
    assert torch.equal(q.values(torch.bfloat16).float(), q.values())


@pytest.mark.parametrize("rule", ["te", "four_over_six_mae"])
def test_columns_are_the_rows_of_the_transpose(rule):
    x = data(48, 80)
    want = nvfp4.quantize(x.T, scale_rule=rule).values().T
    down, _ = nvfp4.operand(x, axis=-2, scale_rule=rule)
    assert torch.equal(down, want) and down.is_contiguous()
    across, _ = nvfp4.operand(x.T, scale_rule=rule)
    assert torch.equal(across.T, want) and across.T.is_contiguous()


def test_a_tile_is_the_same_in_both_orientations():
    x = data(32, 64)
    rows, columns = nvfp4.quantize(x, block="16x16"), nvfp4.quantize(x.T, block="16x16")
    assert torch.equal(rows.values(), columns.values().T)
    assert torch.equal(rows.scales[::16], columns.scales[::16].T)


def test_hadamard_then_quantise():
    x = data(64, 48).bfloat16()
    want = nvfp4.quantize(nvfp4.hadamard(x.T)).values().T
    for source in (x, x.float()):
        values, amax = nvfp4.operand(source, axis=-2, rht=True)
        assert torch.equal(values.float(), want) and amax == nvfp4.hadamard(x.T).abs().max().float()


def test_hadamard_keeps_products():
    x, y = data(8, 64).bfloat16(), data(8, 64, seed=1).bfloat16()
    turned = nvfp4.hadamard(x).double() @ nvfp4.hadamard(y).double().T
    plain = x.double() @ y.double().T
    assert (turned - plain).norm() < 0.01 * plain.norm()


def test_slabs_do_not_change_numbers(monkeypatch):
    x = data(96, 64)
    want = [nvfp4.operand(x, axis=axis, block=block)[0] for axis in (-1, -2) for block in ("1x16", "16x16")]
    monkeypatch.setattr(blocks, "SLAB_ELEMENTS", 2048)
    got = [nvfp4.operand(x, axis=axis, block=block)[0] for axis in (-1, -2) for block in ("1x16", "16x16")]
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert torch.equal(nvfp4.quantize(x).values(), want[0])


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("how", [{}, {"rht": True}, {"scale_rule": "four_over_six_mse"}], ids=str)
def test_slices_have_scales_of_their_own(axis, how):
    x, sizes = data(96, 32), [32, 0, 16, 48]
    values, amax = nvfp4.operand(x, axis=axis, sizes=sizes, **how)
    parts = [nvfp4.operand(part, axis=axis, **how) for part in x.split(sizes)]
    assert torch.equal(values, torch.cat([part[0] for part in parts]))
    assert torch.equal(amax, torch.cat([part[1] for part in parts])) and amax[1] == 0


@pytest.mark.parametrize(("axis", "block"), [(-1, "1x16"), (-2, "1x16"), (-1, "16x16")])
def test_a_stack_is_quantised_matrix_by_matrix(axis, block):
    x = data(3, 32, 48) * torch.tensor([1.0, 100.0, 0.01])[:, None, None]
    values, amax = nvfp4.operand(x, axis=axis, block=block)
    parts = [nvfp4.operand(part, axis=axis, block=block) for part in x]
    assert torch.equal(values, torch.stack([part[0] for part in parts]))
    assert torch.equal(amax, torch.cat([part[1] for part in parts]))


def test_scale_per_row():
    x = data(8, 64)
    values, amax = nvfp4.operand(x, row_scaled=True)
    q = nvfp4.quantize(x, row_scaled=True)
    assert torch.equal(values, q.values()) and torch.equal(amax, q.amax)
    assert torch.equal(q.dequantize(), torch.cat([nvfp4.quantize(row[None]).dequantize() for row in x]))


def test_a_given_amax_is_that_of_the_whole():
    """Two halves with the maximum of both are the whole: what an all-reduce between ranks gives."""
    x = data(64, 64)
    whole, amax = nvfp4.operand(x)
    halves = [nvfp4.operand(part, amax=amax)[0] for part in x.chunk(2)]
    assert torch.equal(torch.cat(halves), whole)
    saturated, _ = nvfp4.operand(x, amax=amax / 64)
    assert saturated.abs().max() == 6 * 448


def test_decode_order_and_error():
    x = data(64, 128)
    q = nvfp4.quantize(x)
    torch.testing.assert_close(q.dequantize(), q.values() * (q.amax / 2688), rtol=1e-6, atol=0)
    normal = torch.randn(256, 256, generator=torch.Generator().manual_seed(3))
    loss = [
        (nvfp4.quantize(normal, scale_rule=rule).dequantize() - normal).square().mean()
        for rule in ("te", "four_over_six_mse")
    ]
    assert 0.0085 < loss[0] < 0.0095 and 0.80 < loss[1] / loss[0] < 0.88


def test_sign_of_zero_and_of_small_numbers_is_kept():
    x = torch.tensor([[-0.0, 0.0, -1e-30, 1e-30, -6.0, 6.0] + [0.0] * 10])
    assert elements.unpack(nvfp4.quantize(x).codes)[0, :6].tolist() == [8, 0, 8, 0, 15, 7]
    assert torch.signbit(nvfp4.quantize(x).dequantize()[0, 0])


def test_block_far_below_the_tensor_keeps_codes_under_a_zero_scale():
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 16:18] = 1.0, torch.tensor([1e-8, -1e-8])
    q = nvfp4.quantize(x)
    assert q.scales.tolist() == [[126, 0]] and elements.unpack(q.codes)[0, 16:18].tolist() == [7, 15]
    assert q.dequantize()[0, 16:].abs().max() == 0 and q.dequantize().isfinite().all()


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_nan_is_six_and_not_seen_by_the_maxima(rounding):
    x = data(4, 32)
    x[1, 3], x[2, 20] = NAN, -NAN
    q = nvfp4.quantize(x, rounding=rounding)
    clean = nvfp4.quantize(torch.nan_to_num(x, nan=0.0))
    assert torch.equal(q.amax, clean.amax) and torch.equal(q.scales, clean.scales) and q.nonfinite == 2
    code = elements.unpack(q.codes)
    assert code[1, 3] == 7 and code[2, 20] == 7
    if rounding == "nearest":
        assert torch.equal(code[x.isnan().logical_not()], elements.unpack(clean.codes)[~x.isnan()])


def test_infinity_is_six_and_counted():
    x = data(4, 32)
    x[1, 3], x[2, 20], x[0, 0] = INF, -INF, NAN
    q, tally = nvfp4.quantize(x), nvfp4.Tally()
    assert q.amax == INF and q.nonfinite == 3
    assert elements.unpack(q.codes)[[1, 2, 0], [3, 20, 0]].tolist() == [7, 15, 7]
    values, _ = nvfp4.operand(x, tally=tally)
    assert torch.equal(values, q.values()) and (tally.elements, tally.tensors) == (3, 1)
    nvfp4.operand(data(4, 32), tally=tally)
    assert (tally.elements, tally.tensors) == (3, 1)


@pytest.mark.parametrize("shape", [(0, 32), (16, 0)])
def test_nothing_to_quantise(shape):
    q = nvfp4.quantize(torch.empty(shape))
    assert q.amax.tolist() == [0] and q.dequantize().shape == shape
    values, amax = nvfp4.operand(torch.empty(shape), axis=-2, rht=True)
    assert values.shape == shape and amax.tolist() == [0]


def test_no_gradient_and_input_untouched():
    x = data(16, 16).requires_grad_()
    before = x.detach().clone()
    values, amax = nvfp4.operand(x, rounding="stochastic", rht=True)
    assert not values.requires_grad and not amax.requires_grad and torch.equal(x, before)


def test_results_outlive_the_next_call():
    first, _ = nvfp4.operand(data(32, 32))
    kept = first.clone()
    nvfp4.operand(data(32, 32, seed=1), rounding="stochastic")
    q = nvfp4.quantize(data(32, 32))
    nvfp4.quantize(data(32, 32, seed=1))
    assert torch.equal(first, kept) and torch.equal(q.values(), kept)


BAD = [
    ({"block": "1x32"}, "unknown block.*1x32.*1x16, 16x16"),
    ({"rounding": "up"}, "unknown rounding.*nearest, stochastic"),
    ({"scale_rule": "te_2_14"}, "unknown scale_rule.*te, te_2_13"),
    ({"scale_max": 240}, "unknown scale_max.*448, 256"),
    ({"scale_rule": "four_over_six_mae", "rounding": "stochastic"}, "four-over-six with stochastic.*nearest"),
    ({"row_scaled": True, "block": "16x16"}, "per row with 16x16.*1x16"),
    ({"row_scaled": True, "rounding": "stochastic"}, "per row with stochastic"),
    ({"random_bits": torch.zeros(16, 32, dtype=torch.uint8)}, "without stochastic"),
    ({"rounding": "stochastic", "random_bits": torch.zeros(16, 32)}, "do not fit.*uint8"),
]


@pytest.mark.parametrize(("options", "message"), BAD, ids=lambda v: str(v)[:40])
def test_refused_options(options, message):
    with pytest.raises(ConfigError, match=message):
        nvfp4.quantize(data(16, 32), **options)


def test_four_over_six_is_not_for_the_transform():
    with pytest.raises(ConfigError, match="four-over-six with the random Hadamard"):
        nvfp4.operand(data(16, 32), rht=True, scale_rule="four_over_six_mae")


@pytest.mark.parametrize(
    ("shape", "how", "message"),
    [
        ((4, 40), {}, r"columns are not a multiple of 16.*40 columns in shape \(4, 40\).*32 or 48.*pad"),
        ((40, 16), {"axis": -2}, r"rows are not a multiple of 16.*40 rows"),
        ((40, 32), {"block": "16x16"}, r"rows are not a multiple of 16"),
        ((32, 32), {"axis": -2, "sizes": [8, 24]}, r"sizes.*\[8, 24\].*multiples of 16.*pad"),
        ((32, 32), {"sizes": [8, 8]}, r"sizes.*add up to 32|sizes.*add up"),
        ((32,), {}, r"not a matrix"),
        ((32, 32), {"row_scaled": True, "axis": -2}, r"scale per row.*axis -2.*transpose"),
    ],
)
def test_refused_shapes(shape, how, message):
    with pytest.raises(ConfigError, match=message):
        nvfp4.operand(torch.ones(shape), **how)


def test_refused_dtypes():
    with pytest.raises(ConfigError, match=r"dtype.*float64.*float32, bfloat16"):
        nvfp4.quantize(data(16, 16).double())
    with pytest.raises(ConfigError, match=r"bfloat16 only.*float32.*bfloat16"):
        nvfp4.hadamard(data(16, 16))
    with pytest.raises(ConfigError, match=r"chunks of 16.*24"):
        nvfp4.hadamard(data(16, 24).bfloat16())
    with pytest.raises(ConfigError, match=r"one matrix.*\(2, 16, 16\)"):
        nvfp4.quantize(data(2, 16, 16))


def test_stored_parts_are_checked():
    q = nvfp4.quantize(data(16, 32))
    parts = {"codes": q.codes, "scales": q.scales, "amax": q.amax, "shape": q.shape}
    wrong = {"codes": q.codes[:, :8], "scales": q.scales.view(torch.float8_e4m3fn), "amax": q.amax.double()}
    for name, part in wrong.items():
        with pytest.raises(ConfigError, match=rf"NVFP4Tensor\.{name} does not fit.*\(16, 32\)"):
            nvfp4.NVFP4Tensor(**(parts | {name: part}))
    assert torch.equal(nvfp4.NVFP4Tensor(**parts).dequantize(), q.dequantize())
