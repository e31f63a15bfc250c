"""A folder that one command fills: job.json says what it depends on, manifest.json that it is whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nemotron_ultra.data.manifest import NAME, damaged_files, write_json
from nemotron_ultra.errors import DataError

JOB = "job.json"


def open_job(
    out: Path, identity: dict[str, Any], owned: tuple[str, ...], *, goes_on: bool
) -> dict[str, Any] | None:
    """The manifest of the finished folder `out`, or None: it is now claimed for `identity` and to be filled.

    identity: JSON values; equal identities mean equal bytes. owned: names of files the command will write.
    goes_on: an unfinished folder holds work that the same job goes on from, so that no other may take it.
    Raises DataError for a folder of another job (with what differs), of files that are not this command's,
    or whose finished files were changed.
    """
    out.mkdir(parents=True, exist_ok=True)
    identity = json.loads(json.dumps(identity))
    claim = out / JOB
    if not claim.is_file():
        there = [name for name in (NAME, *owned) if (out / name).exists()]
        if there:
            raise DataError(f"{out} holds {', '.join(there)} of something else", do="name another --out")
        write_json(claim, identity)
        return None
    finished = (out / NAME).is_file()
    if finished or goes_on:
        _same(out, _read(claim), identity)
    if not finished:
        write_json(claim, identity)
        return None
    manifest = _read(out / NAME)
    damaged = damaged_files(out, manifest)
    if damaged:
        raise DataError(
            f"{out} is finished but damaged",
            got=f"missing or changed: {', '.join(damaged)}",
            do="remove the folder and give the command again",
        )
    return manifest


def _same(out: Path, theirs: dict[str, Any], mine: dict[str, Any]) -> None:
    changed = [key for key in {**mine, **theirs} if theirs.get(key) != mine.get(key)]
    if changed:
        raise DataError(
            f"{out} was made with other {' and '.join(changed)}",
            got="; ".join(f"{key}: {theirs.get(key)} there, {mine.get(key)} here" for key in changed),
            do="name another --out, or remove the folder",
        )


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        do = "remove the folder and give the command again"
        raise DataError(f"{path} is not JSON", got=error, do=do) from error
