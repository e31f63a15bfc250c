"""`python -m nemotron_ultra.report RUN [RUN ...] [--out FILE]`: one self-contained HTML page of runs.

Works while a run goes on. Several runs are laid over each other, with the keys in which their configurations
differ.
"""

from __future__ import annotations

import sys
from pathlib import Path

from nemotron_ultra.config.command import Parser
from nemotron_ultra.errors import NemotronError
from nemotron_ultra.observe.html import write_report


def main(arguments: list[str] | None = None) -> int:
    """Write the page and print its place. Returns the exit code: 2 no run or bad option, 3 no metrics."""
    about, _, more = __doc__.partition("\n\n")
    parser = Parser(prog="python -m nemotron_ultra.report", description=more.strip() or about)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run, such as runs/pretrain")
    parser.add_argument(
        "--out", metavar="FILE", help="page to write; default: in the folder of the first run"
    )
    options = parser.parse_args(arguments)
    runs = [Path(run) for run in options.runs]
    try:
        page = write_report(runs, options.out or default_page(runs))
    except NemotronError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(page)
    return 0


def default_page(runs: list[Path]) -> Path:
    """report.html in the run's folder; for several runs a name of its own beside it."""
    others = "_".join(run.resolve().name for run in runs[1:])
    return runs[0] / (f"report_with_{others}.html" if others else "report.html")


if __name__ == "__main__":
    sys.exit(main())
