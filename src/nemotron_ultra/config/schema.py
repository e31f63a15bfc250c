"""The keys of RunConfig as data: path, type, default, and the text that stands under each field."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import sys
import types
import typing
from collections.abc import Iterator
from itertools import pairwise
from typing import Annotated, Any, Literal

from nemotron_ultra.config.base import key_of
from nemotron_ultra.config.run import RunConfig

MISSING = dataclasses.MISSING
_CONSTRAINTS = (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="))
_WORDS = {int: "whole number", float: "number", bool: "true or false", str: "text", Any: "anything"}


@dataclasses.dataclass(frozen=True)
class Key:
    """One line of the reference: `path` such as trainer.steps or data.phases[].until_tokens."""

    path: str
    type: str
    default: Any
    text: str
    nested: type | None

    @property
    def default_text(self) -> str:
        """The default as YAML would show it; "required" where there is none."""
        if self.default is MISSING:
            return "required"
        return plain(self.default)


def plain(value: Any) -> str:
    """A value in the spelling of YAML: null, true, [0, inf]."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(plain(v) for v in value) + "]"
    return str(value)


def groups() -> list[str]:
    """Fields of RunConfig that have a folder of options under configs/."""
    return [f.name for f in dataclasses.fields(RunConfig) if f.name not in ("recipe", "run")]


def optional_groups() -> list[str]:
    """Groups that a run may do without."""
    return [f.name for f in dataclasses.fields(RunConfig) if f.default is None]


def hints(cls: type) -> dict[str, Any]:
    """Key -> annotation with its constraints."""
    return {key_of(name): hint for name, hint in typing.get_type_hints(cls, include_extras=True).items()}


def keys_of(cls: type) -> list[str]:
    """The keys of one configuration type."""
    return [key_of(field.name) for field in dataclasses.fields(cls)]


def strip(annotation: Any) -> Any:
    """The annotation without constraints and without `| None`."""
    if typing.get_origin(annotation) is Annotated:
        return strip(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return strip(next(a for a in typing.get_args(annotation) if a is not type(None)))
    return annotation


def step_into(annotation: Any, part: str | int) -> Any:
    """The annotation of a field, list element or dict value; None where there is no such thing."""
    inner = strip(annotation)
    if dataclasses.is_dataclass(inner):
        return hints(inner).get(str(part))
    arguments = typing.get_args(inner)
    if typing.get_origin(inner) is tuple:
        return arguments[part] if isinstance(part, int) and part < len(arguments) else None
    return arguments[-1] if typing.get_origin(inner) in (list, dict) else None


def find(path: tuple[str | int, ...]) -> Any:
    """The annotation at a path below RunConfig, None where the path leads nowhere."""
    annotation: Any = RunConfig
    for part in path:
        annotation = step_into(annotation, part) if annotation is not None else None
    return annotation


def type_text(annotation: Any) -> str:
    """A type in words, with its limits: `whole number > 0`, `wsd | cosine | constant`, `list of text`."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return type_text(arguments[0]) + _limits(arguments[1:])
    if origin in (typing.Union, types.UnionType):
        return " or ".join("null" if a is type(None) else type_text(a) for a in arguments)
    if origin is Literal:
        return " | ".join(map(str, arguments))
    if origin is list:
        return f"list of {type_text(arguments[0])}"
    if origin is dict:
        return f"name: {type_text(arguments[1])}"
    if origin is tuple and arguments[-1] is Ellipsis:
        return f"list of {type_text(arguments[0])}"
    if origin is tuple:
        return "[" + ", ".join(map(type_text, arguments)) + "]"
    if dataclasses.is_dataclass(annotation):
        return annotation.__name__
    return _WORDS.get(annotation, str(annotation))


def _limits(extras: tuple[Any, ...]) -> str:
    found = []
    for item in (m for extra in extras for m in getattr(extra, "metadata", [])):
        limits = [(sign, getattr(item, name, None)) for name, sign in _CONSTRAINTS]
        found += [f"{sign} {limit:g}" for sign, limit in limits if limit is not None]
    return f" {' and '.join(found)}" if found else ""


def field_texts(cls: type) -> dict[str, str]:
    """Key -> the string that stands under its field in the class body."""
    tree = ast.parse(inspect.getsource(sys.modules[cls.__module__]))
    body = next(n.body for n in tree.body if isinstance(n, ast.ClassDef) and n.name == cls.__name__)
    return {
        key_of(field.target.id): " ".join(text.value.value.split())
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
    }


def all_keys(cls: type = RunConfig, prefix: str = "") -> Iterator[Key]:
    """Every key below `cls`, parents before children."""
    texts, annotations = field_texts(cls), hints(cls)
    for field in dataclasses.fields(cls):
        name = key_of(field.name)
        annotation = annotations[name]
        nested, path = _nested(annotation, prefix + name)
        yield Key(prefix + name, type_text(annotation), _default(field), texts.get(name, ""), nested)
        if nested is not None:
            yield from all_keys(nested, path + ".")


def _nested(annotation: Any, path: str) -> tuple[type | None, str]:
    """The configuration class in an annotation, and its path: [] for a list, NAME for a dict's key."""
    inner = strip(annotation)
    if dataclasses.is_dataclass(inner):
        return inner, path
    if typing.get_origin(inner) is list:
        return _nested(typing.get_args(inner)[0], path + "[]")
    if typing.get_origin(inner) is dict:
        return _nested(typing.get_args(inner)[1], path + ".NAME")
    return None, path


def _default(field: dataclasses.Field) -> Any:
    """A pydantic dataclass keeps FieldInfo where `Field(default_factory=...)` was written."""
    default = field.default
    if field.default_factory is not MISSING:
        return field.default_factory()
    factory = getattr(default, "default_factory", None)
    return factory() if factory is not None else default
