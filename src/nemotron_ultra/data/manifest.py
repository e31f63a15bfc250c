"""manifest.json: what a folder of shards was made from and with; written last, so it means "finished"."""

from __future__ import annotations

import hashlib
import json
import lzma
import os
from pathlib import Path
from typing import Any

from nemotron_ultra.errors import DataError

NAME = "manifest.json"
FORMAT = 1
SPLITS = ("train", "valid")
REQUIRED = ("format", "tokenizer", "identity", "dtype", "splits", "files")
# xz is quadratic in nothing but slow (1 MB/s), and its rate hardly moves after some megabytes.
XZ_LIMIT_BYTES = 4_000_000


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a prepared folder. Raises DataError: missing, unreadable, of another format."""
    path = Path(folder) / NAME
    if not Path(folder).is_dir():
        raise DataError(f"data folder {folder} does not exist", do=prep_command(folder))
    if not path.is_file():
        raise DataError(f"{folder} has no {NAME}: not a finished prep folder", do=prep_command(folder))
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path} is not JSON", got=error, do=prep_command(folder)) from error
    missing = [key for key in REQUIRED if not isinstance(manifest, dict) or key not in manifest]
    if missing or manifest["format"] != FORMAT:
        raise DataError(
            f"{path}: not a manifest of format {FORMAT}", got=f"missing {missing}" if missing else None
        )
    return manifest


def prep_command(folder: Path | str) -> str:
    return f"make it with: python -m nemotron_ultra.prep INPUT... --out {folder}"


def same_identity(out: Path, theirs: dict[str, Any], mine: dict[str, Any]) -> None:
    """Raises DataError naming every key in which a folder's identity is not the one of this command."""
    changed = [key for key in mine | theirs if theirs.get(key) != mine.get(key)]
    if changed:
        raise DataError(
            f"{out} belongs to a preparation with other {' and '.join(changed)}",
            got="; ".join(f"{key}: {theirs.get(key)} there, {mine.get(key)} here" for key in changed),
            do="name another --out, or remove the folder",
        )


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write, sync and rename, so that the file is either absent, old or whole.

    Names of files that are no UTF-8 become JSON's escapes, and are the same names when read again.
    """
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w", encoding="utf-8", errors="backslashreplace") as file:
        json.dump(content, file, indent=1, ensure_ascii=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def read_receipt(path: Path) -> dict[str, Any] | None:
    """What write_json wrote, or None where the disk lost it: what the receipt is for is then done again."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return None
    return content if isinstance(content, dict) else None


def file_digest(path: Path) -> str:
    """blake2b of a file's bytes, 32 hex digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def file_facts(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "blake2b": file_digest(path)}


def damaged_files(folder: Path, manifest: dict[str, Any]) -> list[str]:
    """Names of files that are missing or whose bytes are not those the manifest was written for."""
    return [
        name
        for name, facts in manifest["files"].items()
        if not (folder / name).is_file() or file_facts(folder / name) != facts
    ]


def xz_bits_per_byte(text: bytes) -> float | None:
    """8 x compressed / plain size of the first XZ_LIMIT_BYTES of `text`; None for no text."""
    text = text[:XZ_LIMIT_BYTES]
    return 8 * len(lzma.compress(text, preset=9)) / len(text) if text else None
