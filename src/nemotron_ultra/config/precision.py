"""PrecisionConfig: ordered rules from a module-name glob to a number format; first match wins (report 2.2)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from nemotron_ultra.config.base import config

Format = Literal["fp32", "bf16", "mxfp8", "nvfp4"]


@config
class PrecisionRule:
    match: str
    """Glob over module names in the checkpoint layout, such as `backbone.layers.*.mixer.in_proj`."""
    format: Format
    """Format of the products of matching modules."""


@config
class PrecisionConfig:
    name: str
    """Name of the policy."""
    weights: Literal["fp32", "bf16"] = "fp32"
    """Storage of the weights between steps; the optimizer's master copy is always fp32."""
    default: Format = "fp32"
    """Format of modules that no rule matches."""
    rules: list[PrecisionRule] = Field(default_factory=list)
    """Ordered rules; the first match wins."""
    last_layers: Annotated[int, Field(ge=0)] = 0
    """Layers at the end of the stack that stay in `last_layers_format`."""
    last_layers_format: Format = "bf16"
    """Format of the last layers."""
    gradients: Literal["fp32"] = "fp32"
    """Accumulation and reduction of gradients (report 2.7: BF16 loses the 0.05-scaled MTP gradient)."""
