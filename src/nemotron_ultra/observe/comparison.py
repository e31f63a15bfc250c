"""Runs that differ in one thing: relative gaps to the first of them, step by step on the same data.

    gap(step) = (metric of the run - metric of the baseline) / metric of the baseline

Steps are compared in pairs, so that what a batch adds to both losses is in no gap.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from nemotron_ultra.observe.numbers import fixed
from nemotron_ultra.observe.run_data import Curve, RunData

NO_CURVE: Curve = ([], [])
_GAPS = {"gap": "gap %", "gap_half": "2nd half %"}


def compare(
    runs: Mapping[str, RunData],
    *,
    baseline: str,
    metrics: Sequence[str],
    level: float | None = None,
    level_name: str = "level",
) -> dict[str, Any]:
    """What a table and a page need, and a script can read: for every run and metric its end and its gaps.

    end: mean of the newest tenth of the curve, 20 steps at most. gap: mean gap of the same steps; gap_half:
    of the second half of the run. Both are shares, not percent, and None for the baseline.
    """
    rows = [
        {"name": name, "metrics": {key: _figures(run, runs.get(baseline), key) for key in metrics}}
        for name, run in runs.items()
    ]
    return {
        "baseline": baseline,
        "metrics": list(metrics),
        "level": level,
        "level_name": level_name,
        "rows": rows,
    }


def gap_curve(run: RunData, base: RunData, key: str) -> Curve:
    """Steps that both runs have, and the relative gap at each; steps that are not finite are left out."""
    own, other = (dict(zip(*one.curves.get(key, NO_CURVE), strict=True)) for one in (run, base))
    found = [(step, (own[step] - other[step]) / other[step]) for step in own if other.get(step)]
    finite = [(step, gap) for step, gap in found if math.isfinite(gap)]
    return [step for step, _ in finite], [gap for _, gap in finite]


def running_mean(values: Sequence[float], width: int) -> list[float]:
    """Mean of the `width` values around each place, of fewer at both ends."""
    before, after = (width - 1) // 2, width // 2 + 1
    windows = (values[max(0, i - before) : i + after] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def comparison_rows(
    found: Mapping[str, Any], gaps: Sequence[str] = ("gap",)
) -> tuple[list[str], list[list[str]]]:
    """Heads and rows of the table: a row a run; of each metric its end and the `gaps` of `compare`."""
    heads = ["run"]
    for key in found["metrics"]:
        heads += [key, *(_GAPS[name] for name in gaps)]
    rows = []
    for row in found["rows"]:
        cells = [row["name"]]
        for key in found["metrics"]:
            figures = row["metrics"][key]
            cells.append("-" if figures is None else fixed(figures["end"], 4))
            cells += [percent(figures[name]) if figures else "-" for name in gaps]
        rows.append(cells)
    return heads, rows


def comparison_lines(found: Mapping[str, Any]) -> list[str]:
    """The table for a screen, with what it says."""
    heads, rows = comparison_rows(found)
    widths = [max(len(row[i]) for row in [heads, *rows]) for i in range(len(heads))]
    lines = [
        "  ".join(
            cell.ljust(width) if not i else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in [heads, *rows]
    ]
    return [*lines, note(found)]


def note(found: Mapping[str, Any]) -> str:
    """What the columns of the table are."""
    level = f"; {found['level_name']}: {100 * found['level']:.2g} %" if found["level"] else ""
    return (
        f"means over the last tenth of each run; gap: relative distance to {found['baseline']} over the "
        f"same steps{level}"
    )


def percent(gap: float | None) -> str:
    """0.0031 as +0.310; - where there is no gap."""
    return "-" if gap is None else f"{100 * gap:+.3f}"


def _figures(run: RunData, base: RunData | None, key: str) -> dict[str, float | None] | None:
    tail = run.tail_mean(key)
    if tail is None or not math.isfinite(tail[0]):
        return None
    gaps = [] if base is None or run is base else gap_curve(run, base, key)[1]
    return {
        "end": tail[0],
        "gap": _mean(gaps[-tail[1] :]),
        "gap_half": _mean(gaps[len(gaps) // 2 :]),
    }


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
