"""What a model remembers of each sequence: keys and values, the convolution's window, the SSM state.

A cache has a fixed number of slots; one row of every tensor is one slot. Rows 0..size-1 are alive: new rows
come at the end, and a finished one is overwritten by the last, so that live rows stay a prefix and a step
reads views, not copies. A slot takes, with numbers of 4 bytes (8 in float64),

    `*` layer   2 G P capacity numbers
    `M` layer   (conv_dim (K - 1)) numbers, and the SSM state: H P N numbers, 2 H P N bytes as fp16_sr,
                H P (N + 4 ceil(N / 128)) bytes as int8_sr
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import Tensor

from nemotron_ultra.config.model import ModelConfig
from nemotron_ultra.errors import ConfigError, DataError
from nemotron_ultra.ops.ssm_store import STORES, PlainStore, check_format, store_bytes
from nemotron_ultra.ops.step import SsdTokens, conv_commit, ssd_commit
from nemotron_ultra.ops.zeros import late_zeros


@dataclass
class KeyValues:
    """Keys and values of an attention layer, [slots, G, capacity, P]. What lies past a row's length is not
    read."""

    key_BGSP: Tensor
    value_BGSP: Tensor

    def tensors(self) -> list[Tensor]:
        return [self.key_BGSP, self.value_BGSP]

    def take(self, rows: slice, other: KeyValues, index_B: Tensor, seen_B: Tensor) -> None:
        """Rows of this state become copies of rows `index_B` of another, which have seen `seen_B` tokens."""
        longest = int(seen_B.max())
        for home, source in zip(self.tensors(), other.tensors(), strict=True):
            home[rows, :, :longest] = source[:, :, :longest].index_select(0, index_B)

    def move(self, to: Tensor, origin: Tensor, longest: int) -> None:
        for home in self.tensors():
            home[to, :, :longest] = home[origin, :, :longest]

    def clear(self, rows: slice) -> None:
        """Nothing: a row of length 0 reads no key."""


@dataclass
class MambaState:
    """SSM state [slots, G, N, X] as `ssd_step` has it; the convolution's last K - 1 inputs, oldest first,
    [slots, K - 1, C]. `pending`: the tokens of an `extend` that is not committed.
    """

    ssm: PlainStore
    window_BKC: Tensor
    pending: tuple[Tensor, SsdTokens] | None = None

    @property
    def ssm_BGNX(self) -> Tensor:
        return self.ssm.load(slice(None))

    def tensors(self) -> list[Tensor]:
        return [*self.ssm.tensors(), self.window_BKC]

    def take(self, rows: slice, other: MambaState, index_B: Tensor, seen_B: Tensor) -> None:
        self.ssm.store(rows, other.ssm_BGNX.index_select(0, index_B), seen_B)
        self.window_BKC[rows] = other.window_BKC.index_select(0, index_B)

    def move(self, to: Tensor, origin: Tensor, longest: int) -> None:
        for home in self.tensors():
            home[to] = home[origin]

    def clear(self, rows: slice) -> None:
        for home in self.tensors():
            home[rows] = 0

    def commit(self, keep_B: Tensor, seen_B: Tensor) -> None:
        rows = slice(0, len(keep_B))
        full_BTC, tokens = self.pending
        self.pending = None
        conv_commit(full_BTC, keep_B, self.window_BKC[rows])
        state_BGNX = self.ssm.load(rows)
        ssd_commit(tokens, keep_B, state_BGNX)
        self.ssm.store(rows, state_BGNX, seen_B)


State = KeyValues | MambaState


class Cache:
    """State of `size` sequences, at most `slots`, in all layers of a pattern (None: a layer without memory).

    capacity: the most tokens a sequence may have. length_B [size] counts the tokens that the state has seen,
    `lengths` is the same on the host.
    """

    def __init__(self, layers: list[State | None], slots: int, capacity: int, device: torch.device | str):
        self.layers, self.slots, self.capacity = layers, slots, capacity
        self._length_B = torch.zeros(slots, dtype=torch.int64, device=device)
        self._row_B = torch.arange(slots, device=device)
        self.lengths: list[int] = []
        self.plan: Any = None  # how a decode step runs with these tensors (`plan.py`)
        self._mask_BKS: Tensor | None = None
        self._opened: list[int] = []

    @classmethod
    def empty(
        cls,
        config: ModelConfig,
        slots: int,
        capacity: int,
        *,
        ssm_format: str = "fp32",
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        pattern: str | None = None,
    ) -> Cache:
        """No live row, all slots allocated. dtype: of keys, windows and fp32 states, float32 or float64.

        pattern: config.pattern unless told, for instance config.mtp_pattern. Raises ConfigError, before
        allocating, where the machine has less memory free than all slots take.
        """
        check_format(ssm_format)
        _check_memory(slots, cls.bytes_per_slot(config, capacity, ssm_format, dtype, pattern), device)
        groups, width = config.n_groups, config.mamba_inner // config.n_groups
        layers: list[State | None] = []
        for number, letter in enumerate(config.pattern if pattern is None else pattern):
            if letter == "*":
                shape = (slots, config.num_key_value_heads, capacity, config.head_dim)
                layers.append(KeyValues(*(late_zeros(shape, dtype, device) for _ in range(2))))
            elif letter == "M":
                shape = (slots, groups, config.ssm_state_size, width)
                window = (slots, config.conv_kernel - 1, config.conv_dim)
                store = STORES[ssm_format](shape, number, dtype, device)
                layers.append(MambaState(store, torch.zeros(window, dtype=dtype, device=device)))
            else:
                layers.append(None)
        return cls(layers, slots, capacity, device)

    @staticmethod
    def bytes_per_slot(
        config: ModelConfig,
        capacity: int,
        ssm_format: str = "fp32",
        dtype: torch.dtype = torch.float32,
        pattern: str | None = None,
    ) -> int:
        """Bytes that one sequence takes: `nbytes` of a cache of one slot."""
        pattern = config.pattern if pattern is None else pattern
        keys = 2 * config.num_key_value_heads * config.head_dim * capacity * dtype.itemsize
        window = config.conv_dim * (config.conv_kernel - 1) * dtype.itemsize
        ssm = store_bytes(ssm_format, config.mamba_inner, config.ssm_state_size, dtype)
        return pattern.count("*") * keys + pattern.count("M") * (window + ssm)

    @property
    def size(self) -> int:
        return len(self.lengths)

    @property
    def free(self) -> int:
        return self.slots - self.size

    @property
    def length_B(self) -> Tensor:
        return self._length_B[: self.size]

    @property
    def rows_B(self) -> Tensor:
        return self._row_B[: self.size]

    @property
    def longest(self) -> int:
        """The most tokens that a row has, those of an open step included."""
        return max(map(sum, zip(self.lengths, self._opened or [0] * self.size, strict=True)), default=0)

    @property
    def nbytes(self) -> int:
        """Bytes of all layers' state, of free slots too."""
        return sum(t.nbytes for layer in self._states() for t in layer.tensors())

    def admit(self, other: Cache, index_B: Tensor) -> None:
        """New rows at the end: copies of rows index_B, repeats too, of another cache of the same layers."""
        assert len(index_B) <= self.free, "more rows than free slots"
        lengths = [other.lengths[row] for row in index_B.tolist()]
        if max(lengths, default=0) > self.capacity:
            raise _too_long(max(lengths), self.capacity)
        rows = slice(self.size, self.size + len(lengths))
        self._length_B[rows] = other._length_B.index_select(0, index_B)
        for home, source in zip(self.layers, other.layers, strict=True):
            if home is not None and lengths:
                home.take(rows, source, index_B, self._length_B[rows])
        self.lengths += lengths

    def admit_new(self, count: int) -> None:
        """New rows at the end that have seen nothing."""
        assert count <= self.free, "more rows than free slots"
        rows = slice(self.size, self.size + count)
        self._length_B[rows] = 0
        for layer in self._states():
            layer.clear(rows)
        self.lengths += [0] * count

    def select(self, index_B: Tensor, config: ModelConfig) -> Cache:
        """A new float32 (or float64) cache whose row b is a copy of row index_B[b]; rows may be repeated."""
        new = Cache.empty(config, len(index_B), self.capacity, dtype=self._dtype, device=index_B.device)
        new.admit(self, index_B)
        return new

    def drop(self, gone_B: Tensor) -> Tensor:
        """Free the rows where the bool `gone_B` [size] is true -> [new size], the old row of each new one."""
        assert gone_B.shape == (self.size,) and not self._opened
        kept = int(self.size - gone_B.sum())
        order_B = torch.arange(kept, device=gone_B.device)
        holes, movers = gone_B[:kept].nonzero()[:, 0], (~gone_B[kept:]).nonzero()[:, 0] + kept
        if len(holes):
            order_B[holes] = movers
            for layer in self._states():
                layer.move(holes, movers, self.longest)
            self._length_B[holes] = self._length_B[movers]
        self.lengths = [self.lengths[row] for row in order_B.tolist()]
        return order_B

    def open(self, counts: Sequence[int]) -> None:
        """Make room for counts[b] more tokens in row b; `longest` and the mask count them already."""
        assert len(counts) == self.size and not self._opened, "one open step at a time, for all live rows"
        longest = max(map(sum, zip(self.lengths, counts, strict=True)), default=0)
        if longest > self.capacity:
            raise _too_long(longest, self.capacity)
        self._opened, self._mask_BKS = list(counts), None

    @property
    def mask_BKS(self) -> Tensor | None:
        """Keys that each opened token attends to, all rows having as many; None: all of them."""
        tokens = self._opened[0]
        if tokens == 1 and len(set(self.lengths)) == 1:
            return None
        if self._mask_BKS is None:
            columns_S = torch.arange(self.longest, device=self._length_B.device)
            self._mask_BKS = columns_S <= self.places_BK(tokens)[..., None]
        return self._mask_BKS

    def places_BK(self, tokens: int) -> Tensor:
        """Positions of the next tokens of each row."""
        return self.length_B[:, None] + self._step_K(tokens)

    def close(self) -> None:
        """The opened tokens are part of every row."""
        counts = self._opened
        if len(set(counts)) == 1:
            self.length_B.add_(counts[0])
        else:
            self.length_B.add_(torch.tensor(counts, device=self._length_B.device))
        self.moved(counts)
        self._opened = []

    def moved(self, counts: Sequence[int]) -> None:
        """length_B counts counts[b] more tokens of row b."""
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def check_room(self, count: int) -> None:
        """Raises DataError if some row has not room for `count` more tokens."""
        longest = max(self.lengths, default=0) + count
        if longest > self.capacity:
            raise _too_long(longest, self.capacity)

    def commit(self, keep_B: Tensor | Sequence[int]) -> None:
        """After `HybridLM.extend` of K tokens: row b keeps the first keep_B[b] of them, 0 to K."""
        keep = [int(k) for k in (keep_B.tolist() if isinstance(keep_B, Tensor) else keep_B)]
        assert len(keep) == self.size and all(
            0 <= k <= most for k, most in zip(keep, self._opened, strict=True)
        )
        self._opened = keep
        self.close()
        compiled = self.plan is not None and self.plan.waits
        pending = [s for s in self.layers if isinstance(s, MambaState) and s.pending is not None]
        if self.size and (compiled or pending):
            kept_B, seen_B = torch.tensor(keep, device=self._length_B.device), self.length_B
            if compiled:
                self.plan.commit(kept_B)
            for state in pending:
                state.commit(kept_B, seen_B)

    def cut(self, count: int) -> None:
        """Forget the last `count` tokens of every row; for layers that a shorter length cuts, not `M`."""
        assert all(isinstance(layer, KeyValues) for layer in self._states()) and not self._opened
        self.length_B.sub_(count)
        self.lengths = [length - count for length in self.lengths]

    @property
    def _dtype(self) -> torch.dtype:
        wide = (t.dtype for layer in self._states() for t in layer.tensors()[-1:])
        return next(wide, torch.float32)

    def _step_K(self, tokens: int) -> Tensor:
        return torch.arange(tokens, device=self._length_B.device)

    def _states(self) -> list[State]:
        return [layer for layer in self.layers if layer is not None]


def _too_long(longest: int, capacity: int) -> DataError:
    return DataError(
        "a sequence does not fit its slot of the cache",
        got=f"{longest} tokens",
        allowed=f"at most {capacity}",
    )


def free_memory(device: torch.device | str) -> int:
    """Bytes that can be had on a device without swapping."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available


def _check_memory(slots: int, each: int, device: torch.device | str) -> None:
    there = free_memory(device)
    if slots * each > there:
        raise ConfigError(
            "slots: their cache needs more memory than is free",
            got=f"{slots} slots x {each:,} bytes = {slots * each:,} bytes",
            allowed=f"{there:,} bytes are free on {device}: at most {there // each} slots",
            do="lower the number of slots or the tokens a slot may hold, or store the SSM state as fp16_sr",
        )
