"""What a run folder holds: metrics as curves; facts, configuration and samples, which may be absent."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from nemotron_ultra.errors import ConfigError, DataError
from nemotron_ultra.observe.metrics import read_metrics

Curve = tuple[list[int], list[float]]


@dataclass(frozen=True)
class RunData:
    """One run. `curves`: metric key -> its steps (ascending, each once) and values (may be non-finite)."""

    path: Path
    name: str
    curves: dict[str, Curve]
    config: dict[str, object] = field(default_factory=dict)
    facts: dict[str, object] = field(default_factory=dict)
    samples: list[dict[str, object]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def last_step(self) -> int:
        return max((steps[-1] for steps, _ in self.curves.values()), default=0)

    @property
    def total_steps(self) -> int | None:
        steps = lookup(self.config, "trainer.steps")
        return steps if isinstance(steps, int) else None

    @property
    def pattern(self) -> str:
        return str(lookup(self.config, "model.pattern") or "")

    def last(self, key: str) -> float | None:
        """Newest value of a metric, or None."""
        return self.curves[key][1][-1] if key in self.curves else None

    def tail_mean(self, key: str) -> tuple[float, int] | None:
        """Mean of the newest values and their number: a tenth of the curve, 1 to 20; None without any."""
        values = self.curves.get(key, ([], []))[1]
        newest = values[-max(1, min(20, len(values) // 10)) :]
        return (sum(newest) / len(newest), len(newest)) if newest else None

    def numbered(self, prefix: str, suffix: str = "") -> dict[str, Curve]:
        """Curves of the keys prefix + name + suffix by name: numbers in order, then words."""
        found = {
            key[len(prefix) : len(key) - len(suffix)]: curve
            for key, curve in self.curves.items()
            if key.startswith(prefix) and key.endswith(suffix) and len(key) > len(prefix) + len(suffix)
        }
        names = [name for name in found if "/" not in name]
        return {name: found[name] for name in sorted(names, key=_number_first)}

    def xz_bits_per_byte(self) -> float | None:
        """What xz reaches on the validation text, from the run's data facts."""
        value = find_key(self.facts, "xz_bits_per_byte")
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def load_run(folder: str | Path) -> RunData:
    """Read a run folder. Without a readable run.json, config.yaml or samples.jsonl `problems` says so.

    Errors: ConfigError if the folder is not there or holds no run; DataError if it has no metrics yet.
    """
    path = Path(folder)
    if not path.is_dir():
        raise ConfigError(f"{path} is not a folder", do="name the folder of a run, such as runs/pretrain")
    if not (path / "metrics.jsonl").is_file():
        is_run = (path / "run.json").is_file() or (path / "config.yaml").is_file()
        if is_run:
            raise DataError(f"{path} has no metrics.jsonl yet", do="wait until its first step is done")
        chain = (path / "scores.json").is_file() and (path / "report.html").is_file()
        raise ConfigError(
            f"{path} is not a run folder: it has no metrics.jsonl",
            do=f"open the page of this chain, {path / 'report.html'}, or name the folder of one of its stages"
            if chain
            else "name the folder of a run, such as runs/pretrain",
        )
    curves = curves_of(read_metrics(path / "metrics.jsonl"))
    if not curves:
        raise DataError(f"{path / 'metrics.jsonl'} holds no step", do="wait until its first step is done")
    problems: list[str] = []
    return RunData(
        path=path,
        name=path.resolve().name,
        curves=curves,
        config=_optional(path / "config.yaml", _read_yaml, problems) or {},
        facts=_optional(path / "run.json", _read_json, problems) or {},
        samples=_optional(path / "samples.jsonl", _read_lines, problems) or [],
        problems=problems,
    )


def curves_of(rows: list[dict[str, object]]) -> dict[str, Curve]:
    """Numbers of the rows by metric key. Of a step that comes twice (a resume) the last value counts."""
    values: dict[str, dict[int, float]] = {}
    for row in rows:
        step = row.get("step")
        if isinstance(step, int | float) and math.isfinite(step):
            _add(values, int(step), row)
    return {
        key: ([step for step, _ in sorted(at.items())], [v for _, v in sorted(at.items())])
        for key, at in values.items()
    }


def _add(values: dict[str, dict[int, float]], step: int, row: Mapping[str, object]) -> None:
    for key, value in row.items():
        if key != "step" and isinstance(value, int | float) and not isinstance(value, bool):
            values.setdefault(key, {})[step] = float(value)


def lookup(tree: object, dotted: str) -> object:
    """Value at a dotted key of nested dicts, or None."""
    for part in dotted.split("."):
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree


def find_key(tree: object, key: str) -> object:
    """First value under `key` anywhere in nested dicts and lists, or None."""
    if isinstance(tree, dict) and tree.get(key) is not None:
        return tree[key]
    inner = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    return next((found for item in inner if (found := find_key(item, key)) is not None), None)


def flatten(tree: object, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Dotted key and value of every leaf; a list of plain values is a leaf."""
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from flatten(value, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(tree, list) and any(isinstance(item, dict | list) for item in tree):
        for number, value in enumerate(tree):
            yield from flatten(value, f"{prefix}.{number}")
    else:
        yield prefix, tree


def config_differences(runs: list[RunData]) -> list[tuple[str, list[object]]]:
    """Configuration keys whose values are not the same in all runs; "absent" where a run lacks the key."""
    flat = [dict(flatten(run.config)) for run in runs]
    keys = list(dict.fromkeys(key for one in flat for key in one))
    rows = [(key, [one.get(key, "absent") for one in flat]) for key in keys]
    return [(key, values) for key, values in rows if any(value != values[0] for value in values)]


def _optional(path: Path, read, problems: list[str]):
    try:
        return read(path)
    except FileNotFoundError:
        if path.suffix != ".jsonl":  # a run need not write samples
            problems.append(f"{path.name} is not there")
    except (ValueError, yaml.YAMLError) as error:
        problems.append(f"{path.name} cannot be read: {str(error).splitlines()[0]}")
    return None


def _read_json(path: Path) -> dict[str, object]:
    return _object(json.loads(path.read_text(encoding="utf-8")))


def _read_yaml(path: Path) -> dict[str, object]:
    return _object(yaml.safe_load(path.read_text(encoding="utf-8")))


def _read_lines(path: Path) -> list[dict[str, object]]:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    whole = [
        line for line in lines if line.endswith("\n") and line.strip()
    ]  # a run may be writing the last one
    return [_object(json.loads(line)) for line in whole]


def _object(value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise ValueError(f"a {type(value).__name__} in place of an object")
    return value


def _number_first(name: str) -> tuple[int, int, str]:
    return (0, int(name), "") if name.isdecimal() else (1, 0, name)
