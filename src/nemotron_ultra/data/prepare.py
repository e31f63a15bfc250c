"""Documents -> {train,valid}.{bin,idx} + manifest.json: parts in parallel, joined in order, resumable at
every part.

The result depends on the input, the tokenizer and the options, never on the number of workers or on kills.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from nemotron_ultra.data.inputs import Part
from nemotron_ultra.data.manifest import (
    FORMAT,
    NAME,
    SPLITS,
    XZ_LIMIT_BYTES,
    damaged_files,
    file_facts,
    read_manifest,
    same_identity,
    write_json,
    xz_bits_per_byte,
)
from nemotron_ultra.data.parts import (
    Options,
    Receipt,
    part_prefix,
    read_receipts,
    shard_files,
    valid_text_path,
)
from nemotron_ultra.data.pool import work_parts
from nemotron_ultra.data.shards import Shard, ShardWriter, token_dtype
from nemotron_ultra.data.tokenizer import Tokenizer
from nemotron_ultra.errors import DataError

PARTS = ".parts"
PLAN = "plan.json"


@dataclass(frozen=True)
class Job:
    """One preparation. input: what identifies the content; about: what else the manifest should say of it."""

    out: Path
    tokenizer: Tokenizer
    options: Options
    input: dict[str, Any]
    about: dict[str, Any] = field(default_factory=dict)

    def identity(self) -> dict[str, Any]:
        """What the output depends on; the same identity means the same bytes."""
        identity = {
            "format": FORMAT,
            "tokenizer.hash": self.tokenizer.hash,
            "input": self.input,
            **{f"options.{key}": value for key, value in asdict(self.options).items()},
        }
        return json.loads(json.dumps(identity))


Progress = Callable[[Receipt, bool], None]


def prepare(
    job: Job,
    parts: Callable[[int], Iterable[Part]],
    *,
    workers: int = 1,
    progress: Progress = lambda receipt, resumed: None,
) -> tuple[dict[str, Any], bool]:
    """Make the folder `job.out`; returns (manifest, whether it was there already).

    parts(n): the parts of the input from number n on. workers: processes; 1 works in this one, with the
    tokenizer library's own threads. progress is told of every finished part, and whether an earlier run had
    finished it. Raises DataError for an empty corpus, unreadable input, or a folder that holds something
    else.
    """
    identity = job.identity()
    if (job.out / NAME).exists():
        return _finished(job.out, identity), True
    folder = _open_parts(job.out, identity)
    done = read_receipts(folder)
    for number in sorted(done):
        progress(done[number], True)
    first = next(number for number in range(len(done) + 1) if number not in done)
    todo = (part for part in parts(first) if part.number not in done)
    for receipt in work_parts(todo, folder, job.options, job.tokenizer, workers):
        done[receipt.number] = receipt
        progress(receipt, False)
    receipts = [done[number] for number in range(len(done))]
    total = _sum(receipts)
    if not total.documents["train"]:
        shutil.rmtree(folder)
        raise _empty(total)
    manifest = _join(job, receipts, total, identity)
    shutil.rmtree(folder)
    return manifest, False


def _finished(out: Path, identity: dict[str, Any]) -> dict[str, Any]:
    manifest = read_manifest(out)
    same_identity(out, manifest["identity"], identity)
    damaged = damaged_files(out, manifest)
    if damaged:
        raise DataError(
            f"{out} is finished but damaged",
            got=f"missing or changed: {', '.join(damaged)}",
            do="remove the folder and give the command again",
        )
    shutil.rmtree(out / PARTS, ignore_errors=True)  # a kill after the manifest leaves some of it
    return manifest


def _open_parts(out: Path, identity: dict[str, Any]) -> Path:
    folder = out / PARTS
    plan = folder / PLAN
    if plan.is_file():
        same_identity(out, json.loads(plan.read_text(encoding="utf-8")), identity)
        return folder
    there = [path.name for split in SPLITS for path in shard_files(out / split) if path.exists()]
    if there:
        raise DataError(f"{out} holds {', '.join(there)} of something else", do="name another --out")
    folder.mkdir(parents=True, exist_ok=True)
    write_json(plan, identity)
    return folder


def _empty(total: Receipt) -> DataError:
    reasons = ", ".join(f"{count} {reason}" for reason, count in total.dropped.items())
    return DataError(
        "empty corpus: nothing to train on",
        got=f"{total.documents_in} documents in, {total.documents['valid']} to valid, "
        f"dropped: {reasons or 'none'}",
        do="check the inputs, --text-field and --valid-fraction",
    )


def _join(job: Job, receipts: list[Receipt], total: Receipt, identity: dict[str, Any]) -> dict[str, Any]:
    out, tokenizer = job.out, job.tokenizer
    dtype = token_dtype(tokenizer.vocab_size)
    for split in SPLITS:
        writer = ShardWriter(out / split, dtype)
        for receipt in receipts:
            shard = Shard(part_prefix(out / PARTS, receipt.number, split))
            writer.add_many(shard.slice(0, shard.tokens), np.diff(shard.starts))
        assert (writer.documents, writer.tokens) == (total.documents[split], total.tokens[split])
        writer.close()
    text = _valid_text(out / PARTS, receipts)
    manifest = {
        "format": FORMAT,
        "tokenizer": {"name": tokenizer.name, "hash": tokenizer.hash, "vocab_size": tokenizer.vocab_size},
        "input": job.input | job.about,
        "identity": identity,
        "dtype": dtype.name,
        "documents_in": total.documents_in,
        "splits": total.splits(),
        "sources": _by_source(receipts),
        "dropped": dict(total.dropped),
        "invalid_utf8": total.invalid_utf8,
        "examples": total.examples,
        "xz_bits_per_byte": xz_bits_per_byte(text),
        "xz_bytes": len(text),
        "files": {path.name: file_facts(path) for split in SPLITS for path in shard_files(out / split)},
    }
    write_json(out / NAME, manifest)
    return manifest


def _sum(receipts: Iterable[Receipt]) -> Receipt:
    total = Receipt(-1, "", 0)
    for receipt in receipts:
        receipt.check()
        total.add(receipt)
    total.check()
    return total


def _by_source(receipts: list[Receipt]) -> dict[str, Any]:
    groups: dict[str, list[Receipt]] = {}
    for receipt in receipts:
        groups.setdefault(receipt.source, []).append(receipt)
    return {
        name: {"documents_in": (s := _sum(group)).documents_in, **s.splits()}
        for name, group in groups.items()
    }


def _valid_text(folder: Path, receipts: list[Receipt]) -> bytes:
    text = bytearray()
    for receipt in receipts:
        if len(text) < XZ_LIMIT_BYTES:
            text += valid_text_path(folder, receipt.number).read_bytes()
    return bytes(text[:XZ_LIMIT_BYTES])
