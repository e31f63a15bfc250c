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
    pieces = [list(_pieces(text)) for text in texts]
    flat = [piece for document in pieces for piece in document]
    encodings = tokenizer.backend(special=special).encode_batch_fast(flat, add_special_tokens=False)
    ids, lengths, at = array("i"), np.empty(len(texts), dtype=np.int32), 0
    for number, document in enumerate(pieces):
        before = len(ids)
        for encoding in encodings[at : at + len(document)]:
            ids.extend(encoding.ids)
        at += len(document)
        ids.append(tokenizer.eos_id)
        lengths[number] = len(ids) - before
    return np.frombuffer(ids, dtype=np.int32), lengths


def _pieces(text: str) -> Iterator[str]:
    start = 0
    while len(text) - start > PIECE_CHARACTERS:
        cut = _CUT.search(text, start + PIECE_CHARACTERS)
        if cut is None:
            break
        yield text[start : cut.end()]
        start = cut.end()
    yield text[start:]
