"""One self-contained page of conversations as training sees them: trained text, the rest, where packs begin.

The page is handed plain objects with the attributes below (those of data/preview.py), so that nothing here
knows of files, tokenizers or templates.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Protocol

from nemotron_ultra.observe.html import check_page, document, save_page


class PieceView(Protocol):
    """Text of one token (or of a few that spell one character)."""

    text: str
    ids: Sequence[int]
    trained: bool
    special: bool


class RowView(Protocol):
    """One conversation; pieces[gap:] follow `left_out` tokens that are not shown. stretches: (first, count)
    of trained tokens."""

    about: str
    pieces: Sequence[PieceView]
    tokens: int
    trained: int
    stretches: Sequence[tuple[int, int]]
    gap: int
    left_out: int


class GroupView(Protocol):
    """A pack of `room` tokens, or with room 0 the rows of one chat."""

    about: str
    rows: Sequence[RowView]
    room: int
    tokens: int
    trained: int


class PreviewView(Protocol):
    """What the page shows."""

    name: str
    kind: str
    facts: Sequence[tuple[str, str]]
    groups: Sequence[GroupView]
    dropped: Sequence[tuple[str, str, str]]


_CSS = """
:root{--on:#0b7a53;--on-bg:#e2f5ec;--on-line:#0f9d6b;--off:#7b8696;--tag:#eef1f5;--tag-ink:#5b6675;--lane:#eceff3;
 --given:#c9d1db}
@media (prefers-color-scheme:dark){:root{--on:#8ee8c3;--on-bg:#12382c;--on-line:#4cd3a0;--off:#8793a3;
 --tag:#222b36;--tag-ink:#a3aebd;--lane:#212a35;--given:#3a4656}}
.key{display:flex;flex-wrap:wrap;gap:4px 18px;margin:14px 0 0;font-size:13px;color:var(--soft)}
.key span.t{padding:0 6px}
.lane{display:flex;gap:2px;height:16px;background:var(--lane);border-radius:5px;overflow:hidden;
 margin:8px 0 4px}
.lane a{position:relative;background:var(--given);min-width:2px;display:block}
.lane a:hover{outline:2px solid var(--c0);outline-offset:-2px}
.lane a i{position:absolute;top:0;bottom:0;background:var(--on-line)}
.row{border-top:1px solid var(--rule);margin-top:10px;padding-top:8px}
.row h4{margin:0 0 5px;font-size:12.5px;font-weight:600;color:var(--soft);display:flex;flex-wrap:wrap;
 gap:2px 12px}
.row h4 b{color:var(--ink)}.row h4 .num{font-weight:400;font-variant-numeric:tabular-nums}
.row pre{white-space:pre-wrap;overflow-wrap:anywhere;line-height:1.62;color:var(--off);font-size:12.5px}
.row:target{background:var(--lane);margin:10px -15px 0;padding:8px 15px;border-radius:8px}
.t{color:var(--on);background:var(--on-bg);border-radius:3px;padding:1px 0;
 box-shadow:inset 0 -1.5px var(--on-line);-webkit-box-decoration-break:clone;box-decoration-break:clone}
pre i{font-style:normal}pre i:hover{outline:1px solid var(--c0);border-radius:2px}
.s{display:inline-block;font-size:11px;line-height:1.35;padding:0 5px;border-radius:4px;margin:0 1px;
 background:var(--tag);color:var(--tag-ink)}
.t .s{background:transparent;color:inherit;border:1px solid currentColor;line-height:1.2}
.gap{display:block;text-align:center;color:var(--faint);border:1px dashed var(--rule);border-radius:6px;
 margin:8px 0;padding:2px;font-family:system-ui,sans-serif}
"""


def write_masks_page(preview: PreviewView, out: str | Path) -> Path:
    """Write the page to `out`, whole or not at all.

    Errors: ConfigError for an `out` that is no page of ours, DataError for a disk that cannot be written.
    """
    out = Path(out)
    check_page(out)
    return save_page(render_masks(preview), out)


def render_masks(preview: PreviewView) -> str:
    """The page as text."""
    body = [f"<style>{_CSS}</style>", _header(preview)]
    body += [_group(group, number) for number, group in enumerate(preview.groups)]
    if preview.dropped:
        body.append(_dropped(preview.dropped))
    return document(f"Masks of {preview.name}", "".join(body))


def _header(preview: PreviewView) -> str:
    facts = " · ".join(f"{key} {value}" for key, value in preview.facts)
    rows = [row for group in preview.groups for row in group.rows]
    tokens, trained = sum(row.tokens for row in rows), sum(row.trained for row in rows)
    room = sum(group.room for group in preview.groups)
    packed = preview.kind == "packs"
    figures = [
        (f"{len(preview.groups):,}", "packs shown" if packed else "conversations shown"),
        (f"{len(rows):,}", "conversations in them" if packed else "training rows of them"),
        (f"{tokens:,}", "tokens"),
        (f"{trained / max(tokens, 1):.1%}", "of them trained"),
    ]
    figures += [(f"{tokens / room:.1%}", "of the packs filled")] if room else []
    cells = "".join(f'<div class="figure"><b>{b}</b><span>{what}</span></div>' for b, what in figures)
    key = (
        '<p class="key"><span><span class="t">trained</span> an assistant wrote it, and the loss counts it'
        "</span>"
        '<span>plain: read, not trained</span><span><span class="s">&lt;tag&gt;</span> a special token</span>'
        "<span>ids show under the pointer</span></p>"
    )
    name = html.escape(Path(preview.name).name or preview.name)
    return (
        f'<header><h1>{name}<span class="pill">{html.escape(preview.kind)}</span></h1>'
        f'<p class="sub">{html.escape(facts)}</p></header><div class="figures">{cells}</div>{key}'
    )


def _group(group: GroupView, number: int) -> str:
    room = group.room or group.tokens
    filled = f" · {group.tokens / room:.2%} of {room:,}" if group.room else ""
    share = group.trained / max(group.tokens, 1)
    what = "conversation" if group.room else "training row"
    plural = "" if len(group.rows) == 1 else "s"
    counts = f"{len(group.rows):,} {what}{plural} · {group.tokens:,} tokens{filled} · {share:.0%} trained"
    rows = "".join(_row(row, f"{number}-{i}", i) for i, row in enumerate(group.rows))
    head = f"<h2>{html.escape(group.about)}</h2>"
    lane = _lane(group, number, room)
    return f'{head}<section class="card"><header><h3>{counts}</h3></header>{lane}{rows}</section>'


def _lane(group: GroupView, number: int, room: int) -> str:
    """The pack as a strip: a block a conversation, trained stretches in colour, unused room empty."""
    blocks = []
    for i, row in enumerate(group.rows):
        marks = "".join(
            f'<i style="left:{100 * first / row.tokens:.2f}%;width:{100 * count / row.tokens:.2f}%"></i>'
            for first, count in row.stretches
        )
        about = f"{i + 1}: {row.about + ' · ' if row.about else ''}"
        title = html.escape(f"{about}{row.tokens:,} tokens, {row.trained:,} trained")
        width = 100 * row.tokens / max(room, 1)
        blocks.append(f'<a href="#r{number}-{i}" style="width:{width:.3f}%" title="{title}">{marks}</a>')
    return f'<div class="lane">{"".join(blocks)}</div>'


def _row(row: RowView, anchor: str, number: int) -> str:
    about = f"<span>{html.escape(row.about)}</span>" if row.about else ""
    counts = f'<span class="num">{row.tokens:,} tokens</span><span class="num">{row.trained:,} trained</span>'
    text = _runs(row.pieces[: row.gap])
    if row.left_out:
        text += f'<span class="gap">{row.left_out:,} tokens are not shown</span>'
        text += _runs(row.pieces[row.gap :])
    head = f"<h4><b>{number + 1}</b>{about}{counts}</h4>"
    return f'<div class="row" id="r{anchor}">{head}<pre>{text}</pre></div>'


def _runs(pieces: Sequence[PieceView]) -> str:
    out = []
    for trained, run in groupby(pieces, key=lambda piece: piece.trained):
        inner = "".join(map(_token, run))
        out.append(f'<span class="t">{inner}</span>' if trained else inner)
    return "".join(out)


def _token(piece: PieceView) -> str:
    ids = " ".join(map(str, piece.ids))
    kind = ' class="s"' if piece.special else ""
    return f'<i{kind} title="{ids}">{html.escape(piece.text)}</i>'


def _dropped(rows: Sequence[tuple[str, str, str]]) -> str:
    cells = "".join(
        f'<tr><td class="key">{place}</td><td>{reason}</td><td>{detail}</td></tr>'
        for place, reason, detail in ([html.escape(part) for part in row] for row in rows)
    )
    heads = "<tr><th>place</th><th>reason</th><th>what was found</th></tr>"
    return f'<h2>Not usable</h2><section class="card scroll"><table>{heads}{cells}</table></section>'
