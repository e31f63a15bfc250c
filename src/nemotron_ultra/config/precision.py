"""PrecisionConfig: ordered rules from a module-name glob to a format; first match wins (report 2.2)."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import Literal

from pydantic import Field, model_validator

from nemotron_ultra.config.base import NonNegative, config

Format = Literal["fp32", "bf16", "mxfp8", "nvfp4"]
PRECISE: tuple[Format, ...] = ("nvfp4", "mxfp8", "bf16", "fp32")


@config
class PrecisionRule:
    match: str
    """Glob over module names in the checkpoint layout, such as `backbone.layers.*.mixer.in_proj`."""
    format: Format
    """Format of the products of matching modules."""


@config
class Nvfp4Config:
    weight_block: Literal["16x16", "1x16"] = "16x16"
    """Block that shares one scale in a weight; 16x16 gives forward and backward the same values."""
    activation_block: Literal["1x16"] = "1x16"
    """Block that shares one scale in activations and gradients, along the contraction."""
    hadamard: Literal["none", "wgrad"] = "wgrad"
    """Inputs that pass a random 16 x 16 Hadamard transform: those of the weight gradient, or none."""
    stochastic_rounding: Literal["none", "gradients"] = "gradients"
    """Tensors rounded stochastically; weights and activations round to nearest."""


@config
class PrecisionConfig:
    name: str
    """Name of the policy."""
    weights: Literal["fp32", "bf16"] = "fp32"
    """Storage of the weights between steps; the optimizer's master copy is always fp32."""
    default: Format = "fp32"
    """Format of modules that no rule matches. On a CPU bf16 is storage only: products run in fp32."""
    rules: list[PrecisionRule] = Field(default_factory=list)
    """Ordered rules; the first match wins."""
    last_layers: NonNegative = 0
    """Layers at the end of the stack whose modules get at least `last_layers_format`."""
    last_layers_format: Format = "bf16"
    """Lowest format inside the last layers."""
    gradients: Literal["fp32"] = "fp32"
    """Accumulation and reduction of gradients (report 2.7: BF16 loses the 0.05-scaled MTP gradient)."""
    nvfp4: Nvfp4Config | None = None
    """Blocks, transform and rounding of the nvfp4 products; null where no module uses the format."""

    @property
    def formats(self) -> list[str]:
        """Every format that the policy can give to a product, without repeats."""
        tail = [self.last_layers_format] if self.last_layers else []
        return list(dict.fromkeys([self.default, *(rule.format for rule in self.rules), *tail]))

    def format_of(self, module: str, num_layers: int) -> Format:
        """Format of a module named as in the checkpoint, such as backbone.layers.3.mixer.in_proj."""
        found = next((rule.format for rule in self.rules if fnmatchcase(module, rule.match)), self.default)
        layer = re.match(r"backbone\.layers\.(\d+)\.", module)
        if layer and int(layer[1]) >= num_layers - self.last_layers:
            return max(found, self.last_layers_format, key=PRECISE.index)
        return found

    @model_validator(mode="after")
    def _nvfp4_is_described(self) -> PrecisionConfig:
        if "nvfp4" in self.formats and self.nvfp4 is None:
            raise ValueError("nvfp4: null, but a rule uses the format; give its options, {} for the report's")
        return self
