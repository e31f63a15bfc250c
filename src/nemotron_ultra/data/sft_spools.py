"""All spooled parts of all sources as arrays: conversations and their rows, numbered through in the order of
sources, parts and rows; and the state of each conversation.

Memory: 21 bytes a conversation and 12 more for each further row of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from nemotron_ultra.data.sft_parts import CHATS, ROWS, ChatReceipt, spool_files
from nemotron_ultra.data.sft_rows import place_name

TRAIN, VALID, CAPPED, DUPLICATE, UNDRAWN = range(5)


class Spools:
    """length int32 and prompt uint64 [rows]; first_row int64 [chats + 1]; state uint8 [chats].

    receipts: of all sources in order, each from part 0 on. caps: usable conversations taken of a source, None
    for all.
    """

    def __init__(self, folder: Path, receipts: dict[str, list[ChatReceipt]], caps: dict[str, int | None]):
        self.folder, self.names = folder, list(receipts)
        self.parts = [receipt for name in self.names for receipt in receipts[name]]
        self.part_chat = _running([part.chats for part in self.parts])
        self.part_row = _running([part.rows for part in self.parts])
        ends = _running([len(receipts[name]) for name in self.names])
        self.source_chat, self.source_row = self.part_chat[ends], self.part_row[ends]
        self._line = _lines_before(self.parts)
        self.state = np.zeros(self.part_chat[-1], np.uint8)
        self.first_row = np.zeros(len(self.state) + 1, np.int64)
        self.length = np.zeros(self.part_row[-1], np.int32)
        self.prompt = np.zeros(self.part_row[-1], np.uint64)
        self._caps = [caps[name] for name in self.names]

    def sort_out(self, *, valid_fraction: float, duplicates: str) -> None:
        """Give every conversation its state: over the cap, a duplicate of an earlier one, valid or train."""
        key = np.zeros(len(self.state), np.uint64)
        for number in range(len(self.parts)):
            chats = self.chats(number)
            there = slice(self.part_chat[number], self.part_chat[number + 1])
            key[there] = chats["key"]
            self.first_row[1:][there] = chats["rows"]
        np.cumsum(self.first_row, out=self.first_row)
        # 2^64 x fraction as a whole number; fractions are below 1.
        self.state[key < np.uint64(int(valid_fraction * 2**64))] = VALID
        for cap, start, stop in zip(self._caps, self.source_chat[:-1], self.source_chat[1:], strict=True):
            if cap is not None:
                self.state[min(start + cap, stop) : stop] = CAPPED
        if duplicates == "drop":
            self._mark_duplicates(key)

    def load_rows(self) -> None:
        for number in range(len(self.parts)):
            rows = self.rows(number)
            there = slice(self.part_row[number], self.part_row[number + 1])
            self.length[there], self.prompt[there] = rows["length"], rows["prompt"]

    def chats(self, part: int) -> np.ndarray:
        return np.fromfile(self.file(part, "chats"), dtype=CHATS)

    def rows(self, part: int) -> np.ndarray:
        return np.fromfile(self.file(part, "rows"), dtype=ROWS)

    def file(self, part: int, suffix: str) -> Path:
        receipt = self.parts[part]
        paths = spool_files(self.folder / receipt.source, receipt.number)
        return next(path for path in paths if path.suffix == f".{suffix}")

    def row_states(self, part: int) -> np.ndarray:
        """uint8 [rows of the part]: the state of the conversation of each row."""
        start, stop = self.part_chat[part : part + 2]
        return np.repeat(self.state[start:stop], np.diff(self.first_row[start : stop + 1]))

    def count(self, state: int) -> list[int]:
        """Conversations in a state, by source."""
        return [len(self.of_source(number, state)) for number in range(len(self.names))]

    def of_source(self, source: int, state: int) -> np.ndarray:
        """Numbers of the source's conversations in a state, in order."""
        start, stop = self.source_chat[source : source + 2]
        return start + np.flatnonzero(self.state[start:stop] == state)

    def parts_of(self, source: int) -> list[int]:
        return [i for i, part in enumerate(self.parts) if part.source == self.names[source]]

    def rows_of(self, chats: np.ndarray) -> np.ndarray:
        """Numbers of the rows of these conversations, in order."""
        first = self.first_row[chats]
        count = self.first_row[chats + 1] - first
        within = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        return np.repeat(first, count) + within

    def place(self, part: int, place: int) -> str:
        receipt = self.parts[part]
        return place_name(receipt.kind, receipt.name, int(self._line[part]) + place)

    def _mark_duplicates(self, key: np.ndarray) -> None:
        """Every conversation whose key an earlier one has, by sixteenths of the keys to bound memory."""
        candidates = self.state != CAPPED
        for share in range(16):
            chosen = np.flatnonzero(candidates & (key >> np.uint64(60) == share))
            order = chosen[np.argsort(key[chosen], kind="stable")]
            again = key[order[1:]] == key[order[:-1]]
            self.state[order[1:][again]] = DUPLICATE


def _running(counts: Sequence[int]) -> np.ndarray:
    return np.cumsum([0, *counts], dtype=np.int64)


def _lines_before(parts: Sequence[ChatReceipt]) -> list[int]:
    """Lines of a part's file before the part."""
    out, count = [], 0
    for part in parts:
        count = 0 if part.begins_file else count
        out.append(count)
        count += part.lines
    return out
