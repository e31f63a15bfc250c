"""x = code * scale * A / 2688: codes of 4 bits (E2M1), E4M3 scales per block of 16, A = max |x| of a tensor.

Bit for bit the numbers of Transformer Engine >= 2.14; its older order and four-over-six by option (report 2.2
and 5.2). `quantize` stores. `operand` gives code * scale for emulated products: (Ax Aw / 2688^2) (Vx Vw^T) is
exact but for the order of the float32 sums, since code * scale has six bits at most. NaN and infinity follow
the hardware: maxima do not see NaN, which becomes +6; an infinity becomes +-6 and makes A infinite.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nemotron_ultra.errors import ConfigError
from nemotron_ultra.ops import nvfp4_elements as elements
from nemotron_ultra.ops import nvfp4_rules as rules_of
from nemotron_ultra.ops import nvfp4_scales as scales
from nemotron_ultra.ops.blocks import slabs
from nemotron_ultra.ops.hadamard import hadamard, rotate
from nemotron_ultra.ops.nvfp4_encode import Draws, Encoded, Slices, encode
from nemotron_ultra.ops.nvfp4_rules import BLOCK
from nemotron_ultra.ops.scratch import recycled

__all__ = ["NVFP4Tensor", "Tally", "hadamard", "operand", "product_scale", "quantize"]


@dataclass(frozen=True, kw_only=True)
class NVFP4Tensor:
    """A quantised matrix [R, C]; ConfigError for parts that do not fit.

    codes uint8 [R, C / 2], element 2j in the low half of a byte. scales uint8 [R, C / 16], E4M3 bits; that of
    a 16 x 16 tile stands in each of its rows. amax float32 [1], or [R] with a scale per row. `nonfinite`: how
    many elements of the source were NaN or infinite.
    """

    codes: Tensor
    scales: Tensor
    amax: Tensor
    shape: tuple[int, int]
    block: str = "1x16"
    scale_max: int = 448
    nonfinite: int = 0

    def __post_init__(self) -> None:
        rows, columns = self.shape
        if columns % BLOCK:
            raise rules_of.bad_axis("NVFP4Tensor", self.shape, -1)
        self._check("codes", torch.uint8, (rows, columns // 2))
        self._check("scales", torch.uint8, (rows, columns // BLOCK))
        self._check("amax", torch.float32, (1,), (rows,))

    def _check(self, name: str, dtype: torch.dtype, *shapes: tuple[int, ...]) -> None:
        part = getattr(self, name)
        if part.dtype != dtype or tuple(part.shape) not in shapes:
            raise ConfigError(
                f"NVFP4Tensor.{name} does not fit a matrix of shape {self.shape}",
                got=f"{part.dtype} {tuple(part.shape)}",
                allowed=" or ".join(f"{dtype} {shape}" for shape in shapes),
                do="build it with nvfp4.quantize",
            )

    def values(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """code * scale [R, C], exact in float32, bfloat16 and float16."""
        return self._times(scales.e4m3_numbers(self.scales)).to(dtype)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """code * ((scale * A) * (1 / 2688)) [R, C] in float32, the order of the CUDA kernel, then cast."""
        share = torch.tensor(1 / (scales.LARGEST * self.scale_max), dtype=torch.float32).item()
        return self._times((scales.e4m3_numbers(self.scales) * self.amax[:, None]).mul_(share)).to(dtype)

    def _times(self, grid: Tensor) -> Tensor:
        numbers = elements.decode(elements.unpack(self.codes)).unflatten(-1, (-1, BLOCK))
        return numbers.mul_(grid[..., None]).flatten(-2)


@dataclass
class Tally:
    """NaN and infinite elements that quantising met, and in how many tensors: for the metrics of a run."""

    elements: int = 0
    tensors: int = 0

    def add(self, count: int) -> None:
        self.elements += count
        self.tensors += count > 0


@torch.no_grad()
def quantize(
    x: Tensor,
    block: str = "1x16",
    rounding: str = "nearest",
    scale_rule: str = "te",
    scale_max: int | None = None,
    random_bits: Tensor | None = None,
    generator: torch.Generator | None = None,
    row_scaled: bool = False,
) -> NVFP4Tensor:
    """x [R, C] float32, bfloat16 or float16 -> codes, scales and amax; blocks lie along the last axis.

    block: "1x16", or "16x16" for weights. rounding: "nearest" (ties to even), or "stochastic" with draws from
    `generator` or, as the hardware has them, eight `random_bits` an element (uint8 [R, C]). scale_rule: "te"
    (>= 2.14), "te_2_13", or "four_over_six_mae" / "_mse". scale_max: E4M3 bound of the tensor scale, 448,
    with four-over-six 256. row_scaled: an amax per row. ConfigError for other words, shapes and dtypes.
    """
    rules = rules_of.check_rules(block, rounding, scale_rule, scale_max, row_scaled, False)
    rules_of.check_tensor(x, -1, rules)
    if x.ndim != 2:
        raise ConfigError("nvfp4.quantize takes one matrix", got=f"shape {tuple(x.shape)}", allowed="[R, C]")
    rules_of.check_bits(random_bits, x, rules)
    signed = x.to(torch.float32).contiguous()
    numbers = recycled(x.shape, signed)
    draws = Draws(random_bits, generator)
    found = encode(signed, numbers, rules, False, Slices(row_scaled), draws, scaled=False)
    nonfinite = _count_nonfinite(x, found)
    signed = signed.masked_fill(signed.isnan(), 0) if nonfinite else signed
    stored = scales.e4m3_bytes(found.scales)
    return NVFP4Tensor(
        codes=torch.cat(
            [elements.packed_codes(numbers[rows], signed[rows]) for rows in slabs(signed, BLOCK)]
        ),
        scales=stored.repeat_interleave(BLOCK, 0) if rules.tile else stored,
        amax=found.amax,
        shape=tuple(x.shape),
        block=block,
        scale_max=rules.scale_max,
        nonfinite=nonfinite,
    )


@torch.no_grad()
def operand(
    x: Tensor,
    block: str = "1x16",
    rounding: str = "nearest",
    axis: int = -1,
    rht: bool = False,
    generator: torch.Generator | None = None,
    random_bits: Tensor | None = None,
    scale_rule: str = "te",
    row_scaled: bool = False,
    sizes: list[int] | None = None,
    amax: Tensor | None = None,
    tally: Tally | None = None,
) -> tuple[Tensor, Tensor]:
    """(values, amax): code * scale of x [R, C] as exact numbers, in the shape, dtype and layout of x.

    axis: that of the contraction, -1, or -2 for what quantize(x.T) gives, turned back; no transpose is copied
    (x may also be one). rht: the random Hadamard transform along that axis first; values are then of the
    transformed tensor, which is rounded to bfloat16. Slices with an A of their own, amax [E]: the matrices of
    x [E, R, C], or `sizes` runs of rows, of whole blocks if axis is -2. amax is [1] otherwise, [R] with
    row_scaled; if given (after an all-reduce), it takes the place of the maximum of x. tally counts NaN and
    infinities. Carries no gradient; other arguments and errors as in `quantize`.
    """
    rules = rules_of.check_rules(block, rounding, scale_rule, None, row_scaled, rht)
    axis = axis - x.ndim if axis >= 0 else axis
    rules_of.check_tensor(x, axis, rules)
    rules_of.check_bits(random_bits, x, rules)
    if x.ndim == 2 and not x.is_contiguous() and x.T.is_contiguous() and sizes is None and not row_scaled:
        bits = None if random_bits is None else random_bits.T
        turned = operand(
            x.T, block, rounding, -3 - axis, rht, generator, bits, scale_rule, amax=amax, tally=tally
        )
        return turned[0].T, turned[1]
    down = axis == -2
    if sizes is not None:
        rules_of.check_sizes(sizes, x, BLOCK if down or rules.tile else 1)
    elif x.ndim == 3:
        sizes = [x.shape[1]] * x.shape[0]
    source = x.contiguous()
    matrix = source.flatten(0, -2)
    if rht:
        matrix = rotate(matrix.float(), down)
    values = recycled(source.shape, source)
    bits = None if random_bits is None else random_bits.reshape(matrix.shape)
    found = encode(
        matrix,
        values.view(matrix.shape),
        rules,
        down,
        Slices(row_scaled, sizes),
        Draws(bits, generator),
        amax,
    )
    if tally is not None:
        tally.add(_count_nonfinite(x, found))
    return values, found.amax


def product_scale(left_amax: Tensor, right_amax: Tensor) -> Tensor:
    """A_left A_right / 2688^2: what makes the product of two operands that of the quantised tensors."""
    largest = scales.LARGEST * scales.E4M3_LARGEST
    return left_amax * right_amax / (largest * largest)


def _count_nonfinite(x: Tensor, found: Encoded) -> int:
    return 0 if found.finite else int((~torch.isfinite(x)).sum())
