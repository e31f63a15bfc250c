"""Which curves of the runs share a chart: one run has a colour per metric, several runs a colour per run."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence

from nemotron_ultra.config.model import BLOCK_LETTERS
from nemotron_ultra.observe import svg
from nemotron_ultra.observe.heat import Heat
from nemotron_ultra.observe.heat import draw as draw_heat
from nemotron_ultra.observe.heat import scale as heat_scale
from nemotron_ultra.observe.run_data import RunData, lookup
from nemotron_ultra.observe.svg import Chart, Line

Keys = list[tuple[str, str, str]]

_HEAT_COLUMNS = 90
# Block, title, [(key, label, style)], options. Style: dots for rare points, exact for what is not measured.
_ZERO = {"from_zero": True}
_GROUPS = [
    ("Learning", "Loss", [("loss", "train", ""), ("val/loss", "validation", "dots")], {}),
    (
        "Learning",
        "MTP loss by depth",
        [("mtp_{}/loss", "depth {}", ""), ("val/mtp_{}/loss", "depth {}, validation", "dots")],
        {},
    ),
    ("Learning", "MTP: argmax equals the label", [("mtp_{}/accept", "depth {}", "")], _ZERO),
    ("Learning", "Bits per byte of the validation text", [("val/bits_per_byte", "validation", "dots")], {}),
    ("Optimizer", "Gradient norm before clipping", [("grad_norm", "norm", "")], {"log_y": True}),
    ("Optimizer", "Learning rate", [("lr", "learning rate", "exact")], _ZERO),
    ("Speed", "Tokens per second", [("tokens_per_second", "tokens/s", "")], _ZERO),
    ("Speed", "Share of the measured matmul limit", [("matmul_share", "share", "")], _ZERO),
    (
        "Experts",
        "MaxVio over MoE layers (max/mean - 1)",
        [("moe/max_vio_median", "median layer", ""), ("moe/max_vio_max", "worst layer", "")],
        _ZERO,
    ),
    ("Experts", "Load-balancing loss", [("balance_loss", "balance loss", "")], {}),
]
_KNOWN_PREFIXES = ("moe/", "residual/", "val/")
_MORE = {"tokens", "seconds", "memory_gb"}


def sections(runs: Sequence[RunData]) -> Iterator[tuple[str, str]]:
    """Title and HTML of each block of charts; empty charts and blocks are left out."""
    drawn: dict[str, list[str]] = {}
    for section, title, keys, options in _GROUPS:
        chart = _chart(runs, title, keys, options)
        drawn.setdefault(section, []).append(_card(chart, runs))
    drawn.setdefault("Experts", []).extend(
        _heat(run, runs, "moe/", "/max_vio", "MaxVio by layer", False) for run in runs
    )
    drawn["Residual stream"] = [
        _profile(runs),
        *(_heat(r, runs, "residual/", "", "Residual norm by layer", True) for r in runs),
    ]
    for section, cards in drawn.items():
        cards = [card for card in cards if card]
        if cards:
            yield section, f'<div class="grid">{"".join(cards)}</div>'


def other_metrics(runs: Sequence[RunData]) -> str:
    """A chart for each metric that no other chart shows, so that a new trainer's figures are never hidden."""
    shown = {key for _, _, keys, _ in _GROUPS for template, _, _ in keys for key in _keys(runs, template)}
    names = dict.fromkeys(key for run in runs for key in run.curves)
    rest = [key for key in names if key not in shown and _charted_alone(key)]
    cards = [_card(_chart(runs, key, [(key, key, "")], {}), runs) for key in rest]
    return f'<div class="grid">{"".join(card for card in cards if card)}</div>' if any(cards) else ""


def _charted_alone(key: str) -> bool:
    by_name = key.startswith("val/") and key.count("/") == 2 and not key.startswith("val/mtp_")
    return by_name or key in _MORE or not key.startswith(_KNOWN_PREFIXES)


def _chart(runs: Sequence[RunData], title: str, keys: Keys, options: dict) -> Chart:
    lines = [line for number, run in enumerate(runs) for line in _lines(run, number, keys, len(runs) > 1)]
    return Chart(title, lines, note=_note(runs, title), references=_references(runs, keys), **options)


def _lines(run: RunData, number: int, keys: Keys, several: bool) -> Iterator[Line]:
    """One run: a colour a metric. Several: a colour a run, a dash a metric, no validation of MTP depths."""
    found = [(key, label.format(_depth(key)), style) for t, label, style in keys for key in _keys([run], t)]
    if several:
        found = [entry for entry in found if not entry[0].startswith("val/mtp_")]
    plain = [key for key, _, style in found if style != "dots"]
    for place, (key, label, style) in enumerate(found):
        dots = style == "dots"
        colour = number if several else place % len(plain) if dots and len(plain) > 1 else place
        dash = (place if several else place // max(2, len(plain))) if not dots or len(plain) > 1 else 0
        name = run.name if several and len(keys) == len(found) == 1 else label
        name = f"{run.name}: {label}" if several and name is label else name
        yield Line(name, *run.curves[key], colour, dash, dots, exact=style == "exact")


def _keys(runs: Sequence[RunData], template: str) -> list[str]:
    names = [template.format(depth) for depth in range(1, 17)] if "{}" in template else [template]
    return [name for name in names if any(name in run.curves for run in runs)]


def _depth(key: str) -> str:
    return "".join(filter(str.isdecimal, key.partition("mtp_")[2].partition("/")[0]))


def _references(runs: Sequence[RunData], keys: Keys) -> list[tuple[str, float]]:
    """The xz line under bits per byte: one if the runs share their validation text."""
    if keys[0][0] != "val/bits_per_byte":
        return []
    found = {run.name: value for run in runs if (value := run.xz_bits_per_byte()) is not None}
    if len(set(found.values())) == 1:
        return [(f"xz: {next(iter(found.values())):.3f}", next(iter(found.values())))]
    return [(f"{name}: xz {value:.3f}", value) for name, value in found.items()]


def _note(runs: Sequence[RunData], title: str) -> str:
    if not title.startswith("MaxVio"):
        return ""
    bounds = {_bound(run) for run in runs} - {None}
    return f"bound E/k - 1 = {', '.join(f'{bound:.4g}' for bound in sorted(bounds))}" if bounds else ""


def _bound(run: RunData) -> float | None:
    experts, chosen = (
        lookup(run.config, "model.n_routed_experts"),
        lookup(run.config, "model.num_experts_per_tok"),
    )
    return experts / chosen - 1 if isinstance(experts, int) and isinstance(chosen, int) and chosen else None


def _profile(runs: Sequence[RunData]) -> str:
    """Residual norm over depth, at the first and the last logged step."""
    lines = []
    for number, run in enumerate(runs):
        layers = {int(name): curve for name, curve in run.numbered("residual/").items() if name.isdecimal()}
        if not layers:
            continue
        for place, (index, when) in enumerate(((-1, "last step"), (0, "first step"))):
            name = f"{run.name}: {when}" if len(runs) > 1 else when
            values = [curve[1][index] for curve in layers.values()]
            lines.append(Line(name, list(layers), values, number if len(runs) > 1 else place, place, True))
    return _card(Chart("Residual norm over depth", lines, log_y=True, x_label="layer"), runs)


def _heat(run: RunData, runs: Sequence[RunData], prefix: str, suffix: str, title: str, log: bool) -> str:
    """Layers from top to bottom, steps from left to right."""
    layers = run.numbered(prefix, suffix)
    if len(layers) < 2 or max(len(steps) for steps, _ in layers.values()) < 2:
        return ""
    steps = sorted({step for curve in layers.values() for step in curve[0]})
    size = math.ceil(len(steps) / _HEAT_COLUMNS)
    starts = [steps[i] for i in range(0, len(steps), size)]
    column = {step: number // size for number, step in enumerate(steps)}
    rows = [_bucket_means(curve, column, len(starts)) for curve in layers.values()]
    labels = [_layer_label(run, name) if prefix == "residual/" else name for name in layers]
    name = f"{title}: {run.name}" if len(runs) > 1 else title
    heat = Heat(name, labels, starts, rows, log)
    strip = draw_heat(heat)
    return _section(name, heat_scale(heat), strip) if strip else ""


def _bucket_means(curve, column: dict[int, int], count: int) -> list[float]:
    sums, seen = [0.0] * count, [0] * count
    for step, value in zip(*curve, strict=True):
        if math.isfinite(value):
            sums[column[step]] += value
            seen[column[step]] += 1
    return [total / number if number else math.nan for total, number in zip(sums, seen, strict=True)]


def _layer_label(run: RunData, name: str) -> str:
    letter = run.pattern[int(name)] if name.isdecimal() and int(name) < len(run.pattern) else ""
    return f"{name} {letter}" if letter in BLOCK_LETTERS else name


def _card(chart: Chart, runs: Sequence[RunData]) -> str:
    return card(chart, legend=len(chart.lines) > 1 or len(runs) > 1)


def card(chart: Chart, *, legend: bool = True) -> str:
    """A chart under its title with its legend, or "" if nothing of it can be drawn."""
    picture = svg.draw(chart)
    note = f'<span class="faint">{html.escape(chart.note)}</span>' if chart.note else ""
    shown = _legend(chart) if legend else ""
    return _section(chart.title, note + shown, picture) if picture else ""


def _section(title: str, beside: str, picture: str) -> str:
    head = f"<header><h3>{html.escape(title)}</h3>{beside}</header>"
    return f'<section class="card">{head}{picture}</section>'


def _legend(chart: Chart) -> str:
    entries = ""
    for line in chart.lines:
        colour = f"c{line.colour % 8}"
        dot = f'<circle class="{colour}" cx="11" cy="4" r="3"/>' if line.dots else ""
        stroke = f'<path class="line {colour} d{line.dash % 4}" d="M1 4H21"/>'
        entries += f'<span><svg viewBox="0 0 22 8">{stroke}{dot}</svg>{html.escape(line.label)}</span>'
    return f'<div class="legend">{entries}</div>'
