"""Write the key reference at the end of docs/configuration.md from the types.

With --check nothing is written; the exit code is 1 where the page differs from the types.
"""

from __future__ import annotations

import sys
from pathlib import Path

from nemotron_ultra.config.explain import reference_markdown

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
MARK = "<!-- Below: written by scripts/make_config_reference.py from the types. -->"


def page_with_reference(page: str) -> str:
    """The page with everything after the mark replaced by the reference."""
    head, mark, _ = page.partition(MARK)
    assert mark, f"{PAGE} has lost its mark: {MARK}"
    return f"{head}{mark}\n\n{reference_markdown()}"


def main(arguments: list[str]) -> int:
    page = PAGE.read_text(encoding="utf-8")
    wanted = page_with_reference(page)
    if "--check" in arguments:
        if page != wanted:
            print(f"{PAGE.name} differs from the types: run python scripts/make_config_reference.py")
        return int(page != wanted)
    PAGE.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
