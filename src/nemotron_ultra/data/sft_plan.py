"""Which training rows share a pack, and which packs a file: decided by one process from lengths alone.

Sources are drawn in turn, or by weight; equal conversations are taken once; a conversation is in train or in
valid by the hash of its content. Packs are planned by best fit, then put in the order of shuffle_keys. The
plan depends on the spools and the options alone, and is made again after a kill.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from nemotron_ultra.data.external_shuffle import ExternalShuffle
from nemotron_ultra.data.interleave import interleave_blocks
from nemotron_ultra.data.pack_manifest import train_file, valid_file
from nemotron_ultra.data.pack_stats import PackStats
from nemotron_ultra.data.packing import BestFitPacker
from nemotron_ultra.data.sft_parts import EXAMPLES
from nemotron_ultra.data.sft_spools import CAPPED, DUPLICATE, TRAIN, UNDRAWN, VALID, Spools
from nemotron_ultra.errors import DataError

BLOCK = 1 << 16
SHUFFLE_BYTES = 64 << 20
MOST_PASSES = 1000  # over one source: beyond it weights are a mistake, and the plan would take for ever
ITEMS, BOUNDS = "items", "bounds"
OVER_CAP = "over the source's cap"
EQUAL = "equal to an earlier conversation"
NOT_DRAWN = "not drawn: the mixture ended with another source"
TOO_LONG = "longer than a pack"
PROMPT_TOO_LONG = "prompt longer than a pack"


@dataclass(frozen=True, kw_only=True)
class PackOptions:
    """How rows become packs and packs become files.

    ended: what happens when a source has run out. "leave-out": the others go on without it; "stop": nothing
    more is drawn; "repeat": it begins again until every source has been drawn once. shard_tokens,
    group_tokens: a file, a row group ends with the pack that reaches them.
    """

    max_length: int = 4096
    pool_size: int = 4096
    window: int = 4096
    tolerance: int = 64
    seed: int = 0
    on_overlong: str = "drop"
    valid_fraction: float = 0.01
    duplicates: str = "drop"
    ended: str = "leave-out"
    shard_tokens: int = 1 << 26
    group_tokens: int = 1 << 16

    def packer(self) -> BestFitPacker:
        return BestFitPacker(
            self.max_length, pool_size=self.pool_size, window=self.window, tolerance=self.tolerance
        )


@dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """One file to write: packs order[start:stop] of the plan. source: that of validation, else None."""

    name: str
    source: str | None
    start: int
    stop: int


@dataclass(kw_only=True)
class SourcePlan:
    """What became of one source. Counts are of "conversations", "rows", "tokens" and "trained" tokens.

    train, valid: packed, without repetitions; repeated: packed again. ended: share of all draws after which
    the source had run out. dropped, examples: by reason.
    """

    read: Counter = field(default_factory=Counter)
    train: Counter = field(default_factory=Counter)
    valid: Counter = field(default_factory=Counter)
    repeated: Counter = field(default_factory=Counter)
    ended: float = 1.0
    dropped: dict[str, Counter] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def drop(self, reason: str, count: int, rows: np.ndarray, examples: Sequence[str]) -> None:
        if count:
            tokens = int(rows["length"].sum(dtype=np.int64))
            self.dropped.setdefault(reason, Counter()).update(count=count, tokens=tokens)
            there = self.examples.setdefault(reason, [])
            there += examples[: EXAMPLES - len(there)]

    def check(self, name: str) -> None:
        """Tokens in = tokens packed + tokens dropped."""
        packed = self.train["tokens"] + self.valid["tokens"]
        dropped = sum(counts["tokens"] for counts in self.dropped.values())
        assert self.read["tokens"] == packed + dropped, f"{name}: {self.read} in, {packed} + {dropped} out"


@dataclass(kw_only=True)
class Plan:
    """The files to write, with packs in their order: ITEMS holds row numbers int64, pack after pack, BOUNDS
    int64 [packs + 1] where each begins. packers: statistics, of train under ""."""

    shards: list[ShardPlan]
    digest: str
    sources: dict[str, SourcePlan]
    packers: dict[str, PackStats]


def make_plan(spools: Spools, weights: Sequence[float], options: PackOptions, folder: Path) -> Plan:
    """Draw, pack, shuffle, cut into files. Raises DataError for nothing to train on."""
    folder.mkdir(exist_ok=True)
    spools.sort_out(valid_fraction=options.valid_fraction, duplicates=options.duplicates)
    there = spools.count(TRAIN)
    counts = draw_counts(there, weights, options.ended)
    _check_passes(spools.names, there, counts)
    for number, count in enumerate(counts):
        spools.state[spools.of_source(number, TRAIN)[count:]] = UNDRAWN
    spools.load_rows()
    sources = {name: _account(spools, number, options) for number, name in enumerate(spools.names)}
    for source, share in zip(sources.values(), shares_when_ended(counts, weights), strict=True):
        source.ended = share
    if not any(source.train["rows"] for source in sources.values()):
        raise _nothing(sources)
    with _PlanWriter(folder, spools, options) as writer:
        writer.group(None, _train_rows(spools, counts, weights, sources, options.max_length))
        for number, name in enumerate(spools.names):
            if sources[name].valid["rows"]:
                writer.group(name, [spools.rows_of(spools.of_source(number, VALID))])
    return Plan(shards=writer.shards, digest=writer.digest, sources=sources, packers=writer.packers)


def draw_counts(there: Sequence[int], weights: Sequence[float], ended: str) -> list[int]:
    """Conversations to draw of each source that has so many."""
    turns = [count / weight for count, weight in zip(there, weights, strict=True) if count]
    if ended == "leave-out" or not turns:
        return list(there)
    # Rounded, so that the source that decides is drawn exactly once in spite of the division.
    if ended == "stop":
        return [min(n, round(min(turns) * weight)) for n, weight in zip(there, weights, strict=True)]
    return [n and max(n, round(max(turns) * weight)) for n, weight in zip(there, weights, strict=True)]


def _check_passes(names: Sequence[str], there: Sequence[int], counts: Sequence[int]) -> None:
    for name, count, drawn in zip(names, there, counts, strict=True):
        if drawn > MOST_PASSES * count:
            raise DataError(
                f"source {name} would be drawn {drawn / count:,.0f} times over",
                got=f"{drawn:,} draws of {count:,} conversations",
                allowed=f"{MOST_PASSES:,} times",
                do="bring the weights nearer together, or set --when-ended stop",
            )


def shares_when_ended(counts: Sequence[int], weights: Sequence[float]) -> list[float]:
    """Of each source the share of all draws that have been made when it has run out."""
    out, total = [], max(1, sum(counts))
    for count, weight in zip(counts, weights, strict=True):
        turn = count / weight
        out.append(sum(min(c, w * turn) for c, w in zip(counts, weights, strict=True)) / total)
    return out


def _account(spools: Spools, number: int, options: PackOptions) -> SourcePlan:
    source = SourcePlan()
    for part in spools.parts_of(number):
        start, stop = spools.part_chat[part : part + 2]
        chats, state = spools.chats(part), spools.state[start:stop]
        rows, of_row = spools.rows(part), spools.row_states(part)
        source.read.update(_counts(rows, len(chats)))
        chat_of_row = np.repeat(np.arange(len(chats)), chats["rows"])
        long = rows["length"] > options.max_length
        for into, wanted in ((source.train, TRAIN), (source.valid, VALID)):
            kept = (of_row == wanted) & ~long
            into.update(_counts(rows[kept], len(np.unique(chat_of_row[kept]))))
        for reason, wanted in ((OVER_CAP, CAPPED), (EQUAL, DUPLICATE), (NOT_DRAWN, UNDRAWN)):
            places = [spools.place(part, int(p)) for p in chats["place"][state == wanted][:EXAMPLES]]
            source.drop(reason, int((state == wanted).sum()), rows[of_row == wanted], places)
        used = (of_row == TRAIN) | (of_row == VALID)
        hopeless = rows["given"] >= options.max_length
        for reason, chosen in ((TOO_LONG, ~hopeless), (PROMPT_TOO_LONG, hopeless)):
            cut = rows[used & long & chosen]
            places = [
                f"{spools.place(part, int(row['place']))}: {row['length']} tokens" for row in cut[:EXAMPLES]
            ]
            if places and options.on_overlong == "error":
                do = "raise --max-length, or leave such rows out with --on-overlong drop"
                raise DataError(f"{places[0]}: {reason}", allowed=f"up to {options.max_length}", do=do)
            source.drop(reason, len(cut), cut, places)
    source.check(spools.names[number])
    return source


def _counts(rows: np.ndarray, conversations: int) -> dict[str, int]:
    return {
        "conversations": conversations,
        "rows": len(rows),
        "tokens": int(rows["length"].sum(dtype=np.int64)),
        "trained": int(rows["trained"].sum(dtype=np.int64)),
    }


def _train_rows(
    spools: Spools,
    counts: Sequence[int],
    weights: Sequence[float],
    sources: dict[str, SourcePlan],
    longest: int,
) -> Iterator[np.ndarray]:
    """Numbers of rows in the order in which their conversations are drawn, with those that fit no pack."""
    chats = [spools.of_source(number, TRAIN) for number in range(len(counts))]
    chats = [numbers[:count] for numbers, count in zip(chats, counts, strict=True)]
    taken = [0] * len(counts)
    for block in interleave_blocks(counts, weights, BLOCK):
        drawn = np.zeros(len(block), np.int64)
        for number in np.unique(block).tolist():
            at = np.flatnonzero(block == number)
            turns = np.arange(taken[number], taken[number] + len(at))
            drawn[at] = chats[number][turns % len(chats[number])]
            taken[number] += len(at)
            again = drawn[at][turns >= len(chats[number])]
            if len(again):
                lengths = spools.length[spools.rows_of(again)]
                lengths = lengths[lengths <= longest]
                sources[spools.names[number]].repeated.update(
                    conversations=len(again), rows=len(lengths), tokens=int(lengths.sum(dtype=np.int64))
                )
        yield spools.rows_of(drawn)


class _PlanWriter:
    """Packs rows group by group, shuffles the packs of each and cuts them into files."""

    def __init__(self, folder: Path, spools: Spools, options: PackOptions):
        self.folder, self.spools, self.options = folder, spools, options
        self.shards: list[ShardPlan] = []
        self.packers: dict[str, PackStats] = {}
        self.packs, self._items, self._digest = 0, 0, hashlib.blake2b(digest_size=16)

    def __enter__(self) -> _PlanWriter:
        self._stack = ExitStack()
        self._file = self._stack.enter_context(open(self.folder / ITEMS, "wb"))
        self._bounds = self._stack.enter_context(open(self.folder / BOUNDS, "wb"))
        self._bounds.write(np.zeros(1, np.int64).tobytes())
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()

    def group(self, source: str | None, blocks: Iterable[np.ndarray]) -> None:
        """The packs of training, or of one source's validation."""
        packer, options = self.options.packer(), self.options
        with ExternalShuffle(self.folder / "shuffle", seed=options.seed, memory=SHUFFLE_BYTES) as shuffle:
            for block in blocks:
                rows = block[self.spools.length[block] <= options.max_length]
                for pack in packer.extend(self.spools.length[rows], rows, self.spools.prompt[rows]):
                    shuffle.add(np.array(pack, "<i8").tobytes())
            for pack in packer.finish():
                shuffle.add(np.array(pack, "<i8").tobytes())
            self._cut(source, shuffle.drain())
        self.packers[source or ""] = packer.stats

    def _cut(self, source: str | None, packs: Iterator[bytes]) -> None:
        start, tokens = self.packs, 0
        for record in packs:
            self._file.write(record)
            self._digest.update(record)
            self._items += len(record) // 8
            self._bounds.write(np.array([self._items], "<i8").tobytes())
            self.packs += 1
            tokens += int(self.spools.length[np.frombuffer(record, "<i8")].sum())
            if tokens >= self.options.shard_tokens:
                start, tokens = self._shard(source, start), 0
        if self.packs > start:
            self._shard(source, start)

    def _shard(self, source: str | None, start: int) -> int:
        number = sum(shard.source == source for shard in self.shards)
        name = train_file(number) if source is None else valid_file(source, number)
        self.shards.append(ShardPlan(name=name, source=source, start=start, stop=self.packs))
        return self.packs


def _nothing(sources: dict[str, SourcePlan]) -> DataError:
    reasons = sum(
        (Counter({r: c["count"] for r, c in s.dropped.items()}) for s in sources.values()), Counter()
    )
    told = ", ".join(f"{count} {reason}" for reason, count in reasons.items()) or "none"
    valid = sum(source.valid["conversations"] for source in sources.values())
    read = sum(source.read["conversations"] for source in sources.values())
    return DataError(
        "nothing to train on",
        got=f"{read} conversations, {valid} to valid, dropped: {told}",
        do="check --max-length, --valid-fraction and the sources",
    )
