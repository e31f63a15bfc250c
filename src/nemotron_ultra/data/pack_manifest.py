"""manifest.json of a folder of packs: made of what, with which tokenizer, template and packer; written last.

DIR/train-00000.parquet ..., DIR/valid-SOURCE-00000.parquet ..., DIR/manifest.json
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from nemotron_ultra.data.manifest import NAME, write_json
from nemotron_ultra.errors import DataError

FORMAT = 1
REQUIRED = ("tokenizer", "template", "packer", "sources", "splits", "dropped", "files")
SOURCE_NAME = r"[A-Za-z0-9][A-Za-z0-9._+-]*"
_COMMAND = "python -m nemotron_ultra.prep sft NAME=CHATS --out"
_VALID = re.compile(rf"valid-({SOURCE_NAME})-\d+\.parquet")


def train_file(number: int) -> str:
    """Name of a training shard."""
    return f"train-{number:05d}.parquet"


def valid_file(source: str, number: int) -> str:
    """Name of a shard of one source's validation packs."""
    assert re.fullmatch(SOURCE_NAME, source), source
    return f"valid-{source}-{number:05d}.parquet"


def write_pack_manifest(folder: Path, content: dict[str, Any]) -> None:
    """Add format and kind, and write. Keys that must be there: REQUIRED."""
    missing = [key for key in REQUIRED if key not in content]
    assert not missing, f"manifest without {missing}"
    write_json(Path(folder) / NAME, {"format": FORMAT, "kind": "packs"} | content)


def read_pack_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a finished folder of packs. Raises DataError: missing, unreadable, of other things."""
    path, do = Path(folder) / NAME, f"make it with: {_COMMAND} {folder}"
    if not Path(folder).is_dir():
        raise DataError(f"data folder {folder} does not exist", do=do)
    if not path.is_file():
        raise DataError(f"{folder} has no {NAME}: not a finished folder of packs", do=do)
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path} is not JSON", got=error, do=do) from error
    kind = manifest.get("kind", "token shards") if isinstance(manifest, dict) else "no object"
    if kind != "packs":
        raise DataError(f"{path} is not a manifest of packs", got=kind, do=do)
    missing = [key for key in REQUIRED if key not in manifest]
    if missing or manifest["format"] != FORMAT:
        got = f"missing {', '.join(missing)}" if missing else f"format {manifest['format']}"
        raise DataError(f"{path}: not a manifest of packs in format {FORMAT}", got=got, do=do)
    wrong = _wrong_values(manifest)
    if wrong:
        got = "; ".join(f"{key}: {value!r:.40}" for key, value in list(wrong.items())[:3])
        raise DataError(f"{path} holds values that no manifest of packs has", got=got, do=do)
    return manifest


def _wrong_values(manifest: dict[str, Any]) -> dict[str, Any]:
    """Values by key that are not of the type which readers count on."""
    wrong = {key: manifest[key] for key in REQUIRED if not isinstance(manifest[key], dict)}
    if wrong:
        return wrong
    rows = {f"{key}.{name}": row for key in ("sources", "files") for name, row in manifest[key].items()}
    rows["identity"] = manifest.get("identity", {})
    wrong = {key: row for key, row in rows.items() if not isinstance(row, dict)}
    if wrong:
        return wrong
    sizes = {f"files.{name}.bytes": row.get("bytes") for name, row in manifest["files"].items()}
    sizes["packer.max_length"] = manifest["packer"].get("max_length")
    return {key: value for key, value in sizes.items() if type(value) is not int or value < 0}


def split_files(folder: Path) -> tuple[list[Path], dict[str, list[Path]]]:
    """(training files, validation files by source) of a folder by the names of its files.

    Also the folders train and valid (or splits/train, splits/valid) of the public preparation, whose
    validation is one source named "valid". Other names: all of them are for training.
    """
    for parent in (folder / "splits", folder):
        if (parent / "train").is_dir():
            valid = sorted((parent / "valid").glob("*.parquet"))
            return sorted((parent / "train").glob("*.parquet")), {"valid": valid} if valid else {}
    return by_split(folder.glob("*.parquet"))


def by_split(paths: Iterable[Path]) -> tuple[list[Path], dict[str, list[Path]]]:
    """(training files, validation files by source) of files named as train_file and valid_file do."""
    train: list[Path] = []
    valid: dict[str, list[Path]] = {}
    for path in sorted(paths):
        match = _VALID.fullmatch(path.name)
        (valid.setdefault(match[1], []) if match else train).append(path)
    return train, valid
