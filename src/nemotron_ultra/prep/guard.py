"""Around the work of every command of `prep`: each mistake is one line, and what happens next is said."""

from __future__ import annotations

import argparse
import errno
import sys
from collections.abc import Callable

from nemotron_ultra.errors import DataError, NemotronError


def guarded(work: Callable[[argparse.Namespace], int], arguments: argparse.Namespace, next_time: str) -> int:
    """The exit status of `work`; `next_time`: what the same command does after an interruption."""
    try:
        return work(arguments)
    except NemotronError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        full = f"; make room for {arguments.out}" if error.errno == errno.ENOSPC else ""
        print(f"error: {error}{full}; {next_time}", file=sys.stderr)
        return DataError.exit_code
    except KeyboardInterrupt:
        print(f"\nstopped; {next_time}", file=sys.stderr)
        return 130
