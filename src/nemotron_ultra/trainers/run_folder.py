"""runs/NAME/: who may write it, whether a command continues it, and the files that describe it.

    config.yaml      the resolved configuration (earlier ones, if it was changed on resume: config.1.yaml ...)
    run.json         facts of the run: recipe, parameters, tables, machine, data, times
    metrics.jsonl    a line a step          samples.jsonl  text          checkpoints/  report.html

The same command again continues the run. Nothing is overwritten: a folder that is not ours, another
recipe's run, or a changed configuration is refused. One process at a time holds the folder.
"""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

from nemotron_ultra.config.compose import read_config, to_dict, to_yaml
from nemotron_ultra.config.run import RunConfig
from nemotron_ultra.engine.checkpoint import latest_checkpoint
from nemotron_ultra.errors import ConfigError

# What a run that was interrupted before its first step may have left.
_FIRST_FILES = {
    ".lock",
    "config.yaml",
    ".config.yaml.tmp",
    "run.json",
    ".run.json.tmp",
    "metrics.jsonl",
    "samples.jsonl",
}

# Beginnings of lines for keys that change which numbers come out. All others (more steps, and with them the
# tokens of the schedule, validation, logging, checkpoints, threads, micro-batches) may differ between a run
# and its continuation; the start panel lists them.
FIXED = (
    "model.",
    "data.",
    "precision.",
    "optim.",
    "schedule.name:",
    "schedule.initial_lr:",
    "schedule.min_lr:",
    "run.seed:",
    "run.from:",
    "tasks.domains.",
    "tasks.only:",
    "tasks.validation_problems:",
    "loss.",
    "advantage.",
    "teachers.",
    "rollout.prompts_per_step:",
    "rollout.group_size:",
    "rollout.max_new_tokens:",
    "rollout.temperature:",
    "rollout.max_age:",
    "trainer.name:",
    "trainer.global_batch_size:",
    "trainer.mtp_loss_scale:",
    "trainer.loss_mean:",
    "trainer.loss_mean_after:",
    "trainer.router_balance_coefficient:",
    "trainer.router_bias_rate:",
)
FREE = ("data.cache_dir", "run.resume", "run.allow_config_change")


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted key -> leaf value."""
    if isinstance(value, dict):
        return {k: v for key, inner in value.items() for k, v in flat(inner, f"{prefix}{key}.").items()}
    if isinstance(value, list) and any(isinstance(inner, dict) for inner in value):
        return flat({str(i): inner for i, inner in enumerate(value)}, prefix)
    return {prefix.removesuffix("."): value}


def changed_keys(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Lines "key: old -> new"."""
    old, new = flat(before), flat(now)
    lines = []
    for key in sorted(old.keys() | new.keys()):
        if key not in FREE and old.get(key) != new.get(key):
            lines.append(f"{key}: {old.get(key, 'absent')} -> {new.get(key, 'absent')}")
    return lines


class RunFolder:
    """An open, locked run folder.

    `facts` is the content of run.json, `checkpoint` the newest one or None, `changes` the keys that differ
    from the configuration of the last start.
    """

    def __init__(self, path: Path, lock: FileLock):
        self.path, self._lock = path, lock
        self.facts: dict[str, Any] = {}
        self.changes: list[str] = []

    @classmethod
    def open(cls, config: RunConfig) -> RunFolder:
        """Create or continue the run that `config` names. Raises ConfigError if that would mix two runs."""
        path = Path(config.run.dir) / config.run.name
        try:
            existed = (path / "run.json").is_file()
            _check_place(path, config, existed)
            path.mkdir(parents=True, exist_ok=True)
            folder = cls(path, _take_lock(path))
        except OSError as error:
            raise _unusable(path, error) from error
        try:
            folder._continue(config) if existed else folder._begin(config)
        except OSError as error:
            folder.close()
            raise _unusable(path, error) from error
        except BaseException:
            folder.close()
            raise
        return folder

    @property
    def checkpoint(self) -> Path | None:
        return latest_checkpoint(self.path)

    @property
    def finished_steps(self) -> int:
        """Steps of the run when it last came to its end; 0 if it never did."""
        return self.facts.get("finished_steps", 0)

    def record(self, **facts: Any) -> None:
        """Add to run.json."""
        self.facts |= facts
        _write(self.path / "run.json", json.dumps(self.facts, indent=1, default=str))

    def leave_no_trace(self) -> None:
        """After an error: remove the folder again if nothing was trained in it."""
        if _is_untrained(self.path) and {p.name for p in self.path.iterdir()} <= _FIRST_FILES:
            for file in self.path.iterdir():
                file.unlink()
            self.path.rmdir()

    def close(self) -> None:
        self._lock.release()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _begin(self, config: RunConfig) -> None:
        _write(self.path / "config.yaml", to_yaml(config))
        self.record(recipe=config.recipe, created=now(), started=[now()], process=_this_process())

    def _continue(self, config: RunConfig) -> None:
        if _is_untrained(self.path):
            self._begin(config)
            return
        self.facts = json.loads((self.path / "run.json").read_text())
        before = to_dict(_read_config(self.path / "config.yaml"))
        self.changes = changed_keys(before, to_dict(config))
        fixed = [line for line in self.changes if line.startswith(FIXED)]
        if fixed and not config.run.allow_config_change:
            raise ConfigError(
                f"{self.path} was started with another configuration",
                got="; ".join(fixed),
                do="take the old values, choose another run.name, or allow it: run.allow_config_change=true",
            )
        if self.changes:
            _keep_earlier(self.path / "config.yaml")
            _write(self.path / "config.yaml", to_yaml(config))
        self.record(started=[*self.facts.get("started", []), now()], process=_this_process())


def _unusable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"the run folder {path} cannot be used", got=error.strerror, do="choose another run.dir or run.name"
    )


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def _read_config(path: Path) -> RunConfig:
    """The configuration of the last start; keys that are newer than it have their defaults."""
    try:
        return read_config(path)
    except ConfigError as error:
        raise ConfigError(
            f"{path} does not fit this version", got=error, do="correct it, or choose another run.name"
        ) from None


def _is_untrained(path: Path) -> bool:
    """No step was finished there, so that its configuration binds nobody."""
    logs = [path / "metrics.jsonl", path / "samples.jsonl"]
    return latest_checkpoint(path) is None and not any(log.exists() and log.stat().st_size for log in logs)


def _check_place(path: Path, config: RunConfig, existed: bool) -> None:
    if path.exists() and not path.is_dir():
        raise ConfigError("the run folder is a file", got=path, do="choose another run.name or run.dir")
    if existed:
        _check_owner(path, config)
        return
    if config.run.resume == "must":
        raise ConfigError(
            "run.resume=must, but there is no such run", got=path, do="check run.name and run.dir"
        )
    foreign = sorted(p.name for p in path.iterdir() if p.name not in _FIRST_FILES) if path.is_dir() else []
    if foreign:
        raise ConfigError(
            f"{path} is not a run folder (it has no run.json) and is not empty",
            got=", ".join(foreign[:6]),
            do="choose another run.name or run.dir",
        )


def _check_owner(path: Path, config: RunConfig) -> None:
    try:
        recipe = json.loads((path / "run.json").read_text())["recipe"]
        yaml.safe_load((path / "config.yaml").read_text())["model"]
    except (ValueError, KeyError, TypeError, FileNotFoundError, yaml.YAMLError) as error:
        raise ConfigError(
            f"{path} is not a run folder: its run.json or config.yaml was not written by a run",
            got=f"{type(error).__name__}: {error}",
            do="choose another run.name or run.dir",
        ) from None
    if recipe != config.recipe:
        raise ConfigError(
            f"{path} belongs to recipe={recipe}",
            got=f"recipe={config.recipe}",
            do="choose another run.name",
        )
    if config.run.resume == "never":
        raise ConfigError("run.resume=never, but the run exists", got=path, do="choose another run.name")


def _take_lock(path: Path) -> FileLock:
    """An exclusive lock that the system drops when this process ends, however it ends."""
    lock = FileLock(path / ".lock", timeout=0)
    try:
        return lock.acquire().lock
    except Timeout:
        facts = path / "run.json"
        owner = json.loads(facts.read_text()).get("process") if facts.is_file() else None
        raise ConfigError(
            f"{path} is being written by another process",
            got=owner,
            do="wait for it, stop it, or choose another run.name",
        ) from None


def _this_process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def _keep_earlier(path: Path) -> None:
    number = 1
    while (kept := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    kept.write_text(path.read_text())


def _write(path: Path, text: str) -> None:
    """Write, flush and rename: the file is absent, old or whole."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
