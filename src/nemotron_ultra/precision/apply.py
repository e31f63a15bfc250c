"""A policy put in place: `product` of linear layers and `run` of routed experts, on the finished model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from nemotron_ultra.config.precision import PrecisionConfig
from nemotron_ultra.errors import ConfigError
from nemotron_ultra.precision.experts import QuantizedExperts
from nemotron_ultra.precision.formats import Format, Mxfp8, Nvfp4
from nemotron_ultra.precision.linear import QuantizedProduct
from nemotron_ultra.precision.policy import PolicyTable, module_shapes, plan_policy
from nemotron_ultra.precision.state import PrecisionState

# Objectives multiply by the head in chunks of their own, with the stored weight.
STORED_ONLY = ("lm_head",)


@dataclass(frozen=True)
class AppliedPolicy:
    """What `apply_policy` did. state: what belongs in a checkpoint, None where no module is quantised;
    own_operands: names of the weights that their products convert by themselves.
    """

    table: PolicyTable
    state: PrecisionState | None
    own_operands: frozenset[str] = frozenset()

    def gradient_format(self, parameter: str) -> str:
        """ "fp32" or "bf16": the buffer that the gradient of a parameter is added up in."""
        return self.table.policy.gradient_format(parameter)


def apply_policy(model: nn.Module, precision: PrecisionConfig, *, seed: int = 0) -> AppliedPolicy:
    """Give every module of a HybridLM the products that `precision` says; `seed` starts stochastic rounding.

    fp32 and bf16 modules keep their plain product, which computes in the dtype of activations: float32 on a
    CPU, the stored dtype on a GPU. There, partial sums in bf16 are forbidden for the whole process. Raises
    ConfigError for a shape that the format cannot hold, and for a module that has no such product.
    """
    table = plan_policy(module_shapes(model), precision, model.config)
    names = [name for name, format in table.formats.items() if format in ("nvfp4", "mxfp8")]
    if not names:
        return AppliedPolicy(table, None)
    device = next(model.parameters()).device
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    state = PrecisionState(device, seed)
    weights: list[str] = []
    for name in names:
        module = model.get_submodule(name)
        _quantise(name, module, _format(table.formats[name], precision, state), state)
        weights += [f"{name}.{key}" for key, p in module.named_parameters(recurse=False) if p.ndim > 1]
    return AppliedPolicy(table, state, frozenset(weights))


def _format(name: str, precision: PrecisionConfig, state: PrecisionState) -> Format:
    return Mxfp8(state.tally) if name == "mxfp8" else Nvfp4(precision.nvfp4, state.tally)


def _quantise(name: str, module: nn.Module, format: Format, state: PrecisionState) -> None:
    if isinstance(module, nn.Linear) and name not in STORED_ONLY:
        module.product = QuantizedProduct(format, state)
    elif getattr(module, "run", None) is not None:
        module.run = QuantizedExperts(format, state)
    else:
        raise ConfigError(
            f"{name} has no low-precision product",
            got=type(format).__name__.lower(),
            allowed="bf16 or fp32",
            do="give it bf16 by an earlier rule of the policy",
        )
