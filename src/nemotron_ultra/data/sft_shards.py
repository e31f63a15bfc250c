"""One file of packs: rows that the plan names, from the spools into parquet; a receipt comes last."""

from __future__ import annotations

import os
from collections import OrderedDict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nemotron_ultra.data.manifest import file_facts, read_receipt, write_json
from nemotron_ultra.data.packs import Conversations, PackWriter
from nemotron_ultra.data.sft_parts import ROWS, spool_files
from nemotron_ultra.data.sft_plan import BOUNDS, ITEMS, ShardPlan

OPEN_PARTS = 64


@dataclass(frozen=True, kw_only=True)
class PartPlace:
    """A spooled part as the writers see it: its files' folder and number, the number of its first row, of its
    source, and of the source's first line in it."""

    folder: str
    number: int
    first_row: int
    source: int
    first_line: int


@dataclass(frozen=True, kw_only=True)
class ShardSetup:
    """What a worker needs to begin. out: where the files go; plan: where the plan lies."""

    out: Path
    plan: Path
    receipts: Path
    digest: str
    parts: tuple[PartPlace, ...]
    group_tokens: int
    metadata: dict[str, str]

    def open(self) -> ShardWorker:
        return ShardWorker(self)


class ShardWorker:
    """Writes one file after the other."""

    def __init__(self, setup: ShardSetup):
        self.setup = setup
        self._items = np.memmap(setup.plan / ITEMS, "<i8", "r")
        self._bounds = np.fromfile(setup.plan / BOUNDS, "<i8")
        self._first_row = np.array([part.first_row for part in setup.parts])
        self._open_parts: OrderedDict[int, tuple[Any, ...]] = OrderedDict()

    def __call__(self, shard: ShardPlan) -> dict[str, Any]:
        """Write one file; returns its receipt, which is on disk by then. Raises DataError for a full disk."""
        setup = self.setup
        path = setup.out / shard.name
        with PackWriter(path, group_tokens=setup.group_tokens, metadata=setup.metadata) as writer:
            for pack in range(shard.start, shard.stop):
                rows, sources, ids = self._pack(self._items[self._bounds[pack] : self._bounds[pack + 1]])
                writer.add(rows, sources, ids)
        receipt = {
            "plan": setup.digest,
            "shard": asdict(shard),
            "packs": writer.packs,
            "tokens": writer.tokens,
            "trained": writer.trained,
            "rows": writer.conversations,
            "files": {shard.name: file_facts(path)},
        }
        write_json(setup.receipts / f"{shard.name}.json", receipt)
        return receipt

    def _pack(self, items: np.ndarray) -> tuple[Conversations, list[int], list[int]]:
        """(tokens and mask, number of the source, row in the source) of each row."""
        rows, sources, ids = [], [], []
        parts = np.searchsorted(self._first_row, items, side="right") - 1
        for item, number in zip(items.tolist(), parts.tolist(), strict=True):
            part = self.setup.parts[number]
            tokens, mask, starts, lengths, places = self._open(number)
            row = item - part.first_row
            start, length = int(starts[row]), int(lengths[row])
            ids_n = np.frombuffer(os.pread(tokens, 4 * length, 4 * start), "<i4")
            rows.append((ids_n, np.frombuffer(os.pread(mask, length, start), np.uint8)))
            sources.append(part.source)
            ids.append(part.first_line + int(places[row]))
        return rows, sources, ids

    def _open(self, number: int) -> tuple[Any, ...]:
        """Descriptors of a part's tokens and mask, and its rows; those of the least used part are closed."""
        if number not in self._open_parts:
            part = self.setup.parts[number]
            *files, rows, _ = spool_files(Path(part.folder), part.number)
            files = [os.open(path, os.O_RDONLY) for path in files]
            found = np.fromfile(rows, ROWS)
            self._open_parts[number] = (*files, *(found[key].copy() for key in ("start", "length", "place")))
            if len(self._open_parts) > OPEN_PARTS:
                tokens, mask, *_ = self._open_parts.popitem(last=False)[1]
                os.close(tokens)
                os.close(mask)
        self._open_parts.move_to_end(number)
        return self._open_parts[number]


def read_shard_receipts(receipts: Path, out: Path, digest: str) -> dict[str, dict[str, Any]]:
    """Receipts of files that this plan asks for and that are still what they were, by name."""
    found = {}
    for path in sorted(receipts.glob("*.json")):
        content = read_receipt(path)
        if not content or content["plan"] != digest:
            continue
        facts = content["files"]
        if all((out / name).is_file() and file_facts(out / name) == fact for name, fact in facts.items()):
            found[content["shard"]["name"]] = content
    return found
