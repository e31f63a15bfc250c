"""Heat strips as inline SVG: a row a layer, a column some steps, 12 colours of the value or its log10."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nemotron_ultra.observe.numbers import fixed
from nemotron_ultra.observe.svg import BOTTOM, LEFT, RIGHT, TOP, WIDTH

LEVELS = 12
_HIGHEST_STRIP = 300


@dataclass(frozen=True)
class Heat:
    """`values` has a row for each of `labels` and a column for each of `columns` (the first step in it)."""

    title: str
    labels: Sequence[str]
    columns: Sequence[int]
    values: Sequence[Sequence[float]]
    log: bool = False

    def scaled(self, value: float) -> float:
        """The value or its log10; NaN for what has no colour."""
        if not math.isfinite(value) or (self.log and value <= 0):
            return math.nan
        return math.log10(value) if self.log else value

    def limits(self) -> tuple[float, float] | None:
        """Lowest and highest scaled value, or None if there is none."""
        finite = [s for row in self.values for v in row if math.isfinite(s := self.scaled(v))]
        return (min(finite), max(finite)) if finite else None


def draw(heat: Heat) -> str:
    """The strip as an <svg> element, or "" without any value; each rectangle tells its value as a tooltip."""
    limits = heat.limits()
    if limits is None:
        return ""
    row_height = max(4.0, min(20.0, _HIGHEST_STRIP / len(heat.labels)))
    bottom = TOP + row_height * len(heat.labels)
    every = math.ceil(9 / row_height)
    parts = []
    for number, label in enumerate(heat.labels):
        y = TOP + number * row_height
        if number % every == 0:
            place = f'x="{LEFT - 5}" y="{y + row_height / 2 + 3.5:.1f}" text-anchor="end"'
            parts.append(f'<text class="tick" {place}>{html.escape(label)}</text>')
        parts += _cells(heat, number, y, row_height, limits)
    parts += _ticks(heat.columns, bottom + 15)
    return (
        f'<svg class="heat" viewBox="0 0 {WIDTH} {bottom + BOTTOM:.0f}" role="img" '
        f'aria-label="{html.escape(heat.title)}">{"".join(parts)}</svg>'
    )


def scale(heat: Heat) -> str:
    """The colours from the lowest to the highest value, as HTML."""
    limits = heat.limits()
    if limits is None:
        return ""
    low, high = (10**limit if heat.log else limit for limit in limits)
    swatches = "".join(f'<i class="h{level}"></i>' for level in range(LEVELS))
    return f'<span class="scale">{fixed(low)} {swatches} {fixed(high)}{" (log)" if heat.log else ""}</span>'


def _cells(heat: Heat, number: int, y: float, height: float, limits: tuple[float, float]) -> Iterator[str]:
    """Rectangles of one row: neighbours of the same colour are one, with their mean as its value."""
    row, width = heat.values[number], (WIDTH - LEFT - RIGHT) / len(heat.columns)
    levels = [_level(heat, value, limits) for value in row]
    start = 0
    for end in range(1, len(row) + 1):
        if end < len(row) and levels[end] == levels[start]:
            continue
        if levels[start] is not None:
            mean = sum(row[start:end]) / (end - start)
            steps = f"step {heat.columns[start]}" + (f"-{heat.columns[end - 1]}" if end > start + 1 else "")
            yield (
                f'<rect class="h{levels[start]}" x="{LEFT + start * width:.1f}" y="{y:.1f}" '
                f'width="{(end - start) * width + 0.3:.1f}" height="{height + 0.3:.1f}">'
                f"<title>{html.escape(heat.labels[number])}, {steps}: {fixed(mean)}</title></rect>"
            )
        start = end


def _level(heat: Heat, value: float, limits: tuple[float, float]) -> int | None:
    scaled = heat.scaled(value)
    if not math.isfinite(scaled):
        return None
    low, high = limits
    return min(LEVELS - 1, int(LEVELS * (scaled - low) / ((high - low) or 1.0)))


def _ticks(columns: Sequence[int], y: float) -> Iterator[str]:
    width = (WIDTH - LEFT - RIGHT) / len(columns)
    for i in sorted({round(i * (len(columns) - 1) / 4) for i in range(5)}):
        anchor, shift = ("start", 0) if i == 0 else ("end", 1) if i == len(columns) - 1 else ("middle", 0.5)
        place = f'x="{LEFT + (i + shift) * width:.1f}" y="{y:.0f}" text-anchor="{anchor}"'
        yield f'<text class="tick" {place}>{columns[i]:,}</text>'
    yield f'<text class="tick" x="{LEFT - 16}" y="{y:.0f}" text-anchor="end">step</text>'
