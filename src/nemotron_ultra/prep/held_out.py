"""Texts that training must not hold: files a person names, and the held-out questions of a set of tasks."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

from nemotron_ultra.config.compose import load_recipe
from nemotron_ultra.data.inputs import InputFile, find_files, with_digests


def add_options(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    file_help = "JSONL, parquet or lines of text that may not be repeated; again for more"
    parser.add_argument("--held-out", action="append", default=[], metavar="FILE", help=file_help)
    task_help = "tasks (configs/tasks/NAME.yaml) whose validation questions may not be; again for more"
    parser.add_argument("--held-out-tasks", action="append", default=[], metavar="NAME", help=task_help)


@contextmanager
def held_out_files(arguments: argparse.Namespace) -> Iterator[list[InputFile]]:
    """The files with their digests; questions of tasks lie in a folder that goes away again."""
    with tempfile.TemporaryDirectory(prefix="held-out-") as folder:
        named = [str(_questions(name, Path(folder))) for name in arguments.held_out_tasks]
        files = find_files([*arguments.held_out, *named], arguments.out)
        yield with_digests(files)


def locked(out: Path) -> FileLock:
    """The lock of the folder `out`, which is made."""
    out.mkdir(parents=True, exist_ok=True)
    return FileLock(out / ".lock", timeout=0)


def _questions(name: str, folder: Path) -> Path:
    """The held-out questions of every domain, as RL and validation ask them (the same for every seed)."""
    from nemotron_ultra.rl.environments import make_environments

    tasks = load_recipe("grpo", [f"tasks={name}"]).tasks
    path = folder / f"tasks-{name}.jsonl"
    with open(path, "w", encoding="utf-8") as file:
        for environment in make_environments(tasks, seed=0).values():
            for question in environment.questions:
                file.write(json.dumps({"domain": environment.domain, "question": question}) + "\n")
    return path
