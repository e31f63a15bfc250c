"""One self-contained HTML page of one or more runs."""

from __future__ import annotations

import html
import os
from collections.abc import Sequence
from pathlib import Path

from nemotron_ultra.observe.metrics import read_metrics


def write_report(run_dirs: Sequence[str | Path], out: str | Path) -> Path:
    """Write the page of `run_dirs` to `out` (whole or not at all) and return its path."""
    rows = "".join(
        f"<h2>{html.escape(Path(run).name)}</h2><p>{len(read_metrics(Path(run) / 'metrics.jsonl'))} rows</p>"
        for run in run_dirs
    )
    fresh = Path(out).with_name(Path(out).name + ".tmp")
    fresh.write_text(f"<!doctype html><meta charset=utf-8><title>runs</title>{rows}", encoding="utf-8")
    os.replace(fresh, out)
    return Path(out)
