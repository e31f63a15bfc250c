"""NVFP4 against Transformer Engine's reference, tables of NVIDIA's headers, and FlashInfer's states."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nemotron_ultra.ops import nvfp4, state_formats
from nemotron_ultra.ops import nvfp4_elements as elements
from nemotron_ultra.ops import nvfp4_scales as scales

TENSORS = dict[str, torch.Tensor]


def load(golden: Path, name: str) -> TENSORS:
    file = golden / "nvfp4" / f"{name}.safetensors"
    if not file.exists():
        pytest.skip(f"golden file {file.name} is not beside this checkout")
    return load_file(file)


def without_sign_of_zero(packed: torch.Tensor) -> torch.Tensor:
    """The reference in Python gives -0.0 code 0, the hardware 8."""
    code = elements.unpack(packed)
    return code.masked_fill(code == 8, 0)


def same(q: nvfp4.NVFP4Tensor, want: TENSORS, key: str) -> None:
    wrong = (without_sign_of_zero(q.codes) != without_sign_of_zero(want[f"{key}.codes"])).sum()
    assert wrong == 0, f"{key}: {wrong} of {q.codes.numel() * 2} codes"
    assert torch.equal(q.scales, want[f"{key}.scale"]), key
    if f"{key}.amax" in want:
        assert torch.equal(q.amax, want[f"{key}.amax"]), key
    if f"{key}.dequant" in want:
        torch.testing.assert_close(
            q.dequantize(), want[f"{key}.dequant"], rtol=0, atol=0, equal_nan=True, msg=key
        )


def cases(want: TENSORS, ending: str) -> list[str]:
    found = sorted(key.removesuffix(ending) for key in want if key.endswith(ending))
    assert found, f"no key ends with {ending}"
    return found


@pytest.mark.parametrize(("name", "block"), [("te_1d", "1x16"), ("te_2d", "16x16")])
def test_rows_and_columns(golden, name, block):
    inputs, want = load(golden, "inputs"), load(golden, name)
    for case in cases(want, ".row.codes"):
        same(nvfp4.quantize(inputs[case], block=block), want, f"{case}.row")
        same(nvfp4.quantize(inputs[case].T, block=block), want, f"{case}.col")


def test_scale_order_of_older_versions(golden):
    inputs, want = load(golden, "inputs"), load(golden, "te213")
    for case in cases(want, ".row.codes"):
        same(nvfp4.quantize(inputs[case], scale_rule="te_2_13"), want, f"{case}.row")
        same(nvfp4.quantize(inputs[case], block="16x16", scale_rule="te_2_13"), want, f"{case}.2d")


def test_the_two_scale_orders_differ(golden):
    x = load(golden, "inputs")["scale_ties_fp32"]
    new, old = nvfp4.quantize(x), nvfp4.quantize(x, scale_rule="te_2_13")
    assert (new.scales != old.scales).sum() == 7


def test_scale_per_row(golden):
    inputs, want = load(golden, "inputs"), load(golden, "te_row_scaled")
    for case in cases(want, ".row.codes"):
        same(nvfp4.quantize(inputs[case], row_scaled=True), want, f"{case}.row")


def test_random_hadamard_transform(golden):
    inputs, want = load(golden, "inputs"), load(golden, "te_rht")
    for case in cases(want, ".xt_rht"):
        turned = nvfp4.hadamard(inputs[case].T)
        assert torch.equal(turned, want[f"{case}.xt_rht"]), case
        same(nvfp4.quantize(turned), want, f"{case}.col")


def test_four_over_six(golden):
    inputs, want = load(golden, "inputs"), load(golden, "te_4over6")
    blocks = {"1d": "1x16", "2d": "16x16"}
    for key in cases(want, ".codes"):
        case, error, bound, shape = key.split(".")
        rule = f"four_over_six_{error.lower()}"
        q = nvfp4.quantize(inputs[case], block=blocks[shape], scale_rule=rule, scale_max=int(bound))
        same(q, want, key)


def test_element_table(golden):
    table = load(golden, "tables")
    known = ~table["e2m1.x"].isnan()
    x, want = table["e2m1.x"][known], table["e2m1.code_cuda_host"][known]
    x, want = x[: len(x) // 2 * 2], want[: len(x) // 2 * 2]
    rounded = elements.round_nearest_(x.clone())
    assert torch.equal(elements.unpack(elements.packed_codes(rounded, x)), want)


def test_scale_table(golden):
    table = load(golden, "tables")
    x, want = table["e4m3.x"], table["e4m3.code_cuda_host"]
    rounded = scales.round_e4m3_(x.clone())
    torch.testing.assert_close(rounded, scales.e4m3_numbers(want), rtol=0, atol=0, equal_nan=True)
    positive = rounded > 0
    assert torch.equal(scales.e4m3_bytes(rounded[positive]), want[positive])


@pytest.mark.parametrize("name", ["sr", "sr_sweep"])
def test_stochastic_rounding_with_given_bytes(golden, name):
    table = load(golden, "tables")
    got = elements.round_with_bytes_(table[f"{name}.x"].clone(), table[f"{name}.rbits8"])
    assert torch.equal(got, table[f"{name}.value_te"])


def product(left: tuple, right: tuple) -> torch.Tensor:
    return nvfp4.product_scale(left[1], right[1]) * (left[0] @ right[0])


def turned(operand: tuple) -> tuple:
    return operand[0].T, operand[1]


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert (got - want).abs().max() <= 1e-6 * want.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products(golden, dtype):
    """Operands in bfloat16 are the same numbers; their products are taken in float32."""
    g = load(golden, "gemm")

    def operand(name: str, **how):
        values, amax = nvfp4.operand(g[name].to(dtype), **how)
        assert values.dtype == dtype
        return values.float(), amax

    weight, by_token = operand("w", block="16x16"), {"axis": -2, "rht": True}
    close(product(operand("x"), turned(weight)), g["fprop.fp32"])
    close(product(operand("dy"), weight), g["dgrad.fp32"])
    close(product(turned(operand("dy", **by_token)), operand("x", **by_token)), g["wgrad.fp32"])
    close(product(turned(operand("dy", axis=-2)), operand("x", axis=-2)), g["wgrad_norht.fp32"])


def test_products_with_stochastic_rounding(golden):
    g = load(golden, "gemm")
    row, col = g["dy_sr.row.rbits8"], g["dy_sr.col.rbits8"]
    q = nvfp4.quantize(g["dy"], rounding="stochastic", random_bits=row)
    assert torch.equal(without_sign_of_zero(q.codes), without_sign_of_zero(g["dy_sr.row.codes"]))
    q = nvfp4.quantize(nvfp4.hadamard(g["dy"].T), rounding="stochastic", random_bits=col)
    assert torch.equal(without_sign_of_zero(q.codes), without_sign_of_zero(g["dy_sr.col.codes"]))
    dy = nvfp4.operand(g["dy"].float(), rounding="stochastic", random_bits=row)
    close(product(dy, nvfp4.operand(g["w"].float(), block="16x16")), g["dgrad_sr.fp32"])
    dy = nvfp4.operand(g["dy"].float(), rounding="stochastic", random_bits=col.T, axis=-2, rht=True)
    close(product(turned(dy), nvfp4.operand(g["x"].float(), axis=-2, rht=True)), g["wgrad_sr.fp32"])


def test_ssm_state(golden):
    t = load(golden, "tables")
    state, words = t["ssm.state"], t["ssm.rand32"]
    got = state_formats.to_int8(state, random_bits=words)
    assert torch.equal(got.codes, t["ssm.int8_sr"])
    assert torch.equal(got.scale[..., 0], t["ssm.decode_scale"])
    assert torch.equal(state_formats.to_int8(state, "nearest").codes, t["ssm.int8_rn"])
    half = state_formats.to_float16(state, random_bits=words)
    assert torch.equal(half.view(torch.int16), t["ssm.fp16_sr"].view(torch.int16))
