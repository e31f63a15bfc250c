"""A precision policy on a built model, by the names of its modules (report 2.2)."""

from __future__ import annotations

from torch import nn

from nemotron_ultra.config.policy import Modules, PolicyRow, PolicyTable, config_modules, plan_policy

__all__ = ["Modules", "PolicyRow", "PolicyTable", "config_modules", "module_shapes", "plan_policy"]


def module_shapes(model: nn.Module) -> dict[str, dict[str, tuple[int, ...]]]:
    """Every module that owns parameters, with their shapes; tensors on the meta device will do."""
    owned = (
        (name, {key: tuple(p.shape) for key, p in module.named_parameters(recurse=False)})
        for name, module in model.named_modules()
    )
    return {name: shapes for name, shapes in owned if shapes}
