"""The convolution against torch's own, document by document, with windows carried and gradients."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from nemotron_ultra.ops.conv import causal_conv_silu, causal_conv_silu_window
from nemotron_ultra.ops.segments import Segments


def reference(x_TC, weight_CK, bias_C, bounds, initial=None):
    parts = []
    for doc, (first, last) in enumerate(pairwise(bounds)):
        rows = x_TC[first:last].T
        left = rows.new_zeros(len(rows), weight_CK.shape[1] - 1) if initial is None else initial[doc]
        out = F.conv1d(torch.cat([left, rows], 1)[None], weight_CK[:, None], bias_C, groups=len(rows))
        parts.append(F.silu(out[0]).T)
    return torch.cat(parts)


def draw(total: int, channels: int, taps: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(total)
    shapes = [(total, channels), (channels, taps), (channels,)]
    return [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]


@pytest.mark.parametrize("taps", [2, 3, 4])
@pytest.mark.parametrize(
    "bounds", [[0, 1], [0, 700], [0, 1, 2, 3, 5, 300, 513, 514], [0, 256, 512], [0, 2, 258]]
)
def test_equals_torch_in_value_and_gradient(bounds, taps):
    inputs = draw(bounds[-1], 3, taps)
    segments = Segments(bounds[-1], torch.tensor(bounds, dtype=torch.int32))
    got, want = causal_conv_silu(*inputs, segments), reference(*inputs, bounds)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    weight = torch.randn_like(got)
    pairs = zip(
        torch.autograd.grad(got, inputs, weight), torch.autograd.grad(want, inputs, weight), strict=True
    )
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-11)


def test_many_slabs_without_bias(monkeypatch):
    monkeypatch.setattr("nemotron_ultra.ops.conv.SLAB_ELEMENTS", 1)
    x, weight, _ = draw(600, 2, 4)
    bounds = [0, 255, 258, 600]
    got = causal_conv_silu(x, weight, None, Segments(600, torch.tensor(bounds, dtype=torch.int32)))
    want = reference(x, weight, None, bounds)
    for mine, theirs in zip(
        *(torch.autograd.grad(y.square().sum(), [x, weight]) for y in (got, want)), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("first", [1, 2, 3, 17])
def test_windows_join_two_calls(first):
    x, weight, bias = draw(20, 3, 4)
    whole = causal_conv_silu(x, weight, bias, Segments(20))
    head, window = causal_conv_silu_window(x[:first], weight, bias, Segments(first))
    tail, window = causal_conv_silu_window(x[first:], weight, bias, Segments(20 - first), window)
    torch.testing.assert_close(torch.cat([head, tail]), whole, rtol=0, atol=1e-12)
    torch.testing.assert_close(window[0], x[-3:].T)


def test_initial_windows_have_gradients():
    inputs = draw(7, 2, 4)
    initial = torch.randn(2, 2, 3, dtype=torch.float64).requires_grad_()
    segments = Segments(7, torch.tensor([0, 2, 7], dtype=torch.int32))
    got = causal_conv_silu(*inputs, segments, initial)
    want = reference(*inputs, segments.bounds, initial)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    for mine, theirs in zip(
        *(torch.autograd.grad(y.square().sum(), [*inputs, initial]) for y in (got, want)), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-11)
