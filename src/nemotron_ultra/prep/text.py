"""python -m nemotron_ultra.prep INPUT... --out DIR: text -> Megatron .bin/.idx shards with a manifest."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from nemotron_ultra.config.command import Parser, plural, say
from nemotron_ultra.data.documents import Reading
from nemotron_ultra.data.hf_rows import RowStream, StreamName
from nemotron_ultra.data.inputs import STREAM_PREFIX, Part, find_files, fingerprint, make_parts, with_digests
from nemotron_ultra.data.parts import Options
from nemotron_ultra.data.prepare import Job, prepare
from nemotron_ultra.data.tokenizer import load_tokenizer
from nemotron_ultra.errors import DataError
from nemotron_ultra.prep.guard import guarded
from nemotron_ultra.prep.progress import Progress

HELP = """\
Turn text into token shards for training: DIR/{train,valid}.{bin,idx} in Megatron's layout, DIR/manifest.json.

INPUT is any mix of
  text files, one document each (any suffix; .gz .bz2 .xz .zst are unpacked)
  .jsonl files, one document a line in the field --text-field
  .parquet files, one document a row in the column --text-field      (pip install 'nemotron-ultra[data]')
  folders, walked in sorted order; hidden names are left out
or one
  datasets:NAME[@CONFIG][:SPLIT], streamed from the Hugging Face hub (pip install 'nemotron-ultra[data]')

The same command again goes on where it was stopped, and says so where it was finished.
"""

SLOW_TO_HASH = 2e9  # bytes, some seconds
TRAIN = "python -m nemotron_ultra.train recipe=pretrain"
EMPTY_VALID = (
    "valid is empty: cut long files into documents with --split-on, "
    "use a larger --valid-fraction, or name validation files with --valid"
)
RESUMES = "finished parts are kept, the same command goes on from them"


def main(argv: Sequence[str] | None = None) -> int:
    return guarded(run, _parser().parse_args(argv), RESUMES)


def run(arguments: argparse.Namespace) -> int:
    out: Path = arguments.out
    tokenizer = load_tokenizer(arguments.tokenizer)
    reading = Reading(text_field=arguments.text_field, split_on=arguments.split_on)
    fraction = 0.0 if arguments.valid else arguments.valid_fraction
    options = Options(reading=reading, valid_fraction=fraction, special=arguments.special_tokens)
    identity, parts, size = _open(arguments)
    about = {"sources": arguments.inputs + arguments.valid, "bytes": size}
    job = Job(out, tokenizer, options, identity, about)
    workers = worker_count(arguments.workers, size)
    make_folder(out)
    progress = Progress(size)
    try:
        with FileLock(out / ".lock", timeout=0):
            manifest, was_there = prepare(job, parts, workers=workers, progress=progress)
    except Timeout as error:
        do = "wait for it, or name another --out"
        raise DataError(f"another preparation is at work in {out}", do=do) from error
    finally:
        progress.end()
    say(summary(out, manifest, was_there, progress.resumed))
    return 0


def summary(out: Path, manifest: dict[str, Any], was_there: bool, resumed: int) -> list[str]:
    """What a person wants to know at the end."""
    tokenizer = manifest["tokenizer"]["name"]
    lines = [f"{out}: already complete with these inputs, nothing to do"] if was_there else []
    if resumed:
        lines.append(f"{resumed} {plural(resumed, 'part')} finished by an earlier run")
    for split, row in manifest["splits"].items():
        ratio = row["bytes"] / max(row["tokens"] - row["documents"], 1)
        documents = f"{row['documents']:>10,} {plural(row['documents'], 'document'):<9}"
        counts = f"{documents}  {row['tokens']:>14,} tokens  {row['bytes'] / 1e6:>10,.1f} MB"
        lines.append(f"{split:<6}{counts}  {ratio:.2f} bytes/token")
    if not manifest["splits"]["valid"]["documents"]:
        lines.append(EMPTY_VALID)
    if manifest["xz_bits_per_byte"]:
        note = f"first {manifest['xz_bytes'] / 1e6:.1f} MB of the validation text"
        lines.append(f"xz needs {manifest['xz_bits_per_byte']:.3f} bits per byte on the {note}")
    if manifest["invalid_utf8"]:
        documents = plural(manifest["invalid_utf8"], "document")
        lines.append(
            f"{manifest['invalid_utf8']:,} {documents} held invalid UTF-8; those bytes became U+FFFD"
        )
    for reason, count in manifest["dropped"].items():
        first = manifest["examples"].get(reason, ["?"])[0]
        lines.append(f"dropped {count:,}: {reason} (first: {first})")
    options = "" if tokenizer == "builtin" else f" data.tokenizer={tokenizer}"
    where = f"run.name={_run_name(out)} data=folder data.phases.0.sources.text.path={out}"
    lines.append(f"train on it: {TRAIN} {where}{options}")
    return lines


def _run_name(out: Path) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "-", out.resolve().name).lstrip("._-") or "mine"


Parts = Callable[[int], Iterable[Part]]


def _open(arguments: argparse.Namespace) -> tuple[dict[str, Any], Parts, int | None]:
    """(what identifies the input, its parts from a number on, bytes in all or None for a stream)."""
    names = list(arguments.inputs)
    streams = [name for name in names if name.startswith(STREAM_PREFIX)]
    if streams:
        if len(names) > 1 or arguments.valid:
            do = "prepare each into its own --out and blend them in data.phases"
            raise DataError("datasets:NAME stands alone", got=" ".join(names), do=do)
        stream = RowStream(StreamName.parse(streams[0]), arguments.text_field)
        return {"stream": stream.identity}, stream.parts, None
    files = find_files(names, arguments.out) + find_files(arguments.valid, arguments.out, valid=True)
    if not files:
        raise DataError("empty corpus: no files in the input", got=" ".join(names))
    total = sum(file.size for file in files)
    if total > SLOW_TO_HASH:
        print(f"hashing {len(files):,} files, {total / 1e9:,.1f} GB", file=sys.stderr)
    files = with_digests(files)
    parts = make_parts(files)
    identity = {"files": len(files), "fingerprint": fingerprint(files)}
    return identity, lambda first: parts[first:], total


def make_folder(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise DataError(f"{out} is not a folder", do="name another --out")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"cannot make the folder {out}", got=error.strerror, do="name another --out"
        ) from error


def worker_count(asked: int, size: int | None) -> int:
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    workers = asked or cores
    if asked == 1:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # Below this a second process costs more than it brings.
    return 1 if size is not None and size < 16 << 20 else workers


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m nemotron_ultra.prep", description=HELP)
    add = parser.add_argument
    add("inputs", nargs="+", metavar="INPUT")
    add("--out", type=Path, required=True, metavar="DIR", help="folder to make")
    add("--tokenizer", default="builtin", metavar="T", help='"builtin" or a Hugging Face tokenizer folder')
    add("--text-field", default="text", metavar="NAME", help="field or column that holds the text (text)")
    add("--split-on", metavar="TEXT", help="what stands between documents of a text file: '<|endoftext|>'")
    add(
        "--valid",
        action="append",
        default=[],
        metavar="INPUT",
        help="validation input, in place of a fraction",
    )
    add("--valid-fraction", type=fraction, default=0.01, metavar="F", help="documents for validation (0.01)")
    add("--special-tokens", action="store_true", help="read special tokens spelled out in the text as such")
    add("--workers", type=whole_number, default=0, metavar="N", help="processes; 0 is one per core (0)")
    return parser


def fraction(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not in [0, 1)")
    return value


def whole_number(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is below 0")
    return value
