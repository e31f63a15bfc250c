"""Plain dict -> typed configuration; every mistake at once, one line each, with the nearest valid name."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeVar, get_args, get_origin

from pydantic import TypeAdapter, ValidationError

from nemotron_ultra.config import schema
from nemotron_ultra.config.run import RunConfig
from nemotron_ultra.errors import ConfigError

T = TypeVar("T")


def checked(
    cls: type[T], values: Mapping[str, Any], already: Iterable[str] = (), derived: Iterable[str] = ()
) -> T:
    """An instance of `cls` from a plain dict.

    `already` holds mistakes found before (in overrides, say), so that one ConfigError lists all of them.
    `derived` holds those of values that are computed from others: they are told only if nothing else is.
    """
    problems = list(already)
    result: T | None = None
    try:
        result = TypeAdapter(cls).validate_python(dict(values))
    except ValidationError as error:
        told = {problem.partition(":")[0] for problem in [*problems, *derived]}
        new = [(line, line.partition(": missing;")) for line in lines_of(error, cls)]
        problems += [line for line, (key, missing, _) in new if not (missing and key in told)]
    if problems or derived or result is None:
        raise mistakes(problems or list(derived))
    return result


def mistakes(problems: list[str]) -> ConfigError:
    """One ConfigError with a line per mistake."""
    unique = list(dict.fromkeys(problems))
    count = "1 mistake" if len(unique) == 1 else f"{len(unique)} mistakes"
    return ConfigError("\n  ".join([f"{count} in the configuration:", *unique]))


def nearest(word: str, names: Iterable[str]) -> str:
    """ " (did you mean 'x'?)" for the most similar name, else an empty string."""
    found = difflib.get_close_matches(word, list(names), n=1, cutoff=0.6)
    return f" (did you mean '{found[0]}'?)" if found else ""


def lines_of(error: ValidationError, cls: type) -> list[str]:
    """The mistakes of one pydantic validation as lines that start with the key's path below `cls`."""
    lines: list[str] = []
    for item in error.errors(include_url=False):
        lines += _lines(item, cls)
    return lines


def _lines(item: Mapping[str, Any], cls: type) -> list[str]:
    parts = tuple(part for part in item["loc"] if part != "[key]")
    path = ".".join(map(str, parts))
    if item["type"] == "value_error":
        prefix = path + "." if path else ""
        return [prefix + problem for problem in str(item["ctx"]["error"]).split(" | ")]
    if item["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        return [_unknown_key(parts, path, item["input"], cls)]
    annotation = _annotation(cls, parts)
    allowed = f"allowed: {_allowed(annotation, item)}"
    if item["type"] == "missing":
        return [f"{path}: missing; {allowed}"]
    found = item["input"]
    hint = nearest(str(found), _choices(annotation)) if isinstance(found, str) else ""
    if item["type"] == "list_type" and isinstance(found, str):
        hint = f" (did you mean '[{found}]'?)"
    return [f"{path}: got {_short(found)}{hint}; {allowed}"]


def _annotation(cls: type, parts: tuple[str | int, ...]) -> Any:
    annotation: Any = cls
    for part in parts:
        annotation = schema.step_into(annotation, part) if annotation is not None else None
    return annotation


def _allowed(annotation: Any, item: Mapping[str, Any]) -> str:
    if item["type"] == "string_pattern_mismatch":
        return "letters, digits, '.', '_' and '-', beginning with a letter or digit"
    if item["type"] == "too_short":
        return "at least one"
    inner = schema.strip(annotation)
    if dataclasses.is_dataclass(inner):
        names = schema.keys_of(inner)
        return f"keys {', '.join(names)}" if len(names) <= 12 else f"{len(names)} keys, see --help"
    return schema.type_text(annotation) if annotation is not None else str(item["msg"])


def _choices(annotation: Any) -> list[str]:
    inner = schema.strip(annotation)
    return [str(a) for a in get_args(inner)] if get_origin(inner) is Literal else []


def _unknown_key(parts: tuple[str | int, ...], path: str, found: Any, cls: type) -> str:
    parent = schema.strip(_annotation(cls, parts[:-1]))
    names = schema.keys_of(parent)
    where = ".".join(map(str, parts[:-1]))
    hint = nearest(str(parts[-1]), names) or _elsewhere(str(parts[-1]), cls)
    listed = len(names) <= 12 or cls is not RunConfig
    allowed = ", ".join(names) if listed else f"see --help {where}".rstrip()
    return f"{path}: unknown key, got {_short(found)}{hint}; allowed: {allowed}"


def _elsewhere(name: str, cls: type) -> str:
    """A key of the same last name in another place."""
    if cls is not RunConfig:
        return ""
    found = [key.path for key in schema.all_keys() if key.path.rsplit(".", 1)[-1] == name]
    return f" (did you mean '{found[0]}'?)" if found else ""


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
