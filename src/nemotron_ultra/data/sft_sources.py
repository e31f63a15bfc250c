"""NAME=PATH arguments or a blend file -> named sources of conversations, each cut into parts.

Parts are numbered within their source and depend on its files alone. A source's identity is the content of
its files, or what the `datasets` library knows of a streamed set.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml

from nemotron_ultra.data.hf_rows import RowStream, StreamName
from nemotron_ultra.data.inputs import (
    PART_BYTES,
    STREAM_PREFIX,
    Part,
    find_files,
    fingerprint,
    make_parts,
    with_digests,
)
from nemotron_ultra.data.pack_manifest import SOURCE_NAME
from nemotron_ultra.errors import DataError

BLEND_SUFFIXES = (".yaml", ".yml", ".json")
FORM = "NAME=PATH[:weight=W][:cap=N][:train=assistant|last][:thinking=auto|on|off]"
CHOICES = {"train": ("assistant", "last"), "thinking": ("auto", "on", "off")}
_OPTIONS = ("weight", "cap", "train", "thinking")
_OPTION = re.compile(rf":({'|'.join(_OPTIONS)})=([^:]*)$")
_UNKNOWN = re.compile(r":(\w+)=[^:/]*$")


@dataclass(frozen=True, kw_only=True)
class SourceSpec:
    """One source as a person named it. paths: files, folders, or one datasets:NAME[@CONFIG][:SPLIT].

    weight: conversations are drawn in proportion to it. cap: at most so many usable ones are taken, in order.
    train, thinking: the command's own options for this source only.
    """

    name: str
    paths: tuple[str, ...]
    weight: float = 1.0
    cap: int | None = None
    train: str | None = None
    thinking: str | None = None

    def __post_init__(self) -> None:
        if not re.fullmatch(SOURCE_NAME, self.name):
            allowed = "letters, digits and . _ + -, the first a letter or digit"
            raise DataError(
                "a source's name becomes part of file names", got=repr(self.name), allowed=allowed
            )
        if not math.isfinite(self.weight) or self.weight <= 0:
            raise DataError(f"source {self.name}: weight", got=self.weight, allowed="a number above 0")
        if self.cap is not None and self.cap < 1:
            raise DataError(f"source {self.name}: cap", got=self.cap, allowed="a whole number from 1 on")
        for key, allowed in CHOICES.items():
            value = getattr(self, key)
            if value is not None and value not in allowed:
                raise DataError(f"source {self.name}: {key}", got=value, allowed=", ".join(allowed))
        if any(path.startswith(STREAM_PREFIX) for path in self.paths) and len(self.paths) > 1:
            do = "give each its own name"
            raise DataError(f"source {self.name}: datasets:NAME stands alone", got=self.paths, do=do)


@dataclass(frozen=True, kw_only=True)
class Source:
    """An opened source. parts(n): its parts from number n on. size: bytes, or None for a stream."""

    spec: SourceSpec
    identity: dict[str, Any]
    size: int | None
    parts: Callable[[int], Iterable[Part]]

    @property
    def name(self) -> str:
        return self.spec.name


def read_specs(arguments: Sequence[str]) -> list[SourceSpec]:
    """Sources of the command line: NAME=PATH with options behind it, and blend files. Raises DataError.

    The same NAME again adds files to it.
    """
    found: dict[str, SourceSpec] = {}
    for argument in arguments:
        is_blend = argument.lower().endswith(BLEND_SUFFIXES) and "=" not in argument
        for spec in read_blend(Path(argument)) if is_blend else [parse_source(argument)]:
            old = found.get(spec.name)
            if old and replace(old, paths=()) != replace(spec, paths=()):
                do = "give the same options each time"
                raise DataError(f"source {spec.name} is named twice with other options", do=do)
            found[spec.name] = replace(spec, paths=old.paths + spec.paths) if old else spec
    return list(found.values())


def parse_source(argument: str) -> SourceSpec:
    """NAME=PATH:weight=2:cap=1000 -> SourceSpec. Raises DataError."""
    name, equals, rest = argument.partition("=")
    if not equals or not name:
        raise DataError("not a source", got=argument, allowed=f"{FORM}, or a blend file (.yaml, .json)")
    options: dict[str, Any] = {}
    while match := _OPTION.search(rest):
        options[match[1]] = match[2]
        rest = rest[: match.start()]
    _check_end(name, rest)
    if not rest:
        raise DataError(f"source {name} names no path", got=argument, allowed=FORM)
    return _spec(name, {"path": rest} | options, argument)


def _check_end(name: str, path: str) -> None:
    """An option that is none; a path may end like one if it is there."""
    found = _UNKNOWN.search(path)
    if found and not path.startswith(STREAM_PREFIX) and not Path(path).expanduser().exists():
        close = difflib.get_close_matches(found[1], _OPTIONS, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise DataError(f"source {name}: unknown option {found[1]}{hint}", got=path, allowed=FORM)


def read_blend(path: Path) -> list[SourceSpec]:
    """Sources of a YAML or JSON file: {sources: {NAME: PATH or {path, weight, cap, ...}}}.

    Also the list of the public preparation: {datasets: [{name, path, weight, subset, split}, ...]}.
    """
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _EachKeyOnce)
    except OSError as error:
        raise DataError(f"cannot read the blend {path}", got=error.strerror, allowed=FORM) from error
    except (ValueError, yaml.YAMLError) as error:
        raise DataError(f"{path} is no YAML or JSON", got=" ".join(str(error).split())) from error
    rows = content if isinstance(content, Mapping) else {}
    sources, datasets = rows.get("sources"), rows.get("datasets")
    if isinstance(sources, Mapping):
        return [_spec(str(name), _blend_row(row), f"{path}: {name}") for name, row in sources.items()]
    if isinstance(datasets, list):
        return [_public_row(row, f"{path}: datasets[{number}]") for number, row in enumerate(datasets)]
    allowed = "sources: {NAME: PATH} or sources: {NAME: {path, weight, cap, train, thinking}}"
    raise DataError(
        f"{path} is no blend of sources", got=f"keys {', '.join(map(str, rows))}", allowed=allowed
    )


def open_sources(
    specs: Sequence[SourceSpec],
    out: Path,
    columns: Mapping[str, Sequence[str]],
    part_bytes: int = PART_BYTES,
) -> list[Source]:
    """Find, hash and cut. columns: fields that are read of a row, by source. Raises DataError: not there, no
    rows."""
    if not specs:
        raise DataError("no source of conversations", allowed=FORM)
    return [_open(spec, out, columns[spec.name], part_bytes) for spec in specs]


class ChatStream(RowStream):
    """A streamed data set whose rows are handed on whole, as JSON."""

    def __init__(self, wanted: StreamName, source: str, columns: Sequence[str]):
        super().__init__(wanted, "")
        self.source, self.columns = source, columns

    def parts(self, first: int) -> Iterator[Part]:
        for part in super().parts(first):
            yield replace(part, source=self.source)

    def _check_field(self, row: dict[str, Any]) -> None:
        check_columns(self.wanted.argument, list(row), self.columns)

    def _value(self, row: dict[str, Any]) -> str:
        kept = {name: row[name] for name in self.columns if name in row}
        return json.dumps(kept, ensure_ascii=False, default=str)


def check_columns(where: str, there: Sequence[str], wanted: Sequence[str]) -> None:
    """Raises DataError if a table has none of the columns that can hold messages (the first of `wanted`)."""
    if not set(there) & {wanted[0], "conversations"}:
        what = f"{where} has no column {wanted[0]!r}"
        raise DataError(what, allowed=", ".join(there), do="name it with --messages-field")


def _open(spec: SourceSpec, out: Path, columns: Sequence[str], part_bytes: int) -> Source:
    if spec.paths[0].startswith(STREAM_PREFIX):
        stream = ChatStream(StreamName.parse(spec.paths[0]), spec.name, columns)
        return Source(spec=spec, identity={"stream": stream.identity}, size=None, parts=stream.parts)
    files = [replace(file, source=spec.name) for file in find_files(spec.paths, out)]
    for file in files:
        if file.kind == "text":
            allowed = ".jsonl, .ndjson (also .gz .bz2 .xz .zst), .parquet"
            raise DataError(f"source {spec.name}: {file.path} is no file of rows", allowed=allowed)
    if not sum(file.size for file in files):
        got = f"{len(files)} files, 0 bytes, in {', '.join(spec.paths)}"
        raise DataError(f"source {spec.name} is empty", got=got, do="mend its path or leave it out")
    files = with_digests(files)
    parts = make_parts(files, part_bytes)
    identity = {"files": len(files), "fingerprint": fingerprint(files), "part_bytes": part_bytes}
    return Source(
        spec=spec, identity=identity, size=sum(f.size for f in files), parts=lambda first: parts[first:]
    )


class _EachKeyOnce(yaml.SafeLoader):
    """Of two equal keys YAML keeps the last: a source would be lost without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        twice = next((key for number, key in enumerate(keys) if key in keys[:number]), None)
        if twice is not None:
            raise yaml.YAMLError(f"line {node.start_mark.line + 1}: {twice!r} is there twice")
        return super().construct_mapping(node, deep)


def _blend_row(row: Any) -> dict[str, Any]:
    return dict(row) if isinstance(row, Mapping) else {"path": row}


def _public_row(row: Any, where: str) -> SourceSpec:
    if not isinstance(row, Mapping) or not {"name", "path"} <= set(row):
        raise DataError(f"{where}: a set needs name and path", got=row)
    options = {key: value for key, value in row.items() if key not in ("name", "subset", "split")}
    path = str(row["path"])
    if path.startswith("hf://"):
        subset = f"@{row['subset']}" if row.get("subset") else ""
        name = path.removeprefix("hf://").removeprefix("datasets/")
        options["path"] = f"{STREAM_PREFIX}{name}{subset}:{row.get('split') or 'train'}"
    return _spec(re.sub(r"[^A-Za-z0-9._+-]", "-", str(row["name"])), options, where)


def _spec(name: str, row: dict[str, Any], where: str) -> SourceSpec:
    paths = row.pop("path", None)
    paths = [paths] if isinstance(paths, str) else paths
    known = [field.name for field in fields(SourceSpec) if field.name not in ("name", "paths")]
    unknown = [key for key in row if key not in known]
    if unknown:
        allowed = f"path, {', '.join(known)}"
        raise DataError(f"{where}: unknown {', '.join(map(str, unknown))}", allowed=allowed)
    if not isinstance(paths, list) or not paths or not all(isinstance(path, str) for path in paths):
        raise DataError(f"{where}: path", got=paths, allowed="a path or a list of paths")
    given = {key: value for key, value in row.items() if value is not None}
    for key, kind, text in (("weight", float, "a number"), ("cap", int, "a whole number")):
        if key in given:
            given[key] = _number(given[key], kind, f"{where}: {key}", text)
    return SourceSpec(name=name, paths=tuple(paths), **given)


def _number(value: Any, kind: type, where: str, allowed: str) -> Any:
    """Text or a number as `kind`, which must be the same number: YAML's true and 1.5 are no whole ones."""
    try:
        number = kind(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise DataError(where, got=value, allowed=allowed) from error
    if isinstance(value, bool) or (isinstance(value, float) and math.isfinite(value) and number != value):
        raise DataError(where, got=value, allowed=allowed)
    return number
