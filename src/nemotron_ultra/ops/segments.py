"""Segments: where documents begin and end in a pack, with what kernels need of it computed once per batch."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from nemotron_ultra.errors import DataError


class Segments:
    """Documents of a pack of `total` tokens.

    `cu_seqlens`, int32 [documents + 1], runs from 0 to total; None is one document.
    """

    def __init__(self, total: int, cu_seqlens: Tensor | None = None, device: torch.device | str = "cpu"):
        if cu_seqlens is None:
            cu_seqlens = torch.tensor([0, total], dtype=torch.int32)
        self.total = total
        self.bounds: list[int] = cu_seqlens.tolist()
        if self.bounds[:1] != [0] or self.bounds[-1] != total or self.bounds != sorted(set(self.bounds)):
            raise DataError(
                f"cu_seqlens does not fit a pack of {total} tokens",
                got=f"{self.bounds[:8]}{' ...' if len(self.bounds) > 8 else ''}",
                allowed=f"int32 bounds of documents that rise from 0 to {total}, no document empty",
            )
        self.device = torch.device(device)

    @cached_property
    def cu_seqlens(self) -> Tensor:
        return torch.tensor(self.bounds, dtype=torch.int32, device=self.device)

    @cached_property
    def lengths(self) -> list[int]:
        return [b - a for a, b in zip(self.bounds, self.bounds[1:], strict=False)]

    @property
    def count(self) -> int:
        return len(self.bounds) - 1

    @cached_property
    def uniform_length(self) -> int | None:
        """The common length of all documents, or None."""
        return self.lengths[0] if len(set(self.lengths)) == 1 else None

    @cached_property
    def index_T(self) -> Tensor:
        """Number of the document of each token, int64 [T]."""
        lengths = torch.tensor(self.lengths, device=self.device)
        return torch.repeat_interleave(torch.arange(self.count, device=self.device), lengths)

    @cached_property
    def position_T(self) -> Tensor:
        """Position of each token inside its document, int64 [T]."""
        starts = torch.tensor(self.bounds[:-1], device=self.device)
        return torch.arange(self.total, device=self.device) - starts[self.index_T]

    @cached_property
    def remaining_T(self) -> Tensor:
        """Tokens of the same document that follow each token, int64 [T]."""
        ends = torch.tensor(self.bounds[1:], device=self.device)
        return ends[self.index_T] - 1 - torch.arange(self.total, device=self.device)

    def roll_left(self, values_T: Tensor, by: int, fill: float | int = 0) -> Tensor:
        """values_T[t + by] of the same document, `fill` past its end."""
        shifted_T = torch.roll(values_T, -by, 0)
        return torch.where(self.remaining_T >= by, shifted_T, torch.full_like(shifted_T, fill))


def pad_rows(values_T: Tensor, lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Rows end to end [T, ...] -> [B, longest, ...], zeros after each; and where in B * longest they are."""
    longest = max(lengths)
    row_T = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    begin_B = torch.tensor([0, *lengths[:-1]]).cumsum(0)
    places_T = (torch.arange(len(values_T)) - begin_B[row_T] + row_T * longest).to(values_T.device)
    padded = values_T.new_zeros(len(lengths) * longest, *values_T.shape[1:])
    padded[places_T] = values_T
    return padded.view(len(lengths), longest, *values_T.shape[1:]), places_T
