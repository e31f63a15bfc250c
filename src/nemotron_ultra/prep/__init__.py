"""python -m nemotron_ultra.prep [COMMAND] ...: from text, chats and prompts to what the trainers read."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from nemotron_ultra.config.command import nearest
from nemotron_ultra.errors import ConfigError
from nemotron_ultra.prep.text import run, summary

__all__ = ["COMMANDS", "main", "run", "summary"]

# Each is a module of this package with main(argv) -> exit status. Without a command the input is text.
COMMANDS: dict[str, str] = {
    "text": "texts -> token shards for pretraining (the default)",
    "sft": "conversations -> packed rows with loss masks",
    "prompts": "prompts of RL environments -> one checked file of rows",
    "preview": "what is trained and what is not, in the terminal and as a page",
    "synth": "seeds -> generated, checked, deduplicated, decontaminated samples",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Dispatch to a command; returns the exit status of the process."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    listed = "\n".join(f"  {name:<9}{about}" for name, about in COMMANDS.items())
    listed = f"python -m nemotron_ultra.prep [COMMAND] ..., COMMAND --help says more:\n{listed}\n"
    if not arguments:
        print(listed, file=sys.stderr)
    elif arguments[0] in ("-h", "--help"):
        print(listed)
    elif arguments[0] not in COMMANDS and (hint := _misspelt(arguments[0])):
        print(f"error: no command and no file {arguments[0]}{hint}", file=sys.stderr)
        return ConfigError.exit_code
    name = arguments.pop(0) if arguments and arguments[0] in COMMANDS else "text"
    return importlib.import_module(f"nemotron_ultra.prep.{name}").main(arguments)


def _misspelt(word: str) -> str:
    """The command that was meant, if the word is neither an option nor something that is there."""
    return "" if word.startswith("-") or Path(word).exists() else nearest(word, COMMANDS)
