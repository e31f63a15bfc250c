"""One self-contained page of a chain of runs: scores by domain after every stage, recovery, curves, samples.

Everything comes from files: DIR/scores.json says which stages there are and what they scored, each stage's
folder has its curves, facts and samples. Works while the chain runs; what is not there yet is left out.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from nemotron_ultra.errors import ConfigError, DataError
from nemotron_ultra.observe import tables
from nemotron_ultra.observe.charts import card
from nemotron_ultra.observe.comparison_page import accumulation_section, comparison_section
from nemotron_ultra.observe.html import check_page, document, fold, sample, save_page
from nemotron_ultra.observe.numbers import compact, duration
from nemotron_ultra.observe.run_data import RunData, load_run
from nemotron_ultra.observe.svg import Chart, Line

_SAMPLES = 2  # of each domain and stage on the open page; the others are folded away


@dataclass(frozen=True, kw_only=True)
class StageView:
    """One stage: its entry of the chain's scores.json, and its run if it has begun."""

    entry: Mapping[str, Any]
    run: RunData | None

    @property
    def name(self) -> str:
        return str(self.entry["name"])

    @property
    def scores(self) -> Mapping[str, float]:
        return self.entry.get("scores") or {}


def write_chain_page(folder: str | Path, summary: Mapping[str, Any]) -> Path:
    """Write FOLDER/report.html from `summary`, the content of the chain's scores.json.

    Errors: ConfigError if report.html is no page of ours, DataError for a disk that cannot be written.
    """
    folder = Path(folder)
    out = folder / "report.html"
    check_page(out)
    stages = [StageView(entry=entry, run=run_or_none(folder / entry["name"])) for entry in summary["stages"]]
    return save_page(render_chain(summary, stages), out)


def render_chain(summary: Mapping[str, Any], stages: Sequence[StageView]) -> str:
    """The page as text."""
    body = [_header(summary, stages), _figures(summary), _scores(summary, stages)]
    if summary.get("accumulation"):
        body.append(accumulation_section(summary["accumulation"]))
    if summary.get("comparison"):
        runs = [(number, stage.run) for number, stage in enumerate(stages) if stage.run is not None]
        body.append(comparison_section(summary["comparison"], runs))
    else:
        body.append(_curves(summary, stages))
    body += [_samples(stages), _costs(stages)]
    return document(f"chain {summary['chain']}", "".join(body))


def score_rows(summary: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Heads and rows of the table: a row a stage, a column a domain, in percent; recovery in the last row.

    A teacher's own domain is marked with *.
    """
    domains = list(summary["domains"])
    rows = []
    for entry in summary["stages"]:
        scores = entry.get("scores")
        if scores is None:
            continue
        cells = [percent(scores.get(d)) + ("*" if d == entry.get("domain") else " ") for d in domains]
        rows.append([entry["name"], *cells, percent(entry.get("mean")) + " "])
    recovery = summary.get("recovery")
    if recovery:
        cells = [percent(recovery["domains"].get(domain), 0) + " " for domain in domains]
        rows.append(["recovery", *cells, percent(recovery["mean"], 0) + " "])
    return ["score in %", *domains, "mean"], rows


def score_lines(summary: Mapping[str, Any]) -> list[str]:
    """The table of `score_rows` for a screen."""
    heads, rows = score_rows(summary)
    heads = [heads[0], *(head + " " for head in heads[1:])]
    widths = [max(len(row[i]) for row in [heads, *rows]) for i in range(len(heads))]
    return [
        "  ".join(
            cell.ljust(width) if not i else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in [heads, *rows]
    ]


def percent(value: object, digits: int = 1) -> str:
    """0.4372 as 43.7; - where there is no number."""
    return f"{100 * value:.{digits}f}" if isinstance(value, int | float) and value == value else "-"


def run_or_none(folder: Path) -> RunData | None:
    """The run in a stage's folder, None before its first step."""
    try:
        return load_run(folder)
    except (ConfigError, DataError):  # not begun yet
        return None


def _header(summary: Mapping[str, Any], stages: Sequence[StageView]) -> str:
    done = sum(bool(stage.entry.get("finished")) for stage in stages)
    state = "finished" if done == len(stages) else f"{done} of {len(stages)} stages"
    way = (" · " if summary.get("comparison") else " → ").join(stage.name for stage in stages)
    return (
        f'<header><h1>chain {html.escape(str(summary["chain"]))}<span class="pill">{state}</span></h1>'
        f'<p class="sub">{html.escape(way)} · seed {tables.text(summary.get("seed"))}</p></header>'
    )


def _figures(summary: Mapping[str, Any]) -> str:
    recovery = summary.get("recovery")
    if not recovery:
        return ""
    found = [(percent(recovery["mean"], 0) + " %", "gap recovered", "mean of the domains")]
    for domain, rate in recovery["domains"].items():
        way = " → ".join(percent(recovery[who].get(domain)) for who in ("student", "mopd"))
        remark = f"{way}, teacher {percent(recovery['teacher'].get(domain))}"
        found.append((percent(rate, 0) + (" %" if rate is not None else ""), f"{domain} recovered", remark))
    cells = "".join(
        f'<div class="figure"><b>{html.escape(figure)}</b><span>{html.escape(what)}</span>'
        f'<span class="faint">{html.escape(remark)}</span></div>'
        for figure, what, remark in found
    )
    return f'<div class="figures">{cells}</div>'


def _scores(summary: Mapping[str, Any], stages: Sequence[StageView]) -> str:
    """Scores as numbers with bars; what was asked and how recovery is computed stand below."""
    if not any(stage.scores for stage in stages):
        return ""
    heads = "".join(f'<th class="n">{tables.text(d)}</th><th></th>' for d in [*summary["domains"], "mean"])
    body = ""
    for stage in (stage for stage in stages if stage.scores):
        cells = "".join(
            _bar(stage.scores.get(d), own=d == stage.entry.get("domain")) for d in summary["domains"]
        )
        name = html.escape(stage.name)
        body += f'<tr><td class="key"><a href="{name}/report.html">{name}</a></td>{cells}'
        body += f"{_bar(stage.entry.get('mean'))}</tr>"
    recovery = summary.get("recovery")
    if recovery:
        rates = [*(recovery["domains"].get(d) for d in summary["domains"]), recovery["mean"]]
        cells = "".join(f'<td class="n"><b>{percent(rate, 0)}</b></td><td></td>' for rate in rates)
        body += f'<tr><td class="key"><b>recovery</b></td>{cells}</tr>'
    settings = next(stage.entry.get("settings") or {} for stage in stages if stage.scores)
    note = (
        f"Percent of full marks on {settings.get('problems', '?')} held-out problems a domain, one answer "
        f"each of at most {settings.get('max_new_tokens', '?')} tokens, temperature "
        f"{settings.get('temperature', '?')}. * a teacher on its own domain. "
        "Recovery is (MOPD - student) / (teacher - student), where the teacher is ahead."
    )
    return (
        f'<h2>Scores after every stage</h2><section class="card"><div class="scroll"><table><thead><tr>'
        f"<th>stage</th>{heads}</tr></thead><tbody>{body}</tbody></table></div>"
        f'<p class="faint">{html.escape(note)}</p></section>'
    )


def _bar(score: object, own: bool = False) -> str:
    shown = percent(score)
    if shown == "-":
        return '<td class="n">-</td><td></td>'
    bar = f'<span class="share" style="width:{max(0.0, min(1.0, score)) * 90:.0f}px"></span>'
    return f'<td class="n">{f"<b>{shown}*</b>" if own else shown}</td><td>{bar}</td>'


def _curves(summary: Mapping[str, Any], stages: Sequence[StageView]) -> str:
    """Loss of the stages that learn from text, reward of those that draw it, scores, gaps to teachers.

    A stage has one colour in all charts but the last, where a colour is a domain.
    """
    runs = [(number, stage.run) for number, stage in enumerate(stages) if stage.run is not None]
    loss = [line for n, run in runs if not _is_rl(run) for line in _loss_lines(run, n)]
    reward = [_line(run, "reward/mean", n, run.name) for n, run in runs]
    cards = [_card("Loss", loss), _card("Mean reward of the rollouts", reward)]
    for domain in summary["domains"]:
        key = f"val/{domain}/score"
        cards.append(
            _card(f"Held-out score: {domain}", [_line(run, key, n, run.name, True) for n, run in runs])
        )
    for _, run in runs:
        gaps = [key for key in run.curves if key.startswith("teacher/") and key.endswith("gap_mean")]
        lines = [_line(run, key, n, _between(key)) for n, key in enumerate(gaps)]
        cards.append(_card(f"{run.name}: log p of the teacher - of the student", lines))
    return f'<h2>Curves</h2><div class="grid">{"".join(cards)}</div>' if any(cards) else ""


def _card(title: str, lines: Sequence[Line | None]) -> str:
    return card(Chart(title, [line for line in lines if line is not None]))


def _between(key: str) -> str:
    """teacher/DOMAIN/gap_mean -> DOMAIN, teacher/gap_mean -> all."""
    return "/".join(key.split("/")[1:-1]) or "all"


def _is_rl(run: RunData) -> bool:
    return any(key.startswith("reward/") for key in run.curves)


def _loss_lines(run: RunData, number: int) -> list[Line | None]:
    validation = _line(run, "val/loss", number, f"{run.name}, validation", dots=True)
    return [_line(run, "loss", number, run.name), validation]


def _line(run: RunData, key: str, colour: int, label: str, dots: bool = False) -> Line | None:
    return Line(label, *run.curves[key], colour, dots=dots) if key in run.curves else None


def _samples(stages: Sequence[StageView]) -> str:
    blocks = []
    for stage in stages:
        rows = list(reversed(stage.run.samples)) if stage.run else []
        if not rows:
            continue
        shown, rest = _newest_of_each(rows)
        content = "".join(map(sample, shown))
        if rest:
            content += fold(f"{len(rest)} more", "".join(map(sample, rest[:50])))
        blocks.append(fold(f"{stage.name}: {len(rows)} samples", content, opened=stage is stages[-1]))
    return f"<h2>Samples</h2>{''.join(blocks)}" if blocks else ""


def _newest_of_each(rows: Sequence[Mapping[str, Any]]) -> tuple[list, list]:
    """The first rows of every domain, and the others."""
    shown, rest, seen = [], [], {}
    for row in rows:
        domain = row.get("domain", "")
        seen[domain] = seen.get(domain, 0) + 1
        (shown if seen[domain] <= _SAMPLES else rest).append(row)
    return shown, rest


def _costs(stages: Sequence[StageView]) -> str:
    """Steps, tokens and time of each stage, and their sum."""
    rows, totals = [], [0.0, 0.0, 0.0, 0.0]
    for stage in stages:
        if stage.run is None:
            continue
        cost = stage_cost(stage)
        totals = [total + value for total, value in zip(totals, cost, strict=True)]
        rows.append([stage.name, f"{stage.run.last_step:,}", *_cost_cells(cost), _wall(stage.run)])
    if not rows:
        return ""
    rows.append(["all", "", *_cost_cells(totals), ""])
    heads = ["stage", "steps", "tokens", "in steps", "of it rollouts", "scoring", "from start to end"]
    note = "From start to end counts validation, checkpoints and, where a run was continued, the pauses."
    table = tables.table(heads, rows)
    section = f'<section class="card">{table}<p class="faint">{note}</p></section>'
    return f"<h2>Time and tokens</h2>{section}"


def stage_cost(stage: StageView) -> list[float]:
    """Tokens trained on, seconds in steps, seconds of rollouts within them, seconds of scoring."""
    assert stage.run is not None
    curves, begin = stage.run.curves, (stage.entry.get("branch") or {}).get("step", 0)

    def own(key: str) -> list[float]:
        """Values of the steps that this stage ran itself."""
        return [v for step, v in zip(*curves.get(key, ([], [])), strict=True) if step > begin and v == v]

    tokens = dict(zip(*curves.get("tokens", ([], [])), strict=True))
    trained = (stage.run.last("tokens") or 0.0) - tokens.get(begin, 0.0)
    scoring = stage.entry.get("scoring_seconds")
    return [trained, sum(own("seconds")), sum(own("seconds/rollouts")), float(scoring or 0.0)]


def _cost_cells(cost: Sequence[float]) -> list[str]:
    return [compact(cost[0]), *(duration(seconds) if seconds else "-" for seconds in cost[1:])]


def _wall(run: RunData) -> str:
    """Time between the first start and the end, from run.json."""
    created, finished = run.facts.get("created"), run.facts.get("finished")
    try:
        span = datetime.fromisoformat(str(finished)) - datetime.fromisoformat(str(created))
    except ValueError:
        return "-"
    starts = run.facts.get("started")
    again = len(starts) - 1 if isinstance(starts, list) else 0
    return duration(span.total_seconds()) + (f", continued {again} times" if again > 0 else "")
