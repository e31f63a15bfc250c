"""Options of `prep` commands: a mistake is one line, with the nearest option."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """ArgumentParser that says `error: ...` without its usage; options are written whole. Exit status 2."""

    def __init__(self, **options: Any):
        raw = argparse.RawDescriptionHelpFormatter
        super().__init__(formatter_class=raw, allow_abbrev=False, **options)

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        """As argparse's, but an unknown option is told before a missing one."""
        words = sys.argv[1:] if args is None else list(args)
        words = words[: words.index("--")] if "--" in words else words
        known = self._option_string_actions
        for name in (word.partition("=")[0] for word in words if word.startswith("--")):
            if name not in known:
                self.error(f"unknown option {name}{nearest(name, known)}")
        return super().parse_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}; all options: {self.prog} --help\n")


def nearest(word: str, names: Any) -> str:
    """ " (did you mean x?)" for the most similar name, else an empty string."""
    found = difflib.get_close_matches(word, list(names), n=1, cutoff=0.6)
    return f" (did you mean {found[0]}?)" if found else ""
