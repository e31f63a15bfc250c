"""Metric: one documented key of metrics.jsonl."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """One row of the table; `unit` is "" for a pure number."""

    key: str
    unit: str
    meaning: str
    healthy: str
    otherwise: str

    def matches(self, key: str) -> bool:
        return re.fullmatch(re.escape(self.key).replace("<k>", "[^/]+"), key) is not None
