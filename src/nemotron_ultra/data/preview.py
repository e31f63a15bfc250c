"""What of packs or chats a person should see: every token's text, whether it is trained, where things begin.

Report section 3.2: packs; the masks are those that training reads, so a token counts as trained when it is
predicted with weight, not when the slot before it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from nemotron_ultra.data.inputs import parquet_module
from nemotron_ultra.data.json_rows import Row, find_row_files, read_rows
from nemotron_ultra.data.manifest import NAME
from nemotron_ultra.data.messages import RowDropped, read_conversation
from nemotron_ultra.data.pack_manifest import read_pack_manifest
from nemotron_ultra.data.packs import Pack, PackFiles
from nemotron_ultra.data.render import Template
from nemotron_ultra.data.tokenizer import Tokenizer, load_tokenizer
from nemotron_ultra.data.training_rows import MaskOptions, training_rows
from nemotron_ultra.errors import DataError

_REPLACEMENT = "\ufffd"
_LONGEST_CHARACTER = 4  # tokens: a character has at most four bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Text of one token, or of the few that spell one character together."""

    text: str
    ids: tuple[int, ...]
    trained: bool
    special: bool


@dataclass(frozen=True, kw_only=True)
class ShownRow:
    """One conversation as it is trained. left_out: tokens between the pieces before and after `gap`.

    stretches: (first token, tokens) of each run of trained ones, of the whole row.
    """

    about: str
    pieces: tuple[Piece, ...]
    tokens: int
    trained: int
    stretches: tuple[tuple[int, int], ...]
    gap: int = 0
    left_out: int = 0


@dataclass(frozen=True, kw_only=True)
class ShownGroup:
    """A pack of `room` tokens, or a chat and the rows it becomes (room 0)."""

    about: str
    rows: tuple[ShownRow, ...]
    room: int = 0

    @property
    def tokens(self) -> int:
        return sum(row.tokens for row in self.rows)

    @property
    def trained(self) -> int:
        return sum(row.trained for row in self.rows)


@dataclass(frozen=True, kw_only=True)
class Preview:
    """Some of what is in `name`: facts of the whole, groups, and (place, reason, detail) of unusable rows."""

    name: str
    kind: str
    facts: tuple[tuple[str, str], ...]
    groups: tuple[ShownGroup, ...]
    dropped: tuple[tuple[str, str, str], ...] = ()


def is_packed(path: Path) -> bool:
    """Whether a file or folder holds packs rather than chats. Raises DataError if there is nothing."""
    if not path.exists():
        raise DataError(
            "nothing to show", got=str(path), allowed="a folder of packs, .parquet or .jsonl files"
        )
    if path.is_dir() and (path / NAME).is_file():
        read_pack_manifest(path)  # a folder of another kind says so
        return True
    files = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
    if not files or files[0].suffix != ".parquet":
        return False
    try:
        return "input_ids" in parquet_module().ParquetFile(files[0]).schema_arrow.names
    except (OSError, ValueError) as error:  # pyarrow's own errors are of these two kinds
        raise DataError(f"cannot open {files[0]}", got=error, do="it is damaged or no parquet") from error


def preview_packs(
    path: Path, *, start: int = 0, count: int = 2, limit: int = 2000, tokenizer: str | None = None
) -> Preview:
    """Packs start..start+count-1 of a folder or file, at most `limit` tokens shown of each conversation.

    tokenizer: None for the one that the manifest names. Raises DataError: no packs there, no such pack, a
    tokenizer that is missing or not the one that the packs were made with.
    """
    folder = path if path.is_dir() else path.parent
    manifest = read_pack_manifest(folder) if (folder / NAME).is_file() else None
    loaded = _tokenizer(folder, manifest, tokenizer)
    files = PackFiles(path)
    if not 0 <= start < max(len(files), 1):
        raise DataError(f"{path} has no pack {start}", allowed=f"0..{len(files) - 1}")
    names = list(manifest["sources"]) if manifest else []
    shown = range(start, min(start + count, len(files)))
    packs = [(files.place(i), files[i]) for i in shown]
    room = manifest["packer"]["max_length"] if manifest else max((len(p.tokens) for _, p in packs), default=0)
    groups = [
        ShownGroup(about=f"{file.name}, pack {row}", rows=_pack_rows(pack, loaded, names, limit), room=room)
        for (file, row), pack in packs
    ]
    return Preview(name=str(path), kind="packs", facts=_facts(manifest, files, loaded), groups=tuple(groups))


def preview_chats(
    path: Path,
    template: Template,
    options: MaskOptions,
    *,
    start: int = 0,
    count: int = 2,
    limit: int = 2000,
    messages_field: str = "messages",
) -> Preview:
    """Conversations start..start+count-1 of a file or folder and the rows that training would make of them.

    Raises DataError: no JSONL or parquet there. Rows that cannot be used are in `dropped`.
    """
    rows = (row for file in find_row_files([str(path)], Path("/dev/null")) for row in read_rows(file))
    groups, dropped = [], []
    for row in islice(rows, start, start + count):
        try:
            groups.append(_chat(row, template, options, messages_field, limit))
        except RowDropped as error:
            dropped.append((row.place, error.reason, error.detail))
    if not groups and not dropped:
        raise DataError(f"{path} has no row {start}" if start else f"{path} holds no rows")
    facts = (
        ("tokenizer", template.tokenizer.name),
        ("template", template.name),
        ("trained", {"assistant": "every answer", "last": "the last answer"}[options.train]),
    )
    return Preview(name=str(path), kind="chats", facts=facts, groups=tuple(groups), dropped=tuple(dropped))


def show_row(about: str, tokens: np.ndarray, mask: np.ndarray, tokenizer: Tokenizer, limit: int) -> ShownRow:
    """tokens int32 [n]; mask uint8 [n], 1 where tokens[i] is trained. Over `limit` the middle is left out."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]]).astype(np.int8)))
    stretches = tuple((int(a), int(b - a)) for a, b in zip(edges[::2], edges[1::2], strict=True))
    head = len(tokens) if len(tokens) <= limit else limit - limit // 3
    tail = len(tokens) if len(tokens) <= limit else len(tokens) - limit // 3
    before = tuple(pieces(tokens[:head], mask[:head], tokenizer))
    after = tuple(pieces(tokens[tail:], mask[tail:], tokenizer))
    return ShownRow(
        about=about,
        pieces=before + after,
        tokens=len(tokens),
        trained=int(np.count_nonzero(mask)),
        stretches=stretches,
        gap=len(before),
        left_out=tail - head,
    )


def pieces(tokens: Sequence[int] | np.ndarray, mask: np.ndarray, tokenizer: Tokenizer) -> Iterator[Piece]:
    """The text of ids one after the other; ids that spell a character together stay together."""
    special = {token["id"] for token in tokenizer.content.get("added_tokens", []) if token.get("special")}
    before: list[int] = []  # of the text, so that a tokenizer that drops a leading blank keeps it
    held: list[int] = []
    for number, (id, trained) in enumerate(zip(np.asarray(tokens).tolist(), mask.tolist(), strict=True)):
        if id in special or tokenizer.token(id) is None:
            if held:
                yield _piece(before, held, bool(mask[number - 1]), tokenizer)
            yield Piece(text=tokenizer.token(id) or f"<{id}>", ids=(id,), trained=bool(trained), special=True)
            before, held = [], []
            continue
        if held and bool(trained) != bool(mask[number - 1]):
            yield _piece(before, held, bool(mask[number - 1]), tokenizer)
            before, held = held, []
        held.append(id)
        whole = not tokenizer.decode(before + held).endswith(_REPLACEMENT)
        if whole or len(held) == _LONGEST_CHARACTER:
            yield _piece(before, held, bool(trained), tokenizer)
            before, held = held, []
    if held:
        yield _piece(before, held, bool(mask[-1]), tokenizer)


def _piece(before: list[int], ids: list[int], trained: bool, tokenizer: Tokenizer) -> Piece:
    text = tokenizer.decode(before + ids)[len(tokenizer.decode(before)) :]
    return Piece(text=text, ids=tuple(ids), trained=trained, special=False)


def _pack_rows(pack: Pack, tokenizer: Tokenizer, names: list[str], limit: int) -> tuple[ShownRow, ...]:
    rows = []
    for number, (tokens, mask) in enumerate(pack.conversations):
        source = "" if pack.sources is None else int(pack.sources[number])
        about = [names[source] if source != "" and source < len(names) else f"source {source}"]
        about = about if source != "" else []
        about += [] if pack.rows is None else [f"row {int(pack.rows[number])}"]
        rows.append(show_row(", ".join(about), tokens, mask, tokenizer, limit))
    return tuple(rows)


def _chat(row: Row, template: Template, options: MaskOptions, field: str, limit: int) -> ShownGroup:
    if row.dropped:
        raise RowDropped(row.dropped, "")
    conversation = read_conversation(row.value, messages_field=field)
    (made,) = training_rows(template, [conversation], options)
    if isinstance(made, RowDropped):
        raise made
    several = len(made) > 1
    rows = (
        show_row(f"user's turn {i}" if several else "", one.tokens, one.mask, template.tokenizer, limit)
        for i, one in enumerate(made, 1)
    )
    return ShownGroup(about=row.place, rows=tuple(rows))


def _tokenizer(folder: Path, manifest: dict | None, named: str | None) -> Tokenizer:
    if named is None and manifest is None:
        do = "say which tokenizer made them with --tokenizer"
        raise DataError(f"{folder} has no manifest that names a tokenizer", do=do)
    tokenizer = load_tokenizer(named if named is not None else manifest["tokenizer"]["name"])
    if manifest is not None and tokenizer.hash != manifest["tokenizer"]["hash"]:
        raise DataError(
            f"{folder} was made with another tokenizer",
            got=f"{tokenizer.name} ({tokenizer.hash[:8]})",
            allowed=f"{manifest['tokenizer']['name']} ({manifest['tokenizer']['hash'][:8]})",
            do="name that one with --tokenizer",
        )
    return tokenizer


def _facts(manifest: dict | None, files: PackFiles, tokenizer: Tokenizer) -> tuple[tuple[str, str], ...]:
    facts = [("packs", f"{len(files):,}"), ("files", f"{len(files.files):,}")]
    if manifest is None:
        return (*facts, ("tokenizer", tokenizer.name))
    train, packer = manifest["splits"]["train"], manifest["packer"]
    facts += [
        ("tokens to train on", f"{train['tokens']:,}"),
        ("of them trained", f"{train['trained'] / max(train['tokens'], 1):.1%}"),
        ("fill", f"{train['fill']:.2%} of {packer['max_length']:,}"),
        ("sources", ", ".join(manifest["sources"])),
        ("tokenizer", manifest["tokenizer"]["name"]),
        ("template", manifest["template"]["name"]),
    ]
    return tuple(facts)
