"""Texts -> one run of token ids, an end-of-document id after every document."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator

import numpy as np

from nemotron_ultra.data.tokenizer import Tokenizer

# Documents longer than this are handed to the library in pieces, which bounds its memory.
PIECE_CHARACTERS = 1 << 20

# A piece ends after a newline that stands alone between visible characters: every pre-tokenizer in use ends a
# word there, so the ids are those of the whole text.
_CUT = re.compile(r"(?<=\S)\n(?=\S)")


def encode_documents(
    tokenizer: Tokenizer, texts: list[str], *, special: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """(ids [tokens], lengths int32 [documents]); the end-of-document id is included in both."""
    backend = tokenizer.backend(special=special)
    ids, lengths = array("i"), np.zeros(len(texts), dtype=np.int32)
    for group in _groups(texts):
        pieces = [piece for _, piece, _ in group]
        encodings = backend.encode_batch_fast(pieces, add_special_tokens=False)
        for (number, _, last), encoding in zip(group, encodings, strict=True):
            before = len(ids)
            ids.extend(encoding.ids)
            if last:
                ids.append(tokenizer.eos_id)
            lengths[number] += len(ids) - before
    return np.frombuffer(ids, dtype=np.int32), lengths


def _groups(texts: list[str]) -> Iterator[list[tuple[int, str, bool]]]:
    """(document, piece of it, whether it is the last one) in order, a few pieces' worth of text at a time."""
    group, size = [], 0
    for number, text in enumerate(texts):
        for piece, last in _pieces(text):
            group.append((number, piece, last))
            size += len(piece)
            if size >= 2 * PIECE_CHARACTERS:
                yield group
                group, size = [], 0
    if group:
        yield group


def _pieces(text: str) -> Iterator[tuple[str, bool]]:
    start = 0
    while len(text) - start > PIECE_CHARACTERS:
        cut = _CUT.search(text, start + PIECE_CHARACTERS)
        if cut is None:
            break
        yield text[start : cut.end()], False
        start = cut.end()
    yield text[start:], True
