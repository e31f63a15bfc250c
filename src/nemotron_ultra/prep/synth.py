"""python -m nemotron_ultra.prep synth --out DIR: seeds -> generated, checked, deduplicated samples."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from filelock import Timeout

from nemotron_ultra.config.command import Parser, plural, say
from nemotron_ultra.data.inputs import find_files
from nemotron_ultra.data.synthetic.endpoint import EndpointOptions
from nemotron_ultra.data.synthetic.gym import DEFAULT, Spec
from nemotron_ultra.data.synthetic.pipeline import SynthOptions, synthesize
from nemotron_ultra.data.synthetic.shapes import FAMILIES, FEWEST, LETTERS
from nemotron_ultra.data.synthetic.steps import Receipt, Report
from nemotron_ultra.data.synthetic.topics import built_in, read_topics
from nemotron_ultra.errors import ConfigError, DataError
from nemotron_ultra.prep.guard import guarded
from nemotron_ultra.prep.held_out import add_options, held_out_files, locked
from nemotron_ultra.prep.prompts import positive, share
from nemotron_ultra.prep.text import whole_number

HELP = """\
Make questions with answers: DIR/chats.jsonl for `prep sft`, DIR/prompts.jsonl for `prep prompts`,
DIR/manifest.json, and what every step kept and left out in DIR/steps/.

  seeds -> generate -> format -> schema -> unique -> clean -> compose

Without --endpoint the problems are made by rule (reasoning-gym), offline, and every answer is one that the
library's scorer accepts. With --endpoint URL --model M any OpenAI-compatible server writes them; give
--generator as well to have both. The key is read from the environment variable OPENAI_API_KEY.

The same command again goes on where it was stopped; nothing that was answered is asked again.
"""
RESUMES = "finished work is kept, the same command goes on from it"


def main(argv: Sequence[str] | None = None) -> int:
    return guarded(run, _parser().parse_args(argv), RESUMES)


def run(arguments: argparse.Namespace) -> int:
    out: Path = arguments.out
    options = _options(arguments)
    if out.exists() and not out.is_dir():
        raise DataError(f"{out} is not a folder", do="name another --out")
    progress = Progress()
    try:
        with held_out_files(arguments) as held_out, locked(out):
            manifest, was_there = synthesize(options, held_out, out, stage=progress.stage)
    except Timeout as error:
        raise DataError(
            f"another run is at work in {out}", do="wait for it, or name another --out"
        ) from error
    say(summary(out, manifest, was_there))
    return 0


class Progress:
    """Rows of the step at work, its rate and the time left, every few seconds."""

    def __init__(self, every: float = 5.0):
        self.every, self.total = every, 0
        self.shown = time.monotonic()

    def stage(self, name: str) -> Report:
        """The step's total is what the step before let through."""
        started, new, total = time.monotonic(), 0, self.total

        def report(receipt: Receipt, rows: int) -> None:
            nonlocal new
            new, now = new + rows, time.monotonic()
            self.total = receipt.rows_out
            if now - self.shown >= self.every:
                self.shown = now
                print(
                    _progress_line(name, receipt, total, new / (now - started)), file=sys.stderr, flush=True
                )

        return report


def _progress_line(name: str, receipt: Receipt, total: int, rate: float) -> str:
    if not total:
        return f"{name:<9}{receipt.rows_in:,} rows  {rate:,.0f} rows/s"
    left = (total - receipt.rows_in) / max(rate, 1e-9)
    dropped = f"{receipt.rows_in - receipt.rows_out:,} left out"
    return (
        f"{name:<9}{receipt.rows_in:,} of {total:,} rows  {dropped}  {rate:,.0f} rows/s  {left:,.0f} s left"
    )


def summary(out: Path, manifest: dict[str, Any], was_there: bool) -> list[str]:
    """What a person wants to know at the end."""
    lines = [f"{out}: already complete with these options, nothing to do"] if was_there else []
    for step in manifest["steps"]:
        lines.append(f"{step['name']:<9}{step['in']:>9,} in  {step['out']:>9,} out")
        for reason, count in sorted(step["dropped"].items(), key=lambda item: -item[1]):
            lines.append(f"         {count:>9,} left out: {reason} (first: {step['examples'][reason][0]})")
    families = ", ".join(f"{name} {count:,}" for name, count in manifest["families"].items())
    samples = f"{manifest['samples']:,} {plural(manifest['samples'], 'sample')}"
    lines.append(f"{samples} ({families}), {manifest['reasoned']:,} with worked steps")
    domains = sorted(manifest["domains"].items(), key=lambda item: -item[1])
    shown = ", ".join(f"{name} {count:,}" for name, count in domains[:12])
    lines.append(f"domains: {shown}" + (f", {len(domains) - 12} more" if len(domains) > 12 else ""))
    for count, letters in manifest["letters"].items():
        dealt = " ".join(f"{letter} {number}" for letter, number in letters.items())
        lines.append(f"right option of {count}: {dealt}")
    lines.append(f"train on it: python -m nemotron_ultra.prep sft synth={out}/chats.jsonl --out {out}-packs")
    return lines


def _options(arguments: argparse.Namespace) -> SynthOptions:
    if bool(arguments.endpoint) != bool(arguments.model):
        given = "--endpoint" if arguments.endpoint else "--model"
        raise ConfigError("--endpoint URL and --model M belong together", got=f"{given} alone")
    if arguments.topics and not arguments.endpoint:
        raise ConfigError("--topics are for an endpoint", do="give --endpoint URL --model M too")
    endpoint = topics = None
    if arguments.endpoint:
        topics = tuple(_topics(arguments.topics, arguments.out))
        endpoint = EndpointOptions(
            url=arguments.endpoint,
            model=arguments.model,
            temperature=arguments.temperature,
            max_tokens=arguments.max_tokens,
            response_format=arguments.response_format,
            concurrency=arguments.concurrency,
            timeout=arguments.timeout,
            retries=arguments.retries,
            key_variable=arguments.key_variable,
        )
    names = arguments.generator or ([] if endpoint else list(DEFAULT))
    return SynthOptions(
        count=arguments.count,
        seed=arguments.seed,
        families=tuple(dict.fromkeys(arguments.family or FAMILIES)),
        generators=tuple(dict.fromkeys(Spec.parse(name).text() for name in names)),
        options=_counts(arguments.options),
        similar=arguments.similar,
        ngram=arguments.ngram,
        topics=topics or (),
        endpoint=endpoint,
    )


def _topics(path: str | None, out: Path) -> list[dict[str, str]]:
    return [topic for file in find_files([path], out) for topic in read_topics(file)] if path else built_in()


def _counts(text: str) -> tuple[int, ...]:
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        counts = ()
    if not counts or not all(FEWEST <= count <= len(LETTERS) for count in counts):
        raise ConfigError("--options", got=repr(text), allowed=f"{FEWEST} to {len(LETTERS)}, as in 4,10")
    return counts


def number(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{value} is not in [0, inf)")
    return value


def seconds(text: str) -> float:
    value = number(text)
    if not value:
        raise argparse.ArgumentTypeError("0 leaves no time for an answer")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m nemotron_ultra.prep synth", description=HELP)
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="DIR", help="folder to make")
    add("--count", type=positive, default=1000, metavar="N", help="samples to begin with (1000)")
    add("--seed", type=int, default=0, metavar="N", help="decides problems, options and requests (0)")
    add("--family", action="append", choices=FAMILIES, help="again for more (both)")
    generator_help = "reasoning_gym:NAME or reasoning_gym:NAME:{JSON options}; again for more (a set of 12)"
    add("--generator", action="append", metavar="G", help=generator_help)
    add("--options", default="4,10", metavar="N,N", help="options of multiple choice, in turn (4,10)")
    add_options(parser)
    add("--ngram", type=positive, default=13, metavar="N", help="words of a run that counts as repeated (13)")
    similar_help = "share of common word runs from which two questions are one (0.8)"
    add("--similar", type=share, default=0.8, metavar="S", help=similar_help)
    group = parser.add_argument_group("an OpenAI-compatible endpoint")
    add = group.add_argument
    add("--endpoint", metavar="URL", help="such as http://localhost:8000/v1")
    add("--model", metavar="M", help="name of the model there")
    add("--topics", metavar="FILE", help='a topic a line, or JSONL {"topic"} or {"text"} (built-in topics)')
    add("--temperature", type=number, default=1.0, metavar="T", help="(1.0)")
    add("--max-tokens", type=positive, default=4096, metavar="N", help="longest answer (4096)")
    formats = ("json_schema", "json_object", "none")
    add(
        "--response-format",
        choices=formats,
        default="json_schema",
        help="what the server knows (json_schema)",
    )
    add("--concurrency", type=positive, default=8, metavar="N", help="requests at a time (8)")
    add("--timeout", type=seconds, default=120.0, metavar="S", help="seconds of one try (120)")
    add(
        "--retries",
        type=whole_number,
        default=4,
        metavar="N",
        help="tries after the first, with growing pauses (4)",
    )
    add(
        "--key-variable",
        default="OPENAI_API_KEY",
        metavar="NAME",
        help="variable with the key (OPENAI_API_KEY)",
    )
    return parser
