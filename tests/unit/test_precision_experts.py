"""Routed experts in low precision: each expert is a product of its own, with its own tensor scales."""

import pytest
import torch
from torch import nn

from nemotron_ultra.config.precision import Nvfp4Config
from nemotron_ultra.ops.experts import routed_experts
from nemotron_ultra.precision.experts import QuantizedExperts
from nemotron_ultra.precision.formats import Bf16, Nvfp4
from nemotron_ultra.precision.linear import QuantizedProduct
from nemotron_ultra.precision.state import PrecisionState

TOKENS, WIDTH, HIDDEN, EXPERTS, CHOSEN = 37, 32, 48, 5, 2
NEAREST = Nvfp4(Nvfp4Config(stochastic_rounding="none"))


def inputs(tokens=TOKENS, experts=EXPERTS, seed=0):
    """x, chosen experts (never the last one), their weights, both stacks."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, WIDTH, generator=draw).requires_grad_()
    scores = torch.rand(tokens, experts - 1, generator=draw)
    weights, indices = scores.topk(CHOSEN)
    up = nn.Parameter(torch.randn(experts, HIDDEN, WIDTH, generator=draw) / WIDTH**0.5)
    down = nn.Parameter(torch.randn(experts, WIDTH, HIDDEN, generator=draw) / HIDDEN**0.5)
    return x, indices, weights.requires_grad_(), up, down


def outcome(run, **sizes):
    """Output and all gradients for one fixed output gradient."""
    x, indices, weights, up, down = inputs(**sizes)
    y = run(x, indices, weights, up, down)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(9)))
    return y.detach(), x.grad, weights.grad, up.grad, down.grad


def loop(format):
    """The same expert by expert, with the product of a linear layer."""

    def run(x, indices, weights, up, down):
        y = torch.zeros_like(x)
        for expert in range(len(up)):
            token, place = (indices == expert).nonzero(as_tuple=True)
            if len(token):
                product = QuantizedProduct(format, PrecisionState())
                hidden = product(x[token], up[expert]).bfloat16().float().relu().square()
                rows = QuantizedProduct(format, PrecisionState())(hidden, down[expert])
                y = y.index_add(0, token, rows * weights[token, place, None])
        return y

    return run


def error(found, expected) -> float:
    return float((found - expected).norm() / expected.norm())


def test_each_expert_is_a_product_of_its_own():
    found, expected = outcome(QuantizedExperts(NEAREST, PrecisionState())), outcome(loop(NEAREST))
    for a, b in zip(found, expected, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("format", "limit"), [(Bf16(), 0.02), (Nvfp4(), 0.35)], ids=["bf16", "nvfp4"])
def test_close_to_the_plain_experts(format, limit):
    found, expected = outcome(QuantizedExperts(format, PrecisionState())), outcome(routed_experts)
    assert all(error(a, b) < limit for a, b in zip(found, expected, strict=True))
    assert not found[3][-1].any() and not found[4][-1].any()  # nobody chose the last expert


def test_random_bits_do_not_depend_on_threads():
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            found.append(outcome(QuantizedExperts(Nvfp4(), PrecisionState(seed=5)), tokens=200))
    finally:
        torch.set_num_threads(threads)
    for a, b in zip(*found, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)


def test_without_gradients_nothing_is_padded_and_the_result_is_the_same():
    x, indices, weights, up, down = inputs()
    run = QuantizedExperts(NEAREST, PrecisionState())
    y = run(x, indices, weights, up, down)
    with torch.inference_mode():
        assert torch.allclose(run(x, indices, weights, up, down), y, atol=1e-6)
        assert run(x[:0], indices[:0], weights[:0], up, down).shape == (0, WIDTH)


def test_operands_are_made_once_per_version():
    x, indices, weights, up, down = inputs()
    run = QuantizedExperts(NEAREST, PrecisionState())
    run(x, indices, weights, up, down)
    made = run.operands
    run(x, indices, weights, up, down)
    assert run.operands is made
    with torch.no_grad():
        down.add_(0)
    run(x, indices, weights, up, down)
    assert run.operands is not made


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_activations_of_other_dtypes(dtype):
    x, indices, weights, up, down = inputs()
    y = QuantizedExperts(NEAREST, PrecisionState())(x, indices, weights, up, down)
    other = x.detach().bfloat16().to(dtype).requires_grad_()
    z = QuantizedExperts(NEAREST, PrecisionState())(other, indices, weights, up, down)
    z.sum().backward()
    assert z.dtype == other.grad.dtype == dtype and torch.equal(z, y.to(dtype))


def test_other_weights_give_other_operands():
    run, (x, indices, weights, up, down) = QuantizedExperts(NEAREST, PrecisionState()), inputs()
    other = nn.Parameter(down.detach().flip(0))
    fresh = QuantizedExperts(NEAREST, PrecisionState())(x, indices, weights, up, other)
    before = run(x, indices, weights, up, down)
    assert torch.equal(run(x, indices, weights, up, other), fresh) and not torch.equal(before, fresh)
