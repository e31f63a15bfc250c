"""A policy put in place: `product` of linear layers and `run` of routed experts, on the finished model."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nemotron_ultra.config.precision import PrecisionConfig
from nemotron_ultra.config.te import Capability, Realisation, realise
from nemotron_ultra.errors import ConfigError
from nemotron_ultra.ops import with_te
from nemotron_ultra.precision.experts import QuantizedExperts
from nemotron_ultra.precision.formats import Format, Mxfp8, Nvfp4
from nemotron_ultra.precision.linear import QuantizedProduct
from nemotron_ultra.precision.policy import PolicyTable, module_shapes, plan_policy
from nemotron_ultra.precision.state import PrecisionState
from nemotron_ultra.precision.te_experts import TeExperts

# Objectives multiply by the head in chunks of their own, with the stored weight.
STORED_ONLY = ("lm_head",)


@dataclass(frozen=True)
class AppliedPolicy:
    """What `apply_policy` did. state: what belongs in a checkpoint, None where no module is quantised;
    own_operands: names of the weights that their products convert by themselves; realised: who multiplies
    each low-precision format, and why.
    """

    table: PolicyTable
    state: PrecisionState | None
    own_operands: frozenset[str] = frozenset()
    realised: tuple[Realisation, ...] = ()

    def gradient_format(self, parameter: str) -> str:
        """ "fp32" or "bf16": the buffer that the gradient of a parameter is added up in."""
        return self.table.policy.gradient_format(parameter)


def apply_policy(
    model: nn.Module, precision: PrecisionConfig, *, seed: int = 0, found: Capability | None = None
) -> AppliedPolicy:
    """Give every module of a HybridLM the products that `precision` says; `seed` starts stochastic rounding.

    fp32 and bf16 modules keep their plain product, which computes in the dtype of activations: float32 on a
    CPU, the stored dtype on a GPU. There, partial sums in bf16 are forbidden for the whole process. Raises
    ConfigError for a shape that the format cannot hold, and for a module that has no such product.

    found: what Transformer Engine can do here, None: as this machine has it. Raises BackendError where
    precision.backend=te and it cannot realise the policy.
    """
    shapes = module_shapes(model)
    table = plan_policy(shapes, precision, model.config)
    names = [name for name, format in table.formats.items() if format in ("nvfp4", "mxfp8")]
    if not names:
        return AppliedPolicy(table, None)
    device = next(model.parameters()).device
    realised = realise(table, shapes, found or with_te.here(device), os.environ)
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    trains = any(p.requires_grad for p in model.parameters())
    drawn_outside = trains and any(row.name == "te" for row in realised)
    state = PrecisionState(device, seed, default_generator=drawn_outside)
    makers = {row.format: _makers(row, precision, state) for row in realised}
    weights: list[str] = []
    for name in names:
        module = model.get_submodule(name)
        _put(name, module, table.formats[name], *makers[table.formats[name]])
        weights += [f"{name}.{key}" for key, p in module.named_parameters(recurse=False) if p.ndim > 1]
    return AppliedPolicy(table, state, frozenset(weights), realised)


def _makers(
    row: Realisation, precision: PrecisionConfig, state: PrecisionState
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """What makes a linear product, and one of routed experts, in the format of this row."""
    if row.name == "te":
        recipe = with_te.make_recipe(row.format, precision.nvfp4)
        return lambda: with_te.TeProduct(recipe), lambda: TeExperts(recipe)
    format = _format(row.format, precision, state)
    return lambda: QuantizedProduct(format, state), lambda: QuantizedExperts(format, state)


def _format(name: str, precision: PrecisionConfig, state: PrecisionState) -> Format:
    return Mxfp8(state.tally) if name == "mxfp8" else Nvfp4(precision.nvfp4, state.tally)


def _put(
    name: str, module: nn.Module, format: str, product: Callable[[], Any], experts: Callable[[], Any]
) -> None:
    if isinstance(module, nn.Linear) and name not in STORED_ONLY:
        module.product = product()
    elif getattr(module, "run", None) is not None:
        module.run = experts()
    else:
        raise ConfigError(
            f"{name} has no low-precision product",
            got=format,
            allowed="bf16 or fp32",
            do="give it bf16 by an earlier rule of the policy",
        )
