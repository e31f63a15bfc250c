"""`-m`: the product of several values per key, as lists of overrides that each name their own run."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from nemotron_ultra.config import compose
from nemotron_ultra.errors import ConfigError


def expand(arguments: Sequence[str]) -> list[tuple[str, list[str]]]:
    """(suffix, overrides) of every run: `a=1,2 b=3` gives ("-a1", [a=1, b=3]), ("-a2", ...).

    The suffix makes names of runs differ; run.name differs by itself, and so does the recipe that a run is
    named after. Raises ConfigError where nothing has several values.
    """
    choices = [_values(text) for text in arguments]
    swept = [key for key, values in choices if len(values) > 1]
    named = any(key == "run.name" for key, _ in choices)
    shown = [key for key in swept if key != "run.name" and (key != "recipe" or named)]
    if not swept:
        raise ConfigError("-m: no key has several values", allowed="such as optim.lr=1e-3,3e-3")
    runs = []
    for picked in itertools.product(*(values for _, values in choices)):
        pairs = list(zip([key for key, _ in choices], picked, strict=True))
        suffix = "".join("-" + _short(key, shown) + _clean(value) for key, value in pairs if key in shown)
        runs.append((suffix, [f"{key}={value}" if value is not None else key for key, value in pairs]))
    return runs


def _values(text: str) -> tuple[str, list[str | None]]:
    """Key and values of one override; one that takes a value out stands whole in place of the key."""
    override = compose.parse_override(text)
    if override.is_delete():
        return text, [None]
    key, _, value = text.partition("=")
    if not override.is_sweep_override():
        return key, [value]
    if not override.is_discrete_sweep() or value.startswith("glob"):
        raise ConfigError(f"-m: {text} names no values", allowed=f"{key}=1,2 or {key}=range(1,4)")
    return key, list(override.sweep_string_iterator())


def _short(key: str, swept: list[str]) -> str:
    """Last word of a key, or all of it where two swept keys end alike."""
    last = key.rsplit(".", 1)[-1]
    alike = [other for other in swept if other.rsplit(".", 1)[-1] == last]
    return last if len(alike) == 1 else _clean(key)


def _clean(value: str | None) -> str:
    return re.sub(r"[^A-Za-z0-9._]+", "_", str(value)).strip("_")
