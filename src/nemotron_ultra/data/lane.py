"""Lane: the steps of one row length; its phases, and which row of which source each place of a step takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from nemotron_ultra.config.data import SourceConfig
from nemotron_ultra.data.order import Draws, SourceOrder
from nemotron_ultra.data.source import Row, Source
from nemotron_ultra.errors import DataError

Blend = Mapping[str, SourceConfig]


class Lane:
    """Steps whose rows have `length` tokens. Rows are numbered through all steps of the lane.

    blends: sources and weights of each phase; starts: the lane's first row in each phase, the first one 0.
    rows, micro_rows: rows in a step and in a micro-batch of it.
    """

    def __init__(
        self,
        sources: Mapping[str, Source],
        blends: Sequence[Blend],
        starts: Sequence[int],
        *,
        length: int,
        rows: int,
        micro_rows: int,
        seed: int,
        key: str = "",
    ):
        self.length, self.rows, self.micro_rows = length, rows, micro_rows
        self.sources, self.starts = sources, list(starts)
        self.names = [list(blend) for blend in blends]
        self.draws = [
            Draws([source.weight for source in blend.values()], seed, f"{key}{number}")
            for number, blend in enumerate(blends)
        ]
        used = dict.fromkeys(name for names in self.names for name in names)
        self.orders = {name: self._order(sources[name], seed, key) for name in used}

    def step_rows(self, step: int) -> list[tuple[str, int]]:
        """(source, how many rows of it the lane took before) for each row of the lane's step-th step."""
        first = step * self.rows
        phase = max(number for number, start in enumerate(self.starts) if start <= first)
        names, draws = self.names[phase], self.draws[phase]
        cursor = {name: self.drawn(name, first) for name in names}
        taken = []
        for row in range(first - self.starts[phase], first - self.starts[phase] + self.rows):
            name = names[draws.source(row)]
            taken.append((name, cursor[name]))
            cursor[name] += 1
        return taken

    def row(self, name: str, draw: int) -> Row:
        """The draw-th row that this lane takes of a source."""
        order = self.orders[name]
        return self.sources[name].row(order.stretches(order.place(draw), self.length))

    def drawn(self, name: str, rows: int) -> int:
        """How many of the lane's first `rows` rows come from this source, through all phases."""
        total = 0
        for number, (start, end) in enumerate(pairwise([*self.starts, max(rows, self.starts[-1])])):
            count = min(rows, end) - start
            if count > 0 and name in self.names[number]:
                total += self.draws[number].drawn(self.names[number].index(name), count)
        return total

    def _order(self, source: Source, seed: int, key: str) -> SourceOrder:
        if source.train.tokens < self.length:
            raise DataError(
                f"source {source.name!r} ({source.folder}) has fewer tokens than one row",
                got=f"{source.train.tokens} tokens in train, sequence_length {self.length}",
                do="add text, or lower data.sequence_length",
            )
        return SourceOrder(key + source.name, np.diff(source.train.starts), self.length, seed)
