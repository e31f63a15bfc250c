"""Checkpoints: {run, engine, stream, hooks}, each a nested state; weights as a Hugging Face folder.

    checkpoints/step_00000123/
      manifest.json                  bytes and blake2b of every other file
      model/                         the weights in the Hugging Face layout: load_model opens it
      run.json engine.json ...       numbers and text of each part
      engine.safetensors ...         tensors of each part

A checkpoint is written under a temporary name, read back for its checksums, flushed to the disk and
renamed: a folder named step_* is whole or was damaged later. Nothing is pickled.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from nemotron_ultra.errors import CheckpointError

FOLDER = "checkpoints"
_FORMAT = 1
_STEP = re.compile(r"^step_(\d{8,})$")
_TEMPORARY, _RETIRED = ".saving-", ".retired-"
_TENSOR = "tensor:"
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# safetensors reports the system's error number inside a text.
_FULL_TEXT = re.compile(rf"os error ({'|'.join(str(int(number)) for number in sorted(_FULL))})\b")


def step_folder(run_dir: Path, step: int) -> Path:
    return Path(run_dir) / FOLDER / f"step_{step:08d}"


def list_checkpoints(run_dir: Path) -> list[tuple[int, Path]]:
    """(step, folder) of the complete checkpoints, oldest first; interrupted saves do not count."""
    folder = Path(run_dir) / FOLDER
    if not folder.is_dir():
        return []
    found = [(int(m.group(1)), p) for p in folder.iterdir() if (m := _STEP.match(p.name)) and p.is_dir()]
    return sorted(found)


def latest_checkpoint(run_dir: Path) -> Path | None:
    """The newest complete checkpoint of a run, or None."""
    found = list_checkpoints(run_dir)
    return found[-1][1] if found else None


def save_checkpoint(
    run_dir: Path,
    step: int,
    parts: dict[str, dict[str, Any]],
    *,
    save_weights: Callable[[Path], None] | None = None,
    keep_last: int = 2,
    keep_every: int = 0,
) -> Path:
    """Write `parts`, and the weights by `save_weights(folder)`, as the checkpoint of `step`.

    The newest `keep_last` checkpoints stay, and those whose step is a multiple of `keep_every`.
    Raises CheckpointError, with earlier checkpoints intact, if the disk is full or cannot be written.
    """
    target = step_folder(run_dir, step)
    temporary = target.with_name(f"{_TEMPORARY}{target.name}")
    try:
        _clean(target.parent)
        temporary.mkdir(parents=True)
        for name, state in parts.items():
            _write_part(temporary, name, state)
        if save_weights is not None:
            save_weights(temporary / "model")
        _write_manifest(temporary, step)
        _retire(target)
        temporary.rename(target)
        _sync(target.parent)
    except (OSError, SafetensorError, CheckpointError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise _cannot_write(target, error) from error
    for number, old in list_checkpoints(run_dir)[:-keep_last]:
        if not keep_every or number % keep_every:
            _retire(old)
    _clean(target.parent)
    return target


def load_checkpoint(folder: Path) -> dict[str, dict[str, Any]]:
    """The parts of a checkpoint, after every file was compared with the manifest.

    The weights are in `folder / "model"`.
    Raises CheckpointError naming the file that is missing or damaged.
    """
    folder = Path(folder)
    manifest = _read_manifest(folder)
    for name, facts in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            raise _damaged(folder, f"{name} is missing")
        if path.stat().st_size != facts["bytes"]:
            raise _damaged(folder, f"{name} has {path.stat().st_size} bytes, {facts['bytes']} were written")
        if _digest(path) != facts["blake2b"]:
            raise _damaged(folder, f"{name} has changed since it was written (checksum)")
    return {name: _read_part(folder, name) for name in manifest["parts"]}


def _write_part(folder: Path, name: str, state: dict[str, Any]) -> None:
    tensors: dict[str, Tensor] = {}
    plain = _split(state, name, tensors)
    (folder / f"{name}.json").write_text(json.dumps(plain, indent=1))
    if tensors:
        save_file(tensors, folder / f"{name}.safetensors")


def _read_part(folder: Path, name: str) -> dict[str, Any]:
    tensors = folder / f"{name}.safetensors"
    found = load_file(tensors) if tensors.is_file() else {}
    return _join(json.loads((folder / f"{name}.json").read_text()), found)


def _split(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """The value as JSON; each tensor goes into `tensors` and leaves its key behind."""
    if isinstance(value, Tensor):
        tensors[path] = value.detach().cpu().contiguous()
        return _TENSOR + path
    if isinstance(value, dict):
        assert all(isinstance(key, str) for key in value), f"{path}: keys of a saved state must be text"
        return {key: _split(inner, f"{path}/{key}", tensors) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_split(inner, f"{path}/{i}", tensors) for i, inner in enumerate(value)]
    assert value is None or isinstance(value, str | int | float | bool), f"{path}: cannot save {type(value)}"
    assert not (isinstance(value, str) and value.startswith(_TENSOR)), f"{path}: text begins with {_TENSOR!r}"
    return value


def _join(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, dict):
        return {key: _join(inner, tensors) for key, inner in value.items()}
    if isinstance(value, list):
        return [_join(inner, tensors) for inner in value]
    if isinstance(value, str) and value.startswith(_TENSOR):
        return tensors[value.removeprefix(_TENSOR)]
    return value


def _write_manifest(folder: Path, step: int) -> None:
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    facts = {str(p.relative_to(folder)): {"bytes": p.stat().st_size, "blake2b": _digest(p)} for p in files}
    parts = [p.stem for p in files if p.parent == folder and p.suffix == ".json"]
    manifest = {"format": _FORMAT, "step": step, "parts": parts, "files": facts}
    path = folder / "manifest.json"
    path.write_text(json.dumps(manifest, indent=1))
    for place in [*files, path, *{p.parent for p in files}]:
        _sync(place)


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / "manifest.json"
    try:
        manifest = json.loads(path.read_text())
    except FileNotFoundError:
        raise _damaged(folder, "manifest.json is missing") from None
    except ValueError:
        raise _damaged(folder, "manifest.json is not readable JSON") from None
    if not isinstance(manifest, dict) or manifest.get("format") != _FORMAT:
        raise CheckpointError(
            f"{path} is not of the format that this version reads",
            got=manifest.get("format") if isinstance(manifest, dict) else type(manifest).__name__,
            allowed=_FORMAT,
            do="use the version of nemotron_ultra that wrote it; its model/ folder opens with load_model",
        )
    files, parts = manifest.get("files"), manifest.get("parts")
    if not isinstance(files, dict) or not isinstance(parts, list):
        raise _damaged(folder, "manifest.json does not list its files and parts")
    return manifest


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _sync(path: Path) -> None:
    """Flush a file or a folder's entries to the disk."""
    if os.name == "nt" and path.is_dir():  # Windows has no handle for a folder's entries
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _retire(folder: Path) -> None:
    """Take a checkpoint out of the list in one rename: an interrupted removal leaves no half folder."""
    if folder.exists():
        folder.rename(folder.with_name(_RETIRED + folder.name))


def _clean(folder: Path) -> None:
    """Remove interrupted saves and retired checkpoints."""
    for leftover in folder.glob(".*") if folder.is_dir() else ():
        if leftover.name.startswith((_TEMPORARY, _RETIRED)):
            shutil.rmtree(leftover)


def _cannot_write(target: Path, error: Exception) -> CheckpointError:
    cause = error if isinstance(error, OSError) else error.__cause__
    full = (isinstance(cause, OSError) and cause.errno in _FULL) or _FULL_TEXT.search(str(error)) is not None
    with contextlib.suppress(OSError):
        free = shutil.disk_usage(target.parents[1]).free
        return CheckpointError(
            f"checkpoint {target} cannot be written" + (": the disk is full" if full else ""),
            got=f"{error} ({free / 1e6:,.0f} MB free)",
            do="earlier checkpoints are intact; make room and run the same command again",
        )
    return CheckpointError(
        f"checkpoint {target} cannot be written", got=str(error), do="is the disk still there?"
    )


def _damaged(folder: Path, what: str) -> CheckpointError:
    earlier = [path for step, path in list_checkpoints(folder.parent.parent) if path.name < folder.name]
    after = f"to go on from {earlier[-1].name}" if earlier else "to begin this run again"
    return CheckpointError(
        f"checkpoint {folder} is damaged",
        got=what,
        do=f"restore the file, or delete that folder {after}",
    )
