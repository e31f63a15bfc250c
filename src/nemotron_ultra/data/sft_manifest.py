"""What manifest.json says of a folder of packs that `prep sft` made: everything is counted, nothing twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from nemotron_ultra.data.pack_manifest import read_pack_manifest, write_pack_manifest
from nemotron_ultra.data.sft_parts import EXAMPLES, ChatReceipt
from nemotron_ultra.data.sft_plan import Plan, SourcePlan
from nemotron_ultra.data.sft_rows import place_name

if TYPE_CHECKING:
    from nemotron_ultra.data.sft_prepare import ChatJob


def write_manifest(
    job: ChatJob,
    identity: dict[str, Any],
    receipts: dict[str, list[ChatReceipt]],
    plan: Plan,
    files: dict[str, dict[str, Any]],
) -> dict[str, Any]:
    """Write DIR/manifest.json and return it."""
    template, packs = job.template, job.packs
    train = plan.packers[""]
    sources = {}
    for source in job.sources:
        parts, planned = receipts[source.name], plan.sources[source.name]
        about = {"paths": list(source.spec.paths), "weight": source.spec.weight, "cap": source.spec.cap}
        sources[source.name] = about | _source(parts, planned) | {"input": source.identity}
    dropped: Counter = Counter()
    for source in sources.values():
        dropped.update({reason: counts["count"] for reason, counts in source["dropped"].items()})
    content = {
        "tokenizer": {
            "name": template.tokenizer.name,
            "hash": template.tokenizer.hash,
            "vocab_size": template.tokenizer.vocab_size,
        },
        "template": {"name": template.name, "hash": template.hash},
        "packer": {
            "max_length": packs.max_length,
            "pool_size": packs.pool_size,
            "window": packs.window,
            "tolerance": packs.tolerance,
            "seed": packs.seed,
            "evicted": train.evicted,
            "prompt_conflicts": train.conflicts,
        },
        "sources": sources,
        "splits": _splits(job, plan, files),
        "dropped": dict(dropped),
        "invalid_utf8": sum(part.invalid_utf8 for parts in receipts.values() for part in parts),
        "about": job.about,
        "identity": identity,
        "files": {name: receipt["files"][name] for name, receipt in files.items()},
    }
    write_pack_manifest(job.out, content)
    return read_pack_manifest(job.out)


def _source(parts: Sequence[ChatReceipt], planned: SourcePlan) -> dict[str, Any]:
    """Counts and drops of one source; examples with file and line."""
    dropped = {}
    examples: dict[str, list[str]] = {}
    line = 0
    for part in parts:
        line = 0 if part.begins_file else line
        for reason, count in part.dropped.items():
            dropped.setdefault(reason, Counter()).update(count=count, tokens=0)
            found = examples.setdefault(reason, [])
            for place, detail in part.examples[reason][: EXAMPLES - len(found)]:
                where = place_name(part.kind, part.name, line + place)
                found.append(f"{where}: {detail}" if detail else where)
        line += part.lines
    for reason, counts in planned.dropped.items():
        dropped.setdefault(reason, Counter()).update(counts)
        examples.setdefault(reason, []).extend(planned.examples[reason])
    together = Counter(planned.train)
    together.update(planned.valid)
    return {
        "rows_in": sum(part.rows_in for part in parts),
        "read": dict(planned.read),
        **together,
        "train": dict(planned.train),
        "valid": dict(planned.valid),
        "repeated": dict(planned.repeated),
        "ended_after_share_of_draws": round(planned.ended, 6),
        "dropped": {reason: dict(counts) for reason, counts in dropped.items()},
        "examples": examples,
    }


def _splits(job: ChatJob, plan: Plan, files: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Packs, rows, tokens, trained and fill of train, and of valid by source, as the files hold them."""
    groups: dict[str | None, Counter] = {}
    for receipt in files.values():
        counts = {key: receipt[key] for key in ("packs", "rows", "tokens", "trained")}
        groups.setdefault(receipt["shard"]["source"], Counter()).update(counts)
    for name, group in groups.items():
        packed = plan.packers[name or ""]
        there = (group["packs"], group["rows"], group["tokens"])
        assert there == (packed.packs, packed.items, packed.tokens), f"{name}: {there}, {packed}"

    def split(group: Counter) -> dict[str, Any]:
        room = group["packs"] * job.packs.max_length
        return dict(group) | {"fill": group["tokens"] / room}

    return {
        "train": split(groups[None]),
        "valid": {name: split(group) for name, group in groups.items() if name is not None},
    }
