"""python -m nemotron_ultra.generate RUN ...: draw text from a run's newest weights, chat with them, or serve
them.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Sequence

from nemotron_ultra.errors import NemotronError
from nemotron_ultra.generate.options import checked, make_parser

TRACEBACK = "NEMOTRON_ULTRA_TRACEBACK"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit status, and prints an error without its traceback."""
    _mend_streams()
    asked = make_parser().parse_args(arguments)
    try:
        return run(asked)
    except NemotronError as error:
        if os.environ.get(TRACEBACK, "0") != "0":
            raise
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        # The reader has gone; what is still buffered must not fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        print(f"error: {error.filename or 'output'}: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130


def _mend_streams() -> None:
    """A closed stream is an empty one. Characters that an output cannot show are replaced, input that is no
    text is left for an error that says so.
    """
    for name, mode, errors in (
        ("stdin", "r", "surrogateescape"),
        ("stdout", "w", "replace"),
        ("stderr", "w", "backslashreplace"),
    ):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 (for the whole process)
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


def run(asked: argparse.Namespace) -> int:
    """Check, load, and do what is asked for."""
    kind = checked(asked)
    if kind == "serve":
        # An entry point of its own, which must be complete before the weights are read.
        serve = importlib.import_module("nemotron_ultra.serve")
        place = serve.check_ready(asked)
    from nemotron_ultra.generate.load import load

    loaded = load(asked)
    if kind == "serve":
        return serve.run(loaded, asked, place)
    if kind == "prompts":
        from nemotron_ultra.generate.batch import answer_file

        return answer_file(loaded, asked)
    from nemotron_ultra.generate.talk import answer_one, talk

    return answer_one(loaded, asked) if kind == "prompt" else talk(loaded, asked)
