"""What a run says of itself before its first step: the start panel on the screen and the facts in
run.json.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import nemotron_ultra
from nemotron_ultra.config.model import BLOCK_LETTERS, ModelConfig
from nemotron_ultra.config.plan import Plan, make_plan
from nemotron_ultra.config.precision import PrecisionConfig
from nemotron_ultra.model.hybrid import HybridLM
from nemotron_ultra.model.norm import RMSNorm
from nemotron_ultra.model.router import Router
from nemotron_ultra.observe.machine import machine_facts
from nemotron_ultra.observe.numbers import compact
from nemotron_ultra.ops import table
from nemotron_ultra.trainers.build import Run

Row = tuple[str, str]


def describe(run: Run) -> None:
    """Print the start panel and write the same facts, and more, to run.json."""
    plan = make_plan(run.config)
    precision = precision_rows(run.engine.model, run.config.precision, run.engine.device)
    data, backends = run.stream.describe(), backend_rows(run)
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
    ops = "\n".join(f"{row['operation']} by {row['backend']}: {row['why']}" for row in backends)
    run.console.panel(panel_rows(run, plan, _precision_line(precision), ops, data))


def panel_rows(run: Run, plan: Plan, precision: str, ops: str, data: dict[str, Any]) -> list[Row]:
    """Label and text of each row of the start panel."""
    model, count, resumed = run.config.model, plan.parameters, run.folder.checkpoint
    depths = f", MTP {model.mtp_pattern} x {model.depths} depths" if model.depths else ""
    begin = f"going on from {resumed.name}" if resumed else "new run"
    marks = "".join(f"; {m.name} at step {m.step:,}" for m in plan.milestones if m.name != "run ends")
    remarks = _end_of_document(run)
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
    named = [
        f"{name} {compact(facts['tokens'])} tokens"
        if "tokens" in facts
        else f"{name} ({facts['environment']})"
        for name, facts in data.items()
    ]
    xz = [facts["xz_bits_per_byte"] for facts in data.values() if facts.get("xz_bits_per_byte")]
    goal = f"; xz needs {min(xz):.2f} bits per byte" if xz else ""
    return f"{', '.join(named)}{goal}; tokenizer {run.tokenizer.name}, {run.tokenizer.vocab_size} ids"


def precision_rows(model: HybridLM, precision: PrecisionConfig, device: torch.device) -> list[dict[str, Any]]:
    """What each kind of weight is stored, multiplied and differentiated in."""
    groups: dict[tuple[str, str, str], int] = {}
    for name, module in model.named_modules():
        own = list(module.parameters(recurse=False))
        if own:
            asked = format_of(name, precision, len(model.backbone.layers))
            stored = _SHORT.get(own[0].dtype, str(own[0].dtype))
            key = (_kind(name, model.config), stored, _products(asked, module, device))
            groups[key] = groups.get(key, 0) + sum(p.numel() for p in own)
    return [
        {
            "layers": kind,
            "parameters": count,
            "weights": stored,
            "products": products,
            "gradients": precision.gradients,
            "master and moments": "fp32",
        }
        for (kind, stored, products), count in groups.items()
    ]


def format_of(name: str, precision: PrecisionConfig, layers: int) -> str:
    """Format that the policy gives to a module of a stack of `layers`."""
    return precision.format_of(name, layers)


def _products(asked: str, module: nn.Module, device: torch.device) -> str:
    """Router and norms compute in fp32 everywhere, a CPU all the rest too: 16-bit products are slow there."""
    return "fp32" if device.type == "cpu" or isinstance(module, Router | RMSNorm) else asked


def _kind(name: str, config: ModelConfig) -> str:
    """mamba in_proj, moe experts, norms, mtp ...: the layer's number left out."""
    parts = name.split(".")
    if parts[0] == "mtp":
        return "mtp"
    if parts[-1] in ("norm", "norm_f"):
        return "norms"
    if parts[:2] == ["backbone", "layers"]:
        return " ".join(
            [BLOCK_LETTERS[config.pattern[int(parts[2])]], ".".join(parts[4:]) or "A_log, D, dt_bias"]
        )
    return parts[-1]


_SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16"}


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


def _precision_line(rows: list[dict[str, Any]]) -> str:
    """One phrase where all layers are alike, else the layers of each format."""
    ways: dict[str, list[str]] = {}
    for row in rows:
        ways.setdefault(f"weights {row['weights']}, products {row['products']}", []).append(row["layers"])
    end = "gradients, masters and moments fp32"
    if len(ways) == 1:
        return f"{next(iter(ways))}, {end}"
    return "\n".join([*(f"{way}: {', '.join(dict.fromkeys(names))}" for way, names in ways.items()), end])


def _device_line(run: Run) -> str:
    device = run.engine.device
    if device.type == "cuda":
        return f"torch on {torch.cuda.get_device_name(device)}"
    threads = torch.get_num_threads()
    return f"torch on CPU, {threads} thread{'s' if threads > 1 else ''}"
