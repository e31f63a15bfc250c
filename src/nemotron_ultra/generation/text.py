"""Text of token ids that come one by one: what is given out is never taken back, and never half a character.

The texts of a stream, joined, are `decode` of all its ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nemotron_ultra.data.tokenizer import Tokenizer

BROKEN = "\ufffd"
UNTHINK = "</think>"
# A character of UTF-8 is at most 4 bytes, so that up to 3 are waiting. Where a decoder shows a whole run of
# bytes as broken because of its end (byte fallback) the run is waited for, up to RUN.
WAITING, RUN = 3, 16
MOST = 512  # ids after which a text that never becomes whole is given out as it is


class TextStream:
    """push(ids) -> the text that is certain by now; finish() -> the rest."""

    def __init__(self, decode: Callable[[Sequence[int]], str]):
        self._decode = decode
        self._ids: list[int] = []  # the latest ids given out whole, as what goes before, then those after
        self._read = 0
        self._sent = 0

    def push(self, ids: Sequence[int]) -> str:
        self._ids += ids
        text = self._unread()
        broken = len(text) - len(text.rstrip(BROKEN))
        held = broken if broken <= RUN else WAITING
        if not held or len(self._ids) - self._read > MOST:
            return self._advance(text)
        new = text[self._sent : len(text) - held]
        self._sent += len(new)
        return new

    def finish(self) -> str:
        return self._advance(self._unread())

    def _unread(self) -> str:
        return self._decode(self._ids)[len(self._decode(self._ids[: self._read])) :]

    def _advance(self, text: str) -> str:
        new = text[self._sent :]
        del self._ids[: self._read]
        self._read, self._sent = len(self._ids), 0
        return new


@dataclass(frozen=True)
class Piece:
    """New text of an answer: of its thoughts and of what it says."""

    thoughts: str = ""
    text: str = ""


class AnswerText:
    """Ids of one answer -> its thoughts and its text, piece by piece.

    Left out are a stop id, the first of `stop_texts` and all after it, and with `thinking` the tag that ends
    the thoughts with one newline before it and one after. The tag is the token where the tokenizer has one.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_ids: Sequence[int],
        stop_texts: Sequence[str] = (),
        thinking: bool = False,
    ):
        self._stop_ids, self._stops, self.thinking = frozenset(stop_ids), tuple(stop_texts), thinking
        self._decode = tokenizer.decode
        self._tag = tokenizer.id(UNTHINK)
        self._stream = TextStream(self._decode)
        self._held = ""
        self._first = False  # the next text is the first one after the tag
        self.closed = False

    def push(self, ids: Sequence[int]) -> Piece:
        ids = [id for id in ids if id not in self._stop_ids]
        if self.thinking and self._tag in ids:
            place = ids.index(self._tag)
            before = self._feed(self._stream.push(ids[:place]) + self._stream.finish())
            rest = self._end_thoughts()
            after = self._feed(self._stream.push(ids[place + 1 :]))
            return Piece(before.thoughts + rest, after.text)
        return self._feed(self._stream.push(ids))

    def finish(self) -> Piece:
        """What was held back for what might have followed."""
        last = self._feed(self._stream.finish())
        rest, self._held = self._shown(self._held), ""
        return (
            Piece(last.thoughts + rest, last.text)
            if self.thinking
            else Piece(last.thoughts, last.text + rest)
        )

    def _feed(self, text: str) -> Piece:
        if self.closed:
            return Piece()
        self._held += text
        thoughts = ""
        if self.thinking and self._tag is None and UNTHINK in self._held:
            self._held, _, rest = self._held.partition(UNTHINK)
            thoughts = self._end_thoughts()
            self._held = rest
        kept = self._kept()
        shown, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        if self.closed:
            self._held = ""
        shown = self._shown(shown)
        return Piece(thoughts + shown) if self.thinking else Piece(thoughts, shown)

    def _kept(self) -> int:
        """Characters at the end of what is held that cannot be shown (yet)."""
        found = [self._held.find(stop) for stop in self._stops if stop in self._held]
        if found:
            self.closed = True
            return len(self._held) - min(found)
        marks = (*self._stops, "\n" + UNTHINK, UNTHINK) if self.thinking else self._stops
        return max((overlap(self._held, mark) for mark in marks), default=0)

    def _shown(self, text: str) -> str:
        if self._first and text:
            self._first = False
            return text.removeprefix("\n")
        return text

    def _end_thoughts(self) -> str:
        rest, self._held = self._held.removesuffix("\n"), ""
        self.thinking, self._first = False, True
        self._stream = TextStream(self._decode)
        return "" if self.closed else rest


def overlap(text: str, mark: str) -> int:
    """Characters at the end of `text` that may be the beginning of `mark`, less than all of it."""
    for size in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:size]):
            return size
    return 0
