"""The text of the running Python: standard library sources with their docstrings, in a fixed order.

Real text that is on every machine; the built-in corpus and the shipped tokenizer are made from it.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from nemotron_ultra.errors import DataError

# Tests, third-party code and generated tables are left out: they are not what people write.
SKIPPED = frozenset(
    {
        "__pycache__",
        "__phello__",
        "encodings",
        "ensurepip",
        "idlelib",
        "lib2to3",
        "site-packages",
        "dist-packages",
        "test",
        "tests",
        "turtledemo",
    }
)


def stdlib_files(max_bytes: int | None = None, root: Path | None = None) -> list[Path]:
    """Source files of the standard library, relative to its folder, in sorted order.

    `max_bytes` keeps a subset of that many bytes: files are taken in the order of the hash of their names, so
    the subset is spread over the whole library and is the same on every start. Raises DataError if there are
    no sources.
    """
    root = root or stdlib_root()
    kept = sorted(_walk(root))
    if not kept:
        raise DataError(
            "builtin:python needs the sources of the standard library",
            got=f"no .py files under {root}",
            do="name a folder made by `python -m nemotron_ultra.prep` as the source's path",
        )
    if max_bytes is None:
        return kept
    chosen, total = [], 0
    for path in sorted(kept, key=lambda p: hashlib.blake2b(p.as_posix().encode(), digest_size=8).digest()):
        size = (root / path).stat().st_size
        if total + size <= max_bytes:
            chosen.append(path)
            total += size
    return sorted(chosen)


def stdlib_root() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _walk(root: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIPPED and not name.startswith("config-")]
        yield from (Path(folder, name).relative_to(root) for name in files if name.endswith(".py"))
