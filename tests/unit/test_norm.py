"""RMSNorm and the gated group norm against their formula, in value and gradient."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from nemotron_ultra.model.norm import RMSNorm
from nemotron_ultra.ops.norm import gated_rms_norm, rms_norm


def plain(x, weight, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def plain_gated(y, z, weight, eps, groups):
    v = (y * F.silu(z)).unflatten(-1, (groups, -1))
    return (v * torch.rsqrt(v.square().mean(-1, keepdim=True) + eps)).flatten(-2) * weight


def same_gradients(got, want, inputs):
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    weight = torch.randn_like(got)
    for mine, theirs in zip(*(torch.autograd.grad(o, inputs, weight) for o in (got, want)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("shape", [(7,), (1, 8), (5, 12), (2, 3, 6)])
def test_rms_norm(shape):
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(shape[-1], dtype=torch.float64, requires_grad=True)
    same_gradients(rms_norm(x, weight, 1e-5), plain(x, weight, 1e-5), [x, weight])


def test_rms_norm_of_a_transposed_view():
    x = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.ones(6, dtype=torch.float64, requires_grad=True)
    same_gradients(rms_norm(x.T, weight, 1e-6), plain(x.T, weight, 1e-6), [x, weight])


@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize("shape", [(1, 12), (9, 12), (2, 3, 12)])
def test_gated_norm(shape, groups):
    y, z = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weight = torch.randn(12, dtype=torch.float64, requires_grad=True)
    got = gated_rms_norm(y, z, weight, 1e-5, groups)
    same_gradients(got, plain_gated(y, z, weight, 1e-5, groups), [y, z, weight])


def test_bf16_input_has_float32_statistics_and_one_rounding():
    x = (torch.randn(4, 64) * 30).bfloat16()
    weight = torch.randn(64).bfloat16()
    want = plain(x.double(), weight.double(), 1e-5).bfloat16()
    assert (rms_norm(x, weight, 1e-5) == want).float().mean() > 0.99


def test_zero_and_huge_rows_stay_finite():
    norm = RMSNorm(8, 1e-5)
    x = torch.tensor([0.0, 1e15])[:, None].expand(2, 8).clone().requires_grad_()
    y = norm(x)
    y.sum().backward()
    assert y.isfinite().all() and x.grad.isfinite().all()
    torch.testing.assert_close(y[1], torch.ones(8))
