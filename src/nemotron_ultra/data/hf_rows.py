"""datasets:NAME[@CONFIG][:SPLIT]: a Hugging Face data set, streamed; one part is ROWS rows in a row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from nemotron_ultra.data.inputs import STREAM_PREFIX, Part, missing_extra
from nemotron_ultra.errors import DataError

ROWS = 2048


@dataclass(frozen=True)
class StreamName:
    """Parsed form of datasets:NAME[@CONFIG][:SPLIT]; NAME is a name on the hub or a local folder."""

    argument: str
    name: str
    config: str | None
    split: str

    @classmethod
    def parse(cls, argument: str) -> StreamName:
        rest = argument.removeprefix(STREAM_PREFIX)
        head, colon, split = rest.rpartition(":")
        if not colon or "/" in split:
            head, split = rest, "train"
        name, _, config = head.partition("@")
        if not name:
            raise DataError("no name after datasets:", got=argument, allowed="datasets:NAME[@CONFIG][:SPLIT]")
        return cls(argument, name, config or None, split)


class RowStream:
    """An opened data set. `identity` says which data it is, as far as the library knows."""

    def __init__(self, wanted: StreamName, text_field: str):
        try:
            import datasets
        except ImportError as error:
            raise missing_extra(wanted.argument, "datasets") from error
        self.wanted, self.text_field = wanted, text_field
        try:
            builder = datasets.load_dataset_builder(wanted.name, wanted.config)
            self._rows = builder.as_streaming_dataset(split=wanted.split)
        except (OSError, ValueError, KeyError) as error:
            what, do = f"cannot open {wanted.argument}", "check the name, @CONFIG and :SPLIT"
            raise DataError(what, got=error, do=do) from error
        # The library's cache path ends with the builder's configuration and a hash of its data files.
        self.identity: dict[str, Any] = {
            "name": wanted.name,
            "config": wanted.config,
            "split": wanted.split,
            "data": "/".join(Path(builder.cache_dir).parts[-3:]),
        }

    def parts(self, first: int) -> Iterator[Part]:
        """Parts from number `first` on; the rows before are skipped by the library."""
        rows = iter(self._rows.skip(first * ROWS))
        number = first
        while chunk := list(islice(rows, ROWS)):
            self._check_field(chunk[0])
            values = tuple(map(self._value, chunk))
            size = sum(len(value) for value in values if isinstance(value, str))
            yield Part(number, self.wanted.argument, "rows", False, size, rows=values)
            number += 1

    def _value(self, row: dict[str, Any]) -> Any:
        return row[self.text_field]

    def _check_field(self, row: dict[str, Any]) -> None:
        if self.text_field not in row:
            columns = ", ".join(row)
            what = f"{self.wanted.argument} has no column {self.text_field!r}"
            raise DataError(what, allowed=columns, do="name it with --text-field")
