"""The command line of `generate`: flags, and what of them goes together. No torch."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

from nemotron_ultra.config.command import Parser, check_folder
from nemotron_ultra.errors import ConfigError, DataError

HELP = """\
Draw text from a run's newest checkpoint, or from a folder of weights.

  python -m nemotron_ultra.generate runs/pretrain --prompt "Once upon"    continue a text
  python -m nemotron_ultra.generate runs/sft                              a conversation, on a terminal
  python -m nemotron_ultra.generate runs/sft --prompts in.jsonl --out answers.jsonl
  python -m nemotron_ultra.generate runs/sft --serve --port 8000          an OpenAI-compatible endpoint

Text is continued as it is (--raw) for runs of recipe=pretrain and plain folders of weights, and asked by
the chat template (--chat) for all other runs and for folders that bring a template of their own.
A line of --prompts is {"prompt": "..."}, {"messages": [...]} or {"tokens": [...]}, and may have an id, tools,
and options of its own: max_tokens, temperature, top_p, top_k, min_p, stop, seed, thinking, budget.
Rows of `prep prompts` are such lines: what else they hold is not read.
"""


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m nemotron_ultra.generate", description=HELP)
    add = parser.add_argument
    add("folder", type=Path, metavar="RUN", help="folder of a run, or of weights")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--prompt", metavar="TEXT", help="one prompt; without it, a conversation")
    what.add_argument("--prompts", type=Path, metavar="FILE", help="prompts, one JSON object a line")
    what.add_argument("--serve", action="store_true", help="HTTP endpoint, until SIGTERM or Ctrl-C")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--raw", action="store_true", help="continue the text as it is")
    how.add_argument("--chat", action="store_true", help="ask by the chat template")
    add(
        "--out", type=Path, metavar="FILE", help="answers to --prompts (standard output); a file is continued"
    )
    add("--system", metavar="TEXT", help="system message of a conversation")
    add(
        "--thinking",
        choices=("off", "regular", "medium"),
        default="off",
        help="thoughts before answers (off)",
    )
    add("--budget", type=_count, metavar="N", help="most tokens of thoughts, then they are closed")
    _add_drawing(parser.add_argument_group("drawing"))
    _add_machine(parser.add_argument_group("machine"))
    _add_serving(parser.add_argument_group("with --serve"))
    return parser


def _add_drawing(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--max-tokens", type=_count, metavar="N", help="most new tokens (256; with --serve what fits)")
    add("--temperature", type=_heat, default=1.0, metavar="T", help="0: always the likeliest token (1)")
    add(
        "--top-p", type=_share, default=1.0, metavar="P", help="likeliest tokens that hold this mass (1: all)"
    )
    add("--top-k", type=_whole, default=0, metavar="K", help="so many likeliest tokens (0: all)")
    add("--min-p", type=_part, default=0.0, metavar="P", help="at least this times the likeliest's odds (0)")
    add(
        "--stop",
        action="append",
        default=[],
        type=_text,
        metavar="TEXT",
        help="end at this text (repeatable)",
    )
    add("--seed", type=_whole, default=0, metavar="N", help="the same seed draws the same tokens (0)")


def _add_machine(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--draft", type=_draft, default=0, metavar="N|auto", help="tokens the MTP module drafts a round (0)")
    add("--slots", type=_count, metavar="N", help="requests that run together (8)")
    add("--context", type=_count, metavar="N", help="most tokens of prompt and answer (4096)")
    formats = ("fp32", "fp16_sr", "int8_sr")
    add("--ssm-format", choices=formats, default="fp32", help="storage of Mamba states (fp32)")
    add(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="where (auto: a GPU if there is one)",
    )
    add("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="of weights (GPU: bfloat16)")
    add("--tokenizer", metavar="T", help='"builtin" or a folder (the one beside the weights)')
    add("--template", metavar="T", help='"builtin", "tokenizer" (its own) or a .jinja file')


def _add_serving(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--host", default="127.0.0.1", metavar="H", help="address to listen at (this machine only)")
    add("--port", type=_port, default=8000, metavar="N", help="port, 0 for any free one (8000)")
    add("--name", metavar="TEXT", help="name of the model (the folder's)")
    add("--max-waiting", type=_whole, default=64, metavar="N", help="answers that may wait, then 429 (64)")
    add("--max-body", type=_count, default=8 << 20, metavar="BYTES", help="largest request (8 MiB)")
    key = "file with a key that clients must send (or NEMOTRON_ULTRA_API_KEY in the environment)"
    add("--api-key-file", type=Path, metavar="FILE", help=key)
    add("--no-api-key", action="store_true", help="let other machines in without a key")
    add(
        "--grace",
        type=_seconds,
        default=30.0,
        metavar="S",
        help="seconds for running answers at the end (30)",
    )


def checked(asked: argparse.Namespace) -> str:
    """ "prompt", "prompts", "serve" or "talk". Raises ConfigError and DataError for what cannot be."""
    check_folder(asked.folder)
    kind = "serve" if asked.serve else "prompts" if asked.prompts else "prompt"
    if kind == "prompt" and asked.prompt is None:
        kind = "talk"
    if kind == "talk" and not (asked.chat or asked.raw or sys.stdin.isatty()):
        raise ConfigError(
            "no prompt, and the input is no terminal",
            do="give --prompt TEXT or --prompts FILE, or --chat to read one question a line",
        )
    if asked.out and kind != "prompts":
        raise ConfigError("--out is the file of answers to --prompts", got=f"--out {asked.out} without it")
    if kind == "prompts" and not asked.prompts.is_file():
        raise DataError("--prompts: no such file", got=asked.prompts)
    if asked.budget and asked.thinking == "off" and kind != "prompts":
        raise ConfigError("--budget is for thoughts", got="--thinking off", do="add --thinking regular")
    if asked.raw and (asked.thinking != "off" or asked.system):
        raise ConfigError("--thinking and --system belong to the chat template", got="--raw")
    return kind


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of 1 or more")
    return int(text)


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of 0 or more")
    return int(text)


def _port(text: str) -> int:
    if _whole(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text} is above 65535")
    return int(text)


def _draft(text: str) -> int | str:
    return text if text == "auto" else _whole(text)


def _text(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("an empty text would stop everything")
    return text


def _number(text: str, fits: str, low: float, high: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not low <= value <= high:
        raise argparse.ArgumentTypeError(f"{text} is not {fits}")
    return value


def _heat(text: str) -> float:
    return _number(text, "a number of 0 or more", 0, sys.float_info.max)


def _seconds(text: str) -> float:
    return _number(text, "a number of seconds", 0, 86_400)


def _part(text: str) -> float:
    return _number(text, "in 0 to 1", 0, 1)


def _share(text: str) -> float:
    return _number(text, "above 0, up to 1", sys.float_info.min, 1)
