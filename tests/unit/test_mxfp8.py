"""MXFP8: powers of two per 32, E4M3 elements, operands equal stored tensors."""

from __future__ import annotations

import pytest
import torch

from nemotron_ultra.errors import ConfigError
from nemotron_ultra.ops import blocks, mxfp8
from nemotron_ultra.ops.nvfp4 import Tally


def data(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(*shape, generator=generator) * torch.logspace(-20, 20, shape[-1])


def test_scale_is_the_least_power_of_two_that_does_not_saturate():
    x = torch.zeros(6, 32)
    x[:, 0] = torch.tensor([448.0, 448.001, 447.9, 7 * 2.0**-3, 0.0, 1.0])
    scales = mxfp8.quantize(x).scales.flatten().int() - 127
    assert scales.tolist() == [0, 1, 0, -9, -127, -8]
    big = data(64, 64)
    peaks = big.unflatten(-1, (2, 32)).abs().amax(-1).double()
    wanted = torch.ceil(torch.log2(peaks / 448)).clamp(min=-127)
    assert torch.equal(mxfp8.quantize(big).scales.double() - 127, wanted)


def test_elements_are_those_of_a_float8_cast():
    x = data(32, 64)
    q = mxfp8.quantize(x)
    scale = torch.exp2(q.scales.double() - 127).repeat_interleave(32, -1)
    want = (x.double() / scale).float().to(torch.float8_e4m3fn).double() * scale
    assert torch.equal(q.dequantize().double(), want)
    normal = want.abs() >= scale * 2.0**-6
    assert ((want - x).abs() <= x.abs() / 16)[normal].all() and normal.float().mean() > 0.2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_operand_is_the_stored_tensor(dtype, monkeypatch):
    monkeypatch.setattr(blocks, "SLAB_ELEMENTS", 4096)
    x = data(96, 128).to(dtype)
    want = mxfp8.quantize(x).dequantize()
    assert torch.equal(mxfp8.operand(x).float(), want) and mxfp8.operand(x).dtype == dtype
    assert torch.equal(mxfp8.operand(x, axis=-2).float(), mxfp8.quantize(x.T).dequantize().T)
    assert torch.equal(mxfp8.operand(x.T, axis=-2).T.float(), want)


def test_not_finite():
    x, tally = data(2, 64), Tally()
    x[0, 3], x[1, 40], x[0, 35] = float("nan"), float("inf"), float("-inf")
    q, values = mxfp8.quantize(x), mxfp8.operand(x, tally=tally)
    assert q.nonfinite == 3 and (tally.elements, tally.tensors) == (3, 1)
    torch.testing.assert_close(values, q.dequantize(), rtol=0, atol=0, equal_nan=True)
    assert q.dequantize().isnan().sum() == 1 and q.scales[1, 1] == 254 and q.elements[1, 40] == 0x7E
    clean = mxfp8.quantize(torch.nan_to_num(x, nan=0.0, posinf=0, neginf=0))
    assert q.scales[0, 0] == clean.scales[0, 0]


def test_nothing_to_quantise():
    assert mxfp8.quantize(torch.empty(0, 64)).dequantize().shape == (0, 64)
    assert mxfp8.operand(torch.empty(0, 64), axis=-2).shape == (0, 64)


def test_bad_input():
    with pytest.raises(ConfigError, match=r"columns are not a multiple of 32.*48 columns.*32 or 64.*bf16"):
        mxfp8.quantize(data(32, 48))
    with pytest.raises(ConfigError, match="rows are not a multiple of 32"):
        mxfp8.operand(data(48, 32), axis=-2)
    with pytest.raises(ConfigError, match=r"one matrix.*float64"):
        mxfp8.operand(data(32, 32).double())
    q = mxfp8.quantize(data(32, 32))
    with pytest.raises(ConfigError, match=r"MXFP8Tensor\.scales does not fit"):
        mxfp8.MXFP8Tensor(elements=q.elements, scales=q.elements, shape=q.shape)
