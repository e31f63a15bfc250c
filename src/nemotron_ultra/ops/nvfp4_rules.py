"""The words of NVFP4, and what no hardware and no library defines: each mistake with its mend."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from nemotron_ultra.errors import ConfigError

BLOCK = 16
BLOCKS = ("1x16", "16x16")
ROUNDINGS = ("nearest", "stochastic")
SCALE_RULES = ("te", "te_2_13", "four_over_six_mae", "four_over_six_mse")
SCALE_BOUNDS = (448, 256)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Rules:
    """Checked options of one quantisation; `scale_max` is the E4M3 bound of the tensor scale."""

    block: str
    rounding: str
    scale_rule: str
    scale_max: int
    row_scaled: bool

    @property
    def tile(self) -> bool:
        return self.block == "16x16"

    @property
    def four_over_six(self) -> bool:
        return self.scale_rule.startswith("four_over_six")


@lru_cache(maxsize=128)
def check_rules(
    block: str, rounding: str, scale_rule: str, scale_max: int | None, row_scaled: bool, rht: bool
) -> Rules:
    """Options as given to `quantize` and `operand`. ConfigError for an unknown word or an undefined pair."""
    _one_of("block", block, BLOCKS)
    _one_of("rounding", rounding, ROUNDINGS)
    _one_of("scale_rule", scale_rule, SCALE_RULES)
    four_six, stochastic = scale_rule.startswith("four_over_six"), rounding == "stochastic"
    bound = (256 if four_six else 448) if scale_max is None else scale_max
    _one_of("scale_max", bound, SCALE_BOUNDS)
    refused = (
        (four_six and rht, "four-over-six with the random Hadamard transform", "scale_rule='te'"),
        (four_six and stochastic, "four-over-six with stochastic rounding", "rounding='nearest'"),
        (row_scaled and rht, "a scale per row with the random Hadamard transform", "row_scaled=False"),
        (row_scaled and stochastic, "a scale per row with stochastic rounding", "rounding='nearest'"),
        (row_scaled and block == "16x16", "a scale per row with 16x16 blocks", "block='1x16'"),
        (row_scaled and four_six, "a scale per row with four-over-six", "scale_rule='te'"),
        (rht and block == "16x16", "the random Hadamard transform with 16x16 blocks", "block='1x16'"),
    )
    for is_asked, pair, mend in refused:
        if is_asked:
            raise ConfigError(f"nvfp4: {pair} is not defined", do=f"use {mend}")
    return Rules(block, rounding, scale_rule, int(bound), row_scaled)


def _one_of(name: str, value: object, allowed: tuple) -> None:
    if value not in allowed:
        words = ", ".join(str(word) for word in allowed)
        raise ConfigError(f"nvfp4: unknown {name}", got=repr(value), allowed=words)


def check_tensor(x: Tensor, axis: int, rules: Rules) -> None:
    """x [R, C] or [E, R, C] with whole blocks along `axis`, -1 or -2. ConfigError otherwise."""
    if x.dtype not in DTYPES:
        got, allowed = str(x.dtype).removeprefix("torch."), "float32, bfloat16, float16"
        raise ConfigError("nvfp4: cannot quantise this dtype", got=got, allowed=allowed)
    if x.ndim not in (2, 3) or axis not in (-1, -2):
        raise ConfigError(
            "nvfp4: not a matrix or a stack of matrices, or not one of its axes",
            got=f"shape {tuple(x.shape)}, axis {axis}",
            allowed="[rows, columns] or [slices, rows, columns], axis -1 or -2",
        )
    if rules.row_scaled and (x.ndim != 2 or axis != -1):
        raise ConfigError(
            "nvfp4: a scale per row is for the rows of one matrix",
            got=f"shape {tuple(x.shape)}, axis {axis}",
            allowed="[rows, columns], axis -1",
            do="use row_scaled=False, or pass the transpose",
        )
    for which in (-2, -1) if rules.tile else (axis,):
        if x.shape[which] % BLOCK:
            raise bad_axis("nvfp4", tuple(x.shape), which)


def check_bits(random_bits: Tensor | None, x: Tensor, rules: Rules) -> None:
    """Random bytes are one uint8 an element and go with stochastic rounding. ConfigError otherwise."""
    if random_bits is None:
        return
    if rules.rounding != "stochastic":
        raise ConfigError(
            "nvfp4: random_bits without stochastic rounding", do="pass rounding='stochastic' or no bits"
        )
    if random_bits.dtype != torch.uint8 or random_bits.shape != x.shape:
        raise ConfigError(
            "nvfp4: random_bits do not fit the tensor",
            got=f"{random_bits.dtype} {tuple(random_bits.shape)}",
            allowed=f"torch.uint8 {tuple(x.shape)}, eight bits an element",
        )


def check_sizes(sizes: list[int], x: Tensor, step: int) -> None:
    """Runs of rows that add up to x [R, C], each of whole blocks of `step` rows. ConfigError otherwise."""
    if x.ndim == 2 and sum(sizes) == x.shape[0] and not any(size % step or size < 0 for size in sizes):
        return
    raise ConfigError(
        "nvfp4: sizes do not cut the rows into slices",
        got=f"{sizes} for shape {tuple(x.shape)}",
        allowed=f"multiples of {step} that add up to the rows of a matrix",
        do="pad the rows of each slice with zeros to a multiple of 16" if step > 1 else None,
    )


def bad_axis(who: str, shape: tuple[int, ...], axis: int) -> ConfigError:
    size, name = shape[axis], {-2: "rows", -1: "columns"}[axis]
    below, above = size // BLOCK * BLOCK, -(-size // BLOCK) * BLOCK
    return ConfigError(
        f"{who}: the {name} are not a multiple of 16, the size of a block",
        got=f"{size} {name} in shape {shape}",
        allowed=f"{below} or {above}" if below else above,
        do="change the layer's width, pad with zeros, or keep this layer in bf16",
    )
