"""One part of the input -> shards of its documents and a receipt: the unit that is done in parallel and
resumed.

A document goes to valid if the hash of its text, as a number in [0, 1), is below valid_fraction; equal texts
therefore never lie in both splits.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from nemotron_ultra.data.documents import Document, Reading, read_documents
from nemotron_ultra.data.encode import encode_documents
from nemotron_ultra.data.inputs import Part
from nemotron_ultra.data.manifest import SPLITS, XZ_LIMIT_BYTES, damaged_files, file_facts, write_json
from nemotron_ultra.data.shards import ShardWriter, token_dtype
from nemotron_ultra.data.tokenizer import Tokenizer

# Texts handed to the library at once: enough to keep it busy, little enough to bound memory.
BATCH_CHARACTERS = 1 << 20
BATCH_DOCUMENTS = 512
EXAMPLES = 5


@dataclass(frozen=True)
class Options:
    """What shapes the output besides input and tokenizer. special: read special tokens that the text spells
    out."""

    reading: Reading = field(default_factory=Reading)
    valid_fraction: float = 0.01
    special: bool = False


@dataclass
class Receipt:
    """What became of the documents of one part, written after its shards."""

    number: int
    source: str
    size: int
    documents_in: int = 0
    documents: Counter = field(default_factory=Counter)
    tokens: Counter = field(default_factory=Counter)
    bytes: Counter = field(default_factory=Counter)
    dropped: Counter = field(default_factory=Counter)
    invalid_utf8: int = 0
    examples: dict[str, list[str]] = field(default_factory=dict)
    files: dict[str, Any] = field(default_factory=dict)

    def example(self, reason: str, name: str) -> None:
        names = self.examples.setdefault(reason, [])
        if len(names) < EXAMPLES:
            names.append(name)

    def check(self) -> None:
        """Documents in = written + dropped."""
        written, dropped = sum(self.documents.values()), sum(self.dropped.values())
        assert self.documents_in == written + dropped, f"{self.documents_in} in, {written} + {dropped} out"

    def add(self, other: Receipt) -> None:
        self.documents_in += other.documents_in
        self.invalid_utf8 += other.invalid_utf8
        for name in COUNTERS:
            getattr(self, name).update(getattr(other, name))
        for reason, names in other.examples.items():
            for name in names:
                self.example(reason, name)

    def splits(self) -> dict[str, dict[str, int]]:
        return {
            s: {"documents": self.documents[s], "tokens": self.tokens[s], "bytes": self.bytes[s]}
            for s in SPLITS
        }


COUNTERS = ("documents", "tokens", "bytes", "dropped")


def part_prefix(folder: Path, number: int, split: str) -> Path:
    return folder / f"{number:07d}.{split}"


def valid_text_path(folder: Path, number: int) -> Path:
    return folder / f"{number:07d}.valid.txt"


def process_part(part: Part, folder: Path, options: Options, tokenizer: Tokenizer) -> Receipt:
    """Tokenise one part into shards NUMBER.{train,valid} and, last of all, its receipt NUMBER.json."""
    receipt = Receipt(part.number, part.source, part.size)
    dtype = token_dtype(tokenizer.vocab_size)
    prefixes = {split: part_prefix(folder, part.number, split) for split in SPLITS}
    writers = {split: ShardWriter(prefix, dtype) for split, prefix in prefixes.items()}
    try:
        with open(valid_text_path(folder, part.number), "wb") as valid_text:
            for batch in _batches(_counted(read_documents(part, options.reading), receipt)):
                raws = [document.text.encode() for document in batch]
                fraction = 1.0 if part.valid else options.valid_fraction
                is_valid = np.array([split_of(raw, fraction) == "valid" for raw in raws])
                ids, lengths = encode_documents(tokenizer, [d.text for d in batch], special=options.special)
                _write(writers, receipt, is_valid, ids, lengths, raws)
                _keep_text(valid_text, [raw for raw, valid in zip(raws, is_valid, strict=True) if valid])
        for writer in writers.values():
            writer.close()
    except BaseException:
        for writer in writers.values():
            writer.abort()
        raise
    receipt.check()
    receipt.files = {p.name: file_facts(p) for s in SPLITS for p in shard_files(prefixes[s])}
    write_json(folder / f"{part.number:07d}.json", vars(receipt))
    return receipt


def read_receipts(folder: Path) -> dict[int, Receipt]:
    """Receipts of finished parts whose files are still what they were; the others are worked again."""
    found = {}
    for path in sorted(folder.glob("[0-9]*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        if not damaged_files(folder, content):
            content |= {name: Counter(content[name]) for name in COUNTERS}
            found[content["number"]] = Receipt(**content)
    return found


def split_of(raw: bytes, valid_fraction: float) -> str:
    """train or valid by the content of a document, so that equal documents stay together."""
    place = int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little") / 2**64
    return "valid" if place < valid_fraction else "train"


def shard_files(prefix: Path) -> list[Path]:
    return [prefix.with_name(f"{prefix.name}.{suffix}") for suffix in ("bin", "idx")]


def _write(
    writers: dict[str, ShardWriter],
    receipt: Receipt,
    is_valid: np.ndarray,
    ids: np.ndarray,
    lengths: np.ndarray,
    raws: list[bytes],
) -> None:
    sizes = np.array([len(raw) for raw in raws])
    for split, chosen in (("train", ~is_valid), ("valid", is_valid)):
        writers[split].add_many(ids if chosen.all() else ids[np.repeat(chosen, lengths)], lengths[chosen])
        receipt.documents[split] += int(chosen.sum())
        receipt.tokens[split] += int(lengths[chosen].sum())
        receipt.bytes[split] += int(sizes[chosen].sum())


def _keep_text(file: BinaryIO, raws: list[bytes]) -> None:
    for raw in raws:
        if file.tell() < XZ_LIMIT_BYTES:
            file.write(raw)


def _counted(documents: Iterable[Document], receipt: Receipt) -> Iterator[Document]:
    for document in documents:
        receipt.documents_in += 1
        if document.dropped:
            receipt.dropped[document.dropped] += 1
            receipt.example(document.dropped, document.name)
            continue
        if document.invalid:
            receipt.invalid_utf8 += 1
            receipt.example("invalid UTF-8, replaced", document.name)
        yield document


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch, size = [], 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if size >= BATCH_CHARACTERS or len(batch) >= BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
