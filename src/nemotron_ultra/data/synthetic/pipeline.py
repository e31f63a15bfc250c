"""The whole way: seeds -> generate -> format -> schema -> unique -> clean -> compose -> chats and prompts."""

from __future__ import annotations

import importlib.metadata
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from nemotron_ultra.data.inputs import InputFile, fingerprint
from nemotron_ultra.data.job_folder import open_job
from nemotron_ultra.data.manifest import NAME, file_facts, write_json
from nemotron_ultra.data.ngrams import HeldOut
from nemotron_ultra.data.synthetic.endpoint import Endpoint, EndpointOptions
from nemotron_ultra.data.synthetic.gym import DEFAULT, Gym, Spec
from nemotron_ultra.data.synthetic.shapes import FAMILIES, LETTERS, MCQ, Compose, Format, Schema
from nemotron_ultra.data.synthetic.similar import Clean, Unique
from nemotron_ultra.data.synthetic.steps import (
    CHUNK,
    Drop,
    Receipt,
    Report,
    Row,
    line,
    read_jsonl,
    run_step,
    step_path,
)
from nemotron_ultra.errors import DataError

FORMAT = 1
CHATS, PROMPTS, STEPS = "chats.jsonl", "prompts.jsonl", "steps"
ENDPOINT = "endpoint"
LIBRARIES = ("reasoning-gym", "datasketch")


@dataclass(frozen=True, kw_only=True)
class SynthOptions:
    """What to make. count: seeds, of which the checks leave fewer samples. generators: Spec texts, taken in
    turn, with the endpoint as one more. options: numbers of options of multiple choice, in turn. similar:
    share of common word runs from which two questions are one. ngram: words of a run shared with held-out
    texts. topics: rows that the endpoint is asked about."""

    count: int = 1000
    seed: int = 0
    families: tuple[str, ...] = FAMILIES
    generators: tuple[str, ...] = tuple(Spec(name).text() for name in DEFAULT)
    options: tuple[int, ...] = (4, 10)
    similar: float = 0.8
    ngram: int = 13
    topics: tuple[dict[str, str], ...] = ()
    endpoint: EndpointOptions | None = None

    def identity(self, held_out: list[InputFile]) -> dict[str, Any]:
        """What the output depends on, libraries included."""
        plain = ("count", "seed", "families", "generators", "options", "similar", "ngram")
        identity: dict[str, Any] = {"format": FORMAT} | {key: getattr(self, key) for key in plain}
        identity["endpoint"] = self.endpoint.identity() if self.endpoint else None
        identity["topics"] = list(self.topics) if self.endpoint else []
        identity["held_out"] = fingerprint(held_out)
        identity["versions"] = versions(*LIBRARIES)
        return identity

    @property
    def sources(self) -> tuple[str, ...]:
        return (*self.generators, ENDPOINT) if self.endpoint else self.generators


class Seeds:
    """Seed rows as they are: the numbering is all there is to them."""

    name, chunk = "seeds", 4096

    def open(self, source: Path | None, kept: Iterable[Row]) -> None:
        pass

    def work(self, rows: list[Row]) -> list[Row | Drop]:
        return list(rows)


def seed_rows(options: SynthOptions, start: int = 0) -> Iterator[Row]:
    """Row i takes generators in turn, then families, then numbers of options, so every pairing comes up."""
    sources, families = options.sources, options.families
    for index in range(start, options.count):
        number, source = divmod(index, len(sources))
        round_, family = divmod(number, len(families))
        row: Row = {"id": f"s{index:07d}", "family": families[family], "generator": sources[source]}
        row["number"] = number
        if row["family"] == MCQ:
            row["options"] = options.options[round_ % len(options.options)]
        if sources[source] == ENDPOINT:
            row |= options.topics[number % len(options.topics)]
        yield row


class Generate:
    """Adds to a seed row its raw sample, domain and environment, by rule or from the endpoint."""

    name = "generate"

    def __init__(self, options: SynthOptions, gyms: dict[str, Gym], endpoint: Endpoint | None):
        self._options, self._gyms, self._endpoint = options, gyms, endpoint
        self.chunk = 8 * options.endpoint.concurrency if options.endpoint else CHUNK

    def open(self, source: Path | None, kept: Iterable[Row]) -> None:
        pass

    def work(self, rows: list[Row]) -> list[Row | Drop]:
        asked = [row for row in rows if row["generator"] == ENDPOINT]
        answers = iter(self._endpoint.make(asked) if asked else ())
        return [
            self._answered(r, next(answers)) if r["generator"] == ENDPOINT else self._ruled(r) for r in rows
        ]

    def _answered(self, row: Row, made: Row | Drop) -> Row | Drop:
        if isinstance(made, Drop):
            return made
        return _seeded(row) | {"domain": row.get("topic", "text"), "environment": None} | made

    def _ruled(self, row: Row) -> Row | Drop:
        gym = self._gyms[row["generator"]]
        wrong = max(self._options.options) - 1 if row["family"] == MCQ else 0
        made = gym.make(row["number"], wrong, f"{self._options.seed} {row['id']}")
        if isinstance(made, Drop):
            return made
        args = {"name": gym.spec.name, "args": gym.spec.args, "entry": made["entry"]}
        environment = {"name": "reasoning_gym", "args": args}
        return _seeded(row) | {"domain": gym.domain, "environment": environment, "raw": made["raw"]}


def _seeded(row: Row) -> Row:
    return {key: row[key] for key in ("id", "family", "generator", "options") if key in row}


Stage = Callable[[str], Report]


def synthesize(
    options: SynthOptions, held_out: list[InputFile], out: Path, *, stage: Stage
) -> tuple[dict[str, Any], bool]:
    """Make the folder `out`; returns (manifest, whether it was there already).

    held_out: files with digests. stage(name) gives the Report of a step. Raises DataError (no sample left, a
    folder of something else), ConfigError (generators), BackendError (a missing library, the endpoint).
    """
    # Before the folder is claimed: what is refused here leaves nothing behind.
    gyms = {text: Gym(Spec.parse(text), options.seed) for text in options.generators}
    unique, clean = Unique(options.similar), Clean(HeldOut(held_out, options.ngram))
    finished = open_job(out, options.identity(held_out), (CHATS, PROMPTS, STEPS), goes_on=True)
    if finished is not None:
        return finished, True
    folder = out / STEPS
    folder.mkdir(exist_ok=True)
    endpoint = Endpoint(options.endpoint, out, options.seed) if options.endpoint else None
    receipts: list[Receipt] = []
    source: Path | Callable[[int], Iterator[Row]] = partial(seed_rows, options)
    try:
        generate = Generate(options, gyms, endpoint)
        steps = (Seeds(), generate, Format(), Schema(), unique, clean, Compose(options.seed))
        for number, step in enumerate(steps, 1):
            receipts.append(run_step(folder, number, step, source, stage(step.name)))
            source = step_path(folder, number, step.name)
    finally:
        if endpoint:
            endpoint.close()
    if not receipts[-1].rows_out:
        raise _empty(receipts)
    return _finish(options, held_out, out, source, receipts), False


@dataclass
class Totals:
    """Samples by what they are, and letters of right options by the number of options."""

    families: Counter[str] = field(default_factory=Counter)
    domains: Counter[str] = field(default_factory=Counter)
    generators: Counter[str] = field(default_factory=Counter)
    letters: dict[str, Counter[str]] = field(default_factory=dict)
    reasoned: int = 0

    def add(self, row: Row) -> None:
        for name in ("family", "domain", "generator"):
            counter = {"family": self.families, "domain": self.domains, "generator": self.generators}[name]
            counter[row[name]] += 1
        self.reasoned += "reasoning_content" in row["chat"]["messages"][-1]
        if row["family"] == MCQ:
            count = row["prompt"]["extra"]["options"]
            letters = self.letters.setdefault(str(count), Counter(dict.fromkeys(LETTERS[:count], 0)))
            letters[row["prompt"]["answer"]] += 1


def _finish(
    options: SynthOptions, held_out: list[InputFile], out: Path, source: Path, receipts: list[Receipt]
) -> dict[str, Any]:
    totals = Totals()
    temporary = {name: out / f"{name}.tmp" for name in (CHATS, PROMPTS)}
    with open(temporary[CHATS], "wb") as chats, open(temporary[PROMPTS], "wb") as prompts:
        for row in read_jsonl(source):
            chats.write(line(row["chat"]))
            prompts.write(line(row["prompt"]))
            totals.add(row)
        for file in (chats, prompts):
            file.flush()
            os.fsync(file.fileno())
    for name, path in temporary.items():
        os.replace(path, out / name)
    manifest = {
        "format": FORMAT,
        "kind": "synthetic",
        "identity": json.loads(json.dumps(options.identity(held_out))),
        "versions": versions("nemotron-ultra", *LIBRARIES, "openai"),
        "steps": [receipt.counts() for receipt in receipts],
        "samples": receipts[-1].rows_out,
        "reasoned": totals.reasoned,
        "families": dict(totals.families),
        "domains": dict(sorted(totals.domains.items())),
        "generators": dict(totals.generators),
        "letters": {count: dict(letters) for count, letters in sorted(totals.letters.items())},
        "files": {name: file_facts(out / name) for name in (CHATS, PROMPTS)},
    }
    write_json(out / NAME, manifest)
    return manifest


def versions(*names: str) -> dict[str, str]:
    """Versions of packages, as far as they are installed."""
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _empty(receipts: list[Receipt]) -> DataError:
    reasons = [f"{n} {reason}" for receipt in receipts for reason, n in receipt.dropped.most_common(2)]
    return DataError("the checks left no sample", got="; ".join(reasons) or "no seeds", do="see steps/*.json")
