"""One part of a source -> spool files of its training rows and, last of all, a receipt: the unit that is done
in parallel and resumed.

NUMBER.tokens int32 and NUMBER.mask uint8 hold all rows back to back; NUMBER.rows says where each begins, how
long it is and which prompt it answers; NUMBER.chats holds the hash of each conversation, by which it goes to
train or valid and by which equal ones are found.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from nemotron_ultra.data.chat import load_template
from nemotron_ultra.data.inputs import Part
from nemotron_ultra.data.manifest import damaged_files, file_facts, read_receipt, write_json
from nemotron_ultra.data.messages import Conversation, RowDropped, read_conversation
from nemotron_ultra.data.pool import check_unchanged
from nemotron_ultra.data.reasoning import ReasoningOptions, transform
from nemotron_ultra.data.render import Template
from nemotron_ultra.data.sft_rows import Row, lines_before, place_name, read_rows
from nemotron_ultra.data.tokenizer import load_tokenizer
from nemotron_ultra.data.training_rows import MaskOptions, TrainingRow, training_rows
from nemotron_ultra.errors import DataError

# Text handed to the tokenizer at once: enough to keep it busy, little enough to bound memory.
BATCH_CHARACTERS = 1 << 19
BATCH_CHATS = 1024
EXAMPLES = 5
DETAIL_CHARACTERS = 200
SUFFIXES = ("tokens", "mask", "rows", "chats")

# start: first token in NUMBER.tokens; prompt: hash of the ids before the first trained one, which are
# `given`; place: row of the part that it comes from.
ROWS = np.dtype(
    [
        ("start", "<i8"),
        ("prompt", "<u8"),
        ("length", "<i4"),
        ("given", "<i4"),
        ("trained", "<i4"),
        ("place", "<i4"),
    ]
)
# key: hash of the conversation; place: its row in the part; rows: how many training rows it became.
CHATS = np.dtype([("key", "<u8"), ("place", "<i4"), ("rows", "<i4")])


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """What shapes the spools of one source besides its files, the tokenizer and the template.

    row_filter: (field, value); rows whose field neither is nor contains the value are left out. strict: a row
    that cannot be used is an error.
    """

    messages_field: str = "messages"
    tools_field: str = "tools"
    row_filter: tuple[str, str] | None = None
    strict: bool = False
    masks: MaskOptions = field(default_factory=MaskOptions)
    reasoning: ReasoningOptions = field(default_factory=ReasoningOptions)

    @property
    def columns(self) -> tuple[str, ...]:
        """Fields that are read of a row, the one with the messages first."""
        extra = (self.row_filter[0],) if self.row_filter else ()
        return tuple(dict.fromkeys((self.messages_field, self.tools_field, "conversations", *extra)))


@dataclass(kw_only=True)
class ChatReceipt:
    """What became of the rows of one part. lines: rows and blank lines; chats: conversations in the spool."""

    number: int
    source: str
    kind: str
    name: str
    begins_file: bool
    size: int
    lines: int = 0
    rows_in: int = 0
    chats: int = 0
    rows: int = 0
    tokens: int = 0
    trained: int = 0
    invalid_utf8: int = 0
    dropped: Counter = field(default_factory=Counter)
    examples: dict[str, list[list[Any]]] = field(default_factory=dict)
    files: dict[str, Any] = field(default_factory=dict)

    def drop(self, place: int, reason: str, detail: str) -> None:
        self.dropped[reason] += 1
        found = self.examples.setdefault(reason, [])
        if len(found) < EXAMPLES:
            found.append([place, detail[:DETAIL_CHARACTERS]])

    def check(self) -> None:
        """Rows in = conversations kept + rows dropped."""
        dropped = sum(self.dropped.values())
        assert self.rows_in == self.chats + dropped, f"{self.rows_in} in, {self.chats} + {dropped} out"


@dataclass(frozen=True, kw_only=True)
class ChatSetup:
    """What a worker needs to begin. options: by source."""

    folder: Path
    tokenizer: str
    tokenizer_hash: str
    template: str
    template_hash: str
    options: dict[str, ChatOptions]

    def open(self) -> ChatWorker:
        tokenizer = load_tokenizer(self.tokenizer)
        check_unchanged(tokenizer, self.tokenizer_hash)
        template = load_template(tokenizer, self.template)
        if template.hash != self.template_hash:
            raise DataError(f"the chat template {self.template} changed while it was in use")
        return ChatWorker(self.folder, template, self.options)


@dataclass(frozen=True)
class ChatWorker:
    """Does one part after the other."""

    folder: Path
    template: Template
    options: dict[str, ChatOptions]

    def __call__(self, part: Part) -> ChatReceipt:
        """Spool one part; returns its receipt, which is on disk by then. Raises DataError."""
        options = self.options[part.source]
        name = part.pieces[0].name if part.pieces else part.source
        receipt = ChatReceipt(
            number=part.number,
            source=part.source,
            kind=part.kind,
            name=name,
            begins_file=part.number == 0 or any(piece.start == 0 for piece in part.pieces),
            size=part.size,
        )
        folder = self.folder / part.source
        folder.mkdir(parents=True, exist_ok=True)
        with Spool(folder, part.number) as spool, _collected_by_batch() as collect:
            for batch in _batches(self._chats(part, options, receipt)):
                self._spool(batch, spool, part, options, receipt)
                collect()
        receipt.check()
        receipt.rows, receipt.tokens, receipt.trained = spool.rows, spool.tokens, spool.trained
        receipt.files = {path.name: file_facts(path) for path in spool_files(folder, part.number)}
        write_json(folder / f"{part.number:07d}.json", vars(receipt))
        return receipt

    def _chats(
        self, part: Part, options: ChatOptions, receipt: ChatReceipt
    ) -> Iterator[tuple[int, Conversation]]:
        for row in read_rows(part, options.columns):
            receipt.lines += 1
            if row.value is None and not row.dropped:
                continue
            receipt.rows_in += 1
            receipt.invalid_utf8 += row.invalid
            try:
                yield row.place, _conversation(row, options)
            except RowDropped as drop:
                self._drop(part, options, receipt, row.place, drop)

    def _spool(
        self,
        batch: list[tuple[int, Conversation]],
        spool: Spool,
        part: Part,
        options: ChatOptions,
        receipt: ChatReceipt,
    ) -> None:
        keys = [conversation_key(conversation) for _, conversation in batch]
        changed = [
            transform(conversation, options.reasoning, f"{key:016x}", self.template.tokenizer)
            for key, (_, conversation) in zip(keys, batch, strict=True)
        ]
        found = training_rows(self.template, changed, options.masks)
        for key, (place, _), rows in zip(keys, batch, found, strict=True):
            if isinstance(rows, RowDropped):
                self._drop(part, options, receipt, place, rows)
                continue
            spool.add(key, place, rows)
            receipt.chats += 1
        spool.flush()

    def _drop(
        self, part: Part, options: ChatOptions, receipt: ChatReceipt, place: int, drop: RowDropped
    ) -> None:
        if options.strict and drop.reason != FILTERED:
            if part.kind == "jsonl":
                place += lines_before(part)
            where = place_name(part.kind, receipt.name, place)
            raise DataError(
                f"{where}: {drop.reason}", got=drop.detail or None, do="mend it, or leave out --strict"
            )
        receipt.drop(place, drop.reason, drop.detail)


FILTERED = "left out by --row-filter"


class Spool:
    """The files of one part while they are written. Removed again if an error ends the part."""

    def __init__(self, folder: Path, number: int):
        self.paths = spool_files(folder, number)
        self.rows, self.tokens, self.trained = 0, 0, 0
        self._stack = ExitStack()
        self._pending: list[TrainingRow] = []
        self._rows: list[tuple[int, ...]] = []
        self._chats: list[tuple[int, int, int]] = []

    def __enter__(self) -> Spool:
        self._files = [self._stack.enter_context(path.open("wb")) for path in self.paths]
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            for file in self._files:
                file.flush()
                os.fsync(file.fileno())
        self._stack.close()
        if kind is not None:
            for path in self.paths:
                path.unlink(missing_ok=True)

    def add(self, key: int, place: int, rows: list[TrainingRow]) -> None:
        self._chats.append((key, place, len(rows)))
        for row in rows:
            length, trained = len(row.tokens), int(np.count_nonzero(row.mask))
            given = int(row.mask.argmax()) if trained else length
            self._rows.append((self.tokens, row.prompt, length, given, trained, place))
            self.tokens, self.trained = self.tokens + length, self.trained + trained
        self._pending += rows
        self.rows += len(rows)

    def flush(self) -> None:
        if self._pending:
            columns = [
                np.concatenate([row.tokens for row in self._pending]).astype("<i4", copy=False),
                np.concatenate([row.mask for row in self._pending]).astype(np.uint8, copy=False),
                np.array(self._rows, dtype=ROWS),
                np.array(self._chats, dtype=CHATS),
            ]
            for file, values in zip(self._files, columns, strict=True):
                file.write(values.tobytes())  # tofile would not say why a disk refuses
        self._pending, self._rows, self._chats = [], [], []


def spool_files(folder: Path, number: int) -> list[Path]:
    return [folder / f"{number:07d}.{suffix}" for suffix in SUFFIXES]


def read_chat_receipts(folder: Path) -> dict[int, ChatReceipt]:
    """Receipts of a source's finished parts whose files are still what they were."""
    found = {}
    for path in sorted(folder.glob("[0-9]*.json")):
        content = read_receipt(path)
        if content and not damaged_files(folder, content):
            content["dropped"] = Counter(content["dropped"])
            found[content["number"]] = ChatReceipt(**content)
    return found


def conversation_key(conversation: Conversation) -> int:
    """64-bit hash of messages and tools as they were given, before any transform."""
    parts: list[str] = []
    for message in conversation.messages:
        for key in sorted(message):
            value = message[key]
            text = value if type(value) is str else _canonical(value)
            # With its kind and length, so that no two conversations are spelled alike.
            parts += (key, f" {type(value).__name__} {len(text)} ", text)
        parts.append(";")
    if conversation.tools:
        parts.append(_canonical(conversation.tools))
    raw = "".join(parts).encode("utf-8", "replace")
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little")


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


@contextmanager
def _collected_by_batch() -> Iterator[Callable[[], object]]:
    """No looking for cycles among what a batch still uses (5 % of the time): collect when it is done."""
    was = gc.isenabled()
    gc.freeze()
    gc.disable()
    try:
        yield gc.collect
    finally:
        gc.unfreeze()
        if was:
            gc.enable()


def _conversation(row: Row, options: ChatOptions) -> Conversation:
    if row.dropped:
        raise RowDropped(row.dropped, row.detail)
    if options.row_filter:
        name, wanted = options.row_filter
        value = row.value.get(name)
        values = value if isinstance(value, list) else [value]
        if wanted not in map(str, values):
            raise RowDropped(FILTERED, f"{name} is {value!r}")
    return read_conversation(
        row.value, messages_field=options.messages_field, tools_field=options.tools_field
    )


def _batches(chats: Iterable[tuple[int, Conversation]]) -> Iterator[list[tuple[int, Conversation]]]:
    batch, size = [], 0
    for place, conversation in chats:
        batch.append((place, conversation))
        for message in conversation.messages:
            size += len(message["content"]) + len(message.get("reasoning_content", ""))
        if size >= BATCH_CHARACTERS or len(batch) >= BATCH_CHATS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
