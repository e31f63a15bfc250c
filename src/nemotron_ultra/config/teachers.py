"""TeachersConfig: which run teaches which domain in on-policy distillation (report 3.3.1, 3.3.2)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field, model_validator

from nemotron_ultra.config.base import config
from nemotron_ultra.config.tasks import close_to


@config
class TeachersConfig:
    folders: Annotated[dict[str, str], Field(min_length=1)]
    """Name of each teacher -> its run folder (the newest checkpoint) or a folder of weights."""
    domains: dict[str, str] = Field(default_factory=dict)
    """Domain -> its teacher's name; a domain that is itself the name of a teacher needs no entry."""
    default: str | None = None
    """Teacher of the domains that have none (strict=false)."""
    strict: bool = True
    """Whether a domain without a teacher is a mistake; false leaves it to `default`."""

    def name_for(self, domain: str) -> str | None:
        """Name of the teacher of a domain; null where it has none."""
        found = self.domains.get(domain, domain if domain in self.folders else None)
        return found if found is not None or self.strict else self.default

    @model_validator(mode="after")
    def _named_teachers_are_there(self) -> TeachersConfig:
        problems = list(_problems(self))
        if problems:
            raise ValueError(" | ".join(problems))
        return self


def _problems(c: TeachersConfig) -> Iterator[str]:
    for domain, teacher in c.domains.items():
        if teacher not in c.folders:
            yield f"domains.{domain}: no teacher '{teacher}'{close_to(teacher, list(c.folders))}"
    if c.strict and c.default is not None:
        yield f"default: '{c.default}' has no effect with strict=true; use strict=false or default=null"
    elif not c.strict and c.default is None:
        yield f"default: strict=false needs a teacher; allowed: {', '.join(c.folders)}"
    elif c.default is not None and c.default not in c.folders:
        yield f"default: no teacher '{c.default}'{close_to(c.default, list(c.folders))}"
