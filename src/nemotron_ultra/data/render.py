"""What a template makes of a conversation before any text is encoded: segments of ids and text, each with a
flag.

A row of training data is a list of segments; all texts of many rows are encoded in one call and laid
together, so that the mask comes from the segments and nothing is looked for in the ids (report 3.2.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from nemotron_ultra.data.tokenizer import Tokenizer

# (text still to be encoded or ids, whether it is trained)
Segment = tuple[str | tuple[int, ...], bool]


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """Ids of a conversation. mask[i] is 1 where an assistant wrote tokens[i], its <|im_end|> included."""

    tokens: list[int]
    mask: list[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """What one row shows of a conversation and what of it is trained.

    thoughts_from: thoughts of messages before this number are left out. bare: an answer without thoughts gets
    the empty tags although thoughts are shown. close: the tag that closes cut thoughts is trained.
    """

    messages: Sequence[dict[str, Any]]
    trained: frozenset[int] | range
    tools: Sequence[dict[str, Any]] = ()
    thinking: bool = False
    thoughts_from: int = 0
    bare: bool = True
    close: bool = False
    budget: int | None = None
    effort: str | None = None


class Template(Protocol):
    """Messages -> ids and masks of one tokenizer. `hash` changes when a rendering may change."""

    tokenizer: Tokenizer
    stop_ids: tuple[int, ...]
    hash: str
    name: str
    special: bool  # how texts of its segments are encoded: special tokens spelled in them as such, or as text

    def prompt(
        self,
        messages: Sequence[Any],
        thinking: bool = False,
        *,
        tools: Sequence[Any] = (),
        budget: int | None = None,
        effort: str | None = None,
    ) -> list[int]: ...

    def conversation(
        self,
        messages: Sequence[Any],
        thinking: bool = False,
        *,
        tools: Sequence[Any] = (),
        budget: int | None = None,
        effort: str | None = None,
        truncate_history: bool = False,
    ) -> Rendered: ...

    def text(self, tokens: Sequence[int], thinking: bool = False) -> str: ...

    def segments(self, view: View) -> list[Segment]: ...


def last_of(messages: Sequence[dict[str, Any]], role: str) -> int:
    """Number of the last message of a role, or -1."""
    for i in range(len(messages) - 1, -1, -1):
        if messages[i]["role"] == role:
            return i
    return -1


def lay_out(
    tokenizer: Tokenizer, rows: Sequence[Sequence[Segment]], special: bool
) -> list[tuple[np.ndarray, np.ndarray, int]]:
    """(tokens int32 [n], mask uint8 [n], number of the first trained token or n) of each row.

    Every text is encoded once, however many rows hold it.
    """
    places: dict[str, int] = {}
    for row in rows:
        for piece, _ in row:
            if type(piece) is str and piece not in places:
                places[piece] = len(places)
    backend = tokenizer.backend(special=special)
    encodings = backend.encode_batch_fast(list(places), add_special_tokens=False)
    parts = {text: encoding.ids for text, encoding in zip(places, encodings, strict=True)}
    ids: list[int] = []
    lengths: list[int] = []
    flags: list[bool] = []
    where: list[tuple[int, int, int]] = []
    for row in rows:
        start, first = len(ids), -1
        for piece, trained in row:
            part = parts[piece] if type(piece) is str else piece
            if trained and first < 0 and part:
                first = len(ids) - start
            ids += part
            lengths.append(len(part))
            flags.append(trained)
        where.append((start, len(ids), len(ids) - start if first < 0 else first))
    tokens = np.fromiter(ids, dtype=np.int32, count=len(ids))  # half the time of np.array
    mask = np.repeat(np.array(flags, dtype=np.uint8), lengths)
    return [(tokens[start:end], mask[start:end], first) for start, end, first in where]
