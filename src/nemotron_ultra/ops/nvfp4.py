"""x = code * scale * A / 2688: 4-bit codes (E2M1), a scale of 8 bits (E4M3) per block of 16, A of float32 per tensor.

Bit for bit the numbers of Transformer Engine >= 2.14 (older order and four-over-six by option; report 2.2, 5.2).
`quantize` stores; `operand` gives code * scale for emulated products, where y = (Ax Aw / 2688^2) (Vx Vw^T) is exact
but for the float32 sums, since code * scale needs six bits. NaN and infinity follow the hardware: NaN is not seen
by the maxima and becomes +6, an infinity becomes +-6 and makes A infinite.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from nemotron_ultra.errors import ConfigError
from nemotron_ultra.ops import nvfp4_elements as elements
from nemotron_ultra.ops import nvfp4_scales as scales
from nemotron_ultra.ops.hadamard import hadamard, rotate
from nemotron_ultra.ops.nvfp4_choice import four_over_six
from nemotron_ultra.ops.nvfp4_random import noise_like
from nemotron_ultra.ops.scratch import recycled, scratch

__all__ = ["NVFP4Tensor", "Tally", "hadamard", "operand", "product_scale", "quantize"]

BLOCK = scales.BLOCK
BLOCKS = ("1x16", "16x16")
ROUNDINGS = ("nearest", "stochastic")
SCALE_RULES = ("te", "te_2_13", "four_over_six_mae", "four_over_six_mse")
SCALE_BOUNDS = (448, 256)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class NVFP4Tensor:
    """A quantised matrix. codes uint8 [R, C / 2] (element 2j in the low half), scales uint8 [R, C / 16] (E4M3 bits;
    those of a 16 x 16 tile are stored for each of its rows), amax float32 [1], or [R] with a scale per row.

    `nonfinite`: how many elements of the source were NaN or infinite. ConfigError for parts that do not fit.
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
        wanted = {
            "codes": (torch.uint8, [(rows, columns // 2)]),
            "scales": (torch.uint8, [(rows, columns // BLOCK)]),
            "amax": (torch.float32, [(1,), (rows,)]),
        }
        if columns % BLOCK:
            raise _bad_axis("NVFP4Tensor", self.shape, "columns", columns)
        for name, (dtype, shapes) in wanted.items():
            part = getattr(self, name)
            if part.dtype != dtype or tuple(part.shape) not in shapes:
                raise ConfigError(
                    f"NVFP4Tensor.{name} does not fit a matrix of shape {self.shape}",
                    got=f"{part.dtype} {tuple(part.shape)}",
                    allowed=" or ".join(f"{dtype} {shape}" for shape in shapes),
                    do="build it with nvfp4.quantize",
                )

    def values(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """code * scale [R, C], exact in float32, bfloat16 and float16; `operand` without the quantising."""
        code = elements.decode(elements.unpack(self.codes)).unflatten(-1, (-1, BLOCK))
        return code.mul_(scales.e4m3_numbers(self.scales)[..., None]).flatten(-2).to(dtype)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """code * ((scale * A) * (1 / 2688)) [R, C], float32 in the order of the CUDA kernel, then cast."""
        code = elements.decode(elements.unpack(self.codes)).unflatten(-1, (-1, BLOCK))
        share = torch.tensor(1 / (scales.LARGEST * self.scale_max), dtype=torch.float32).item()
        decode_scale = (scales.e4m3_numbers(self.scales) * self.amax[:, None]).mul_(share)
        return code.mul_(decode_scale[..., None]).flatten(-2).to(dtype)


@dataclass
class Tally:
    """NaN and infinite elements that quantising met: how many, in how many tensors. For the metrics of a run."""

    elements: int = 0
    tensors: int = 0

    def add(self, count: int) -> None:
        self.elements += count
        self.tensors += count > 0


@dataclass(frozen=True)
class Rules:
    block: str
    rounding: str
    scale_rule: str
    scale_max: int
    row_scaled: bool


@lru_cache(maxsize=128)
def _rules(
    block: str, rounding: str, scale_rule: str, scale_max: int | None, row_scaled: bool, rht: bool
) -> Rules:
    """The options, checked. ConfigError for a word that is unknown or a pair that no hardware offers."""
    choices = (
        ("block", block, BLOCKS),
        ("rounding", rounding, ROUNDINGS),
        ("scale_rule", scale_rule, SCALE_RULES),
    )
    for name, value, allowed in choices:
        if value not in allowed:
            raise ConfigError(f"nvfp4: unknown {name}", got=repr(value), allowed=", ".join(allowed))
    four_six = scale_rule.startswith("four_over_six")
    bound = (256 if four_six else 448) if scale_max is None else scale_max
    if bound not in SCALE_BOUNDS:
        raise ConfigError("nvfp4: unknown scale_max", got=repr(scale_max), allowed="448, 256")
    stochastic = rounding == "stochastic"
    refused = (
        (four_six and rht, "four-over-six with the random Hadamard transform", "use scale_rule='te'"),
        (four_six and stochastic, "four-over-six with stochastic rounding", "use rounding='nearest'"),
        (row_scaled and rht, "a scale per row with the random Hadamard transform", "use row_scaled=False"),
        (row_scaled and stochastic, "a scale per row with stochastic rounding", "use rounding='nearest'"),
        (row_scaled and block == "16x16", "a scale per row with 16x16 blocks", "use block='1x16'"),
        (row_scaled and four_six, "a scale per row with four-over-six", "use scale_rule='te'"),
        (rht and block == "16x16", "the random Hadamard transform with 16x16 blocks", "use block='1x16'"),
    )
    for is_asked, pair, mend in refused:
        if is_asked:
            raise ConfigError(f"nvfp4: {pair} is not defined, in Transformer Engine neither", do=mend)
    return Rules(block, rounding, scale_rule, int(bound), row_scaled)


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
    """x [R, C] float32, bfloat16 or float16 -> codes, scales, amax; blocks lie along the last axis.

    block: "1x16", or "16x16" for weights. rounding: "nearest" (ties to even) or "stochastic", with draws from
    `generator` or, as the hardware has them, 8 `random_bits` an element (uint8 [R, C]). scale_rule: "te" (>= 2.14),
    "te_2_13", or four-over-six by mean absolute or squared error. scale_max: E4M3 bound of the tensor scale, 448, for
    four-over-six 256. row_scaled: an amax per row. ConfigError for other words, shapes and dtypes.
    """
    rules = _rules(block, rounding, scale_rule, scale_max, row_scaled, False)
    if x.ndim != 2:
        raise ConfigError(
            "nvfp4.quantize takes a matrix", got=f"shape {tuple(x.shape)}", allowed="[rows, columns]"
        )
    with torch.no_grad():
        _check_input(x, -1, rules)
        found = _encode(x.contiguous(), False, rules, random_bits=random_bits, generator=generator)
        nonfinite = 0 if found.finite else int((~torch.isfinite(x)).sum())
        code = elements.codes(found.elements, x.masked_fill(x.isnan(), 0) if nonfinite else x)
        stored = (
            found.scales.unsqueeze(-2).expand(-1, BLOCK, -1).flatten(0, 1)
            if block == "16x16"
            else found.scales
        )
        return NVFP4Tensor(
            codes=elements.pack(code),
            scales=scales.e4m3_bytes(stored.contiguous()),
            amax=found.amax,
            shape=tuple(x.shape),
            block=block,
            scale_max=rules.scale_max,
            nonfinite=nonfinite,
        )


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
    """(values, amax): code * scale of x [..., R, C] as exact numbers, in x's dtype, shape and layout.

    The contraction axis is the last (`axis=-1`) or the rows (`axis=-2`: what quantize(x.T) gives, transposed back,
    without a copy of x.T). rht: the random Hadamard transform along that axis first (values are the transformed
    ones); a float32 x counts as bfloat16 numbers. Leading axes are slices with an A each, amax [E]; so are `sizes`
    runs of rows of a matrix (multiples of 16 where the rows are the contraction axis). amax [1], or [R] with
    row_scaled; given, it is used instead of the maximum of x (after an all-reduce). tally counts NaN and infinities.
    No gradient flows. ConfigError as in `quantize`.
    """
    rules = _rules(block, rounding, scale_rule, None, row_scaled, rht)
    with torch.no_grad():
        _check_input(x, axis, rules)
        flip = not x.is_contiguous() and x.mT.is_contiguous() and sizes is None and not row_scaled
        source = x.mT if flip else x.contiguous()
        down = (axis in (0, -2)) != flip
        if random_bits is not None and flip:
            random_bits = random_bits.mT
        found = _encode(
            source, down, rules, rht, random_bits=random_bits, generator=generator, sizes=sizes, amax=amax
        )
        if tally is not None and not found.finite:
            tally.add(int((~torch.isfinite(x)).sum()))
        values = recycled(source.shape, source)
        down = down or block == "16x16"
        _scaled(found.elements, _over_rows(found.scales, block), down, values)
        return (values.mT if flip else values), found.amax


def product_scale(left_amax: Tensor, right_amax: Tensor) -> Tensor:
    """A_left A_right / 2688^2, float32: what turns the product of two operands into the product of the tensors."""
    largest = scales.LARGEST * scales.E4M3_LARGEST
    return left_amax * right_amax / (largest * largest)


@dataclass(frozen=True)
class _Encoded:
    """elements: E2M1 numbers in scratch memory; scales: E4M3 numbers of the block grid; amax as returned."""

    elements: Tensor
    scales: Tensor
    amax: Tensor
    finite: bool


def _encode(
    x: Tensor,
    down: bool,
    rules: Rules,
    rht: bool = False,
    random_bits: Tensor | None = None,
    generator: torch.Generator | None = None,
    sizes: list[int] | None = None,
    amax: Tensor | None = None,
) -> _Encoded:
    """x contiguous [..., R, C]; blocks along the last axis, or `down` the rows."""
    if x.dtype != torch.float32:
        x = scratch.take("nvfp4.x", x.shape, _FLOAT.to(x.device)).copy_(x)
    if x.numel() == 0:
        return _empty(x, rules, sizes)
    if rht:
        x = rotate(x, down)
    tile = rules.block == "16x16"
    grid = _grid(x, down or tile, tile)
    slices = _Slices(x, grid, down, rules.row_scaled, sizes)
    largest = slices.amax(grid) if amax is None else amax
    finite = bool(torch.isfinite(largest).all())
    nan = None
    if not finite:
        nan = torch.isnan(x)
        x = x.masked_fill(nan, 0)
        grid = _grid(x, down or tile, tile)
        largest = slices.amax(grid) if amax is None else amax
    spread = slices.spread(largest)
    scale = scales.global_scale(spread, rules.scale_max)
    if rules.scale_rule.startswith("four_over_six"):
        chosen, stored = four_over_six(x, grid, spread, scale, rules, down)
        return _Encoded(chosen, stored, largest, finite)
    stored = scales.block_scale(grid, scale, rules.scale_rule == "te_2_13")
    v = scratch.take("nvfp4.v", x.shape, x)
    encode = scales.encode_scale(stored, scale)
    _scaled(x, _over_rows(encode, rules.block), down or tile, v)
    if rules.rounding == "nearest":
        # A normal scale is within 1/16 of the block's largest sixth, so that |v| < 6.4.
        elements.round_nearest_(v, saturate=not finite or bool(stored.amin() < scales.E4M3_SMALLEST_NORMAL))
    elif random_bits is not None:
        elements.round_with_bytes_(v, random_bits)
    else:
        elements.round_stochastic_(v, noise_like(v, generator))
    if nan is not None:
        v.masked_fill_(nan, elements.LARGEST)
    return _Encoded(v, stored, largest, finite)


def _grid(x: Tensor, down: bool, tile: bool) -> Tensor:
    grid = scales.block_max(x, down)
    return scales.row_block_max_(grid) if tile else grid


def _over_rows(grid: Tensor, block: str) -> Tensor:
    """A grid of 16 x 16 tiles as one of 16 x 1 blocks, so that it is read along rows of memory."""
    return grid.repeat_interleave(BLOCK, -1) if block == "16x16" else grid


def _scaled(x: Tensor, grid: Tensor, down: bool, out: Tensor) -> None:
    """out = x times the number of its block."""
    if down:
        torch.mul(x.unflatten(-2, (-1, BLOCK)), grid.unsqueeze(-2), out=out.unflatten(-2, (-1, BLOCK)))
    else:
        torch.mul(x.unflatten(-1, (-1, BLOCK)), grid.unsqueeze(-1), out=out.unflatten(-1, (-1, BLOCK)))


class _Slices:
    """Which blocks share one A: all, those of a row, of a leading index, or of a run of rows."""

    def __init__(self, x: Tensor, grid: Tensor, down: bool, row_scaled: bool, sizes: list[int] | None):
        self.leading, self.row_scaled, self.sizes = x.ndim - 2, row_scaled, sizes
        if sizes is None:
            return
        step = x.shape[-2] // grid.shape[-2]
        if x.ndim != 2 or sum(sizes) != x.shape[0] or any(size % step for size in sizes):
            raise ConfigError(
                "nvfp4.operand: sizes do not divide the rows into slices",
                got=f"{sizes} for shape {tuple(x.shape)}",
                allowed=f"multiples of {step} that add up to {x.shape[0]}",
                do="pad the rows of each slice with zeros to a multiple of 16" if step > 1 else None,
            )
        counts = torch.tensor([size // step for size in sizes], device=x.device)
        self.slice_of_row = torch.repeat_interleave(counts, output_size=grid.shape[0])

    def amax(self, grid: Tensor) -> Tensor:
        if self.sizes is not None:
            empty = grid.new_zeros(len(self.sizes))
            return empty.index_reduce_(0, self.slice_of_row, grid.amax(-1), "amax")
        if self.row_scaled:
            return grid.amax(-1)
        return grid.flatten(-2).amax(-1).reshape(-1)

    def spread(self, amax: Tensor) -> Tensor:
        """A in a shape that broadcasts to the grid."""
        if self.sizes is not None:
            return amax[self.slice_of_row][:, None]
        if self.row_scaled:
            return amax[:, None]
        return amax.view(-1, *[1] * 2) if self.leading else amax


_FLOAT = torch.empty(0)


def _empty(x: Tensor, rules: Rules, sizes: list[int] | None) -> _Encoded:
    """No element: no blocks, and A = 0."""
    rows, columns = x.shape[-2:]
    count = len(sizes) if sizes is not None else rows if rules.row_scaled else x.shape[:-2].numel()
    grid = x.new_zeros(*x.shape[:-2], rows, columns // BLOCK)
    return _Encoded(x, grid, x.new_zeros(count), True)


def _check_input(x: Tensor, axis: int, rules: Rules) -> None:
    if x.dtype not in DTYPES:
        raise ConfigError(
            "nvfp4: cannot quantise this dtype", got=str(x.dtype), allowed="float32, bfloat16, float16"
        )
    if x.ndim not in (2, 3) or axis not in (-1, -2, x.ndim - 1, x.ndim - 2):
        raise ConfigError(
            "nvfp4: not a matrix or a stack of matrices, or not one of its axes",
            got=f"shape {tuple(x.shape)}, axis {axis}",
            allowed="[rows, columns] or [slices, rows, columns], axis -1 or -2",
        )
    names = {-2: "rows", -1: "columns"}
    for which in (-2, -1) if rules.block == "16x16" else (axis if axis < 0 else axis - x.ndim,):
        if x.shape[which] % BLOCK:
            raise _bad_axis("nvfp4", tuple(x.shape), names[which], x.shape[which])


def _bad_axis(who: str, shape: tuple[int, ...], axis: str, size: int) -> ConfigError:
    return ConfigError(
        f"{who}: the {axis} are not a multiple of 16, the size of a block",
        got=f"{size} {axis} in shape {shape}",
        allowed=f"{size // BLOCK * BLOCK} or {-(-size // BLOCK) * BLOCK}",
        do="change the layer's width, pad with zeros, or keep this layer in bf16",
    )
