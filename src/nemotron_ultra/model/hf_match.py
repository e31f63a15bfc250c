"""Which tensor of which file fills which entry of the state dict; all that does not fit, in one error."""

from __future__ import annotations

import json
from pathlib import Path

from nemotron_ultra.config.hf_tensors import state_tensors
from nemotron_ultra.config.model import ModelConfig
from nemotron_ultra.errors import CheckpointError
from nemotron_ultra.model.hf_names import state_name
from nemotron_ultra.model.safetensors_stream import DTYPES, Entry, read_header

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
LISTED = 20
# (place in the file, entry of the state dict, expert or None for the whole)
Reads = list[tuple[Entry, str, int | None]]


class Shards:
    """Headers of all files of a checkpoint, and what the index says that they do not."""

    def __init__(self, headers: dict[str, dict[str, Entry]], problems: list[str]):
        self.headers, self.problems = headers, problems


def open_shards(folder: Path) -> Shards:
    """Headers of model.safetensors, or of the files that the index names. Raises CheckpointError."""
    if (folder / SINGLE).is_file():
        return Shards({SINGLE: read_header(folder / SINGLE)}, [])
    if not (folder / INDEX).is_file():
        other = sorted(
            p.name for p in folder.glob("*") if p.suffix in (".safetensors", ".bin", ".pt", ".pth")
        )
        raise CheckpointError(
            f"{folder}: neither {SINGLE} nor {INDEX}",
            got=", ".join(other[:5]) or "no weights at all",
            do=f"restore {INDEX} from the source" if other else "give the folder that holds the weights",
        )
    weight_map = _read_index(folder / INDEX)
    files = sorted(set(weight_map.values()))
    absent = [file for file in files if not (folder / file).is_file()]
    if absent:
        listed = ", ".join(absent[:LISTED]) + (
            f" and {len(absent) - LISTED} more" if len(absent) > LISTED else ""
        )
        raise CheckpointError(
            f"{folder}: {len(absent)} of {len(files)} shards missing",
            got=f"no {listed}",
            do="copy these files too",
        )
    headers = {file: read_header(folder / file) for file in files}
    problems = [
        f"{key}: the index says {file}, which does not hold it"
        for key, file in weight_map.items()
        if key not in headers[file]
    ]
    problems += [
        f"{key}: in {file}, but not in the index"
        for file, header in headers.items()
        for key in header
        if weight_map.get(key) != file
    ]
    return Shards(headers, problems)


def match_tensors(folder: Path, config: ModelConfig, shards: Shards) -> dict[str, Reads]:
    """For each file what to read from it. Raises one CheckpointError listing all misfits."""
    expected = {spec.name: spec for spec in state_tensors(config)}
    waiting = {
        (spec.name, e)
        for spec in expected.values()
        for e in (range(spec.experts) if spec.experts else [None])
    }
    reads: dict[str, Reads] = {file: [] for file in shards.headers}
    unexpected, unfit = [], list(shards.problems)
    for file, header in shards.headers.items():
        for key, entry in header.items():
            name, expert = state_name(key)
            spec = expected.get(name)
            filled = _filled(spec, expert) if spec else []
            if not filled:
                unexpected.append(f"unexpected: {key} {list(entry.shape)} in {file}")
                continue
            shape = spec.shape if expert is None else spec.shape[1:]
            if entry.shape != shape:
                unfit.append(f"shape: {key} is {list(entry.shape)}, config.json needs {list(shape)}")
            elif entry.dtype not in DTYPES:
                unfit.append(f"format: {key} is {entry.dtype}, readable are {' '.join(DTYPES)}")
            elif not waiting.issuperset(filled):
                unfit.append(f"twice: {key} in {file} fills what another tensor has filled")
            reads[file].append((entry, name, expert))
            waiting.difference_update(filled)
    missing = [f"missing: {_hub_name(*slot)}" for slot in sorted(waiting, key=str)]
    if missing or unexpected or unfit:
        raise _misfit(folder, missing, unexpected, unfit)
    return reads


def _filled(spec, expert: int | None) -> list[tuple[str, int | None]]:
    """The slots that a tensor fills: one expert, all experts of a stacked tensor, or a whole tensor."""
    if expert is None:
        return [(spec.name, e) for e in range(spec.experts)] if spec.experts else [(spec.name, None)]
    return [(spec.name, expert)] if expert < spec.experts else []


def _hub_name(name: str, expert: int | None) -> str:
    stem, _, kind = name.rpartition(".")
    return name if expert is None else f"{stem}.{expert}.{kind}.weight"


def _misfit(folder: Path, missing: list[str], unexpected: list[str], unfit: list[str]) -> CheckpointError:
    problems = missing + unexpected + unfit
    counts = [
        (len(missing), "missing"),
        (len(unexpected), "unexpected"),
        (len(unfit), "wrong in shape or place"),
    ]
    lines = "".join(f"\n  {line}" for line in problems[:LISTED])
    rest = len(problems) - LISTED
    more = f"\n  and {rest} more" if rest > 0 else ""
    do = "give the config.json that belongs to these weights"
    if all(line.startswith("missing: mtp.") for line in problems):
        do = "transformers drops MTP weights when it saves; set num_nextn_predict_layers to 0 in config.json"
    elif all(line.startswith("unexpected: mtp.") for line in problems):
        do = "the weights hold an MTP module; set num_nextn_predict_layers to 1 in config.json"
    summary = ", ".join(f"{count} {what}" for count, what in counts if count)
    return CheckpointError(f"{folder}: tensors do not fit config.json ({summary}):{lines}{more}\n", do=do)


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        names = {str(key): str(file) for key, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path}: no usable weight_map ({error!r})", do="restore the file from its source"
        ) from error
    outside = sorted({file for file in names.values() if Path(file).name != file})
    if outside or not names:
        raise CheckpointError(
            f"{path}: must name files of its own folder", got=", ".join(outside) or "none at all"
        )
    return names
