"""Products in NVFP4, MXFP8 and BF16: operands, padding, caching, random state, bad shapes."""

import copy

import pytest
import torch
from torch import nn

from nemotron_ultra.config.precision import Nvfp4Config
from nemotron_ultra.model.linear import Linear
from nemotron_ultra.ops import mxfp8, nvfp4
from nemotron_ultra.precision.linear import Bf16Product, Mxfp8Product, Nvfp4Product
from nemotron_ultra.precision.state import PrecisionState

NEAREST = Nvfp4Config(stochastic_rounding="none")
PRODUCTS = {"nvfp4": Nvfp4Product, "mxfp8": Mxfp8Product, "bf16": Bf16Product}
ERRORS = {"nvfp4": 0.25, "mxfp8": 0.05, "bf16": 0.01}


def tensors(tokens=48, inputs=64, outputs=32, seed=0):
    draw = torch.Generator().manual_seed(seed)
    x, weight, dy = (
        torch.randn(shape, generator=draw)
        for shape in ((tokens, inputs), (outputs, inputs), (tokens, outputs))
    )
    return x, nn.Parameter(weight / inputs**0.5), dy


def gradients(product, x, weight, dy, bias=None):
    x, weight.grad = x.clone().requires_grad_(), None
    y = product(x, weight, bias)
    y.backward(dy)
    return y.detach(), x.grad, weight.grad


def error(found, expected) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("shape", [(48, 64, 32), (37, 64, 40), (1, 96, 8)])
def test_close_to_the_plain_product_whatever_tokens_and_outputs(name, shape):
    x, weight, dy = tensors(*shape)
    bias = nn.Parameter(torch.randn(shape[2]))
    found = gradients(PRODUCTS[name](), x, weight, dy, bias)
    expected = gradients(Linear.product, x, weight, dy, bias)
    assert all(error(a, b) < ERRORS[name] for a, b in zip(found, expected, strict=True))
    assert torch.equal(bias.grad, 2 * dy.sum(0))


def test_mxfp8_products_are_those_of_the_stored_format():
    def stored(x):
        return mxfp8.quantize(x.detach().bfloat16().float().contiguous()).dequantize()

    x, weight, dy = tensors(tokens=64)
    y, dx, dw = gradients(Mxfp8Product(), x, weight, dy)
    assert torch.allclose(y, stored(x) @ stored(weight).T, atol=1e-5)
    assert torch.allclose(dx, stored(dy) @ stored(weight.T).T, atol=1e-5)
    assert torch.allclose(dw, stored(dy.T) @ stored(x.T).T, atol=1e-5)


@pytest.mark.parametrize("rule", ["te_2_13", "four_over_six_mae", "four_over_six_mse"])
def test_other_scale_rules(rule):
    options = Nvfp4Config(scale_rule=rule, stochastic_rounding="none", hadamard="none")
    x, weight, dy = tensors()
    found, expected = (gradients(p, x, weight, dy) for p in (Nvfp4Product(options), Linear.product))
    assert all(error(a, b) < 0.2 for a, b in zip(found, expected, strict=True))


def test_padding_with_zero_tokens_changes_nothing():
    x, weight, dy = tensors(tokens=37)
    y, dx, dw = gradients(Nvfp4Product(NEAREST), x, weight, dy)
    longer = [torch.cat([t, torch.zeros(11, t.shape[1])]) for t in (x, dy)]
    y_longer, dx_longer, dw_longer = gradients(Nvfp4Product(NEAREST), longer[0], weight, longer[1])
    assert torch.allclose(y, y_longer[:37], atol=1e-6) and torch.allclose(dx, dx_longer[:37], atol=1e-6)
    assert torch.equal(dw, dw_longer)


def test_forward_and_dgrad_see_the_same_weight():
    x, weight, _ = tensors()
    product = Nvfp4Product(NEAREST)
    product(x, weight)
    fprop, dgrad = product.operands
    assert fprop is dgrad
    stored = nvfp4.quantize(weight.detach().bfloat16(), block="16x16").values()
    assert torch.equal(fprop.values, stored)
    untiled = Nvfp4Product(Nvfp4Config(weight_block="1x16"))
    untiled(x, weight)
    assert not torch.equal(untiled.operands[0].values, untiled.operands[1].values)


def test_input_is_rounded_to_bf16_first():
    x, weight, _ = tensors()
    product = Nvfp4Product()
    assert torch.equal(product(x, weight), product(x.bfloat16().float(), weight))


def test_operand_of_a_weight_is_made_once_per_version():
    x, weight, dy = tensors()
    product = Nvfp4Product()
    gradients(product, x, weight, dy)
    made = product.operands
    gradients(product, x, weight, dy)
    with torch.inference_mode():
        product(x, weight)
    assert product.operands is made
    before = product(x, weight)
    with torch.no_grad():
        weight.mul_(2)
    assert torch.allclose(product(x, weight), 2 * before) and product.operands is not made


def test_operand_of_another_weight_is_made_anew():
    x, weight, _ = tensors()
    product, other = Nvfp4Product(), nn.Parameter(tensors(seed=1)[1].detach())
    first, second = (Nvfp4Product()(x, w) for w in (weight, other))
    assert torch.equal(product(x, weight), first) and torch.equal(product(x, other), second)
    assert torch.equal(product(x, other.detach().bfloat16()), second)
    weight.data = other.detach().clone()
    assert torch.equal(product(x, weight), second)


def test_copied_product_does_not_trust_its_operands():
    module = Linear(64, 32)
    module.weight, module.product = tensors()[1], Nvfp4Product()
    x = tensors()[0]
    before = module(x)
    with torch.no_grad():
        module.weight.mul_(2)
    assert torch.allclose(copy.deepcopy(module)(x), 2 * before)


def test_stochastic_rounding_moves_on_and_comes_back():
    x, weight, dy = tensors()
    state = PrecisionState(seed=3)
    product = Nvfp4Product(state=state)
    before = state.state_dict()
    first, second = (gradients(product, x, weight, dy)[1:] for _ in range(2))
    assert not torch.equal(first[0], second[0]) and not torch.equal(first[1], second[1])
    state.load_state_dict(before)
    again = gradients(product, x, weight, dy)[1:]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_stochastic_gradients_are_unbiased():
    x, weight, dy = tensors(tokens=16)
    product = Nvfp4Product(Nvfp4Config(hadamard="none"))
    draws = torch.stack([gradients(product, x, weight, dy)[1] for _ in range(400)])
    exact = dy.bfloat16().float() @ product.operands[1].values * product.operands[1].factor
    standard_error = draws.std(0) / 20
    # Values just above 6 saturate, so a few elements are off by more than chance.
    assert float(((draws.mean(0) - exact).abs() > 4 * standard_error).float().mean()) < 0.1
    assert error(draws.mean(0), exact) < 0.03


def test_forward_leaves_the_random_state_alone():
    x, weight, _ = tensors()
    state = PrecisionState()
    before = state.generator.get_state()
    Nvfp4Product(state=state)(x, weight)
    assert torch.equal(state.generator.get_state(), before)


@pytest.mark.parametrize("name", ["nvfp4", "mxfp8"])
def test_non_finite_elements_are_counted(name):
    x, weight, _ = tensors()
    state = PrecisionState()
    product = PRODUCTS[name](state=state)
    product(x, weight)
    assert state.take_non_finite() == 0
    x[3, 5], x[7, 0] = torch.nan, torch.inf
    product(x, weight)
    assert state.take_non_finite() == 2 and state.take_non_finite() == 0


def test_more_axes_and_float64():
    x, weight, _ = tensors()
    y = Nvfp4Product()(x, weight)
    assert torch.equal(Nvfp4Product()(x.view(4, 12, 64), weight).view(48, 32), y)
    double = Nvfp4Product()(x.double(), weight.double())
    assert double.dtype == torch.float64 and torch.allclose(double.float(), y)


@pytest.mark.parametrize("name", PRODUCTS)
def test_bf16_activations_and_weights(name):
    x, weight, dy = (t.detach().bfloat16() for t in tensors())
    low = gradients(PRODUCTS[name](), x, nn.Parameter(weight), dy)
    wide = gradients(PRODUCTS[name](), x.float(), nn.Parameter(weight.float()), dy.float())
    for a, b in zip(low, wide, strict=True):
        assert a.dtype == torch.bfloat16 and torch.equal(a, b.bfloat16())
