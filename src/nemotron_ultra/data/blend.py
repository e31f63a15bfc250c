"""BlendStream: weighted sources -> micro-batches of packed rows; step N is a function of (seed, N) alone.

A step takes global_batch_size rows of sequence_length tokens. Each row comes from a source drawn by the
weights of the phase that the consumed tokens are in (report section 2.3, Figure 4); a document longer than
what is left of a row goes on in another row, where it begins a new segment. Steps of another row length
(`data.alternates`, report section 2.5) are drawn by share. Resuming is therefore setting one number.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from nemotron_ultra.config.data import DataConfig, SourceConfig
from nemotron_ultra.data.batch import TokenBatch
from nemotron_ultra.data.corpus import BUILTIN_SOURCE, ensure_builtin
from nemotron_ultra.data.lane import Lane
from nemotron_ultra.data.order import Draws, keyed
from nemotron_ultra.data.source import Source, make_batch
from nemotron_ultra.data.tokenizer import Tokenizer
from nemotron_ultra.errors import ConfigError, DataError


class BlendStream:
    """Iterator over global steps: next() is the list of TokenBatch micro-batches of one step.

    seed: order of documents, rows and draws. start_step: the first step that next() gives. rank, world: of
    `world` data-parallel readers this one gets every world-th micro-batch; together they get exactly what one
    reader would. Raises ConfigError for sizes and phases that contradict each other, DataError for sources
    that cannot be used.
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
        self.data, self.seed, self.tokenizer, self.step = data, seed, tokenizer, start_step
        self.micro_batch_size, self.global_batch_size = micro_batch_size, global_batch_size
        self.rank, self.world = rank, world
        self.tokens_per_step = global_batch_size * data.sequence_length
        self.sources = self._open_sources()
        shares = [alternate.share for alternate in data.alternates]
        self._lane_draws = Draws([1 - sum(shares), *shares], seed, "lanes")
        self.lanes = [self._main_lane(), *(self._lane(number) for number in range(len(shares)))]

    def __iter__(self) -> Iterator[list[TokenBatch]]:
        return self

    def __next__(self) -> list[TokenBatch]:
        batches = self.batches(self.step)
        self.step += 1
        return batches

    def batches(self, step: int) -> list[TokenBatch]:
        """Micro-batches of any step, without moving the stream."""
        number = self._lane_draws.source(step)
        lane = self.lanes[number]
        rows = lane.step_rows(self._lane_draws.drawn(number, step))
        micro = [rows[i : i + lane.micro_rows] for i in range(0, len(rows), lane.micro_rows)]
        return [make_batch([lane.row(*row) for row in group]) for group in micro[self.rank :: self.world]]

    def ledger(self, step: int | None = None) -> dict[str, dict[str, float]]:
        """Tokens and epochs consumed of each source before `step` (default: the step that comes next)."""
        step = self.step if step is None else step
        consumed = dict.fromkeys(self.sources, 0)
        for number, lane in enumerate(self.lanes):
            rows = self._lane_draws.drawn(number, step) * lane.rows
            for name in lane.orders:
                consumed[name] += lane.drawn(name, rows) * lane.length
        return {n: {"tokens": t, "epochs": t / self.sources[n].train.tokens} for n, t in consumed.items()}

    def validation_batches(self, rows: int) -> list[TokenBatch]:
        """Up to `rows` rows of the validation split, the same ones every time and at every seed.

        They are spaced evenly through the split, in the weights of the last phase. Raises DataError if no
        source of the last phase has validation text.
        """
        length, blend = self.data.sequence_length, self.data.phases[-1].sources
        draws = Draws([source.weight for source in blend.values()], 0, "valid")
        chosen = []
        for number, name in enumerate(blend):
            there = self.sources[name].valid_rows(length)
            count = min(there, draws.drawn(number, rows))
            chosen += [self.sources[name].valid_row(i * there // count, length) for i in range(count)]
        if not chosen:
            raise DataError(
                "no validation text",
                got=f"0 tokens in the valid split of {', '.join(blend)}",
                do="prepare again with --split-on, a larger --valid-fraction or --valid FILE",
            )
        size = self.micro_batch_size
        return [make_batch(chosen[i : i + size]) for i in range(0, len(chosen), size)]

    def describe(self) -> dict[str, dict[str, Any]]:
        """Of each source: folder, tokens and documents to train on, and what xz makes of its validation
        text.
        """
        return {
            name: {
                "folder": str(source.folder),
                "tokens": int(source.train.tokens),
                "documents": len(source.train.starts) - 1,
                "validation_tokens": int(source.valid.tokens),
                "xz_bits_per_byte": source.manifest.get("xz_bits_per_byte"),
                "input": source.manifest["input"],
            }
            for name, source in self.sources.items()
        }

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "fingerprint": self.fingerprint(), "facts": self.facts()}

    def load_state_dict(self, state: dict[str, Any], *, allow_change: bool = False) -> None:
        """Go on at the saved step. Raises DataError if the saved run read other data, unless allow_change."""
        if state["fingerprint"] != self.fingerprint() and not allow_change:
            mine, theirs = self.facts(), state["facts"]
            changed = sorted(key for key in mine.keys() | theirs.keys() if mine.get(key) != theirs.get(key))
            raise DataError(
                "the data is not what this run was started with",
                got="; ".join(f"{key}: {theirs.get(key)} then, {mine.get(key)} now" for key in changed),
                do="restore it, start another run with run.name=..., or set run.allow_config_change=true",
            )
        self.step = state["step"]

    def facts(self) -> dict[str, Any]:
        """Everything that the order of tokens depends on; JSON types only."""
        data = self.data
        facts: dict[str, Any] = {
            "seed": self.seed,
            "global_batch_size": self.global_batch_size,
            "sequence_length": data.sequence_length,
            "tokenizer": self.tokenizer.hash,
        }
        for number, phase in enumerate(data.phases):
            facts[f"phases.{number}.until_tokens"] = phase.until_tokens
            facts[f"phases.{number}.weights"] = {n: s.weight for n, s in phase.sources.items()}
        for number, other in enumerate(data.alternates):
            facts[f"alternates.{number}"] = [other.sequence_length, other.share]
            facts[f"alternates.{number}.weights"] = {n: s.weight for n, s in other.sources.items()}
        return facts | {f"source.{name}": source.digest for name, source in self.sources.items()}

    def fingerprint(self) -> str:
        return f"{keyed(json.dumps(self.facts(), sort_keys=True)):016x}"

    def _main_lane(self) -> Lane:
        """A phase begins at the first step that finds its tokens consumed."""
        starts = [0]
        for phase in self.data.phases[:-1]:
            assert phase.until_tokens is not None
            step = -int(-phase.until_tokens // self.tokens_per_step)
            starts.append(self._lane_draws.drawn(0, step) * self.global_batch_size)
        if any(a >= b for a, b in pairwise(starts)):
            raise ConfigError(
                "data.phases: a phase is shorter than one step",
                got=[phase.until_tokens for phase in self.data.phases],
                do=f"a step takes {self.tokens_per_step} tokens",
            )
        blends = [phase.sources for phase in self.data.phases]
        return self._make_lane(blends, starts, self.data.sequence_length, self.micro_batch_size, "")

    def _lane(self, number: int) -> Lane:
        other = self.data.alternates[number]
        length = other.sequence_length
        if self.tokens_per_step % length:
            raise ConfigError(
                f"data.alternates.{number}.sequence_length does not divide the tokens of a step",
                got=f"{length} and {self.tokens_per_step}",
            )
        micro_rows = max(1, self.micro_batch_size * self.data.sequence_length // length)
        return self._make_lane([other.sources], [0], length, micro_rows, f"alternate {number} ")

    def _make_lane(self, blends: list, starts: list[int], length: int, micro_rows: int, key: str) -> Lane:
        rows = self.tokens_per_step // length
        if rows % (micro_rows * self.world):
            raise ConfigError(
                "trainer.global_batch_size is not a multiple of micro_batch_size x data-parallel readers",
                got=f"{rows} rows of {length} tokens, {micro_rows} x {self.world}",
            )
        return Lane(
            self.sources,
            blends,
            starts,
            length=length,
            rows=rows,
            micro_rows=micro_rows,
            seed=self.seed,
            key=key,
        )

    def _open_sources(self) -> dict[str, Source]:
        wanted: dict[str, SourceConfig] = {}
        for blend in [*self.data.phases, *self.data.alternates]:
            for name, source in blend.sources.items():
                if wanted.setdefault(name, source).path != source.path:
                    paths = f"{wanted[name].path} and {source.path}"
                    raise ConfigError(f"source {name!r} has two paths", got=paths, do="name them apart")
        return {n: Source(n, self._folder(s.path), self.tokenizer) for n, s in wanted.items()}

    def _folder(self, path: str) -> Path:
        if path == BUILTIN_SOURCE:
            return ensure_builtin(self.data.cache_dir, self.tokenizer)
        if path.startswith("builtin:"):
            raise DataError("unknown built-in source", got=path, allowed=BUILTIN_SOURCE)
        return Path(path).expanduser()
