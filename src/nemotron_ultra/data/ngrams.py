"""Runs of n words shared with held-out texts, and the runs that are only the boilerplate of a template.

A question is contaminated if it holds a run of n words of a held-out text, or is the same text where it is
shorter than n words. A run that more than a fifth of the different questions of one generator (or domain)
hold is its template's wording and says nothing about any one question, so it is left out of account.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from nemotron_ultra.data.documents import open_binary
from nemotron_ultra.data.inputs import InputFile
from nemotron_ultra.data.json_rows import read_rows
from nemotron_ultra.errors import DataError

COMMON_SHARE = 0.2
COMMON_LEAST = 2  # a run of no more questions than this is never boilerplate
SAMPLE = 1000  # questions of a group that are looked at for it

# Letters and digits, and the signs that make one sum another.
_WORD = re.compile(r"\w+|[-+*/^=<>%]")


def words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())


def grams(text: str, n: int) -> set[int]:
    """64-bit hashes of all runs of n words; of the whole text if it is shorter; none for no words."""
    parts = words(text)
    if not parts:
        return set()
    count = max(1, len(parts) - n + 1)
    return {_hash(" ".join(parts[i : i + n])) for i in range(count)}


class Common:
    """Hashes that many texts of a group share. `add` texts first, then ask for `of(group)`."""

    def __init__(self, n: int):
        self.n = n
        self._seen: dict[str, set[int]] = defaultdict(set)
        self._counts: dict[str, Counter[int]] = defaultdict(Counter)
        self._found: dict[str, frozenset[int]] = {}

    def add(self, group: str, text: str) -> None:
        seen, whole = self._seen[group], _hash(" ".join(words(text)))
        if len(seen) < SAMPLE and whole not in seen:
            seen.add(whole)
            self._counts[group].update(grams(text, self.n))

    def of(self, group: str) -> frozenset[int]:
        if group not in self._found:
            least = max(COMMON_LEAST, COMMON_SHARE * len(self._seen[group]))
            counts = self._counts.pop(group, Counter())
            self._found[group] = frozenset(gram for gram, count in counts.items() if count > least)
        return self._found[group]


class HeldOut:
    """Texts that training data must not hold: prompts of JSONL or parquet rows, or lines of text files.

    Raises DataError for a file that holds no text at all.
    """

    def __init__(self, files: Iterable[InputFile], n: int):
        self.n, self.texts = n, 0
        self._places: dict[int, str] = {}
        self._whole: dict[int, str] = {}
        for file in files:
            before = self.texts
            for place, text in _texts(file):
                self._add(place, text)
            if self.texts == before:
                fields = ", ".join(TEXT_FIELDS)
                raise DataError(f"{file.path}: no held-out text in it", allowed=f"rows with one of {fields}")

    def hit(self, text: str, common: frozenset[int] = frozenset()) -> str | None:
        """Place of a held-out text that `text` repeats, or None. common: runs that do not count."""
        whole = self._whole.get(_hash(" ".join(words(text))))
        if whole is not None:
            return whole
        if len(words(text)) < self.n:
            return None
        for gram in sorted(grams(text, self.n) - common):
            if gram in self._places:
                return self._places[gram]
        return None

    def _add(self, place: str, text: str) -> None:
        parts = words(text)
        if not parts:
            return
        self.texts += 1
        self._whole.setdefault(_hash(" ".join(parts)), place)
        if len(parts) >= self.n:
            for gram in grams(text, self.n):
                self._places.setdefault(gram, place)


TEXT_FIELDS = ("messages", "responses_create_params", "question", "prompt", "problem", "text")


def row_texts(row: Mapping[str, Any]) -> list[str]:
    """What a user asks in a row: of the first of TEXT_FIELDS that it has."""
    for field in TEXT_FIELDS:
        value = row.get(field)
        if isinstance(value, Mapping):
            value = value.get("input")
        if isinstance(value, str) and value.strip():
            return [value]
        if isinstance(value, list):
            users = [m for m in value if isinstance(m, Mapping) and m.get("role") == "user"]
            return [text for m in users if (text := content_text(m.get("content")))]
    return []


def content_text(content: Any) -> str:
    """Text of a message's content: a string, or a list of parts with their text."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "".join(p["text"] for p in parts if isinstance(p, Mapping) and isinstance(p.get("text"), str))


def _texts(file: InputFile) -> Iterable[tuple[str, str]]:
    if file.kind != "text":
        for row in read_rows(file):
            for text in row_texts(row.value):
                yield row.place, text
        return
    with open_binary(file.path) as stream:
        for number, line in enumerate(stream, 1):
            yield f"{file.name}:{number}", line.decode("utf-8", "replace")


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest(), "little")
