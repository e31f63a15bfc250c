"""What a run says of itself before its first step: the start panel on the screen and the facts in
run.json.
"""

from __future__ import annotations

import fnmatch
import os
from typing import Any

import psutil
import torch
from torch import nn

import nemotron_ultra
from nemotron_ultra.config.plan import Plan, make_plan
from nemotron_ultra.config.precision import PrecisionConfig
from nemotron_ultra.model.hybrid import HybridLM
from nemotron_ultra.observe.machine import machine_facts
from nemotron_ultra.observe.numbers import compact
from nemotron_ultra.ops import table
from nemotron_ultra.trainers.build import Run

Row = tuple[str, str]


def describe(run: Run) -> None:
    """Print the start panel and write the same facts, and more, to run.json."""
    plan = make_plan(run.config)
    precision = precision_rows(run.engine.model, run.config.precision, run.engine.device)
    data, backends = data_facts(run), backend_rows(run)
    run.folder.record(
        version=nemotron_ultra.__version__,
        **plan_facts(plan),
        precision=precision,
        backends=backends,
        machine=machine_facts(),
        data=data,
        tokenizer={
            "name": run.tokenizer.name,
            "hash": run.tokenizer.hash,
            "vocab_size": run.tokenizer.vocab_size,
        },
    )
    ops = ", ".join(f"{row['operation']} {row['backend']}" for row in backends)
    run.console.panel(panel_rows(run, plan, _precision_line(precision), ops, data))
    note = thread_note()
    if note:
        run.console.note(note)


def panel_rows(run: Run, plan: Plan, precision: str, ops: str, data: dict[str, Any]) -> list[Row]:
    """Label and text of each row of the start panel."""
    model, count, resumed = run.config.model, plan.parameters, run.folder.checkpoint
    depths = f", MTP {model.mtp_pattern} x {model.depths} depths" if model.depths else ""
    begin = f"going on from {resumed.name}" if resumed else "new run"
    sources = ", ".join(f"{name} {compact(facts['tokens'])} tokens" for name, facts in data.items())
    xz = [facts["xz_bits_per_byte"] for facts in data.values() if facts["xz_bits_per_byte"]]
    goal = f"; xz needs {min(xz):.2f} bits per byte" if xz else ""
    marks = "".join(f"; {m.name} at step {m.step:,}" for m in plan.milestones if m.name != "run ends")
    return [
        (run.config.recipe, f"{begin} in {run.folder.path}"),
        ("model", f"{model.pattern}{depths}"),
        ("size", f"{compact(count.total)} parameters, {compact(count.active)} active for a token"),
        ("precision", precision),
        ("engine", f"{_device_line(run)}; {ops}"),
        ("data", f"{sources}{goal}; tokenizer {run.tokenizer.name}, {run.tokenizer.vocab_size} ids"),
        (
            "plan",
            f"{plan.steps:,} steps x {plan.tokens_per_step:,} tokens = {compact(plan.tokens)} tokens, "
            f"{compact(3 * plan.flops_per_token)}FLOP a token{marks}",
        ),
    ]


def data_facts(run: Run) -> dict[str, Any]:
    """Of each source: folder, tokens and documents to train on, and what xz makes of its validation text."""
    return {
        name: {
            "folder": str(source.folder),
            "tokens": int(source.train.tokens),
            "documents": len(source.train.starts) - 1,
            "validation_tokens": int(source.valid.tokens),
            "xz_bits_per_byte": source.manifest.get("xz_bits_per_byte"),
            "input": source.manifest["input"],
        }
        for name, source in run.stream.sources.items()
    }


def precision_rows(model: HybridLM, precision: PrecisionConfig, device: torch.device) -> list[dict[str, Any]]:
    """What each kind of weight is stored, multiplied and differentiated in, and why."""
    groups: dict[tuple[str, str, str], int] = {}
    for name, module in model.named_modules():
        count = sum(p.numel() for p in module.parameters(recurse=False))
        if count:
            wanted = _format(name, precision, len(model.backbone.layers))
            key = (_kind(name, module), wanted, _computed(wanted, device))
            groups[key] = groups.get(key, 0) + count
    return [
        {
            "layers": kind,
            "parameters": count,
            "asked": wanted,
            "products": computed,
            "weights": precision.weights,
            "master": "fp32",
            "gradients": precision.gradients,
        }
        for (kind, wanted, computed), count in sorted(groups.items())
    ]


def thread_note() -> str | None:
    """Advice where other programs keep the machine busy: threads that spin while waiting get in their way."""
    passive = os.environ.get("OMP_WAIT_POLICY", "").upper() == "PASSIVE"
    if passive or torch.get_num_threads() == 1 or psutil.getloadavg()[0] < 1:
        return None
    return "this machine is busy: steps are faster with OMP_WAIT_POLICY=PASSIVE in the environment"


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


def _format(name: str, precision: PrecisionConfig, layers: int) -> str:
    parts = name.split(".")
    inside = parts[:2] == ["backbone", "layers"] and int(parts[2]) >= layers - precision.last_layers
    if inside and precision.last_layers:
        return precision.last_layers_format
    found = (rule.format for rule in precision.rules if fnmatch.fnmatchcase(name, rule.match))
    return next(found, precision.default)


def _computed(wanted: str, device: torch.device) -> str:
    """A CPU multiplies in float32: 16-bit products are about 26 times slower there."""
    return wanted if device.type == "cuda" or wanted == "fp32" else "fp32 (CPU)"


def _kind(name: str, module: nn.Module) -> str:
    parts = name.split(".")
    if parts[0] == "mtp":
        return "mtp"
    if parts[:2] == ["backbone", "layers"]:
        return f"{_BLOCKS.get(type(module).__name__, '.'.join(parts[3:]))}"
    return parts[-1]


_BLOCKS = {"RMSNorm": "norms", "Mamba2Mixer": "mixer A_log, D, dt_bias", "Router": "router"}


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


def _precision_line(rows: list[dict[str, Any]]) -> str:
    found = sorted({row["products"] for row in rows})
    stored = rows[0]["weights"]
    return f"weights {stored}, products {' and '.join(found)}, gradients and optimizer fp32"


def _device_line(run: Run) -> str:
    device = run.engine.device
    if device.type == "cuda":
        return f"torch on {torch.cuda.get_device_name(device)}"
    return f"torch on CPU, {torch.get_num_threads()} threads"
