"""SSM state in float16 and int8: stochastic rounding keeps the mean, scales per 128, edges, bad input."""

from __future__ import annotations

import math

import pytest
import torch

from nemotron_ultra.errors import ConfigError
from nemotron_ultra.ops.state_formats import to_float16, to_int8


def test_int8_keeps_the_mean():
    state = torch.full((8192, 128), 0.317)
    state[:, 0] = 127.0
    got = to_int8(state, generator=torch.Generator().manual_seed(0))
    drawn = got.dequantize()[:, 1:].double()
    error = math.sqrt(0.317 * 0.683 / drawn.numel())
    assert abs(drawn.mean() - 0.317) < 4 * error and set(got.codes.unique().tolist()) == {0, 1, 127}


@pytest.mark.parametrize("value", [1.0004, -0.7777777, 3.1e-4])
def test_float16_keeps_the_mean(value):
    got = to_float16(torch.full((1 << 20,), value), generator=torch.Generator().manual_seed(1)).double()
    low, high = got.min().item(), got.max().item()
    place = (value - low) / (high - low)
    error = (high - low) * math.sqrt(place * (1 - place) / got.numel())
    assert low < value < high and abs(got.mean() - value) < 4 * error
    assert torch.nextafter(torch.tensor(low).half(), torch.tensor(9.0).half()) == torch.tensor(high).half()


def test_a_scale_for_each_128():
    state = torch.randn(2, 3, 256, generator=torch.Generator().manual_seed(2))
    state[..., 128:] *= 1000
    got = to_int8(state, "nearest")
    assert got.scale.shape == (2, 3, 2) and got.codes.dtype == torch.int8 and got.codes.abs().max() == 127
    half_step = (got.scale / 2 * 1.0001).repeat_interleave(128, -1)
    assert ((got.dequantize() - state).abs() <= half_step).all()
    assert to_int8(state[..., :64]).scale.shape == (2, 3, 1)


def test_float16_edges():
    state = torch.tensor([0.0, -0.0, 65504.0, 65536.0, -1e30, 2.0**-14, 2.0**-15, float("inf"), float("nan")])
    got = to_float16(state, random_bits=torch.zeros(9, dtype=torch.int32)).tolist()
    assert got[:8] == [0, 0, 65504, math.inf, -math.inf, 2.0**-14, 0, math.inf] and math.isnan(got[8])
    ones = to_float16(state, random_bits=torch.full((9,), 0x1FFF))
    assert ones[2] == 65504 and ones[5] == 2.0**-14 and ones[7] == math.inf and ones[8].isnan()


def test_zero_state_and_the_generator():
    zero = to_int8(torch.zeros(4, 128))
    assert zero.codes.abs().max() == 0 and zero.dequantize().abs().max() == 0
    state, generator = torch.randn(4, 128), torch.Generator().manual_seed(3)
    before = generator.get_state()
    first = to_float16(state, generator=generator), to_int8(state, generator=generator).codes
    generator.set_state(before)
    again = to_float16(state, generator=generator), to_int8(state, generator=generator).codes
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


def test_bad_input():
    with pytest.raises(ConfigError, match=r"does not divide into blocks.*192.*multiple of 128"):
        to_int8(torch.ones(2, 192))
    with pytest.raises(ConfigError, match=r"unknown rounding.*'down'.*nearest, stochastic"):
        to_float16(torch.ones(2, 128), "down")
    with pytest.raises(ConfigError, match="random_bits do not fit"):
        to_int8(torch.ones(2, 128), random_bits=torch.ones(2, 64, dtype=torch.int64))
    with pytest.raises(ConfigError, match="takes numbers"):
        to_int8(torch.ones(2, 128, dtype=torch.int32))
