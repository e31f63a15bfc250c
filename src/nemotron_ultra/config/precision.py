"""PrecisionConfig: ordered rules from a module-name glob to a format; first match wins (report 2.2)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Literal

from pydantic import Field, model_validator

from nemotron_ultra.config.base import Fraction, NonNegative, config

Format = Literal["fp32", "bf16", "mxfp8", "nvfp4"]
PRECISE: tuple[Format, ...] = ("nvfp4", "mxfp8", "bf16", "fp32")
BLOCK: dict[Format, int] = {"nvfp4": 16, "mxfp8": 32}
"""Values along the contraction that share one scale."""
SHARED_WITH_MTP = ("lm_head", "backbone.embeddings")
"""Modules whose gradient is a sum over the main loss and every MTP depth."""


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
    scale_rule: Literal["te", "te_2_13", "four_over_six_mae", "four_over_six_mse"] = "te"
    """How a block's scale follows from its largest value: the order of operations of Transformer Engine
    2.14 and later, that of 2.13 and before, or the better of two scales (four-over-six, by its error)."""

    @model_validator(mode="after")
    def _four_over_six_is_for_finished_weights(self) -> Nvfp4Config:
        used = [name for name in ("hadamard", "stochastic_rounding") if getattr(self, name) != "none"]
        if self.scale_rule.startswith("four_over_six") and used:
            raise ValueError(
                f"scale_rule: got {self.scale_rule} with {' and '.join(used)}; allowed: te, te_2_13; "
                "four-over-six is for weights after training (report Table 12) and has no form with either: "
                f"set {' and '.join(f'{name}=none' for name in used)}, or use te"
            )
        return self


@config
class PrecisionConfig:
    name: str
    """Name of the policy."""
    backend: Literal["auto", "emulate", "te"] = "auto"
    """Who multiplies nvfp4 and mxfp8: te is Transformer Engine on an FP4 GPU; auto takes it where version,
    GPU, options and shapes all fit, else emulation; te is an error where one does not."""
    weights: Literal["fp32", "bf16"] = "fp32"
    """Storage of the weights between steps; the optimizer's master copy is always fp32."""
    default: Format = "fp32"
    """Format of modules that no rule matches. On a CPU bf16 is storage only: products run in fp32."""
    rules: list[PrecisionRule] = Field(default_factory=list)
    """Ordered rules; the first match wins."""
    last_layers: NonNegative | None = None
    """Layers at the end of the stack whose modules get at least `last_layers_format`; null takes
    `last_share` of them."""
    last_share: Fraction = 0.0
    """Share of the stack at its end that `last_layers: null` stands for, to the nearest whole layer."""
    last_layers_format: Format = "bf16"
    """Lowest format inside the last layers."""
    gradients: Literal["fp32"] = "fp32"
    """Accumulation and reduction of gradients (report 2.7: BF16 loses the 0.05-scaled MTP gradient)."""
    gradients_bf16: list[str] = Field(default_factory=list)
    """Globs over names of modules or parameters whose gradients are accumulated in bf16 all the same."""
    allow_bf16_head_gradients: bool = False
    """Let `gradients_bf16` reach the head and the embedding while MTP is on: the failure of report 2.7, for
    the experiment that shows it."""
    nvfp4: Nvfp4Config | None = None
    """Blocks, transform, rounding and scales of the nvfp4 products; null where no module uses the format."""

    @property
    def formats(self) -> list[str]:
        """Every format that the policy can give to a product, without repeats."""
        some = self.last_share if self.last_layers is None else self.last_layers
        tail = [self.last_layers_format] if some else []
        return list(dict.fromkeys([self.default, *(rule.format for rule in self.rules), *tail]))

    def kept_layers(self, num_layers: int) -> int:
        """Layers at the end of a stack of `num_layers` that get at least `last_layers_format`."""
        if self.last_layers is not None:
            return min(self.last_layers, num_layers)
        return math.floor(self.last_share * num_layers + 0.5)

    def format_of(self, module: str, num_layers: int) -> Format:
        """Format of a module named as in the checkpoint, such as backbone.layers.3.mixer.in_proj."""
        found = next((rule.format for rule in self.rules if fnmatchcase(module, rule.match)), self.default)
        layer = re.match(r"backbone\.layers\.(\d+)\.", module)
        if layer and int(layer[1]) >= num_layers - self.kept_layers(num_layers):
            return max(found, self.last_layers_format, key=PRECISE.index)
        return found

    def gradient_format(self, parameter: str) -> Literal["fp32", "bf16"]:
        """Format that the gradient of a parameter, such as lm_head.weight, is accumulated in."""
        module = parameter.rpartition(".")[0]
        lowered = any(fnmatchcase(name, glob) for glob in self.gradients_bf16 for name in (parameter, module))
        return "bf16" if lowered else "fp32"

    @model_validator(mode="after")
    def _consistent(self) -> PrecisionConfig:
        problems = list(_problems(self))
        if problems:
            raise ValueError(" | ".join(problems))
        return self


def gradient_problems(c: PrecisionConfig, mtp: bool) -> Iterator[str]:
    """One line for each module shared with the MTP heads whose gradient the policy lowers."""
    if not mtp or c.allow_bf16_head_gradients:
        return
    for module in SHARED_WITH_MTP:
        if c.gradient_format(f"{module}.weight") == "bf16":
            yield (
                f"gradients_bf16: lowers {module} to bf16 while MTP is on; allowed: globs that leave it out; "
                "a bf16 sum of many micro-batches loses the small MTP gradient of this shared matrix, the "
                "divergence of report 2.7; allow_bf16_head_gradients=true is for the experiment on it"
            )


def _problems(c: PrecisionConfig) -> Iterator[str]:
    if "nvfp4" in c.formats and c.nvfp4 is None:
        yield "nvfp4: null, but a rule uses the format; give its options, {} for the report's"
    first: dict[str, tuple[int, Format]] = {}
    for number, rule in enumerate(c.rules):
        earlier, before = first.setdefault(rule.match, (number, rule.format))
        if before != rule.format:
            yield (
                f"rules.{number}: got {rule.format} for {rule.match!r}, rules.{earlier} has {before} for it; "
                "allowed: one format for one glob"
            )
