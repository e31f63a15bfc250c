"""python -m nemotron_ultra.prep sft NAME=PATH... --out DIR: conversations -> packs with loss masks."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from nemotron_ultra.config.command import Parser, plural, say
from nemotron_ultra.data.chat import load_template
from nemotron_ultra.data.inputs import PART_BYTES, parquet_module
from nemotron_ultra.data.reasoning import ReasoningOptions
from nemotron_ultra.data.sft_parts import ChatOptions, ChatReceipt
from nemotron_ultra.data.sft_plan import PackOptions, Plan
from nemotron_ultra.data.sft_prepare import ChatJob, prepare_chats
from nemotron_ultra.data.sft_sources import FORM, SourceSpec, open_sources, read_specs
from nemotron_ultra.data.tokenizer import load_tokenizer
from nemotron_ultra.data.training_rows import MaskOptions
from nemotron_ultra.errors import DataError
from nemotron_ultra.prep.guard import guarded
from nemotron_ultra.prep.progress import Progress
from nemotron_ultra.prep.text import RESUMES, fraction, make_folder, whole_number, worker_count

HELP = f"""\
Turn conversations into packs: DIR/train-*.parquet, DIR/valid-NAME-*.parquet, DIR/manifest.json.

A source is {FORM};
PATH is a .jsonl or .parquet file (.gz .bz2 .xz .zst too), a folder of them, or
datasets:NAME[@CONFIG][:SPLIT]. The same NAME again adds files. weight: conversations are drawn in proportion
to it. cap: at most so many are taken. A blend file (.yaml, .json) says the same:
  sources: {{math: {{path: math.jsonl, weight: 2}}, chat: {{path: [a.jsonl, b/], cap: 1000, train: last}}}}

The same command again goes on where it was stopped, and says so where it was finished.
"""
LATE = 0.99  # a source that runs out after this is told of as if it had not
SIZES = ("max-length", "shard-tokens", "group-tokens")
TRAIN = "python -m nemotron_ultra.train recipe=sft run.name=chats tasks=null"


class ChatProgress:
    """Progress of the three phases of prepare_chats."""

    def __init__(self, size: int | None):
        self.parts, self.files = Progress(size), _Writing(None)
        self.resumed = 0

    def spooled(self, receipt: ChatReceipt, resumed: bool) -> None:
        self.parts.add(receipt.size, receipt.tokens, resumed)

    def planned(self, plan: Plan) -> None:
        self.parts.end()
        self.files = _Writing(sum(packer.tokens for packer in plan.packers.values()))

    def wrote(self, receipt: dict[str, Any], resumed: bool) -> None:
        self.files.add(receipt["tokens"], receipt["tokens"], resumed)

    def note(self, text: str) -> None:
        self.parts.note(text)

    def end(self) -> None:
        self.files.end()


class _Writing(Progress):
    def line(self) -> str:
        seconds = max(time.monotonic() - self.started, 1e-3)
        left = (self.total - self.tokens) * seconds / max(self.new_tokens, 1)
        share = 100 * self.tokens / max(self.total, 1)
        rate = f"{self.new_tokens / seconds:,.0f} tokens/s"
        return f"writing {self.tokens:,} of {self.total:,} tokens ({share:.0f} %)  {rate}  {left:,.0f} s left"


def main(argv: Sequence[str] | None = None) -> int:
    return guarded(run, _parser().parse_args(argv), RESUMES)


def run(arguments: argparse.Namespace) -> int:
    out: Path = arguments.out
    parquet_module()  # nothing can be written without it
    template = load_template(load_tokenizer(arguments.tokenizer), arguments.template)
    specs = read_specs(arguments.sources)
    options = {spec.name: _chat_options(arguments, spec) for spec in specs}
    packs = _pack_options(arguments)
    columns = {name: chosen.columns for name, chosen in options.items()}
    sources = open_sources(specs, out, columns, arguments.part_bytes)
    job = ChatJob(
        out=out,
        template=template,
        template_name=arguments.template,
        sources=sources,
        options=options,
        packs=packs,
    )
    sizes = [source.size for source in sources]
    size = None if None in sizes else sum(sizes)
    workers = arguments.workers if arguments.workers > 1 else worker_count(arguments.workers, size)
    make_folder(out)
    progress = ChatProgress(size)
    try:
        with FileLock(out / ".lock", timeout=0):
            manifest, was_there = prepare_chats(job, workers=workers, progress=progress)
    except Timeout as error:
        do = "wait for it, or name another --out"
        raise DataError(f"another preparation is at work in {out}", do=do) from error
    finally:
        progress.end()
    say(summary(out, manifest, was_there, progress.parts.resumed))
    return 0


def summary(out: Path, manifest: dict[str, Any], was_there: bool, resumed: int) -> list[str]:
    """What a person wants to know at the end."""
    lines = [f"{out}: already complete with these inputs, nothing to do"] if was_there else []
    if resumed:
        lines.append(f"{resumed} {plural(resumed, 'part')} finished by an earlier run")
    splits = {"train": manifest["splits"]["train"]}
    splits |= {f"valid {name}": row for name, row in manifest["splits"]["valid"].items()}
    wide = max(map(len, splits))
    lines += [f"{name:<{wide}}{_split_line(row)}" for name, row in splits.items()]
    if not manifest["splits"]["valid"]:
        lines.append("valid is empty: use a larger --valid-fraction")
    for name, source in manifest["sources"].items():
        lines.append(_source_line(name, source, manifest))
        for reason, counts in source["dropped"].items():
            tokens = f", {counts['tokens']:,} tokens" if counts["tokens"] else ""
            first = source["examples"].get(reason, ["?"])[0]
            lines.append(f"  dropped {counts['count']:,}{tokens}: {reason} (first: {first})")
    if manifest["invalid_utf8"]:
        rows = plural(manifest["invalid_utf8"], "row")
        lines.append(f"{manifest['invalid_utf8']:,} {rows} held invalid UTF-8; those bytes became U+FFFD")
    tokenizer = manifest["tokenizer"]["name"]
    options = "" if tokenizer == "builtin" else f" data.tokenizer={tokenizer}"
    length = manifest["packer"]["max_length"]
    where = f"data=packs trainer=packs data.packs={out}"
    lines.append(f"look at the masks: python -m nemotron_ultra.prep preview {out}")
    lines.append(f"train on it: {TRAIN} {where} data.sequence_length={length}{options}")
    return lines


def _split_line(row: dict[str, Any]) -> str:
    packs = f"{row['packs']:>10,} {plural(row['packs'], 'pack'):<5}"
    rows = f"{row['rows']:>12,} {plural(row['rows'], 'row'):<4}"
    counts = f"{packs}  {rows}  {row['tokens']:>14,} tokens"
    trained = 100 * row["trained"] / max(row["tokens"], 1)
    return f"{counts}  {trained:5.1f} % trained  fill {100 * row['fill']:.2f} %"


def _source_line(name: str, source: dict[str, Any], manifest: dict[str, Any]) -> str:
    drawn = source["train"].get("tokens", 0) + source["repeated"].get("tokens", 0)
    share = 100 * drawn / max(manifest["splits"]["train"]["tokens"], 1)
    again = source["repeated"].get("conversations", 0)
    more = f", {again:,} drawn again" if again else ""
    ended = source["ended_after_share_of_draws"]
    weighted = len({other["weight"] for other in manifest["sources"].values()}) > 1
    if weighted and ended < LATE:
        more += f", ran out after {100 * ended:.0f} % of the draws"
    rows, kept = source["rows_in"], source["conversations"]
    return (
        f"{name}: {rows:,} {plural(rows, 'row')} in, {kept:,} {plural(kept, 'conversation')} kept, "
        f"{share:.1f} % of the training tokens{more}"
    )


def _chat_options(arguments: argparse.Namespace, spec: SourceSpec) -> ChatOptions:
    masks = MaskOptions(
        train=spec.train or arguments.train,
        thinking=spec.thinking or arguments.thinking,
        expand=arguments.expand,
        train_cut_close=arguments.train_cut_close,
    )
    reasoning = ReasoningOptions(
        strip_share=arguments.strip_share,
        effort_share=arguments.effort_share,
        truncate_share=arguments.truncate_share,
        effort=arguments.effort,
        min_budget=arguments.min_budget,
        max_budget=arguments.max_budget,
        seed=arguments.seed,
    )
    return ChatOptions(
        messages_field=arguments.messages_field,
        tools_field=arguments.tools_field,
        row_filter=arguments.row_filter,
        strict=arguments.strict,
        masks=masks,
        reasoning=reasoning,
    )


def _pack_options(arguments: argparse.Namespace) -> PackOptions:
    options = PackOptions(
        max_length=arguments.max_length,
        pool_size=arguments.pool_size,
        window=arguments.window,
        tolerance=arguments.tolerance,
        seed=arguments.seed,
        on_overlong=arguments.on_overlong,
        valid_fraction=arguments.valid_fraction,
        duplicates=arguments.duplicates,
        ended=arguments.when_ended,
        shard_tokens=arguments.shard_tokens,
        group_tokens=arguments.group_tokens,
    )
    packer = options.packer()  # mistakes show before the work; what follows from others is written down
    return replace(options, window=packer.window, tolerance=packer.tolerance)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m nemotron_ultra.prep sft", description=HELP)
    parser.add_argument("sources", nargs="+", metavar="SOURCE")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to make")
    _reading_options(parser.add_argument_group("reading"))
    _mask_options(parser.add_argument_group("what is shown and trained"))
    _packing_options(parser.add_argument_group("packing"))
    part = f"bytes of input that a worker does at a time ({PART_BYTES})"
    parser.add_argument("--part-bytes", type=positive, default=PART_BYTES, metavar="N", help=part)
    workers = "processes; 0 is one per core (0)"
    parser.add_argument("--workers", type=whole_number, default=0, metavar="N", help=workers)
    return parser


def _reading_options(group: Any) -> None:
    add = group.add_argument
    add("--tokenizer", default="builtin", metavar="T", help='"builtin" or a Hugging Face tokenizer folder')
    template = '"builtin", "tokenizer" (the one in its folder) or a .jinja file'
    add("--template", default="builtin", metavar="T", help=template)
    add("--messages-field", default="messages", metavar="NAME", help="field of the messages (messages)")
    add("--tools-field", default="tools", metavar="NAME", help="field of the tools (tools)")
    only = "take only rows whose FIELD is VALUE or contains it: used_in=stage_1"
    add("--row-filter", type=_field_value, metavar="FIELD=VALUE", help=only)
    add(
        "--strict", action="store_true", help="a row that cannot be used is an error, not counted and dropped"
    )
    add("--duplicates", choices=("drop", "keep"), default="drop", help="equal conversations (drop)")
    add("--valid-fraction", type=fraction, default=0.01, metavar="F", help="conversations for valid (0.01)")


def _mask_options(group: Any) -> None:
    add, known = group.add_argument, MaskOptions()
    add(
        "--train",
        choices=("assistant", "last"),
        default=known.train,
        help="every answer, or the last (assistant)",
    )
    add("--thinking", choices=("auto", "on", "off"), default=known.thinking, help="thoughts shown (auto)")
    expand = "a row for each user's turn (auto: where there are thoughts)"
    add("--expand", choices=("auto", "always", "never"), default=known.expand, help=expand)
    add("--train-cut-close", action="store_true", help="train the </think> of thoughts that were cut")
    defaults = ReasoningOptions()
    for name, what in (
        ("strip", "without their thoughts"),
        ("effort", "asking for --effort"),
        ("truncate", "with thoughts cut at a random budget"),
    ):
        add(f"--{name}-share", type=float, default=0.0, metavar="F", help=f"share of them {what} (0)")
    add("--effort", default=defaults.effort, metavar="WORD", help=f"({defaults.effort})")
    add("--min-budget", type=int, default=defaults.min_budget, metavar="N", help=f"({defaults.min_budget})")
    add("--max-budget", type=int, default=defaults.max_budget, metavar="N", help=f"({defaults.max_budget})")


def _packing_options(group: Any) -> None:
    add, known = group.add_argument, PackOptions()
    for name, default, what in (
        ("max-length", known.max_length, "tokens of a pack"),
        ("pool-size", known.pool_size, "packs open at once"),
        ("window", known.window, "conversations sorted before they are placed"),
        ("tolerance", known.tolerance, "a pack with less room is full"),
        ("seed", known.seed, "of the shuffle and of --*-share"),
        ("shard-tokens", known.shard_tokens, "tokens of a file"),
        ("group-tokens", known.group_tokens, "tokens of a row group"),
    ):
        add(
            f"--{name}",
            type=positive if name in SIZES else whole_number,
            default=default,
            metavar="N",
            help=f"{what} ({default})",
        )
    add(
        "--on-overlong",
        choices=("drop", "error"),
        default=known.on_overlong,
        help="rows longer than a pack (drop)",
    )
    ended = "what happens when a source has run out (leave-out: the others go on without it)"
    add("--when-ended", choices=("leave-out", "stop", "repeat"), default=known.ended, help=ended)


def positive(text: str) -> int:
    value = whole_number(text)
    if not value:
        raise argparse.ArgumentTypeError(f"{value} is below 1")
    return value


def _field_value(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not FIELD=VALUE")
    return name, value
