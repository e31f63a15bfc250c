"""Prompt rows of any kind -> {train,valid}.jsonl and a manifest: checked, counted, every prompt once.

A prompt goes to valid by the hash of its messages and tools, so the same prompt can never be in both splits
(the curriculum of report section 4.4 draws from train by pass_rate). The output depends on the input's
content and the options alone; a killed run left only .tmp files and is done again as a whole.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from nemotron_ultra.data.inputs import InputFile, fingerprint
from nemotron_ultra.data.job_folder import open_job
from nemotron_ultra.data.json_rows import Row, read_rows
from nemotron_ultra.data.manifest import NAME, SPLITS, file_facts, write_json
from nemotron_ultra.data.messages import RowDropped, depth_checked
from nemotron_ultra.data.ngrams import Common, HeldOut
from nemotron_ultra.data.parts import EXAMPLES, split_of
from nemotron_ultra.data.prompt_rows import Prompt, read_prompt
from nemotron_ultra.errors import DataError

FORMAT = 1
FILES = tuple(f"{split}.jsonl" for split in SPLITS)


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """What is kept. domain, environment: of rows that name none. max_tokens: longest prompt, as `length`
    counts. min_pass_rate, max_pass_rate: inclusive; rows without a pass rate stay. only: environments to
    keep, () means all. ngram: words of a run shared with held-out texts. strict: a malformed
    line is an error."""

    domain: str | None = None
    environment: str | None = None
    max_tokens: int | None = None
    min_pass_rate: float = 0.0
    max_pass_rate: float = 1.0
    only: tuple[str, ...] = ()
    ngram: int = 13
    valid_fraction: float = 0.01
    strict: bool = False


@dataclass
class Counts:
    """Rows in = written + dropped."""

    rows: int = 0
    invalid_utf8: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)
    splits: dict[str, Counter[str]] = field(default_factory=lambda: {split: Counter() for split in SPLITS})
    environments: Counter[str] = field(default_factory=Counter)
    sources: Counter[str] = field(default_factory=Counter)

    def drop(self, place: str, reason: str, detail: str = "") -> None:
        self.dropped[reason] += 1
        places = self.examples.setdefault(reason, [])
        if len(places) < EXAMPLES:
            places.append(f"{place}: {detail}" if detail else place)


Length = Callable[[Prompt], int]
Report = Callable[[int, int], None]


def prepare_prompts(
    files: list[InputFile],
    held_out: list[InputFile],
    out: Path,
    options: PromptOptions,
    *,
    length: Length | None = None,
    measure: str | None = None,
    report: Report = lambda rows, size: None,
) -> tuple[dict[str, Any], bool]:
    """Make the folder `out`; returns (manifest, whether it was there already).

    files, held_out: with digests. length: tokens of a prompt, `measure` says by what (tokenizer, template and
    their hashes). report is told rows read and bytes of the files done. Raises DataError: no usable row, a
    malformed line under strict, unreadable input, a folder of something else.
    """
    assert (length is None) == (options.max_tokens is None), "max_tokens needs a length and the reverse"
    identity = {
        "format": FORMAT,
        "input": fingerprint(files),
        "held_out": fingerprint(held_out),
        "length": measure,
        **{f"options.{key}": value for key, value in asdict(options).items()},
    }
    finished = open_job(out, identity, FILES, goes_on=False)
    if finished is not None:
        return finished, True
    counts = Counts()
    prompts = _chosen(files, HeldOut(held_out, options.ngram), options, length, counts, report)
    with ExitStack() as stack:
        streams = {s: stack.enter_context(open(out / f"{s}.jsonl.tmp", "wb")) for s in SPLITS}
        for prompt, raw in prompts:
            split = split_of(prompt.key(), options.valid_fraction)
            streams[split].write(raw)
            counts.splits[split][prompt.domain] += 1
        for stream in streams.values():
            stream.flush()
            os.fsync(stream.fileno())
    written = sum(sum(split.values()) for split in counts.splits.values())
    assert counts.rows == written + sum(counts.dropped.values())
    if not written:
        raise _empty(counts)
    for split in SPLITS:
        os.replace(out / f"{split}.jsonl.tmp", out / f"{split}.jsonl")
    manifest = {
        "format": FORMAT,
        "kind": "prompts",
        "identity": json.loads(json.dumps(identity)),
        "sources": dict(counts.sources),
        "rows": counts.rows,
        "invalid_utf8": counts.invalid_utf8,
        "splits": {s: {"prompts": sum(c.values()), "domains": dict(c)} for s, c in counts.splits.items()},
        "environments": dict(counts.environments),
        "dropped": dict(counts.dropped),
        "examples": counts.examples,
        "files": {name: file_facts(out / name) for name in FILES},
    }
    write_json(out / NAME, manifest)
    return manifest, False


def _chosen(
    files: list[InputFile],
    held_out: HeldOut,
    options: PromptOptions,
    length: Length | None,
    counts: Counts,
    report: Report,
) -> Iterator[tuple[Prompt, bytes]]:
    """The prompts to write, each with its line."""
    common = _boilerplate(files, held_out, options)
    seen: set[bytes] = set()
    for row in _counted(files, counts, report):
        try:
            prompt = _read(row, options)
            with depth_checked():
                raw = (json.dumps(prompt.row(), ensure_ascii=False) + "\n").encode()
                key = hashlib.blake2b(prompt.key(), digest_size=16).digest()
            if key in seen:
                raise RowDropped("duplicate prompt", "")
            _check(prompt, held_out, common, options, length)
        except RowDropped as error:
            counts.drop(row.place, error.reason, error.detail)
            continue
        except UnicodeEncodeError:
            counts.drop(row.place, "half of a surrogate pair in the text")
            continue
        seen.add(key)
        counts.environments[prompt.environment["name"]] += 1
        yield prompt, raw


def _counted(files: list[InputFile], counts: Counts, report: Report) -> Iterator[Row]:
    done = 0
    for file in files:
        for row in read_rows(file):
            counts.rows += 1
            counts.invalid_utf8 += row.invalid
            counts.sources[file.name] += 1
            report(counts.rows, done)
            yield row
        done += file.size


def _read(row: Row, options: PromptOptions) -> Prompt:
    if row.dropped is None:
        return read_prompt(row.value, options.domain, options.environment)
    if options.strict:
        raise DataError(f"{row.place}: {row.dropped}", do="mend the line, or leave --strict out to skip it")
    raise RowDropped(row.dropped, "")


def _check(
    prompt: Prompt, held_out: HeldOut, common: Common, options: PromptOptions, length: Length | None
) -> None:
    name = prompt.environment["name"]
    if options.only and name not in options.only:
        raise RowDropped("environment not chosen", name)
    if prompt.pass_rate is not None and prompt.pass_rate < options.min_pass_rate:
        raise RowDropped("pass rate below the bound", str(prompt.pass_rate))
    if prompt.pass_rate is not None and prompt.pass_rate > options.max_pass_rate:
        raise RowDropped("pass rate above the bound", str(prompt.pass_rate))
    if held_out.texts:
        boilerplate = common.of(prompt.domain)
        hits = (held_out.hit(text, boilerplate) for text in _asked(prompt))
        if place := next(filter(None, hits), None):
            raise RowDropped("in the held-out texts", place)
    if length is not None:
        _check_length(prompt, length, options.max_tokens)


def _check_length(prompt: Prompt, length: Length, most: int) -> None:
    try:
        tokens = length(prompt)
    except DataError as error:
        raise RowDropped("the template cannot render the prompt", str(error)) from error
    if tokens > most:
        raise RowDropped("prompt too long", f"{tokens} tokens, at most {most}")


def _boilerplate(files: list[InputFile], held_out: HeldOut, options: PromptOptions) -> Common:
    """What many prompts of a domain say alike; a pass over the input of its own, where it is needed."""
    common = Common(options.ngram)
    for row in (row for file in files if held_out.texts for row in read_rows(file)):
        try:
            prompt = read_prompt(row.value, options.domain, options.environment) if not row.dropped else None
        except RowDropped:
            continue
        for text in _asked(prompt) if prompt else ():
            common.add(prompt.domain, text)
    return common


def _asked(prompt: Prompt) -> list[str]:
    return [message["content"] for message in prompt.messages if message["role"] == "user"]


def _empty(counts: Counts) -> DataError:
    reasons = ", ".join(f"{count} {reason}" for reason, count in counts.dropped.most_common(3))
    first = next((places[0] for places in counts.examples.values()), "")
    return DataError(
        "no usable prompt in the input",
        got=f"{counts.rows} rows" + (f": {reasons} (first: {first})" if reasons else ""),
        allowed="rows of this command, chats with an --environment, NeMo Gym rows",
    )
