"""Conversations -> packs: parts spooled in parallel, packs planned in one process, files written in parallel.

    DIR/.parts/spools/SOURCE/NUMBER.*  with receipts of parts       (phase 1, in parallel)
    DIR/.parts/plan/             which rows share a pack            (phase 2, one process, seconds a million)
    DIR/train-00000.parquet ...  and DIR/.parts/files/*.json        (phase 3, in parallel)
    DIR/manifest.json            written last: finished

What is on disk with a receipt is not done again. The result depends on the sources, the tokenizer, the
template and the options, never on the number of workers or on kills. After an error of the input or of the
options .parts/failed is there: the next command may differ, and keeps the spools of what it left as it was.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from nemotron_ultra.data.inputs import Part
from nemotron_ultra.data.manifest import NAME, damaged_files, read_receipt, same_identity, write_json
from nemotron_ultra.data.pack_manifest import read_pack_manifest
from nemotron_ultra.data.pool import WorkerKilled, work_all
from nemotron_ultra.data.render import Template
from nemotron_ultra.data.sft_manifest import write_manifest
from nemotron_ultra.data.sft_parts import (
    ChatOptions,
    ChatReceipt,
    ChatSetup,
    ChatWorker,
    read_chat_receipts,
)
from nemotron_ultra.data.sft_plan import PackOptions, Plan, make_plan
from nemotron_ultra.data.sft_shards import PartPlace, ShardSetup, read_shard_receipts
from nemotron_ultra.data.sft_sources import Source
from nemotron_ultra.data.sft_spools import Spools
from nemotron_ultra.errors import DataError, NemotronError

FORMAT = 1
PARTS = ".parts"
PLAN = "plan.json"
SPOOLS = "spools"
FILES = "files"
FAILED = "failed"
# Of a source's identity: what says how many of its conversations are taken, not what they become.
SHARES = ("weight", "cap")
# A worker that the system killed is replaced so often, each time with half as many beside it.
REPLACED = 3

Receipts = dict[str, list[ChatReceipt]]


class Progress(Protocol):
    """Told of every finished part and file, and whether an earlier run had finished it."""

    def spooled(self, receipt: ChatReceipt, resumed: bool) -> None: ...
    def planned(self, plan: Plan) -> None: ...
    def wrote(self, receipt: dict[str, Any], resumed: bool) -> None: ...
    def note(self, text: str) -> None: ...


@dataclass(frozen=True, kw_only=True)
class ChatJob:
    """One preparation. options: by source; template_name: as load_template takes it."""

    out: Path
    template: Template
    template_name: str
    sources: list[Source]
    options: dict[str, ChatOptions]
    packs: PackOptions
    about: dict[str, Any] = field(default_factory=dict)

    def identity(self) -> dict[str, Any]:
        """What the output depends on; the same identity means the same bytes."""
        identity: dict[str, Any] = {
            "format": FORMAT,
            "tokenizer.hash": self.template.tokenizer.hash,
            "template.hash": self.template.hash,
            "sources": [source.name for source in self.sources],
            **{f"options.{key}": value for key, value in asdict(self.packs).items()},
        }
        for source in self.sources:
            about = {"input": source.identity, "weight": source.spec.weight, "cap": source.spec.cap}
            about |= _flat(asdict(self.options[source.name]))
            identity |= {f"source.{source.name}.{key}": value for key, value in about.items()}
        return json.loads(json.dumps(identity))


def prepare_chats(job: ChatJob, *, workers: int, progress: Progress) -> tuple[dict[str, Any], bool]:
    """Make the folder `job.out`; returns (manifest, whether it was there already).

    workers: processes; 1 works in this one. Raises DataError for nothing to train on, unreadable input, or a
    folder that holds something else.
    """
    identity = job.identity()
    if (job.out / NAME).exists():
        return _finished(job.out, identity), True
    folder = _open_parts(job.out, identity)
    try:
        receipts = _spool(job, folder / SPOOLS, workers, progress)
        _check_sources(receipts)
        caps = {source.name: source.spec.cap for source in job.sources}
        spools = Spools(folder / SPOOLS, receipts, caps)
        weights = [source.spec.weight for source in job.sources]
        plan = make_plan(spools, weights, job.packs, folder / "plan")
    except WorkerKilled:
        raise
    except NemotronError:
        (folder / FAILED).touch()
        raise
    progress.planned(plan)
    files = _write(job, folder, spools, plan, workers, progress)
    manifest = write_manifest(job, identity, receipts, plan, files)
    shutil.rmtree(folder)
    return manifest, False


def _finished(out: Path, identity: dict[str, Any]) -> dict[str, Any]:
    try:
        manifest = read_pack_manifest(out)
    except DataError as error:
        raise DataError(f"{out} holds something else", got=error.what, do="name another --out") from error
    same_identity(out, manifest.get("identity", {}), identity)
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
        before = read_receipt(plan)
        if before is None:
            raise DataError(f"{plan} is damaged", do=f"remove {out} and give the command again")
        if not (folder / FAILED).exists():
            same_identity(out, before, identity)
            return folder
        _remove_changed(out, before, identity)
    there = sorted(path.name for path in out.glob("*.parquet"))
    if there:
        raise DataError(f"{out} holds {', '.join(there[:3])} of something else", do="name another --out")
    (folder / SPOOLS).mkdir(parents=True, exist_ok=True)
    write_json(plan, identity)
    (folder / FAILED).unlink(missing_ok=True)
    return folder


def _remove_changed(out: Path, before: dict[str, Any], identity: dict[str, Any]) -> None:
    """Of a preparation that failed: whatever depends on what the new command has changed."""
    folder = out / PARTS
    changed = {key for key in before | identity if before.get(key) != identity.get(key)}
    for receipt in (folder / FILES).glob("*.json") if changed else ():
        (out / receipt.stem).unlink(missing_ok=True)
        receipt.unlink()
    for source in (folder / SPOOLS).iterdir():
        own = {key for key in changed if key.startswith(f"source.{source.name}.")}
        own -= {f"source.{source.name}.{key}" for key in SHARES}
        if own or changed & {"format", "tokenizer.hash", "template.hash"}:
            shutil.rmtree(source)


def _spool(job: ChatJob, folder: Path, workers: int, progress: Progress) -> Receipts:
    """Phase 1: receipts of the parts of every source, from part 0 to its end or its cap."""
    done = {source.name: read_chat_receipts(folder / source.name) for source in job.sources}
    for found in done.values():
        for number in sorted(found):
            progress.spooled(found[number], True)
    setup = ChatSetup(
        folder=folder,
        tokenizer=job.template.tokenizer.name,
        tokenizer_hash=job.template.tokenizer.hash,
        template=job.template_name,
        template_hash=job.template.hash,
        options=job.options,
    )

    def keep(receipt: ChatReceipt) -> None:
        done[receipt.source][receipt.number] = receipt
        progress.spooled(receipt, False)

    here = ChatWorker(folder, job.template, job.options)  # opened already, and its caches are warm
    opener = setup.open if workers > 1 else lambda: here
    _work(lambda: _todo(job.sources, done), opener, workers, keep, progress)
    return {source.name: done_parts(done[source.name], source.spec.cap) for source in job.sources}


def done_parts(found: dict[int, ChatReceipt], cap: int | None) -> list[ChatReceipt]:
    """Receipts from part 0 on without a gap, up to the part that reaches the cap."""
    out, chats = [], 0
    while len(out) in found and (cap is None or chats < cap):
        out.append(found[len(out)])
        chats += out[-1].chats
    return out


def _todo(sources: list[Source], done: dict[str, dict[int, ChatReceipt]]) -> Iterator[Part]:
    """Parts that are still to do; looked up as it goes, so that a source ends soon after its cap."""
    for source in sources:
        found = done[source.name]
        first = next(number for number in range(len(found) + 1) if number not in found)
        for part in source.parts(first):
            cap = source.spec.cap
            if cap is not None and sum(r.chats for r in done_parts(found, cap)) >= cap:
                break
            if part.number not in found:
                yield part


def _work(
    todo: Callable[[], Iterator[Any]],
    opener: Callable[[], Callable[[Any], Any]],
    workers: int,
    keep: Callable[[Any], None],
    progress: Progress,
) -> None:
    """Do all of `todo`, with new workers where one was killed. todo() leaves out what `keep` was given."""
    for killed in range(REPLACED + 1):
        try:
            for result in work_all(todo(), opener, workers):
                keep(result)
            return
        except WorkerKilled:
            if killed == REPLACED:
                raise
            workers = max(2, workers // 2)  # one alone would be this process, and die as it did
            progress.note(f"a worker process was killed; its part is done again, by {workers} workers")


def _check_sources(receipts: Receipts) -> None:
    """Raises DataError for a source without a conversation."""
    for name, parts in receipts.items():
        if any(part.chats for part in parts):
            continue
        reasons: dict[str, int] = {}
        for part in parts:
            for reason, count in part.dropped.items():
                reasons[reason] = reasons.get(reason, 0) + count
        told = ", ".join(f"{count} {reason}" for reason, count in reasons.items()) or "none"
        first = next((f": {p.name}: {rows[0][1]}" for p in parts for rows in p.examples.values()), "")
        raise DataError(
            f"source {name} has no conversation to train on",
            got=f"{sum(part.rows_in for part in parts)} rows in, dropped: {told}{first}",
            do="check its files, --messages-field and --row-filter, or leave it out",
        )


def _write(
    job: ChatJob, folder: Path, spools: Spools, plan: Plan, workers: int, progress: Progress
) -> dict[str, dict[str, Any]]:
    """Phase 3: receipts of all files by name."""
    receipts = folder / FILES
    receipts.mkdir(exist_ok=True)
    done = read_shard_receipts(receipts, job.out, plan.digest)
    for receipt in done.values():
        progress.wrote(receipt, True)
    setup = ShardSetup(
        out=job.out,
        plan=folder / "plan",
        receipts=receipts,
        digest=plan.digest,
        parts=_places(spools),
        group_tokens=job.packs.group_tokens,
        metadata={
            "tokenizer": job.template.tokenizer.hash,
            "template": job.template.hash,
            "max_length": str(job.packs.max_length),
        },
    )

    def keep(receipt: dict[str, Any]) -> None:
        done[receipt["shard"]["name"]] = receipt
        progress.wrote(receipt, False)

    left = [shard for shard in plan.shards if shard.name not in done]
    workers = min(workers, max(1, len(left)))
    _work(lambda: (s for s in plan.shards if s.name not in done), setup.open, workers, keep, progress)
    return {shard.name: done[shard.name] for shard in plan.shards}


def _places(spools: Spools) -> tuple[PartPlace, ...]:
    out: list[PartPlace] = []
    line = 0
    for index, part in enumerate(spools.parts):
        line = 0 if part.number == 0 else line
        source = spools.names.index(part.source)
        out.append(
            PartPlace(
                folder=str(spools.folder / part.source),
                number=part.number,
                first_row=int(spools.part_row[index]),
                source=source,
                first_line=line,
            )
        )
        line += part.lines
    return tuple(out)


def _flat(content: dict[str, Any]) -> dict[str, Any]:
    """Nested options under one level of names."""
    out = {}
    for key, value in content.items():
        out |= value if isinstance(value, dict) else {key: value}
    return out
