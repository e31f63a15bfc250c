"""Sections of a chain's page for runs that are compared, and for the arithmetic of gradient buffers."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

from nemotron_ultra.observe import tables
from nemotron_ultra.observe.charts import card
from nemotron_ultra.observe.comparison import comparison_rows, gap_curve, note, running_mean
from nemotron_ultra.observe.html import fold
from nemotron_ultra.observe.numbers import fixed
from nemotron_ultra.observe.run_data import RunData, config_differences
from nemotron_ultra.observe.svg import SMOOTH_FROM, Chart, Line

# Keys that tell runs apart without changing what they compute.
_NAMES = ("run.name", "run.dir", "trainer.checkpoint_every", "trainer.keep_every")
_RULES = "precision.rules"
_KINDS = ("coherent", "noisy")
_CURVES = [("bf16", "coherent"), ("bf16", "noisy"), ("fp32", "coherent"), ("fp32", "noisy")]


def comparison_section(found: Mapping[str, Any], runs: Sequence[tuple[int, RunData]]) -> str:
    """Table, curves over each other, gaps to the baseline, differing keys. runs: (colour, run) in order."""
    if not found["rows"]:
        return ""
    few = len(found["metrics"]) <= 2
    heads, rows = comparison_rows(found, ("gap", "gap_half") if few else ("gap",))
    says = note(found) + ("; 2nd half: over the second half of the run." if few else ".")
    table = f'{tables.table(heads, rows)}<p class="faint">{html.escape(says)}</p>'
    cards = [one for key in found["metrics"] for one in (_overlay(key, runs), _gaps(key, found, runs))]
    shown = "".join(cards)
    return (
        f'<h2>Compared with {html.escape(found["baseline"])}</h2><section class="card">{table}</section>'
        + (f'<div class="grid">{shown}</div>' if shown else "")
        + _differences([run for _, run in runs])
    )


def accumulation_section(found: Mapping[str, Any]) -> str:
    """What is left of the MTP gradient by number of micro-batches: curves and the table."""
    rows, scale = found["rows"], found["settings"]["mtp_scale"]
    by_kind = {kind: [row for row in rows if row["gradients"] == kind] for kind in _KINDS}
    says = (
        f"A buffer adds, for each micro-batch, two MTP gradients of scale {scale:g} and the main one, as the "
        "shared head does. Kept: projection of what MTP changed in the buffer on the exact MTP sum. No-op: "
        "share of MTP adds that changed no bit. Coherent: the same gradients every time; noisy: a tenth of "
        "signal in noise of unit size."
    )
    content = "".join(
        f"<h3>{kind} gradients</h3>{_accumulation_table(rows)}" for kind, rows in by_kind.items() if rows
    )
    charts = [
        card(
            Chart(
                "Share of the MTP gradient that is kept after n micro-batches",
                _by_format(rows, "kept"),
                x_label=_X,
                from_zero=True,
            )
        ),
        card(
            Chart(
                "Error of the sum / MTP gradient, after n micro-batches",
                _by_format(rows, "mtp_error"),
                x_label=_X,
                log_y=True,
            )
        ),
    ]
    return (
        f'<h2>Gradient buffers</h2><p class="sub">{html.escape(says)}</p>'
        f'<div class="grid">{"".join(charts)}</div><section class="card">{content}</section>'
    )


_X = "log2 n"


def _accumulation_table(rows: Sequence[Mapping[str, Any]]) -> str:
    by = {(row["buffer"], row["n"]): row for row in rows}
    keys = [("kept", 3), ("noop", 3), ("mtp_error", 3), ("total_error", 4)]
    heads = [
        "micro-batches",
        *(f"{buffer} {key.replace('_', ' ')}" for buffer in ("bf16", "fp32") for key, _ in keys),
    ]
    cells = [
        [
            f"{n:,}",
            *(fixed(by[buffer, n][key], digits) for buffer in ("bf16", "fp32") for key, digits in keys),
        ]
        for n in sorted({row["n"] for row in rows})
    ]
    return tables.table(heads, cells)


def _by_format(rows: Sequence[Mapping[str, Any]], key: str) -> list[Line]:
    lines = []
    for colour, (buffer, kind) in enumerate(_CURVES):
        points = [
            (math.log2(r["n"]), r[key]) for r in rows if (r["buffer"], r["gradients"]) == (buffer, kind)
        ]
        if points:
            xs, ys = zip(*points, strict=True)
            lines.append(Line(f"{buffer}, {kind}", xs, ys, colour, dots=True, exact=True))
    return lines


def _overlay(key: str, runs: Sequence[tuple[int, RunData]]) -> str:
    lines = [
        Line(run.name, *run.curves[key], colour, colour // 8, dots=_is_sparse(run, key))
        for colour, run in runs
        if key in run.curves
    ]
    return card(Chart(key, lines))


def _gaps(key: str, found: Mapping[str, Any], runs: Sequence[tuple[int, RunData]]) -> str:
    """Running means of the gaps in percent, and the level that they may be held against."""
    base = next((run for _, run in runs if run.name == found["baseline"]), None)
    lines, width = [], 1
    for colour, run in runs:
        if base is None or run is base:
            continue
        steps, gaps = gap_curve(run, base, key)
        width = max(width, len(gaps) // 10)
        ys = [100 * gap for gap in running_mean(gaps, max(1, len(gaps) // 10))]
        if steps:
            sparse = _is_sparse(run, key)
            lines.append(Line(run.name, steps, ys, colour, colour // 8, dots=sparse, exact=True))
    level = (
        [(f"{found['level_name']}: {100 * found['level']:.2g} %", 100 * found["level"])]
        if found["level"]
        else []
    )
    title = f"{key}: gap to {found['baseline']} in %"
    return card(
        Chart(title, lines, references=level, log_y=False, note=f"mean of {width} steps" if width > 1 else "")
    )


def _is_sparse(run: RunData, key: str) -> bool:
    return len(run.curves[key][0]) < SMOOTH_FROM


def _differences(runs: list[RunData]) -> str:
    """Keys that differ; the rules of a policy, which its name stands for, are folded away."""
    found = [(key, values) for key, values in config_differences(runs) if key not in _NAMES]
    found = [(key, values) for key, values in found if not all(value in (None, "absent") for value in values)]
    rules = [[key, *values] for key, values in found if key.startswith(_RULES)]
    rows = [[key, *values] for key, values in found if not key.startswith(_RULES)]
    if not found:
        return ""
    heads = ["key", *(run.name for run in runs)]
    content = tables.table(heads, rows) if rows else ""
    content += fold("Rules of the policies", tables.table(heads, rules)) if rules else ""
    return f'<h2>What differs in the configuration</h2><section class="card">{content}</section>'
