"""What the order of a stream depends on, kept in its state: a run never goes on with other data unnoticed."""

from __future__ import annotations

from typing import Any

from nemotron_ultra.errors import DataError


def refuse_changes(before: dict[str, Any], now: dict[str, Any], allow_change: bool) -> None:
    """DataError naming what differs between the facts of a saved stream and of this one."""
    changed = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    if changed and not allow_change:
        raise DataError(
            "the data is not what this run was started with",
            got="; ".join(f"{key}: {before.get(key)} then, {now.get(key)} now" for key in changed),
            do="restore it, start another run with run.name=..., or set run.allow_config_change=true",
        )
