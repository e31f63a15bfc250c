"""The decorator of every configuration type (frozen, keyword-only, unknown keys refused) and its numbers."""

from __future__ import annotations

import math
from typing import Annotated, Any, dataclass_transform

from pydantic import BeforeValidator, ConfigDict, Field, PlainValidator
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticCustomError


def key_of(field: str) -> str:
    """The key of a field: a trailing underscore, there for a word that Python reserves, is no part of it."""
    return field.removesuffix("_")


_STRICT = ConfigDict(
    extra="forbid",
    validate_default=False,
    allow_inf_nan=True,
    coerce_numbers_to_str=True,
    alias_generator=key_of,
    populate_by_name=True,
)


@dataclass_transform(kw_only_default=True, frozen_default=True)
def config(cls: type) -> type:
    """Make `cls` a frozen, keyword-only pydantic dataclass that refuses unknown keys."""
    return dataclass(frozen=True, kw_only=True, config=_STRICT)(cls)


def _whole(value: Any) -> Any:
    """Accept 20e12, 1e3 and "1e3"; refuse true and false, which Python would take for 1 and 0."""
    number = _real(value, "a whole number")
    if isinstance(number, float) and not (math.isfinite(number) and number.is_integer()):
        raise PydanticCustomError("number", "expected {kind}", {"kind": "a whole number"})
    return int(number)


def _real(value: Any, kind: str = "a number") -> Any:
    if isinstance(value, str):
        try:
            value = int(value) if value.lstrip("+-").replace("_", "").isdigit() else float(value)
        except ValueError:
            value = None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise PydanticCustomError("number", "expected {kind}", {"kind": kind})
    return value


def _ids(value: Any) -> int | tuple[int, ...]:
    ids = tuple(_whole(one) for one in (value if isinstance(value, list | tuple) else [value]))
    if not ids or min(ids) < 0:
        raise PydanticCustomError(
            "number", "expected {kind}", {"kind": "one token id >= 0 or a list of them"}
        )
    return ids if isinstance(value, list | tuple) else ids[0]


Whole = Annotated[int, BeforeValidator(_whole)]
Real = Annotated[float, BeforeValidator(lambda value: _real(value))]

Positive = Annotated[Whole, Field(gt=0)]
NonNegative = Annotated[Whole, Field(ge=0)]
PositiveReal = Annotated[Real, Field(gt=0, allow_inf_nan=False)]
NonNegativeReal = Annotated[Real, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[Real, Field(ge=0, lt=1)]
TokenIds = Annotated[int | tuple[int, ...], PlainValidator(_ids)]
