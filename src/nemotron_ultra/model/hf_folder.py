"""load_model and save_model: a folder in the Hugging Face `nemotron_h` layout, streamed tensor by tensor.

config.json, model.safetensors or shards with model.safetensors.index.json, and checksums.json of ours. Memory
stays at the model plus a few megabytes both ways; a save appears under its name complete or not at all.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from nemotron_ultra.config.hf import MODEL_TYPE, model_config_to_hf, read_hf_config
from nemotron_ultra.errors import CheckpointError
from nemotron_ultra.model.hf_match import INDEX, SINGLE, Reads, match_tensors, open_shards
from nemotron_ultra.model.hf_names import hub_items, stays_fp32
from nemotron_ultra.model.hybrid import HybridLM
from nemotron_ultra.model.safetensors_stream import file_digest, read_into, write_file

CONFIG = "config.json"
CHECKSUMS = "checksums.json"


def load_model(
    path: str | Path,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    verify: bool = True,
) -> HybridLM:
    """Model of a folder, weights converted to `dtype` (the router's selection biases stay float32).

    `verify` checks every file against checksums.json where there is one; it reads each file once more.
    Raises CheckpointError (one, listing everything that does not fit) or ConfigError for config.json.
    """
    folder = Path(path)
    checksums = _read_checksums(folder) if verify else {}
    _verify(folder, CONFIG, checksums)
    config = read_hf_config(folder)
    _verify(folder, INDEX, checksums)
    reads = match_tensors(folder, config, open_shards(folder))
    model = HybridLM(config, device="meta", dtype=dtype)
    _allocate(model, device)
    state = model.state_dict()
    for file in reads:
        _verify(folder, file, checksums)
        _read_shard(folder / file, reads[file], state)
    return model


def save_model(
    model: HybridLM,
    path: str | Path,
    dtype: torch.dtype | None = None,
    max_shard_bytes: float = 5e9,
    overwrite: bool = False,
) -> None:
    """Write `model` as a folder that `load_model` and transformers open; None keeps each tensor's dtype.

    The folder is written beside `path` under a temporary name and renamed. A non-empty `path` is refused;
    `overwrite=True` replaces it if it is a checkpoint of this layout. Raises CheckpointError.
    """
    target = Path(path).absolute()
    _check_target(target, overwrite)
    scratch = target.with_name(f".{target.name}.writing")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(scratch, ignore_errors=True)  # left by a save that was killed
        scratch.mkdir()
        _write_folder(model, scratch, dtype, max_shard_bytes)
        _swap_in(scratch, target)
    except OSError as error:
        raise CheckpointError(
            f"{target}: could not be written ({error.strerror or error})",
            do="free space or choose another folder; nothing was changed there",
        ) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _allocate(model: HybridLM, device: torch.device | str) -> None:
    """Memory for a model built on the meta device. (to_empty would import 35 MB of operator definitions.)"""
    for module in model.modules():
        for name, old in list(module.named_parameters(recurse=False)):
            new = torch.empty(old.shape, dtype=old.dtype, device=device)
            module.register_parameter(name, nn.Parameter(new, requires_grad=old.requires_grad))
        for name, old in list(module.named_buffers(recurse=False)):
            module.register_buffer(name, torch.empty(old.shape, dtype=old.dtype, device=device))


def _read_shard(path: Path, reads: Reads, state: dict[str, Tensor]) -> None:
    try:
        with path.open("rb", buffering=0) as file:
            for entry, name, expert in sorted(reads, key=lambda read: read[0].begin):
                read_into(file, entry, state[name] if expert is None else state[name][expert])
    except OSError as error:
        raise CheckpointError(f"{path}: could not be read ({error.strerror or error})") from error


def _read_checksums(folder: Path) -> dict[str, dict]:
    path = folder / CHECKSUMS
    if not path.is_file():
        return {}
    try:
        checksums = json.loads(path.read_text(encoding="utf-8"))
        return {str(name): dict(value) for name, value in checksums.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path}: unreadable ({error})", do="copy the folder again, or load with verify=False"
        ) from error


def _verify(folder: Path, name: str, checksums: dict[str, dict]) -> None:
    if name not in checksums:
        return
    path, known = folder / name, checksums[name]
    if not path.is_file():
        raise CheckpointError(f"{path}: missing, though {CHECKSUMS} lists it", do="copy the folder again")
    size = path.stat().st_size
    if size != known.get("bytes"):
        raise CheckpointError(f"{path}: {size} bytes, {CHECKSUMS} says {known.get('bytes')}", do=_REPAIR)
    if file_digest(path) != known.get("blake2b"):
        raise CheckpointError(f"{path}: its content differs from {CHECKSUMS}", do=_REPAIR)


_REPAIR = f"copy this file again; if it was changed on purpose, delete {CHECKSUMS}"


def _check_target(target: Path, overwrite: bool) -> None:
    if target.is_file():
        raise CheckpointError(f"{target}: is a file", do="give a folder")
    if not target.is_dir() or not any(target.iterdir()):
        return
    if not overwrite:
        raise CheckpointError(
            f"{target}: is not empty",
            do="choose another folder, or pass overwrite=True to replace a checkpoint",
        )
    strangers = [file.name for file in target.iterdir() if not _is_ours(file.name)]
    config = target / CONFIG
    if strangers or not config.is_file() or MODEL_TYPE not in config.read_text(encoding="utf-8"):
        found = ", ".join(sorted(strangers)[:5]) or "no nemotron_h config.json"
        raise CheckpointError(
            f"{target}: holds something else than a checkpoint, so it is not replaced",
            got=found,
            do="move it away",
        )


def _is_ours(name: str) -> bool:
    return name in (CONFIG, CHECKSUMS, INDEX) or (name.startswith("model") and name.endswith(".safetensors"))


def _swap_in(scratch: Path, target: Path) -> None:
    """Rename, with an older folder moved aside first and back again if the rename fails."""
    old = target.with_name(f".{target.name}.old")
    if not target.exists():
        os.rename(scratch, target)
        return
    shutil.rmtree(old, ignore_errors=True)
    os.rename(target, old)
    try:
        os.rename(scratch, target)
    except OSError:
        os.rename(old, target)
        raise
    shutil.rmtree(old)


def _stored(model: HybridLM, dtype: torch.dtype | None) -> Iterator[tuple[str, torch.dtype, Tensor]]:
    for name, tensor in model.state_dict().items():
        kept = dtype is None or stays_fp32(name)
        for key, piece in hub_items(name, tensor):
            yield key, tensor.dtype if kept else dtype, piece


def _shards(
    model: HybridLM, dtype: torch.dtype | None, limit: float
) -> list[list[tuple[str, torch.dtype, Tensor]]]:
    shards, size = [[]], 0
    for item in _stored(model, dtype):
        _, kind, tensor = item
        count = tensor.numel() * kind.itemsize
        if shards[-1] and size + count > limit:
            shards.append([])
            size = 0
        shards[-1].append(item)
        size += count
    return shards


def _write_folder(model: HybridLM, folder: Path, dtype: torch.dtype | None, max_shard_bytes: float) -> None:
    shards = _shards(model, dtype, max_shard_bytes)
    weight_map, total, checksums = {}, 0, {}
    for number, items in enumerate(shards, 1):
        name = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        digest = write_file(folder / name, items)
        checksums[name] = {"blake2b": digest, "bytes": (folder / name).stat().st_size}
        weight_map |= {key: name for key, _, _ in items}
        total += sum(tensor.numel() * kind.itemsize for _, kind, tensor in items)
    stored = dtype or model.state_dict()["lm_head.weight"].dtype
    texts = {CONFIG: model_config_to_hf(model.config, dtype=str(stored).removeprefix("torch."))}
    if len(shards) > 1:
        texts[INDEX] = {"metadata": {"total_size": total}, "weight_map": weight_map}
    for name, content in texts.items():
        _write_json(folder / name, content)
        checksums[name] = {"blake2b": file_digest(folder / name), "bytes": (folder / name).stat().st_size}
    _write_json(folder / CHECKSUMS, checksums)


def _write_json(path: Path, content: dict) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=2, allow_nan=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
