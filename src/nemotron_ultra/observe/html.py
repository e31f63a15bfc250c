"""One self-contained HTML page of one or more runs: figures, curves, tables, samples; no request leaves it.

The page is complete without its script, which only shows values under the pointer.
"""

from __future__ import annotations

import contextlib
import html
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from nemotron_ultra.errors import ConfigError, DataError
from nemotron_ultra.observe import charts, svg, tables
from nemotron_ultra.observe.numbers import compact, duration, fixed
from nemotron_ultra.observe.run_data import RunData, config_differences, load_run
from nemotron_ultra.observe.style import CSS, SCRIPT

_SHOWN_SAMPLES = 5
_MARK = '<meta name="generator" content="nemotron_ultra.report">'
# Facts of run.json that get a table of their own, by key; everything else is listed under "Other facts".
_TABLES = {
    "precision": "Precision",
    "backends": "Backends",
    "ops": "Backends",
    "plan": "Plan",
    "machine": "Machine",
    "data": "Data",
    "tokenizer": "Tokenizer",
}


def write_report(run_dirs: Sequence[str | Path], out: str | Path) -> Path:
    """Write the page of `run_dirs` (the first is the one compared with) to `out`, whole or not at all.

    Works on a run in progress, on one metric row, and without run.json, config.yaml or samples.jsonl.
    Errors: ConfigError for a folder that is no run or an `out` that is no page of ours, DataError for a run
    without metrics or a disk that cannot be written.
    """
    out = Path(out)
    runs = [load_run(folder) for folder in run_dirs]
    check_page(out)
    return save_page(render(runs), out)


def save_page(page: str, out: Path) -> Path:
    """Write a page, whole or not at all. Errors: DataError for a disk that cannot be written."""
    fresh = out.with_name(f".{out.name}.tmp")
    try:
        fresh.write_text(page, encoding="utf-8")
        os.replace(fresh, out)
    except OSError as error:
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise DataError(
            f"cannot write {out}", got=error.strerror, do="name another file with --out"
        ) from error
    return out


def check_page(out: Path) -> None:
    """Raise ConfigError unless `out` is free or a page of ours: nothing else is ever overwritten."""
    if not out.parent.is_dir():
        raise ConfigError(f"{out.parent} is not a folder", do="make it, or name another file with --out")
    if out.is_dir():
        raise ConfigError(f"{out} is a folder", do="name a file with --out")
    if out.exists() and not _is_page(out):
        raise ConfigError(f"{out} exists and is not a report page", do="name another file with --out")


def _is_page(path: Path) -> bool:
    if not path.is_file():  # a device has no end
        return False
    with path.open("rb") as file:
        return _MARK.encode() in file.read(400)


def render(runs: Sequence[RunData]) -> str:
    """The page as text."""
    runs = _distinct(runs)
    title = " and ".join(run.name for run in runs)
    body = [_header(runs), _figures(runs[0]) if len(runs) == 1 else _figure_table(runs)]
    if len(runs) > 1:
        body.append(_differences(runs))
    for section, content in charts.sections(runs):
        body.append(f"<h2>{section}</h2>{content}")
    for number, run in enumerate(runs):
        body.append(_samples(run, number, len(runs) > 1))
    for number, run in enumerate(runs):
        body.append(_details(run, number, len(runs) > 1))
    more = charts.other_metrics(runs)
    if more:
        body.append(fold("More metrics", more))
    return document(title, "".join(body))


def document(title: str, body: str) -> str:
    """A whole page: `body` is HTML, `title` text."""
    script = SCRIPT % {"left": svg.LEFT, "right": svg.RIGHT, "top": svg.TOP, "bottom": svg.BOTTOM}
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'{_MARK}<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{CSS}</style></head><body><main>{body}"
        f"<footer>nemotron_ultra report, written {time.strftime('%Y-%m-%d %H:%M')}</footer></main>"
        f"<script>{script}</script></body></html>\n"
    )


def _distinct(runs: Sequence[RunData]) -> list[RunData]:
    """Runs of equal name are told apart by their folder."""
    names = [run.name for run in runs]
    return [
        RunData(**{**vars(run), "name": str(run.path) if names.count(run.name) > 1 else run.name})
        for run in runs
    ]


def _header(runs: Sequence[RunData]) -> str:
    lines = []
    for number, run in enumerate(runs):
        dot = f'<span class="dot c{number % 8}"></span>' if len(runs) > 1 else ""
        lines.append(
            f'<h1>{dot}{html.escape(run.name)}<span class="pill">{html.escape(_state(run))}</span></h1>'
        )
        lines.append(f'<p class="sub">{html.escape(_subtitle(run))}</p>')
        if run.problems:
            lines.append(f'<p class="faint">{html.escape("; ".join(run.problems))}</p>')
    return f"<header>{''.join(lines)}</header>"


def _state(run: RunData) -> str:
    total = run.total_steps
    if total is None:
        return f"step {run.last_step:,}"
    if run.last_step >= total:
        return f"finished, {run.last_step:,} steps"
    return f"step {run.last_step:,} of {total:,}, {100 * run.last_step // total} %"


def _subtitle(run: RunData) -> str:
    recipe = run.facts.get("recipe") or run.config.get("recipe")
    parts = [f"recipe {recipe}"] if recipe else []
    if run.pattern:
        shown = (
            run.pattern if len(run.pattern) <= 40 else f"{run.pattern[:40]}... ({len(run.pattern)} layers)"
        )
        parts.append(f"pattern {shown}")
    count, active = _parameter_count(run)
    if count:
        parts.append(f"{compact(count)} parameters" + (f" ({compact(active)} active)" if active else ""))
    return " · ".join(parts)


def _parameter_count(run: RunData) -> tuple[object, object]:
    counts = run.facts.get("parameters")
    return (counts.get("total"), counts.get("active")) if isinstance(counts, dict) else (None, None)


def key_figures(run: RunData) -> list[tuple[str, str, str]]:
    """(figure, what it is, remark) of each key figure that the run has."""
    xz, tail = run.xz_bits_per_byte(), run.tail_mean("loss")
    beside = f"xz needs {xz:.3f} on the same text" if xz is not None else ""
    found = [
        ("loss", lambda _: fixed(tail[0]), "training loss", _last_steps(tail)),
        ("val/loss", fixed, "validation loss", "nats a token"),
        ("val/bits_per_byte", fixed, "bits per byte, validation", beside),
        ("tokens", compact, "tokens seen", f"{run.last_step:,} steps"),
        ("seconds", lambda _: duration(_seconds(run)), "time in steps", _pace(run)),
        (
            "tokens_per_second",
            lambda _: compact(_median(run, "tokens_per_second")),
            "tokens a second",
            _share(run),
        ),
        ("memory_gb", lambda value: f"{fixed(value, 2)} GB", "peak memory", ""),
    ]
    return [(show(run.last(key)), what, note) for key, show, what, note in found if key in run.curves]


def _last_steps(tail: tuple[float, int] | None) -> str:
    return "" if tail is None else f"mean of the last {tail[1]} steps" if tail[1] > 1 else "last step"


def _figures(run: RunData) -> str:
    cells = "".join(
        f'<div class="figure"><b>{html.escape(figure)}</b><span>{html.escape(what)}</span>'
        f'<span class="faint">{html.escape(remark)}</span></div>'
        for figure, what, remark in key_figures(run)
    )
    return f'<div class="figures">{cells}</div>'


def _figure_table(runs: Sequence[RunData]) -> str:
    found = [{what: (figure, remark) for figure, what, remark in key_figures(run)} for run in runs]
    names = list(dict.fromkeys(what for one in found for what in one))
    heads = "".join(
        f'<th><span class="dot c{i % 8}"></span>{html.escape(run.name)}</th>' for i, run in enumerate(runs)
    )
    rows = ""
    for what in names:
        cells = (one.get(what, ("-", "")) for one in found)
        rows += f'<tr><td class="key">{html.escape(what)}</td>' + "".join(
            f'<td><b>{html.escape(figure)}</b> <span class="faint">{html.escape(remark)}</span></td>'
            for figure, remark in cells
        )
        rows += "</tr>"
    return (
        f'<h2>Key figures</h2><section class="card scroll"><table><thead><tr><th></th>{heads}</tr></thead>'
        f"<tbody>{rows}</tbody></table></section>"
    )


def _differences(runs: list[RunData]) -> str:
    rows = [[key, *values] for key, values in config_differences(runs)]
    content = (
        tables.table(["key", *(run.name for run in runs)], rows)
        if rows
        else "<p>The configurations are equal.</p>"
    )
    return f'<h2>What differs in the configuration</h2><section class="card">{content}</section>'


def _samples(run: RunData, number: int, several: bool) -> str:
    if not run.samples:
        return ""
    newest = list(reversed(run.samples))
    shown, rest = newest[:_SHOWN_SAMPLES], newest[_SHOWN_SAMPLES:]
    content = "".join(map(sample, shown))
    if rest:
        content += fold(f"{len(rest)} earlier samples", "".join(map(sample, rest)))
    title = _run_title("Text samples", run, number, several)
    return f'<h2>{title}</h2><section class="card">{content}</section>'


def sample(row: Mapping[str, object]) -> str:
    """One row of samples.jsonl: a continuation, a rollout with its domain, reward and end, or an answer
    beside the one that was packed.
    """
    facts = [f"step {tables.text(row.get('step', ''))}"]
    facts += [tables.text(row["domain"])] if "domain" in row else []
    facts += [f"reward {fixed(row['reward'])}"] if "reward" in row else []
    facts += ["cut at the limit"] if row.get("finish_reason") == "length" else []
    prompt, text = (html.escape(str(row.get(key, ""))) for key in ("prompt", "text"))
    packed = (
        f'\n<span class="faint">packed: {html.escape(str(row["packed"]))}</span>' if "packed" in row else ""
    )
    arrow = " &rarr; " if "domain" in row else ""  # an answer does not continue its question
    return (
        f'<div class="sample"><p class="faint">{" · ".join(facts)}</p>'
        f'<pre><span class="prompt">{prompt}{arrow}</span>{text}{packed}</pre></div>'
    )


def _details(run: RunData, number: int, several: bool) -> str:
    blocks = []
    count = run.facts.get("parameters")
    if isinstance(count, dict):
        blocks.append(fold("Parameters by block", tables.parameters(count), opened=not several))
    for key, title in _TABLES.items():
        if run.facts.get(key):
            opened = not several and key in ("precision", "backends", "ops") and len(run.facts[key]) <= 10
            blocks.append(fold(title, tables.facts(run.facts[key]), opened=opened))
    rest = {k: v for k, v in run.facts.items() if k not in _TABLES and k != "parameters"}
    if rest:
        blocks.append(fold("Other facts", tables.facts(rest)))
    if run.config:
        shown = yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True, width=110)
        blocks.append(fold("Configuration", f"<pre>{html.escape(shown)}</pre>"))
    title = _run_title("Model, machine, configuration", run, number, several)
    return f"<h2>{title}</h2>{''.join(blocks)}" if blocks else ""


def fold(title: str, content: str, opened: bool = False) -> str:
    """A block under a heading that opens it; `content` is HTML, `title` text."""
    head = f"<summary>{html.escape(title)}</summary>"
    return f"<details{' open' if opened else ''}>{head}<div>{content}</div></details>"


def _run_title(title: str, run: RunData, number: int, several: bool) -> str:
    dot = f'<span class="dot c{number % 8}"></span>' if several else ""
    return f"{dot}{title}{': ' + html.escape(run.name) if several else ''}"


def _seconds(run: RunData) -> float:
    return sum(value for value in run.curves.get("seconds", ([], []))[1] if value == value)


def _pace(run: RunData) -> str:
    seconds = _median(run, "seconds")
    return f"{seconds:.3g} s a step" if seconds else ""


def _median(run: RunData, key: str) -> float | None:
    values = sorted(value for value in run.curves.get(key, ([], []))[1] if value == value)
    return values[len(values) // 2] if values else None


def _share(run: RunData) -> str:
    share = _median(run, "matmul_share")
    return f"{100 * share:.0f} % of the matmul limit" if share is not None else ""
