"""`python -m nemotron_ultra.report RUN [RUN] [--out FILE]`: one self-contained HTML page of runs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from nemotron_ultra.errors import NemotronError
from nemotron_ultra.observe.html import write_report


def main(arguments: list[str] | None = None) -> int:
    """Write the page and print its place; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m nemotron_ultra.report", description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run, such as runs/pretrain")
    parser.add_argument("--out", metavar="FILE", help="page to write (default: report.html in the first run)")
    options = parser.parse_args(arguments)
    try:
        page = write_report(options.runs, options.out or Path(options.runs[0]) / "report.html")
    except NemotronError as error:
        print(f"report: {error}", file=sys.stderr)
        return error.exit_code
    print(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
