"""Curves as inline SVG: x = left + w (s - s0) / (s1 - s0), y linear or log10; colours come from CSS.

A measured curve is a thin raw line and, from 20 points on, a smoothed one (exponential kernel to both sides).
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from nemotron_ultra.observe.numbers import compact, fixed

WIDTH, HEIGHT = 560, 250
LEFT, RIGHT, TOP, BOTTOM = 50, 12, 10, 22
POINTS = 500
SMOOTH_FROM = 20
HUGE = 1e100  # larger numbers and NaN are marked, not drawn


@dataclass(frozen=True)
class Line:
    """One curve. `colour`, `dash`: classes c0-c7, d0-d3; `dots` marks points; `exact`: no smoothing."""

    label: str
    xs: Sequence[float]
    ys: Sequence[float]
    colour: int = 0
    dash: int = 0
    dots: bool = False
    exact: bool = False


@dataclass(frozen=True)
class Chart:
    """Title, curves and scale (log_y None: log if the range asks for it); `references`: labelled levels."""

    title: str
    lines: list[Line]
    note: str = ""
    log_y: bool | None = None
    references: list[tuple[str, float]] = field(default_factory=list)
    x_label: str = "step"
    from_zero: bool = False


@dataclass(frozen=True)
class Frame:
    """Maps data to pixels. On a log axis `low` and `high` are powers of ten's exponents."""

    x0: float
    x1: float
    low: float
    high: float
    log: bool

    def x(self, value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (value - self.x0) / (self.x1 - self.x0)

    def y(self, value: float) -> float:
        scaled = math.log10(value) if self.log else value
        return TOP + (HEIGHT - TOP - BOTTOM) * (self.high - scaled) / (self.high - self.low)

    def drawable(self, value: float) -> bool:
        return abs(value) < HUGE and (not self.log or value > 0)


def draw(chart: Chart) -> str:
    """The chart as an <svg> element, or "" if no curve has a point that can be drawn."""
    frame = _frame(chart)
    if frame is None:
        return ""
    parts = [*_axes(frame, chart.x_label)]
    parts += [_reference(frame, label, value) for label, value in chart.references if frame.drawable(value)]
    for line in chart.lines:
        parts += _curve(frame, line)
    data = (
        f'data-x0="{frame.x0:.10g}" data-x1="{frame.x1:.10g}" data-low="{frame.low:.10g}" '
        f'data-high="{frame.high:.10g}" data-log="{int(frame.log)}"'
    )
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{html.escape(chart.title)}" {data}>{"".join(parts)}</svg>'
    )


def smooth(values: Sequence[float]) -> list[float]:
    """Mean of the finite values under a two-sided exponential kernel, a 20th of the curve wide."""
    keep = 1.0 - 1.0 / min(50.0, max(2.0, len(values) / 40))  # 100 steps at most
    ahead = _running(values, keep)
    back = _running(values[::-1], keep)[::-1]
    out = []
    for value, (sum_a, weight_a), (sum_b, weight_b) in zip(values, ahead, back, strict=True):
        own = (value, 1.0) if math.isfinite(value) else (0.0, 0.0)  # both directions hold it
        weight = weight_a + weight_b - own[1]
        out.append((sum_a + sum_b - own[0]) / weight if weight > 0 else math.nan)
    return out


def _running(values: Sequence[float], keep: float) -> list[tuple[float, float]]:
    """Decayed sum and weight of the values up to each place."""
    total = weight = 0.0
    out = []
    for value in values:
        total, weight = keep * total, keep * weight
        if math.isfinite(value):
            total, weight = total + value, weight + 1.0
        out.append((total, weight))
    return out


def thin(xs: Sequence[float], ys: Sequence[float], count: int = POINTS) -> tuple[list[float], list[float]]:
    """At most about `count` points: the lowest and highest of each bucket in their order, so spikes stay."""
    if len(xs) <= count:
        return list(xs), list(ys)
    size = math.ceil(2 * len(xs) / count)
    keep: list[int] = []
    for start in range(0, len(xs), size):
        bucket = [i for i in range(start, min(start + size, len(xs))) if math.isfinite(ys[i])]
        if bucket:
            keep += sorted({min(bucket, key=ys.__getitem__), max(bucket, key=ys.__getitem__)})
    return [xs[i] for i in keep], [ys[i] for i in keep]


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers (1, 2, 5 times a power of ten) within [low, high]."""
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [step * i for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _frame(chart: Chart) -> Frame | None:
    xs = [x for line in chart.lines for x in line.xs]
    ys = [y for line in chart.lines for y in line.ys] + [value for _, value in chart.references]
    ys = [y for y in ys if abs(y) < HUGE]
    log = _wants_log(ys) if chart.log_y is None else chart.log_y and any(y > 0 for y in ys)
    ys = [math.log10(y) for y in ys if y > 0] if log else ys
    if not xs or not ys:
        return None
    low, high = min(ys), max(ys)
    if chart.from_zero and not log and low >= 0:
        low = 0.0
    margin = 0.05 * (high - low) or abs(high) * 0.05 or 1.0
    low = low if chart.from_zero and low == 0 else low - margin
    x0, x1 = min(xs), max(xs)
    return Frame(x0, x1 if x1 > x0 else x0 + 1, low, high + margin, log)


def _wants_log(ys: Sequence[float]) -> bool:
    return bool(ys) and min(ys) > 0 and max(ys) > 200 * min(ys)


def _axes(frame: Frame, x_label: str) -> Iterator[str]:
    for value in _y_ticks(frame):
        y = frame.y(value)
        yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        place = f'x="{LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end"'
        yield f'<text class="tick" {place}>{_tick(value)}</text>'
    base = HEIGHT - BOTTOM
    for value in (tick for tick in ticks(frame.x0, frame.x1, 6) if tick == int(tick)):
        place = f'x="{frame.x(value):.1f}" y="{base + 15}" text-anchor="middle"'
        yield f'<text class="tick" {place}>{_tick(value)}</text>'
    yield f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}"/>'
    place = f'x="{LEFT - 16}" y="{base + 15}" text-anchor="end"'
    yield f'<text class="tick" {place}>{html.escape(x_label)}</text>'


def _y_ticks(frame: Frame) -> list[float]:
    if not frame.log:
        return ticks(frame.low, frame.high)
    first, last = math.floor(frame.low), math.ceil(frame.high)
    factors = (1,) if frame.high - frame.low > 2.5 else (1, 2, 5) if frame.high - frame.low > 0.7 else ()
    found = [f * 10.0**e for e in range(first, last + 1) for f in factors]
    found = [value for value in found if frame.low <= math.log10(value) <= frame.high]
    found = found or ticks(10**frame.low, 10**frame.high)
    return [value for value in found[:: math.ceil(len(found) / 8)] if value > 0]


def _tick(value: float) -> str:
    """A round number as short as it goes: 0.05, 2e-4, 8000, 10k, 1.5M."""
    if abs(value) >= 1e4:
        number, unit = re.fullmatch(r"([-\d.]+)(.*)", compact(value)).groups()
        return f"{float(number):g}{unit}"
    if value and abs(value) < 1e-3:
        return re.sub("e-0*", "e-", f"{value:.0e}")
    return f"{value:.4g}"


def _reference(frame: Frame, label: str, value: float) -> str:
    y = frame.y(value)
    return (
        f'<line class="reference" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text class="reference" x="{LEFT + 4}" y="{y - 4:.1f}">'
        f"{html.escape(label)}</text>"
    )


def _curve(frame: Frame, line: Line) -> Iterator[str]:
    style, label = f"c{line.colour % 8} d{line.dash % 4}", html.escape(line.label)
    path = _path(frame, *thin(line.xs, line.ys))
    if len(line.xs) >= SMOOTH_FROM and not line.dots and not line.exact:
        yield f'<path class="raw {style}" d="{path}"/>'
        path = _path(frame, *thin(line.xs, smooth(line.ys)))
    yield f'<path class="line {style}" data-label="{label}" d="{path}"/>'
    if line.dots or len(line.xs) == 1:
        yield from _dots(frame, line, label)
    broken = [x for x, y in zip(line.xs, line.ys, strict=True) if not abs(y) < HUGE]
    for x in broken[:20]:
        said = f"<title>{label} is not finite at step {x:g}</title>"
        place = f'x="{frame.x(x):.1f}" y="{TOP + 9}" text-anchor="middle"'
        yield f'<text class="broken" {place}>&#215;{said}</text>'


def _dots(frame: Frame, line: Line, label: str) -> Iterator[str]:
    points = zip(*thin(line.xs, line.ys), strict=True)
    for x, y in ((x, y) for x, y in points if frame.drawable(y)):
        place = f'cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="3"'
        yield f'<circle class="c{line.colour % 8}" {place}><title>{label}, {x:g}: {fixed(y)}</title></circle>'


def _path(frame: Frame, xs: Sequence[float], ys: Sequence[float]) -> str:
    """SVG path through the points that can be drawn, with a gap at the others."""
    parts, pen = [], "M"
    for x, y in zip(xs, ys, strict=True):
        if not frame.drawable(y):
            pen = "M"
            continue
        parts.append(f"{pen}{frame.x(x):.1f} {frame.y(y):.2f}")
        pen = "L"
    return "".join(parts)
