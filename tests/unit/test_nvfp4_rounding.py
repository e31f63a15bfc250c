"""Stochastic rounding keeps the mean in every interval of the grid; its only state is the generator."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from nemotron_ultra.ops import nvfp4
from nemotron_ultra.ops import nvfp4_elements as elements
from nemotron_ultra.ops.nvfp4_random import noise_like

GRID = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
DRAWS = 1 << 20


def scaled(v: float, rows: int) -> torch.Tensor:
    """[rows, 16] whose scales are 448 and 1: every element is v after scaling, but one 6 a row."""
    x = torch.full((rows, 16), v * 448)
    x[:, 0] = 2688
    return x


@pytest.mark.parametrize("place", [0.03, 0.25, 0.5, 0.81])
@pytest.mark.parametrize("sign", [1, -1])
def test_mean_in_every_interval(place, sign):
    generator = torch.Generator().manual_seed(17)
    for low, high in pairwise(GRID):
        v = torch.tensor(sign * (low + place * (high - low)))
        x = scaled(v.item(), -(-DRAWS // 15))
        values, _ = nvfp4.operand(x, rounding="stochastic", generator=generator)
        drawn = values[:, 1:].div(448).double()
        assert set(drawn.unique().abs().tolist()) == {low, high}
        error = (high - low) * math.sqrt(place * (1 - place) / drawn.numel())
        assert abs(drawn.mean() - v.double()) < 4 * error


def test_numbers_of_the_grid_never_move():
    generator = torch.Generator().manual_seed(1)
    for v in [*GRID, *(-g for g in GRID)]:
        x = torch.full((1 << 19,), v)
        assert elements.round_stochastic_(x, noise_like(x, generator)).eq(v).all()
    extremes = torch.tensor([-0.5 + 2.0**-22, 0.5 - 2.0**-22])
    for v in GRID:
        assert elements.round_stochastic_(torch.full((2,), v), extremes).eq(v).all()


def test_saturates_above_six():
    x = torch.tensor([6.375, -6.4, 7.5, 100.0, -1e38, 3e38])
    got = elements.round_stochastic_(x.clone(), noise_like(x, None))
    assert torch.equal(got, 6 * x.sign())


@pytest.mark.parametrize("size", [100_000, (1 << 19) + 16])
def test_noise_is_uniform_and_within_a_half(size):
    """Below and above the size where it is drawn element by element."""
    noise = noise_like(torch.empty(size), torch.Generator().manual_seed(5)).double()
    assert noise.abs().max() < 0.5 and noise.unique().numel() > 0.8 * size
    counts = torch.histc(noise, 64, -0.5, 0.5)
    assert ((counts - size / 64).abs() < 5 * math.sqrt(size / 64)).all()
    lag = (noise[1:] * noise[:-1]).mean() * 12
    assert lag.abs() < 5 / math.sqrt(size)


def test_noise_is_uniform_over_the_states_of_the_generator():
    generator, v = torch.Generator().manual_seed(11), torch.empty(4)
    draws = torch.stack([noise_like(v, generator).clone() for _ in range(20_000)]).double()
    assert (draws.mean(0).abs() < 4 / math.sqrt(12 * len(draws))).all()
    together = torch.corrcoef(draws.T) - torch.eye(4)
    assert together.abs().max() < 5 / math.sqrt(len(draws))


def test_the_generator_is_the_only_state():
    x, generator = torch.randn(64, 64), torch.Generator().manual_seed(2)
    start = generator.get_state()
    first, second = (nvfp4.operand(x, rounding="stochastic", generator=generator)[0] for _ in range(2))
    assert not torch.equal(first, second)
    generator.set_state(start)
    assert torch.equal(nvfp4.operand(x, rounding="stochastic", generator=generator)[0], first)
    generator.set_state(start)
    assert torch.equal(nvfp4.quantize(x, rounding="stochastic", generator=generator).values(), first)


def test_bytes_give_the_share_of_the_hardware():
    """Over all bytes, up in floor(256 f) of 256."""
    for low, high in pairwise(GRID):
        v = torch.full((256,), low + 0.3 * (high - low))
        got = elements.round_with_bytes_(v.clone(), torch.arange(256).to(torch.uint8))
        assert set(got.tolist()) == {low, high} and (got == high).sum() == math.floor(256 * 0.3)
