"""builtin:python: the text of the running Python, prepared on first use into the user's cache folder.

The folder's name holds the Python version, the tokenizer's hash and a hash of the text, so another
installation or another tokenizer never meets the wrong shards. Files go to train or valid whole, by the hash
of their content.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
from pathlib import Path

from filelock import FileLock

from nemotron_ultra.data.inputs import InputFile, fingerprint, make_parts, with_digests
from nemotron_ultra.data.manifest import damaged_files, read_manifest
from nemotron_ultra.data.parts import Options
from nemotron_ultra.data.prepare import Job, prepare
from nemotron_ultra.data.stdlib_text import stdlib_files, stdlib_root
from nemotron_ultra.data.tokenizer import Tokenizer
from nemotron_ultra.errors import DataError

BUILTIN_SOURCE = "builtin:python"
# Some 1.6 M tokens: more than a run of the `pretrain` recipe reads, and prepared in a few seconds.
TEXT_BYTES = 6_000_000
VALID_FRACTION = 0.05


def cache_root(cache_dir: str | Path | None = None) -> Path:
    """`cache_dir`, else NEMOTRON_ULTRA_CACHE, else the platform's cache folder."""
    named = cache_dir or os.environ.get("NEMOTRON_ULTRA_CACHE")
    if named:
        return Path(named).expanduser()
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local"))
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "nemotron_ultra"


def ensure_builtin(cache_dir: str | Path | None, tokenizer: Tokenizer) -> Path:
    """Folder of {train,valid}.{bin,idx} and manifest.json, made if it is not there or damaged.

    Two processes that start together are safe: one makes it under a lock, the other waits and finds it.
    """
    root, library = cache_root(cache_dir), stdlib_root()
    names = stdlib_files(TEXT_BYTES, library)
    files = with_digests([_input(library, name) for name in names])
    content = fingerprint(files)
    folder = root / f"python-{platform.python_version()}-{tokenizer.hash[:12]}-{content[:12]}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f"{folder.name}.lock"):
            if not _is_whole(folder):
                shutil.rmtree(folder, ignore_errors=True)
                _make(folder, files, content, tokenizer)
    except OSError as error:
        raise DataError(
            f"cannot prepare {BUILTIN_SOURCE} in {root}",
            got=error,
            do="name another folder with data.cache_dir=... or the variable NEMOTRON_ULTRA_CACHE",
        ) from error
    return folder


def _input(library: Path, name: Path) -> InputFile:
    path = library / name
    return InputFile(BUILTIN_SOURCE, name.as_posix(), str(path), "text", path.stat().st_size)


def _is_whole(folder: Path) -> bool:
    try:
        return not damaged_files(folder, read_manifest(folder))
    except DataError:
        return False


def _make(folder: Path, files: list[InputFile], content: str, tokenizer: Tokenizer) -> None:
    temporary = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    about = {"sources": [BUILTIN_SOURCE], "python": platform.python_version()}
    options = Options(valid_fraction=VALID_FRACTION)
    job = Job(temporary, tokenizer, options, {"fingerprint": content}, about)
    prepare(job, lambda first: make_parts(files)[first:])
    os.rename(temporary, folder)
