"""What a packer counts: packs, their fill, and by source what came and what was dropped."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass
class SourceCounts:
    """Conversations and tokens of one source: those that fit a pack, and those longer than one."""

    items: int = 0
    tokens: int = 0
    dropped: int = 0
    dropped_tokens: int = 0


@dataclass
class PackStats:
    """Counts of one packer. packs, items, tokens: retired so far, so everything after finish().

    evicted: packs retired because the pool was full. conflicts: conversations that did not go into the
    tightest pack because it had their prompt.
    """

    max_length: int
    packs: int = 0
    items: int = 0
    tokens: int = 0
    evicted: int = 0
    conflicts: int = 0
    sources: dict[int, SourceCounts] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        """stats["fill"] is stats.fill."""
        return getattr(self, name)

    @property
    def fill(self) -> float:
        """Share of the retired packs that is tokens; 0 without packs."""
        return self.tokens / (self.packs * self.max_length) if self.packs else 0.0

    @property
    def dropped(self) -> int:
        """Conversations longer than a pack."""
        return sum(counts.dropped for counts in self.sources.values())

    def retired(self, items: int, tokens: int) -> None:
        self.packs += 1
        self.items += items
        self.tokens += tokens

    def one_arrived(self, length: int, source: int) -> None:
        """Count one that fits."""
        counts = self.sources.get(source)
        if counts is None:
            counts = self.sources[source] = SourceCounts()
        counts.items += 1
        counts.tokens += length

    def arrived(self, lengths: np.ndarray, fits: np.ndarray, sources: np.ndarray | None) -> None:
        """Count arrivals: int64 [n], bool [n] whether it fits a pack, int64 [n] or None for source 0."""
        if sources is None:
            self._count(0, lengths, fits)
            return
        for source in np.unique(sources).tolist():
            of = sources == source
            self._count(source, lengths[of], fits[of])

    def _count(self, source: int, lengths: np.ndarray, fits: np.ndarray) -> None:
        if not len(lengths):
            return
        counts = self.sources.setdefault(source, SourceCounts())
        fitting, total = int(fits.sum()), int(lengths.sum())
        tokens = int(lengths[fits].sum())
        counts.items += fitting
        counts.tokens += tokens
        counts.dropped += len(lengths) - fitting
        counts.dropped_tokens += total - tokens

    def as_dict(self) -> dict[str, Any]:
        """JSON types. `fill` is given along and not read back."""
        plain = {key: value for key, value in vars(self).items() if key != "sources"}
        sources = {str(number): dict(vars(counts)) for number, counts in sorted(self.sources.items())}
        return plain | {"fill": self.fill, "sources": sources}

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> PackStats:
        plain = {key: value for key, value in content.items() if key not in ("fill", "sources")}
        sources = {int(number): SourceCounts(**counts) for number, counts in content["sources"].items()}
        return cls(**plain, sources=sources)
