"""What a run says of itself before its first step: the start panel on the screen and the facts in
run.json.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

import nemotron_ultra
from nemotron_ultra.config.plan import Plan, make_plan
from nemotron_ultra.config.policy import PolicyTable
from nemotron_ultra.config.te import Realisation
from nemotron_ultra.observe.machine import machine_facts
from nemotron_ultra.observe.numbers import compact
from nemotron_ultra.ops import table
from nemotron_ultra.trainers.build import Run

Row = tuple[str, str]
EMULATED = ("nvfp4", "mxfp8")


def describe(run: Run) -> None:
    """Print the start panel and write the same facts, and more, to run.json."""
    plan = make_plan(run.config)
    policy, realised, device = run.engine.policy.table, run.engine.policy.realised, run.engine.device
    data, backends = run.stream.describe(), backend_rows(run)
    run.folder.record(
        version=nemotron_ultra.__version__,
        **plan_facts(plan),
        precision=precision_rows(policy, device, realised),
        backends=backends,
        machine=machine_facts(),
        data=data,
        tokenizer={
            "name": run.tokenizer.name,
            "hash": run.tokenizer.hash,
            "vocab_size": run.tokenizer.vocab_size,
        },
    )
    ops = "\n".join(f"{row['operation']} by {row['backend']}: {row['why']}" for row in backends)
    run.console.panel(panel_rows(run, plan, precision_text(policy, device, realised), ops, data))


def panel_rows(run: Run, plan: Plan, precision: str, ops: str, data: dict[str, Any]) -> list[Row]:
    """Label and text of each row of the start panel."""
    model, count, resumed = run.config.model, plan.parameters, run.folder.checkpoint
    depths = f", MTP {model.mtp_pattern} x {model.depths} depths" if model.depths else ""
    begin = f"going on from {resumed.name}" if resumed else "new run"
    marks = "".join(f"; {m.name} at step {m.step:,}" for m in plan.milestones if m.name != "run ends")
    remarks = [*_end_of_document(run), *(("remark", f["remark"]) for f in data.values() if "remark" in f)]
    changed = [("changed", "\n".join(run.folder.changes))] if run.folder.changes else []
    return [
        (run.config.recipe, f"{begin} in {run.folder.path}"),
        *changed,
        ("model", f"{model.pattern}{depths}"),
        ("size", f"{compact(count.total)} parameters, {compact(count.active)} active for a token"),
        ("precision", precision),
        ("engine", _device_line(run)),
        ("ops", ops),
        ("data", data_line(run, data)),
        (
            "plan",
            f"{plan.steps:,} steps x {plan.tokens_per_step:,} tokens = {compact(plan.tokens)} tokens, "
            f"{compact(3 * plan.flops_per_token)}FLOP a token{marks}",
        ),
        *remarks,
    ]


def _end_of_document(run: Run) -> list[Row]:
    """A remark where config.json would name another end of document than the one that is trained."""
    ids, trained = run.config.model.eos_token_id, run.tokenizer.eos_id
    if trained in (ids if isinstance(ids, tuple) else (ids,)):
        return []
    return [
        (
            "remark",
            f"documents end with id {trained} of the tokenizer, model.eos_token_id is {ids}: "
            f"set model.eos_token_id={trained} so that config.json says the same",
        )
    ]


def data_line(run: Run, data: dict[str, Any]) -> str:
    """Sources with their tokens or domains with their environments, the goal that xz sets, and the
    tokenizer.
    """
    named = [_source(name, facts) for name, facts in data.items()]
    xz = [facts["xz_bits_per_byte"] for facts in data.values() if facts.get("xz_bits_per_byte")]
    goal = f"; xz needs {min(xz):.2f} bits per byte" if xz else ""
    return f"{', '.join(named)}{goal}; tokenizer {run.tokenizer.name}, {run.tokenizer.vocab_size} ids"


def _source(name: str, facts: dict[str, Any]) -> str:
    for unit in ("tokens", "packs"):
        if unit in facts:
            return f"{name} {compact(facts[unit])} {unit}"
    return f"{name} ({facts['environment']})"


def precision_rows(
    policy: PolicyTable, device: torch.device, realised: Sequence[Realisation] = ()
) -> list[dict[str, Any]]:
    """The policy's table, how each format is computed here, and why."""
    by_format = {row.format: row for row in realised}
    return [
        row
        | {
            "weights": policy.policy.weights,
            "computed": computed(row["format"], device, by_format.get(row["format"])),
            "why": by_format[row["format"]].why if row["format"] in by_format else "",
            "gradients": _gradients(policy),
        }
        for row in policy.facts()
    ]


def computed(format: str, device: torch.device, realised: Realisation | None = None) -> str:
    """What multiplies the operands of a format: a CPU is slow in bf16, and emulated products are not FP4."""
    if realised is not None and realised.name == "te":
        return "by Transformer Engine"
    multiplied = "fp32" if device.type == "cpu" else "bf16"
    if format in EMULATED:
        return f"emulated: operands exact, products in {multiplied}"
    return "fp32" if format == "fp32" else multiplied


def precision_text(policy: PolicyTable, device: torch.device, realised: Sequence[Realisation] = ()) -> str:
    """One phrase where nothing is quantised, else a line per format; warnings of rules without effect."""
    end = "gradients, masters and moments fp32"
    if policy.policy.gradients_bf16:
        end = f"gradients {_gradients(policy)}; masters and moments fp32"
    stored = f"weights {policy.policy.weights}"
    emulated = [format for format in policy.used() if format in EMULATED]
    if not emulated:
        products = computed(policy.policy.weights, device)
        return "\n".join([f"{stored}, products {products}, {end}", *policy.warnings])
    how = _ways(emulated, device, {row.format: row for row in realised})
    return "\n".join([*policy.summary(), *how, f"{stored}, {end}", *policy.warnings])


def _ways(formats: Sequence[str], device: torch.device, realised: Mapping[str, Realisation]) -> list[str]:
    """A line for each way that low-precision formats are computed in, and for each reason."""
    ways: dict[str, list[str]] = {}
    for format in formats:
        row = realised.get(format)
        way = computed(format, device, row)
        if row is not None:
            way = f"by {row.why}" if row.name == "te" else f"{way}, because {row.why}"
        ways.setdefault(way, []).append(format)
    return [f"{', '.join(names)} {way}" for way, names in ways.items()]


def _gradients(policy: PolicyTable) -> str:
    lowered = ", ".join(policy.policy.gradients_bf16)
    return policy.policy.gradients + (f" but bf16 for {lowered}" if lowered else "")


def plan_facts(plan: Plan) -> dict[str, Any]:
    """Parameters and plan for run.json."""
    count = plan.parameters
    return {
        "parameters": {
            "total": count.total,
            "active": count.active,
            "blocks": {
                b.name: {"layers": b.layers, "total": b.total, "active": b.active} for b in count.blocks
            },
        },
        "plan": plan.lines(),
        "flops_per_token": plan.flops_per_token,
        "steps": plan.steps,
        "tokens_per_step": plan.tokens_per_step,
    }


def backend_rows(run: Run) -> list[dict[str, str]]:
    """Which function computes each operation of this model, and why."""
    model = run.config.model
    used = table.rows(model.pattern + (model.mtp_pattern if model.depths else ""))
    return [
        {
            "operation": row.op,
            "backend": row.name,
            "function": row.module,
            "why": row.why,
            "passed over": row.passed_over,
        }
        for row in used
    ]


def _device_line(run: Run) -> str:
    device = run.engine.device
    if device.type == "cuda":
        return f"torch on {torch.cuda.get_device_name(device)}"
    threads = torch.get_num_threads()
    return f"torch on CPU, {threads} thread{'s' if threads > 1 else ''}"
