"""Where the SSM state [slots, G, N, X] lies between tokens: as it is, or in fewer bits.

    fp32     4 bytes a number (8 in float64), read and written in place
    fp16_sr  2 bytes, rounded stochastically
    int8_sr  1 byte, rounded stochastically, and a float32 scale per 128 (or N, where smaller) along N

Report 5.3, Table 16. The random words are a hash of (layer, tokens seen, place in the state): a row is
rounded the same alone and in company.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nemotron_ultra.errors import ConfigError
from nemotron_ultra.ops.state_formats import BLOCK, Int8State, to_float16, to_int8
from nemotron_ultra.ops.zeros import late_zeros

FORMATS = ("fp32", "fp16_sr", "int8_sr")
LOW = (1 << 32) - 1


class PlainStore:
    """The state itself: `load` gives a view, and writing into it is storing."""

    def __init__(self, shape: tuple[int, ...], layer: int, dtype: torch.dtype, device: torch.device | str):
        self.state = late_zeros(shape, dtype, device)

    def tensors(self) -> list[Tensor]:
        return [self.state]

    def load(self, rows: slice) -> Tensor:
        """[rows, G, N, X] in float32 or float64."""
        return self.state[rows]

    def store(self, rows: slice, state: Tensor, seen_B: Tensor) -> None:
        """`state`: what `load` gave, moved on, or new rows. seen_B: tokens that each row has seen."""
        home = self.state[rows]
        if home.data_ptr() != state.data_ptr():
            home.copy_(state)


class HalfStore(PlainStore):
    def __init__(self, shape: tuple[int, ...], layer: int, dtype: torch.dtype, device: torch.device | str):
        self.layer, self.dtype = layer, dtype
        self.state = torch.zeros(shape, dtype=torch.float16, device=device)

    def load(self, rows: slice) -> Tensor:
        return self.state[rows].to(self.dtype)

    def store(self, rows: slice, state: Tensor, seen_B: Tensor) -> None:
        words = random_words(state.shape, self.layer, seen_B)
        self.state[rows] = to_float16(state, random_bits=words)


class ByteStore(PlainStore):
    """Codes lie as [slots, G, X, N], their blocks along N."""

    def __init__(self, shape: tuple[int, ...], layer: int, dtype: torch.dtype, device: torch.device | str):
        slots, groups, columns, width = shape
        self.layer, self.dtype = layer, dtype
        self.codes = torch.zeros((slots, groups, width, columns), dtype=torch.int8, device=device)
        self.scale = torch.zeros((slots, groups, width, blocks(columns)), device=device)

    def tensors(self) -> list[Tensor]:
        return [self.codes, self.scale]

    def load(self, rows: slice) -> Tensor:
        stored = Int8State(self.codes[rows], self.scale[rows])
        return stored.dequantize(self.dtype).transpose(2, 3).contiguous()

    def store(self, rows: slice, state: Tensor, seen_B: Tensor) -> None:
        by_column = state.transpose(2, 3).contiguous()
        words = random_words(by_column.shape, self.layer, seen_B)
        self.codes[rows], self.scale[rows] = to_int8(by_column, random_bits=words)


STORES = {"fp32": PlainStore, "fp16_sr": HalfStore, "int8_sr": ByteStore}


def blocks(columns: int) -> int:
    """Scales of one row of N = `columns` numbers. Raises ConfigError where N does not divide into blocks."""
    if columns > BLOCK and columns % BLOCK:
        raise ConfigError(
            "ssm_format=int8_sr: the state axis does not divide into blocks",
            got=f"ssm_state_size {columns}",
            allowed="at most 128, or a multiple of 128",
            do="store this state as fp16_sr or fp32",
        )
    return -(-columns // BLOCK)


def check_format(name: str) -> None:
    if name not in STORES:
        raise ConfigError("ssm_format: unknown", got=repr(name), allowed=", ".join(FORMATS))


def store_bytes(format: str, rows: int, columns: int, dtype: torch.dtype) -> int:
    """Bytes of `rows` rows of N = `columns` numbers each."""
    check_format(format)
    if format == "int8_sr":
        return rows * (columns + 4 * blocks(columns))
    return rows * columns * (2 if format == "fp16_sr" else dtype.itemsize)


def random_words(shape: torch.Size, layer: int, seen_B: Tensor) -> Tensor:
    """int64 words of 32 random bits, [shape]; shape[0] is the rows of seen_B."""
    key_B = _mixed(_mixed(seen_B.to(torch.int64) + (layer << 20)) + 0x9E3779B9)
    place = torch.arange(math.prod(shape[1:]), device=seen_B.device)
    return _mixed(place + key_B[:, None]).view(shape)


def _mixed(word: Tensor) -> Tensor:
    """A bijection of 32-bit words whose every output bit depends on every input bit."""
    word = word & LOW
    word = ((word ^ (word >> 16)) * 0x7FEB352D) & LOW
    word = ((word ^ (word >> 15)) * 0x846CA68B) & LOW
    return word ^ (word >> 16)
