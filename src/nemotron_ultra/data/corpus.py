"""builtin:python: the text of the running Python, prepared on first use into the user's cache folder.

The folder's name holds the Python version, the tokenizer's hash and a hash of the text, so another installation or
another tokenizer never meets the wrong shards. Files go to train or valid whole, by the hash of their content.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from nemotron_ultra.data.encode import encode_documents
from nemotron_ultra.data.manifest import (
    FORMAT,
    SPLITS,
    damaged_files,
    file_facts,
    read_manifest,
    write_json,
    xz_bits_per_byte,
)
from nemotron_ultra.data.shards import ShardWriter, token_dtype
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
    """Folder with {train,valid}.{bin,idx} and manifest.json of builtin:python, made if it is not there or damaged.

    Two processes that start together are safe: one makes it under a lock, the other waits and finds it.
    """
    root = cache_root(cache_dir)
    texts = [(path.as_posix(), (stdlib_root() / path).read_bytes()) for path in stdlib_files(TEXT_BYTES)]
    content = hashlib.blake2b(digest_size=16)
    for name, text in texts:
        content.update(name.encode() + b"\0" + text + b"\0")
    fingerprint = content.hexdigest()
    folder = root / f"python-{platform.python_version()}-{tokenizer.hash[:12]}-{fingerprint[:12]}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f"{folder.name}.lock"):
            if not _is_whole(folder):
                shutil.rmtree(folder, ignore_errors=True)
                _make(folder, texts, fingerprint, tokenizer)
    except OSError as error:
        raise DataError(
            f"cannot prepare {BUILTIN_SOURCE} in {root}",
            got=error,
            do="name another folder with data.cache_dir=... or the variable NEMOTRON_ULTRA_CACHE",
        ) from error
    return folder


def _is_whole(folder: Path) -> bool:
    try:
        return not damaged_files(folder, read_manifest(folder))
    except DataError:
        return False


def _make(folder: Path, texts: list[tuple[str, bytes]], fingerprint: str, tokenizer: Tokenizer) -> None:
    temporary = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    dtype = token_dtype(tokenizer.vocab_size)
    splits, valid_text, invalid = {}, b"", 0
    for split in SPLITS:
        chosen = [text for _, text in texts if (_fraction(text) < VALID_FRACTION) == (split == "valid")]
        decoded = [text.decode("utf-8", "replace") for text in chosen]
        invalid += sum("\ufffd" in text for text in decoded)
        ids, lengths = encode_documents(tokenizer, decoded)
        writer = ShardWriter(temporary / split, dtype)
        writer.add_many(ids, lengths)
        writer.close()
        splits[split] = {"documents": len(chosen), "tokens": len(ids), "bytes": sum(map(len, chosen))}
        valid_text = b"".join(chosen) if split == "valid" else valid_text
    write_json(
        temporary / "manifest.json", _manifest(temporary, splits, valid_text, invalid, fingerprint, tokenizer)
    )
    os.rename(temporary, folder)


def _fraction(text: bytes) -> float:
    """Hash of a document as a number in [0, 1): the same text always falls into the same split."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") / 2**64


def _manifest(
    folder: Path,
    splits: dict[str, Any],
    valid_text: bytes,
    invalid: int,
    fingerprint: str,
    tokenizer: Tokenizer,
) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "source": BUILTIN_SOURCE,
        "tokenizer": {"name": tokenizer.name, "hash": tokenizer.hash, "vocab_size": tokenizer.vocab_size},
        "dtype": np.dtype(token_dtype(tokenizer.vocab_size)).name,
        "splits": splits,
        "invalid_utf8": invalid,
        "xz_bits_per_byte": xz_bits_per_byte(valid_text),
        "input": {"python": platform.python_version(), "fingerprint": fingerprint},
        "files": {
            f"{split}.{ext}": file_facts(folder / f"{split}.{ext}")
            for split in SPLITS
            for ext in ("bin", "idx")
        },
    }
