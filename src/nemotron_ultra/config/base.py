"""The one decorator of every configuration type: frozen, keyword-only, unknown keys refused."""

from __future__ import annotations

from typing import dataclass_transform

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

_STRICT = ConfigDict(extra="forbid", validate_default=False, allow_inf_nan=True)


@dataclass_transform(kw_only_default=True, frozen_default=True)
def config(cls: type) -> type:
    """Make `cls` a frozen, keyword-only pydantic dataclass that refuses unknown keys."""
    return dataclass(frozen=True, kw_only=True, config=_STRICT)(cls)
