"""Facts as HTML tables: dicts, lists of dicts, lists of lines, whatever their keys; every text is escaped."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence

from nemotron_ultra.observe.numbers import compact, fixed


def text(value: object) -> str:
    """Any value as escaped HTML text."""
    return html.escape(_plain(value))


def table(heads: Sequence[str], rows: Sequence[Sequence[object]], keys: bool = True) -> str:
    """Heads and cells; columns that hold only numbers are set right, the first is a key if `keys`."""
    numeric = [all(_is_number(row[i]) or row[i] in ("", None) for row in rows) for i in range(len(heads))]
    mark = ["n" if number else "key" if keys and not i else "" for i, number in enumerate(numeric)]
    head = "".join(
        f'<th class="{m if m == "n" else ""}">{text(h)}</th>' for h, m in zip(heads, mark, strict=True)
    )
    body = "".join(
        "<tr>" + "".join(f'<td class="{m}">{_cell(v)}</td>' for v, m in zip(row, mark, strict=True)) + "</tr>"
        for row in rows
    )
    thead = f"<thead><tr>{head}</tr></thead>" if any(heads) else ""
    return f'<div class="scroll"><table>{thead}<tbody>{body}</tbody></table></div>'


def facts(value: object) -> str:
    """By shape: dicts of dicts and lists of dicts are tables, a flat dict two columns, lines a <pre>."""
    if isinstance(value, Mapping) and value:
        return _mapping(value)
    if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        heads = list(dict.fromkeys(key for item in value for key in item))
        return table([_title(h) for h in heads], [[item.get(h, "") for h in heads] for item in value])
    if isinstance(value, list) and value and all(isinstance(item, list) for item in value):
        width = max(len(item) for item in value)
        return table([""] * width, [[*item, *[""] * (width - len(item))] for item in value])
    if isinstance(value, list):
        return f"<pre>{html.escape(chr(10).join(_plain(item) for item in value))}</pre>"
    return f"<p>{text(value)}</p>"


def parameters(value: Mapping[str, object]) -> str:
    """Parameters by block kind with each kind's share of the total as a bar."""
    blocks = value.get("blocks", value)
    rows = blocks.items() if isinstance(blocks, Mapping) else ()
    counts = [(name, row) for name, row in rows if isinstance(row, Mapping) and _is_number(row.get("total"))]
    total = sum(row["total"] for _, row in counts)
    if not total:
        return facts(value)
    body = "".join(_parameter_row(name, row, total) for name, row in counts)
    active = value.get("active") if blocks is not value else None
    body += _parameter_row("all", {"total": total, "active": active}, 0)
    heads = '<th>Block</th><th class="n">Layers</th><th class="n">Total</th><th></th>'
    heads += '<th class="n">Active a token</th>'
    return f'<div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>'


def _parameter_row(name: str, row: Mapping[str, object], total: float) -> str:
    share = row["total"] / total if total else 0.0
    bar = f'<span class="share" style="width:{260 * share:.0f}px"></span> '
    bar += f'<span class="faint">{100 * share:.1f} %</span>'
    layers = text(row.get("layers", "")) if row.get("layers") is not None else ""
    active = compact(row.get("active")) if row.get("active") is not None else ""
    return (
        f'<tr><td class="key">{text(name)}</td><td class="n">{layers}</td>'
        f'<td class="n">{compact(row["total"])}</td><td>{bar if total else ""}</td>'
        f'<td class="n">{active}</td></tr>'
    )


def _mapping(value: Mapping[str, object]) -> str:
    inner = list(value.values())
    if len(inner) > 1 and all(isinstance(item, Mapping) and item for item in inner):
        heads = list(dict.fromkeys(key for item in inner for key in item))
        if len(heads) <= 8:
            rows = [[name, *(item.get(h, "") for h in heads)] for name, item in value.items()]
            return table(["", *(_title(h) for h in heads)], rows)
    rows = "".join(
        f'<tr><td class="key">{text(_title(str(key)))}</td><td>{_cell(item)}</td></tr>'
        for key, item in value.items()
    )
    return f'<div class="scroll"><table class="flat"><tbody>{rows}</tbody></table></div>'


def _cell(value: object) -> str:
    nested = isinstance(value, Mapping | list) and bool(value)
    flat_list = isinstance(value, list) and not any(isinstance(item, Mapping | list) for item in value)
    if nested and not flat_list:
        return facts(value)
    return text(value)


def _plain(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        whole = math.isfinite(value) and value == int(value) and abs(value) < 1e15
        return (
            f"{int(value):,}"
            if whole and abs(value) >= 1e4
            else f"{value:.6g}"
            if math.isfinite(value)
            else fixed(value)
        )
    if isinstance(value, list):
        return ", ".join(_plain(item) for item in value)
    return str(value)


def _title(key: str) -> str:
    return key.replace("_", " ")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
