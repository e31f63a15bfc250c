"""TasksConfig: the verifiable tasks that SFT, GRPO and MOPD draw problems from, by domain (report 3.2)."""

from __future__ import annotations

import difflib
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from nemotron_ultra.config.base import NonNegativeReal, Positive, PositiveReal, config


def close_to(name: str, names: list[str]) -> str:
    """ " (did you mean 'x'?); allowed: ..." for a name that has to be one of `names`."""
    found = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    hint = f" (did you mean '{found[0]}'?)" if found else ""
    return f"{hint}; allowed: {', '.join(names)}"


@config
class TaskConfig:
    environment: Literal["reasoning_gym"] = "reasoning_gym"
    """Library that makes the problems of this domain and scores their answers."""
    name: str
    """Generator of that library, such as chain_sum."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Options of the generator, such as {min_terms: 2}."""
    weight: PositiveReal = 1.0
    """Share of this domain in the problems; weights need not sum to 1."""


@config
class TasksConfig:
    domains: Annotated[dict[str, TaskConfig], Field(min_length=1)]
    """Name of each domain -> its task."""
    only: list[str] = Field(default_factory=list)
    """Domains to train on; [] means all. Scores on held-out problems are of all domains."""
    validation_problems: Positive = 100
    """Held-out problems of each domain that a validation answers."""
    validation_temperature: NonNegativeReal = 1.0
    """Temperature of those answers; 0 takes the likeliest token."""

    @property
    def trained(self) -> dict[str, TaskConfig]:
        """The domains that problems are drawn from, in the order of `domains`."""
        return {name: task for name, task in self.domains.items() if not self.only or name in self.only}

    @model_validator(mode="after")
    def _only_known_domains(self) -> TasksConfig:
        unknown = [name for name in self.only if name not in self.domains]
        if unknown:
            lines = [f"only: no domain '{name}'{close_to(name, list(self.domains))}" for name in unknown]
            raise ValueError(" | ".join(lines))
        return self
