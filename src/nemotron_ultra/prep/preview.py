"""python -m nemotron_ultra.prep preview PATH: what is trained and what is not, on screen and as a page."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from nemotron_ultra.config.command import Parser, plural
from nemotron_ultra.data.chat import load_template
from nemotron_ultra.data.preview import (
    Piece,
    Preview,
    ShownGroup,
    ShownRow,
    is_packed,
    preview_chats,
    preview_packs,
)
from nemotron_ultra.data.tokenizer import load_tokenizer
from nemotron_ultra.data.training_rows import MaskOptions
from nemotron_ultra.errors import ConfigError, NemotronError
from nemotron_ultra.observe.masks_page import write_masks_page
from nemotron_ultra.prep.prompts import positive
from nemotron_ultra.prep.text import whole_number

HELP = """\
Show conversations as training sees them: of a folder made by `prep sft` (or any packed parquet), or of chats
(.jsonl, .parquet) with the masks that `prep sft` would make. Trained text is coloured, or stands in [[ ]]
where the output is no terminal.
"""
MOST = 8
_TRAINED, _SPECIAL, _DIM, _HEAD, _END = "\x1b[1;32m", "\x1b[36m", "\x1b[2m", "\x1b[1m", "\x1b[0m"
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    try:
        if arguments.html is not None and arguments.conversations is not None:
            raise ConfigError("--conversations is for the terminal", got="--html, which shows all of them")
        shown = read(arguments)
        if arguments.html is not None:
            print(f"page: {write_masks_page(shown, arguments.html)}")
        else:
            colour = sys.stdout.isatty() if arguments.color == "auto" else arguments.color == "always"
            encoding = sys.stdout.encoding or "utf-8"
            for line in lines(shown, colour, arguments.conversations):
                print(line.encode(encoding, "backslashreplace").decode(encoding))
    except BrokenPipeError:  # `| head` has seen enough
        sys.stderr.close()
        return 0
    except NemotronError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def read(arguments: argparse.Namespace) -> Preview:
    """The preview that the command line asks for."""
    path = arguments.path.expanduser()
    some = {"start": arguments.start, "count": arguments.rows, "limit": arguments.tokens}
    if is_packed(path):
        return preview_packs(path, tokenizer=arguments.tokenizer, **some)
    template = load_template(load_tokenizer(arguments.tokenizer or "builtin"), arguments.template)
    options = MaskOptions(train=arguments.train, thinking=arguments.thinking, expand=arguments.expand)
    return preview_chats(path, template, options, messages_field=arguments.messages_field, **some)


def lines(preview: Preview, colour: bool, most: int | None = None) -> Iterator[str]:
    """The text for a terminal, with or without colours. most: conversations in all, one of each group at
    least; None for 8 of packs and all of chats.
    """
    most = MOST if most is None and preview.kind == "packs" else most
    each = None if most is None else max(1, most // max(len(preview.groups), 1))
    yield _paint(f"{preview.name}  ({preview.kind})", _HEAD, colour)
    yield "; ".join(f"{key} {value}" for key, value in preview.facts)
    mark = _paint("trained", _TRAINED, colour) if colour else "[[trained]]"
    yield f"{mark}, {_paint('not trained', _DIM, colour)}, {_paint('<|special|>', _SPECIAL, colour)}"
    for group in preview.groups:
        yield ""
        yield _paint(f"=== {_group_head(group)} ===", _HEAD, colour)
        for number, row in enumerate(group.rows[:each], 1):
            about = f", {row.about}" if row.about else ""
            head = f"--- {number} of {len(group.rows)}{about}: {row.tokens:,} tokens, {row.trained:,} trained"
            yield _paint(head, _HEAD, colour)
            yield _row_text(row, colour)
        left = 0 if each is None else len(group.rows) - each
        if left > 0:
            about = f"{left:,} more {plural(left, 'conversation')}: --conversations N, or --html FILE for all"
            yield _paint(f"--- {about}", _DIM, colour)
    if preview.dropped:
        yield ""
        yield _paint("=== not usable ===", _HEAD, colour)
        yield from (": ".join(filter(None, parts)) for parts in preview.dropped)


def _group_head(group: ShownGroup) -> str:
    counts = f"{group.tokens:,} tokens in {len(group.rows)}, {group.trained:,} trained"
    return f"{group.about}: {counts}" + (f", {group.tokens / group.room:.2%} full" if group.room else "")


def _row_text(row: ShownRow, colour: bool) -> str:
    text = _runs(row.pieces[: row.gap], colour)
    if row.left_out:
        text += f"\n... {row.left_out:,} tokens are not shown ...\n" + _runs(row.pieces[row.gap :], colour)
    return text.rstrip("\n")


def _runs(pieces: Sequence[Piece], colour: bool) -> str:
    out = []
    for trained, run in groupby(pieces, key=lambda piece: piece.trained):
        if not colour:
            text = "".join(_visible(piece.text) for piece in run)
            out.append(f"[[{text}]]" if trained else text)
            continue
        for special, same in groupby(run, key=lambda piece: piece.special):
            text = "".join(_visible(piece.text) for piece in same)
            look = _TRAINED if trained else _DIM
            out.append(f"{look}{_SPECIAL if special else ''}{text}{_END}")
    return "".join(out)


def _visible(text: str) -> str:
    """Control characters as pictures: text must not steer the terminal."""
    return _CONTROL.sub(lambda found: chr(0x2400 + ord(found[0])) if ord(found[0]) < 0x20 else "\u2421", text)


def _paint(text: str, look: str, colour: bool) -> str:
    return f"{look}{text}{_END}" if colour else text


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m nemotron_ultra.prep preview", description=HELP)
    add, masks = parser.add_argument, MaskOptions()
    add("path", type=Path, metavar="PATH", help="folder of packs, packed parquet, or chats")
    add("--rows", type=positive, default=2, metavar="N", help="packs or chats to show (2)")
    add("--conversations", type=positive, metavar="N", help=f"most to show of packs, in all ({MOST})")
    add("--start", type=whole_number, default=0, metavar="I", help="the first one to show (0)")
    add("--tokens", type=positive, default=2000, metavar="N", help="most tokens of a conversation (2000)")
    add("--html", type=Path, metavar="FILE", help="write a page instead")
    add("--color", choices=("auto", "always", "never"), default="auto", help="auto: on a terminal")
    add("--tokenizer", metavar="T", help="of packs: the manifest's; of chats: builtin")
    group = parser.add_argument_group("of chats")
    group.add_argument(
        "--template", default="builtin", metavar="T", help='"builtin", "tokenizer" or a .jinja file'
    )
    group.add_argument("--messages-field", default="messages", metavar="NAME", help="field of the messages")
    group.add_argument("--train", choices=("assistant", "last"), default=masks.train)
    group.add_argument("--thinking", choices=("auto", "on", "off"), default=masks.thinking)
    group.add_argument("--expand", choices=("auto", "always", "never"), default=masks.expand)
    return parser
