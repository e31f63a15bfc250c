"""BlendStream: weighted sources -> micro-batches of packed rows; step N is a function of (seed, N) alone.

A step takes global_batch_size rows of sequence_length tokens. Each row comes from a source drawn by the
weights of the phase that the consumed tokens are in (report section 2.2); a document longer than what is left
of a row goes on in another row, where it begins a new segment. Resuming is therefore setting one number.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nemotron_ultra.config.data import DataConfig, SourceConfig
from nemotron_ultra.data.batch import TokenBatch
from nemotron_ultra.data.corpus import BUILTIN_SOURCE, ensure_builtin
from nemotron_ultra.data.manifest import read_manifest
from nemotron_ultra.data.order import Draws, SourceOrder, keyed
from nemotron_ultra.data.shards import Shard
from nemotron_ultra.data.tokenizer import Tokenizer
from nemotron_ultra.errors import ConfigError, DataError


@dataclass(frozen=True)
class Row:
    """Tokens of one row, the label of its last token (-1: its document ends there) and its segments."""

    tokens: np.ndarray
    after: int
    lengths: list[int]
    ends: list[bool]
    documents: list[str]
    source: str


class Source:
    """One prepared folder: its manifest, its splits, and the order in which rows of `train` are served."""

    def __init__(self, name: str, folder: Path, length: int, seed: int, tokenizer: Tokenizer):
        self.name, self.folder = name, folder
        self.manifest = read_manifest(folder)
        theirs = self.manifest["tokenizer"]
        if theirs["hash"] != tokenizer.hash:
            raise DataError(
                f"source {name!r} ({folder}) was prepared with another tokenizer",
                got=f"shards of {theirs['name']!r} (hash {theirs['hash']}), "
                f"run with {tokenizer.name!r} (hash {tokenizer.hash})",
                do="set data.tokenizer to the shards' tokenizer, or prepare the text again with this one",
            )
        self.train, self.valid = Shard(folder / "train"), Shard(folder / "valid")
        if self.train.tokens < length:
            raise DataError(
                f"source {name!r} ({folder}) has fewer tokens than one row",
                got=f"{self.train.tokens} tokens in train, sequence_length {length}",
                do="add text, or lower data.sequence_length",
            )
        self.order = SourceOrder(name, np.diff(self.train.starts), length, seed)

    def row(self, draw: int) -> Row:
        place, length = self.order.place(draw), self.order.length
        return self._row(self.train, "train", self.order.segments(place, length))

    def valid_row(self, index: int, length: int) -> Row:
        """Row `index` of the validation split in stored order; the last one may be short."""
        start = index * length
        stop = min(start + length, self.valid.tokens)
        found = []
        while start < stop:
            document = int(np.searchsorted(self.valid.starts, start, side="right")) - 1
            take = min(stop, int(self.valid.starts[document + 1])) - start
            found.append((document, start - int(self.valid.starts[document]), take))
            start += take
        return self._row(self.valid, "valid", found)

    def _row(self, shard: Shard, split: str, segments: list[tuple[int, int, int]]) -> Row:
        parts, ends, after = [], [], -1
        for document, first, count in segments:
            begin = int(shard.starts[document]) + first
            parts.append(shard.slice(begin, begin + count))
            ends.append(begin + count == int(shard.starts[document + 1]))
            after = -1 if ends[-1] else int(shard.slice(begin + count, begin + count + 1)[0])
        return Row(
            tokens=np.concatenate(parts).astype(np.int64),
            after=after,
            lengths=[count for _, _, count in segments],
            ends=ends,
            documents=[f"{self.name}:{split}:{document}" for document, _, _ in segments],
            source=self.name,
        )


class BlendStream:
    """Iterator over global steps: next() is the list of TokenBatch micro-batches of one step.

    seed: order of documents, rows and draws. start_step: the first step that next() gives. rank, world: of
    `world` data parallel readers this one gets every world-th micro-batch; together they get exactly what one
    reader would. Raises ConfigError for phases that contradict each other, DataError for sources that cannot
    be used.
    """

    def __init__(
        self,
        data: DataConfig,
        *,
        micro_batch_size: int,
        global_batch_size: int,
        seed: int,
        tokenizer: Tokenizer,
        start_step: int = 0,
        rank: int = 0,
        world: int = 1,
    ):
        if global_batch_size % (micro_batch_size * world):
            raise ConfigError(
                "trainer.global_batch_size is not a multiple of micro_batch_size x data-parallel readers",
                got=f"{global_batch_size} and {micro_batch_size} x {world}",
            )
        self.data, self.seed, self.tokenizer, self.step = data, seed, tokenizer, start_step
        self.micro_batch_size, self.global_batch_size = micro_batch_size, global_batch_size
        self.rank, self.world = rank, world
        self.tokens_per_step = global_batch_size * data.sequence_length
        self.sources = self._open_sources()
        self._starts, self._draws = self._phases()

    def __iter__(self) -> Iterator[list[TokenBatch]]:
        return self

    def __next__(self) -> list[TokenBatch]:
        batches = self.batches(self.step)
        self.step += 1
        return batches

    def batches(self, step: int) -> list[TokenBatch]:
        """Micro-batches of any step, without moving the stream."""
        first = step * self.global_batch_size
        phase = self.phase(step)
        names, draws = list(self.data.phases[phase].sources), self._draws[phase]
        cursor = {name: self._drawn_before(name, first) for name in names}
        rows = []
        for row in range(first, first + self.global_batch_size):
            name = names[draws.source(row - self._starts[phase])]
            rows.append((name, cursor[name]))
            cursor[name] += 1
        size = self.micro_batch_size
        micro = [rows[i : i + size] for i in range(0, len(rows), size)][self.rank :: self.world]
        return [make_batch([self.sources[name].row(draw) for name, draw in group]) for group in micro]

    def phase(self, step: int) -> int:
        """Number of the phase that `step` belongs to."""
        row = step * self.global_batch_size
        return max(i for i, start in enumerate(self._starts) if start <= row)

    def ledger(self, step: int | None = None) -> dict[str, dict[str, float]]:
        """Tokens and epochs consumed of each source before `step` (default: the step that comes next)."""
        rows = (self.step if step is None else step) * self.global_batch_size
        consumed = {n: self._drawn_before(n, rows) * self.data.sequence_length for n in self.sources}
        return {n: {"tokens": t, "epochs": t / self.sources[n].train.tokens} for n, t in consumed.items()}

    def validation_batches(self, rows: int) -> list[TokenBatch]:
        """Up to `rows` rows of the validation split, the same ones every time and at every seed.

        They are spaced evenly through the split, in the weights of the last phase. Raises DataError if no
        source of the last phase has validation text.
        """
        length, phase = self.data.sequence_length, self.data.phases[-1]
        draws = Draws([source.weight for source in phase.sources.values()], 0, 0)
        chosen = []
        for number, name in enumerate(phase.sources):
            source = self.sources[name]
            there = -(-source.valid.tokens // length)
            count = min(there, draws.drawn(number, rows))
            chosen += [source.valid_row(i * there // count, length) for i in range(count)]
        if not chosen:
            raise DataError(
                "no validation text",
                got=f"0 tokens in the valid split of {', '.join(phase.sources)}",
                do="prepare with a larger --valid-fraction or with --valid FILE",
            )
        size = self.micro_batch_size
        return [make_batch(chosen[i : i + size]) for i in range(0, len(chosen), size)]

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "fingerprint": self.fingerprint(), "facts": self.facts()}

    def load_state_dict(self, state: dict[str, Any], *, allow_change: bool = False) -> None:
        """Go on at the saved step. Raises DataError if the saved run read other data, unless allow_change."""
        if state["fingerprint"] != self.fingerprint() and not allow_change:
            mine, theirs = self.facts(), state.get("facts", {})
            changed = sorted(key for key in mine.keys() | theirs.keys() if mine.get(key) != theirs.get(key))
            raise DataError(
                "the data configuration is not the one this run was started with",
                got="; ".join(f"{key}: {theirs.get(key)} -> {mine.get(key)}" for key in changed),
                do="restore it, start another run with run.name=..., or set run.allow_config_change=true",
            )
        self.step = state["step"]

    def facts(self) -> dict[str, Any]:
        """Everything the order of tokens depends on: what a resumed run is compared by."""
        facts: dict[str, Any] = {
            "seed": self.seed,
            "global_batch_size": self.global_batch_size,
            "sequence_length": self.data.sequence_length,
            "tokenizer": self.tokenizer.hash,
        }
        for number, phase in enumerate(self.data.phases):
            facts[f"phases.{number}.until_tokens"] = phase.until_tokens
            facts[f"phases.{number}.weights"] = {n: s.weight for n, s in phase.sources.items()}
        for name, source in self.sources.items():
            facts[f"source.{name}"] = source.manifest["files"]["train.bin"]["blake2b"]
        return facts

    def fingerprint(self) -> str:
        return f"{keyed(json.dumps(self.facts(), sort_keys=True)):016x}"

    def _drawn_before(self, name: str, rows: int) -> int:
        """How many of the run's first `rows` rows come from this source, through all phases."""
        total = 0
        for number, (start, phase) in enumerate(zip(self._starts, self.data.phases, strict=True)):
            last = number + 1 == len(self._starts)
            stop = rows if last else min(rows, self._starts[number + 1])
            if stop > start and name in phase.sources:
                total += self._draws[number].drawn(list(phase.sources).index(name), stop - start)
        return total

    def _phases(self) -> tuple[list[int], list[Draws]]:
        """First row and draws of each phase; it begins at the first step that finds its tokens consumed."""
        starts = [0]
        ends = [phase.until_tokens for phase in self.data.phases]
        for number, end in enumerate(ends[:-1]):
            if end is None or end <= (ends[number - 1] or 0 if number else 0):
                raise ConfigError(
                    f"data.phases.{number}.until_tokens must grow from phase to phase, null only in the last",
                    got=ends,
                )
            steps = -(-end // self.tokens_per_step)
            starts.append(int(steps) * self.global_batch_size)
        draws = []
        for number, phase in enumerate(self.data.phases):
            weights = [source.weight for source in phase.sources.values()]
            if not sum(weights):
                raise ConfigError(f"data.phases.{number}: no source with a weight above 0", got=weights)
            draws.append(Draws(weights, self.seed, number))
        return starts, draws

    def _open_sources(self) -> dict[str, Source]:
        wanted: dict[str, SourceConfig] = {}
        for phase in self.data.phases:
            for name, source in phase.sources.items():
                if wanted.setdefault(name, source).path != source.path:
                    raise ConfigError(
                        f"source {name!r} has two paths",
                        got=f"{wanted[name].path} and {source.path}",
                        do="name them apart",
                    )
        return {
            name: Source(
                name, self._folder(source.path), self.data.sequence_length, self.seed, self.tokenizer
            )
            for name, source in wanted.items()
        }

    def _folder(self, path: str) -> Path:
        if path == BUILTIN_SOURCE:
            return ensure_builtin(self.data.cache_dir, self.tokenizer)
        if path.startswith("builtin:"):
            raise DataError("unknown built-in source", got=path, allowed=BUILTIN_SOURCE)
        return Path(path).expanduser()


def make_batch(rows: list[Row]) -> TokenBatch:
    """Rows laid end to end; each segment of a row is one document of the batch."""
    tokens = np.concatenate([row.tokens for row in rows])
    labels = np.concatenate([np.append(row.tokens[1:], max(row.after, 0)) for row in rows])
    lengths = [n for row in rows for n in row.lengths]
    bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    closed = bounds[1:][[end for row in rows for end in row.ends]] - 1
    weight = np.ones(len(tokens), dtype=np.float32)
    labels[closed], weight[closed] = 0, 0
    consumed: dict[str, int] = {}
    for row in rows:
        consumed[row.source] = consumed.get(row.source, 0) + len(row.tokens)
    return TokenBatch(
        tokens_T=torch.from_numpy(tokens),
        labels_T=torch.from_numpy(labels),
        weight_T=torch.from_numpy(weight),
        cu_seqlens=torch.from_numpy(bounds.astype(np.int32)),
        stats={"documents": [d for row in rows for d in row.documents], "tokens": consumed},
    )
