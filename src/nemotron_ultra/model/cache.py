"""What a model remembers of each sequence: keys and values, the convolution's window, the SSM state; float32.

One row of every tensor is one slot. Rows 0..size-1 are alive; a finished row is overwritten by the last one,
so that live rows stay a prefix and a step reads views, not copies. A slot takes 4 bytes (8 in float64) times
2 G P capacity for each `*` layer and conv_dim (K - 1) + H P N for each `M` layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nemotron_ultra.errors import DataError
from nemotron_ultra.ops.segments import Segments


@dataclass
class KeyValues:
    """Keys and values of an attention layer, [slots, G, capacity, P]."""

    key_BGSP: Tensor
    value_BGSP: Tensor

    def tensors(self) -> list[Tensor]:
        return [self.key_BGSP, self.value_BGSP]

    def selected(self, index_B: Tensor) -> KeyValues:
        return KeyValues(*(t.index_select(0, index_B) for t in self.tensors()))


@dataclass
class MambaState:
    """SSM state [slots, G, N, X] as `ssd_step` has it; the convolution's last K - 1 inputs, [slots, C]."""

    ssm_BGNX: Tensor
    window: list[Tensor]

    @classmethod
    def of(cls, ssm_BHPN: Tensor, window_BCK: Tensor, groups: int) -> MambaState:
        """From the final states and windows (oldest input first) of whole prompts."""
        ssm_BGNX = ssm_BHPN.flatten(1, 2).unflatten(1, (groups, -1)).transpose(2, 3).contiguous()
        return cls(ssm_BGNX, [before.contiguous() for before in window_BCK.unbind(-1)])

    def tensors(self) -> list[Tensor]:
        return [self.ssm_BGNX, *self.window]

    def selected(self, index_B: Tensor) -> MambaState:
        ssm, *window = (t.index_select(0, index_B) for t in self.tensors())
        return MambaState(ssm, window)


State = KeyValues | MambaState


class Cache:
    """State of `size` sequences in all layers of the backbone (None for layers without memory).

    capacity: the most tokens a sequence may have. length_B [size] counts the tokens that the state has seen.
    """

    def __init__(self, layers: list[State | None], length_B: Tensor, capacity: int):
        self.layers, self.capacity = layers, capacity
        self.size = len(length_B)
        self._length_B = length_B
        self.mask_BS: Tensor | None = None
        self._settle()

    @classmethod
    def of_prompts(cls, segments: Segments, capacity: int) -> Cache:
        """For the documents of a pack, its layers to be filled in by their prefill. Raises DataError."""
        longest = max(segments.lengths)
        if longest > capacity:
            raise DataError(
                "a prompt is longer than the cache", got=f"{longest} tokens", allowed=f"at most {capacity}"
            )
        return cls([], torch.tensor(segments.lengths, device=segments.device), capacity)

    @property
    def length_B(self) -> Tensor:
        return self._length_B[: self.size]

    @property
    def nbytes(self) -> int:
        """Bytes of all layers' state, of free slots too."""
        return sum(t.nbytes for layer in self.layers if layer is not None for t in layer.tensors())

    def select(self, index_B: Tensor) -> Cache:
        """A new cache whose row b is a copy of row index_B[b]; rows may be repeated and left out."""
        layers = [None if layer is None else layer.selected(index_B) for layer in self.layers]
        return Cache(layers, self._length_B.index_select(0, index_B), self.capacity)

    def drop(self, gone_B: Tensor) -> Tensor:
        """Free the rows where the bool `gone_B` [size] is true -> [new size], the old row of each new one."""
        assert gone_B.shape == (self.size,)
        kept = int(self.size - gone_B.sum())
        order_B = torch.arange(kept, device=gone_B.device)
        holes, movers = gone_B[:kept].nonzero()[:, 0], (~gone_B[kept:]).nonzero()[:, 0] + kept
        if len(holes):
            order_B[holes] = movers
            for tensor in self._tensors():
                tensor.index_copy_(0, holes, tensor.index_select(0, movers))
        self.size = kept
        self._settle()
        return order_B

    def open_step(self) -> None:
        """Make room for one more token in every row; `mask_BS` and `longest` count it already."""
        if self.longest >= self.capacity:
            raise DataError(
                "a sequence has filled its cache",
                got=f"{self.longest + 1} tokens",
                allowed=f"at most {self.capacity}",
            )
        self.longest += 1
        self.mask_BS = None
        if not self.even:
            columns_S = torch.arange(self.longest, device=self._length_B.device)
            self.mask_BS = columns_S <= self.length_B[:, None]

    def close_step(self) -> None:
        self._length_B[: self.size] += 1

    def _settle(self) -> None:
        """What a step asks of the lengths, read from the device only when rows come or go."""
        self.rows_B = torch.arange(self.size, device=self._length_B.device)
        lengths = self.length_B.tolist()
        self.longest = max(lengths, default=0)
        self.even = len(set(lengths)) <= 1

    def _tensors(self) -> list[Tensor]:
        return [self._length_B, *(t for layer in self.layers if layer is not None for t in layer.tensors())]
