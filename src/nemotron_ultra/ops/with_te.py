"""y = x W^T + b by Transformer Engine's linear, in its NVFP4 or MXFP8 recipe: the policy on FP4 hardware.

The weight stays the model's parameter: TE's module holds a second one over the same memory, and adds the
weight gradient to the model's `weight.main_grad` in FP32 (`fuse_wgrad_accumulation`). Written against the
Python source of TE 2.20 and never run on a GPU: no machine with one was at hand. Emulation is what tests hold
to golden numbers; TE's stochastic rounding draws bits of its own, so its runs are other runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nemotron_ultra.config.precision import Format, Nvfp4Config
from nemotron_ultra.config.te import INSTALL, Capability, capability, installed_version, multiple
from nemotron_ultra.errors import BackendError

__all__ = ["Capability", "TeGroupedProduct", "TeProduct", "capability", "here", "make_recipe"]


def here(device: torch.device | str | None = None) -> Capability:
    """`capability` of this machine, for a model on `device` (None: its first GPU); TE is not imported."""
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    compute = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    return capability(installed_version(), compute)


def library() -> tuple[Any, Any]:
    """The modules transformer_engine.pytorch and transformer_engine.common.recipe.

    Raises BackendError where they are missing or do not load: PyPI's package alone is empty, which TE says
    by a RuntimeError.
    """
    try:
        import transformer_engine.pytorch as te
        from transformer_engine.common import recipe
    except (ImportError, RuntimeError, OSError, AssertionError) as error:
        raise BackendError("Transformer Engine does not load", got=error, do=INSTALL) from error
    return te, recipe


def nvfp4_arguments(options: Nvfp4Config) -> dict[str, bool]:
    """Arguments of TE's NVFP4BlockScaling for the options of a policy."""
    return {
        "disable_rht": options.hadamard == "none",
        "disable_stochastic_rounding": options.stochastic_rounding == "none",
        "disable_2d_quantization": options.weight_block == "1x16",
    }


def make_recipe(format: Format, options: Nvfp4Config | None = None) -> Any:
    """TE's recipe for "nvfp4" or "mxfp8". Raises BackendError without TE."""
    _, recipe = library()
    if format == "mxfp8":
        return recipe.MXFP8BlockScaling()
    return recipe.NVFP4BlockScaling(**nvfp4_arguments(options or Nvfp4Config()))


class TeProduct:
    """(x [..., K], weight [N, K] bf16, bias [N] or None) -> [..., N] in the dtype of x; one object a module.

    K and N must be multiples of 32. Rows are filled up with zeros to a multiple of 64. The gradient of the
    weight goes to `weight.main_grad`, FP32 [N, K], made here where it is missing, and not to `weight.grad`.
    """

    def __init__(self, recipe: Any):
        self.te, _ = library()
        self.recipe = recipe
        self.linear: Any = None

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        rows_MK = x.flatten(0, -2)
        count, step = len(rows_MK), multiple("tokens")
        full_MK = nn.functional.pad(rows_MK.bfloat16(), (0, 0, 0, -count % step))
        linear = self._linear(weight)
        with self.te.autocast(enabled=True, recipe=self.recipe):
            y_MN = linear(full_MK)
        y_MN = (y_MN if len(full_MK) == count else y_MN[:count].clone()).to(x.dtype)
        y_MN = y_MN if bias is None else y_MN + bias.to(x.dtype)
        return y_MN if x.ndim == 2 else y_MN.view(*x.shape[:-1], -1)

    def _linear(self, weight: Tensor) -> Any:
        outputs, inputs = weight.shape
        if self.linear is None:
            self.linear = self.te.Linear(inputs, outputs, **_options(weight))
        _share(self.linear, ["weight"], weight)
        return self.linear


class TeGroupedProduct:
    """(rows [N, K] sorted by expert, sizes, weight [E, O, K] bf16) -> [N, O], a product for each expert.

    Sizes are rows of each expert, multiples of 128 that add up to N. Gradients as in TeProduct.
    """

    def __init__(self, recipe: Any):
        self.te, _ = library()
        self.recipe = recipe
        self.linear: Any = None

    def __call__(self, rows_NK: Tensor, sizes: Sequence[int], weight_EOK: Tensor) -> Tensor:
        experts, outputs, inputs = weight_EOK.shape
        if self.linear is None:
            self.linear = self.te.GroupedLinear(experts, inputs, outputs, **_options(weight_EOK))
        _share(self.linear, [f"weight{i}" for i in range(experts)], weight_EOK)
        with self.te.autocast(enabled=True, recipe=self.recipe):
            return self.linear(rows_NK.bfloat16(), list(sizes))


def _options(weight: Tensor) -> dict[str, Any]:
    """Without memory of its own: parameters are put in place by `_share`."""
    if weight.dtype != torch.bfloat16:
        raise BackendError(
            "Transformer Engine multiplies bf16 weights", got=weight.dtype, do="set precision.weights=bf16"
        )
    return {"bias": False, "params_dtype": weight.dtype, "fuse_wgrad_accumulation": True, "device": "meta"}


def _share(linear: nn.Module, names: Sequence[str], weight: Tensor) -> None:
    """Let the parameters `names` of TE's module be the parts of the model's weight and of its main_grad."""
    if getattr(linear, names[0]).data_ptr() != weight.data_ptr():
        with torch.inference_mode(False):
            for name, part in zip(names, _parts(weight), strict=True):
                setattr(linear, name, nn.Parameter(part))
    linear.requires_grad_(weight.requires_grad)
    if not (weight.requires_grad and torch.is_grad_enabled()):
        return
    if getattr(weight, "main_grad", None) is None:
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
    held = getattr(getattr(linear, names[0]), "main_grad", None)
    if held is None or held.data_ptr() != weight.main_grad.data_ptr():
        for name, grad in zip(names, _parts(weight.main_grad), strict=True):
            getattr(linear, name).main_grad = grad


def _parts(stack: Tensor) -> Sequence[Tensor]:
    """Views of the matrices of [N, K] or [E, N, K]."""
    return stack.detach().unbind() if stack.ndim == 3 else (stack.detach(),)
