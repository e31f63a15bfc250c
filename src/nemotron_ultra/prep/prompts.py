"""python -m nemotron_ultra.prep prompts INPUT... --out DIR: prompts of RL -> one checked form."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from filelock import Timeout

from nemotron_ultra.config.command import Parser, plural, say
from nemotron_ultra.data.chat import load_template
from nemotron_ultra.data.inputs import with_digests
from nemotron_ultra.data.json_rows import find_row_files
from nemotron_ultra.data.prompt_rows import Prompt
from nemotron_ultra.data.prompts import Length, PromptOptions, prepare_prompts
from nemotron_ultra.data.tokenizer import load_tokenizer
from nemotron_ultra.errors import ConfigError, DataError
from nemotron_ultra.prep.guard import guarded
from nemotron_ultra.prep.held_out import add_options, held_out_files, locked
from nemotron_ultra.prep.text import fraction

HELP = """\
Check prompts of RL environments and write DIR/{train,valid}.jsonl, DIR/manifest.json. One line is
  {"messages": [...], "domain": "...", "environment": {"name": "...", "args": {...}}, "answer": "...",
   "pass_rate": 0.5, "tools": [...], "extra": {...}}

INPUT is any mix of .jsonl (.gz .bz2 .xz .zst too), .parquet and folders of them. Rows may be
  of this form
  chats {"messages": [...]}: the last answer becomes the reference    (name --environment, --domain)
  NeMo Gym rows {"responses_create_params": ..., "agent_ref": ...}

Nothing is left out without a count and the first places (FILE:LINE) in the manifest.
"""
ANSWER = "python -m nemotron_ultra.generate runs/sft"


def main(argv: Sequence[str] | None = None) -> int:
    return guarded(run, _parser().parse_args(argv), "the same command begins again")


def run(arguments: argparse.Namespace) -> int:
    out: Path = arguments.out
    options = _options(arguments)
    if out.exists() and not out.is_dir():
        raise DataError(f"{out} is not a folder", do="name another --out")
    files = with_digests(find_row_files(arguments.inputs, out))
    length, measure = _length(arguments) if options.max_tokens is not None else (None, None)
    progress = Progress(sum(file.size for file in files))
    try:
        with held_out_files(arguments) as held_out, locked(out):
            manifest, was_there = prepare_prompts(
                files, held_out, out, options, length=length, measure=measure, report=progress
            )
    except Timeout as error:
        do = "wait for it, or name another --out"
        raise DataError(f"another preparation is at work in {out}", do=do) from error
    say(summary(out, manifest, was_there))
    return 0


class Progress:
    """Rows read and their rate, every few seconds."""

    def __init__(self, total_bytes: int, every: float = 5.0):
        self.total, self.every = total_bytes, every
        self.started = self.shown = time.monotonic()

    def __call__(self, rows: int, size: int) -> None:
        if rows % 256 or (now := time.monotonic()) - self.shown < self.every:
            return
        self.shown = now
        rate = rows / (now - self.started)
        share = f"{size / 1e6:,.1f} of {self.total / 1e6:,.1f} MB in finished files"
        print(f"{rows:,} rows  {rate:,.0f} rows/s  {share}", file=sys.stderr, flush=True)


def summary(out: Path, manifest: dict[str, Any], was_there: bool) -> list[str]:
    """What a person wants to know at the end."""
    lines = [f"{out}: already complete with these inputs, nothing to do"] if was_there else []
    for split, row in manifest["splits"].items():
        domains = ", ".join(f"{name} {count:,}" for name, count in sorted(row["domains"].items()))
        lines.append(f"{split:<6}{row['prompts']:>10,} {plural(row['prompts'], 'prompt'):<7}  {domains}")
    names = ", ".join(f"{name} {count:,}" for name, count in sorted(manifest["environments"].items()))
    lines.append(f"environments: {names}")
    if manifest["invalid_utf8"]:
        rows = plural(manifest["invalid_utf8"], "row")
        lines.append(f"{manifest['invalid_utf8']:,} {rows} held invalid UTF-8; those bytes became U+FFFD")
    for reason, count in sorted(manifest["dropped"].items(), key=lambda item: -item[1]):
        lines.append(f"dropped {count:,}: {reason} (first: {manifest['examples'][reason][0]})")
    lines.append(f"answer them: {ANSWER} --prompts {out / 'train.jsonl'} --out answers.jsonl")
    return lines


def _options(arguments: argparse.Namespace) -> PromptOptions:
    low, high = arguments.min_pass_rate, arguments.max_pass_rate
    if low > high:
        raise ConfigError("no pass rate is in the bounds", got=f"{low} to {high}", allowed="0 to 1, rising")
    return PromptOptions(
        domain=arguments.domain,
        environment=arguments.environment,
        max_tokens=arguments.max_tokens,
        min_pass_rate=low,
        max_pass_rate=high,
        only=tuple(sorted(set(arguments.only_environment))),
        ngram=arguments.ngram,
        valid_fraction=arguments.valid_fraction,
        strict=arguments.strict,
    )


def _length(arguments: argparse.Namespace) -> tuple[Length, str]:
    """Tokens of a prompt as it will be asked, the opening of the answer included."""
    tokenizer = load_tokenizer(arguments.tokenizer)
    template = load_template(tokenizer, arguments.template)

    def length(prompt: Prompt) -> int:
        return len(template.prompt(prompt.messages, tools=prompt.tools))

    return length, f"{tokenizer.name} {tokenizer.hash}, {template.name} {template.hash}"


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is below 1")
    return value


def share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{value} is not in [0, 1]")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m nemotron_ultra.prep prompts", description=HELP)
    add = parser.add_argument
    add("inputs", nargs="+", metavar="INPUT")
    add("--out", type=Path, required=True, metavar="DIR", help="folder to make")
    add("--environment", metavar="NAME", help="environment of rows that name none")
    add("--domain", metavar="NAME", help="domain of rows that name none")
    name_help = "keep the prompts of this environment (again for more; all)"
    add("--only-environment", action="append", default=[], metavar="NAME", help=name_help)
    add("--min-pass-rate", type=share, default=0.0, metavar="P", help="lowest pass rate kept (0)")
    add("--max-pass-rate", type=share, default=1.0, metavar="P", help="highest pass rate kept (1)")
    add("--max-tokens", type=positive, metavar="N", help="longest prompt, in tokens of --tokenizer (any)")
    add("--tokenizer", default="builtin", metavar="T", help='"builtin" or a Hugging Face tokenizer folder')
    add("--template", default="builtin", metavar="T", help='"builtin", "tokenizer" or a .jinja file')
    add_options(parser)
    add("--ngram", type=positive, default=13, metavar="N", help="words of a run that counts as repeated (13)")
    add("--valid-fraction", type=fraction, default=0.01, metavar="F", help="prompts for validation (0.01)")
    add("--strict", action="store_true", help="a line that is no JSON object is an error")
    return parser
