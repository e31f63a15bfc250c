"""The three products of a layer beside Transformer Engine's, within 1e-6 of the largest result."""

import pytest
import torch
from safetensors.torch import load_file

from nemotron_ultra.config.precision import Nvfp4Config
from nemotron_ultra.ops import nvfp4
from nemotron_ultra.precision.formats import Nvfp4, Operand, multiply
from nemotron_ultra.precision.linear import Nvfp4Product

NEAREST = Nvfp4Config(stochastic_rounding="none")


@pytest.fixture(scope="module")
def gemm(golden):
    return load_file(golden / "nvfp4" / "gemm.safetensors")


def close(found, expected) -> bool:
    return float((found - expected).abs().max()) <= 1e-6 * float(expected.abs().max())


def products(gemm, options, dtype=torch.float32, main_grad=None):
    """Y, dX and the gradient of W after one backward."""
    x, weight = (gemm[name].to(dtype).requires_grad_() for name in ("x", "w"))
    weight.grad = main_grad
    y = Nvfp4Product(options)(x, weight)
    y.backward(gemm["dy"].to(dtype))
    return y.detach(), x.grad, weight.grad


def test_fprop_dgrad_and_wgrad(gemm):
    y, dx, dw = products(gemm, NEAREST)
    assert close(y, gemm["fprop.fp32"]) and close(dx, gemm["dgrad.fp32"]) and close(dw, gemm["wgrad.fp32"])


def test_bf16_results_are_the_float32_ones_rounded(gemm):
    y, dx, _ = products(gemm, NEAREST)
    for found, name in ((y, "fprop.bf16"), (dx, "dgrad.bf16")):
        assert float((found.bfloat16() != gemm[name]).float().mean()) < 2e-3


def test_wgrad_is_added_to_the_main_gradient_in_float32(gemm):
    _, _, dw = products(gemm, NEAREST, main_grad=gemm["wgrad_accum.main_grad_in"].clone())
    assert close(dw, gemm["wgrad_accum.fp32"])


def test_without_the_hadamard_transform(gemm):
    options = Nvfp4Config(stochastic_rounding="none", hadamard="none")
    y, dx, dw = products(gemm, options)
    assert close(y, gemm["fprop.fp32"]) and close(dx, gemm["dgrad.fp32"])
    assert close(dw, gemm["wgrad_norht.fp32"]) and not close(dw, gemm["wgrad.fp32"])


def rounded(gemm, bits, **how):
    """dY rounded stochastically with given random bytes."""
    values, amax = nvfp4.operand(
        gemm["dy"].float(), rounding="stochastic", random_bits=bits.contiguous(), **how
    )
    return Operand(values, amax[0] / 2688)


def test_stochastic_rounding_with_given_bits(gemm):
    low = Nvfp4()
    _, weight = low.weight(gemm["w"])
    dy = rounded(gemm, gemm["dy_sr.row.rbits8"])
    assert close(multiply(dy, weight.T, torch.empty(64, 128)), gemm["dgrad_sr.fp32"])
    dy = rounded(gemm, gemm["dy_sr.col.rbits8"].T, axis=-2, rht=True)
    wgrad = multiply(dy.T, low.input_by_token(gemm["x"]), torch.empty(96, 128))
    assert close(wgrad, gemm["wgrad_sr.fp32"])
