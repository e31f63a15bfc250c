"""What the command lines of the entry points share: options, folders of runs, output that nobody reads."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from nemotron_ultra.errors import ConfigError

SHOWN_RUNS = 6


class Parser(argparse.ArgumentParser):
    """ArgumentParser that says `error: ...` without its usage; options are written whole. Exit status 2."""

    def __init__(self, **options: Any):
        raw = argparse.RawDescriptionHelpFormatter
        super().__init__(formatter_class=raw, allow_abbrev=False, **options)

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        """As argparse's, but an unknown option is told before a missing one."""
        self._check_names(args)
        return super().parse_args(args, namespace)

    def parse_intermixed_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        """The same where options may stand between positional words."""
        self._check_names(args)
        return super().parse_intermixed_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}; all options: {self.prog} --help\n")

    def _check_names(self, args: Sequence[str] | None) -> None:
        words = sys.argv[1:] if args is None else list(args)
        words = words[: words.index("--")] if "--" in words else words
        known = self._option_string_actions
        for word in words:
            name = word.partition("=")[0]
            # With a blank it is a text that begins with dashes, as it is to argparse.
            if word.startswith("--") and name not in known and " " not in word:
                self.error(f"unknown option {name}{nearest(name, known)}")


def nearest(word: str, names: Any) -> str:
    """ " (did you mean x?)" for the most similar name, else an empty string."""
    found = difflib.get_close_matches(word, list(names), n=1, cutoff=0.6)
    return f" (did you mean {found[0]}?)" if found else ""


def plural(count: int, word: str) -> str:
    """The word with an s unless there is one of it."""
    return word if count == 1 else f"{word}s"


def is_run(folder: Path) -> bool:
    return (folder / "config.yaml").is_file() and (folder / "run.json").is_file()


def runs_in(folder: Path) -> str:
    """Runs that lie in a folder, the newest first, as one text of a few; empty if there are none."""
    found = [child for child in folder.iterdir() if is_run(child)] if folder.is_dir() else []
    found.sort(key=lambda run: (run / "run.json").stat().st_mtime, reverse=True)
    more = f" and {len(found) - SHOWN_RUNS} more" if len(found) > SHOWN_RUNS else ""
    return ", ".join(map(str, found[:SHOWN_RUNS])) + more


def check_folder(folder: Path) -> None:
    """Raises ConfigError for what can be neither a run nor weights, with the runs that are near."""
    if not folder.is_dir():
        there = runs_in(folder.parent)
        do = f"name one of the runs there ({there})" if there else "name the folder of a run"
        raise ConfigError(f"{folder} is not a folder", do=f"{do}, or a folder of weights")
    if not is_run(folder) and not (folder / "config.json").is_file() and (there := runs_in(folder)):
        raise ConfigError(f"{folder} holds runs and is none itself", do=f"name one: {there}")


def say(lines: Iterable[str]) -> None:
    """Print what is said when the work is done; a reader that has gone away is no error."""
    try:
        for line in lines:
            print(line)
        sys.stdout.flush()
    except BrokenPipeError:
        # What is still buffered must not fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
