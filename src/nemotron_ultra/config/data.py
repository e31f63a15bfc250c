"""DataConfig: weighted sources of Megatron `.bin/.idx` shards, the tokenizer and the sequence length."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from nemotron_ultra.config.base import config


@config
class SourceConfig:
    weight: Annotated[float, Field(ge=0)] = 1.0
    """Share of this source in the blend; weights need not sum to 1."""
    path: str
    """Folder made by `python -m nemotron_ultra.prep`, or "builtin:python" for the text of the Python installation."""


@config
class PhaseConfig:
    until_tokens: Annotated[float, Field(gt=0)] | None = None
    """Consumed tokens at which the next phase begins; null in the last phase."""
    sources: dict[str, SourceConfig]
    """Name of each source -> its weight and place."""


@config
class DataConfig:
    sequence_length: Annotated[int, Field(ge=8)] = 256
    """Tokens in one packed row."""
    tokenizer: str = "builtin"
    """"builtin" for the shipped byte-level BPE, or a folder or file of a Hugging Face tokenizer."""
    phases: Annotated[list[PhaseConfig], Field(min_length=1)]
    """Blends in order; most runs have one."""
    cache_dir: str | None = None
    """Where built-in corpora are prepared; null means the user's cache folder."""
