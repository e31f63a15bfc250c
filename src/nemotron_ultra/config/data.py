"""DataConfig: weighted sources of `.bin/.idx` shards, the tokenizer and the sequence length (report 2.3)."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated

from pydantic import Field, model_validator

from nemotron_ultra.config.base import NonNegativeReal, PositiveReal, Real, Whole, config

RowLength = Annotated[Whole, Field(ge=8)]


@config
class SourceConfig:
    weight: NonNegativeReal = 1.0
    """Share of this source in the blend; weights need not sum to 1."""
    path: str
    """Folder made by `nemotron_ultra.prep`, or "builtin:python", text of the Python installation."""


@config
class PhaseConfig:
    until_tokens: PositiveReal | None = None
    """Consumed tokens at which the next phase begins; null in the last phase."""
    sources: Annotated[dict[str, SourceConfig], Field(min_length=1)]
    """Name of each source -> its weight and place."""

    @model_validator(mode="after")
    def _some_weight(self) -> PhaseConfig:
        if sum(source.weight for source in self.sources.values()) <= 0:
            raise ValueError("sources: all weights are 0; at least one must be above 0")
        return self


@config
class AlternateConfig:
    sequence_length: RowLength
    """Tokens in one row of these steps; rows per step follow, so that tokens per step stay the same."""
    share: Annotated[Real, Field(gt=0, lt=1)]
    """Share of the optimizer steps of this length; lengths are never mixed inside a step (report 2.5)."""
    sources: Annotated[dict[str, SourceConfig], Field(min_length=1)]
    """Blend of these steps, in place of the phase's."""


@config
class DataConfig:
    sequence_length: RowLength = 256
    """Tokens in one packed row; with tasks, the longest prompt and answer together; the longest pack."""
    tokenizer: str = "builtin"
    """"builtin" for the shipped byte-level BPE, or a folder or file of a Hugging Face tokenizer."""
    phases: list[PhaseConfig]
    """Blends in order; most runs have one, and [] is for trainers that learn from tasks or packs."""
    packs: str | None = None
    """Packed conversations for sft: a folder of `nemotron_ultra.prep sft`, or a file, folder or pattern of
    packed parquet in Megatron-Bridge's form."""
    alternates: list[AlternateConfig] = Field(default_factory=list)
    """Steps with another row length and blend, drawn by share; the long-context phase has one."""
    cache_dir: str | None = None
    """Where built-in corpora are prepared; null means the user's cache folder."""

    @model_validator(mode="after")
    def _phases_in_order(self) -> DataConfig:
        ends = [phase.until_tokens for phase in self.phases]
        if ends and ends[-1] is not None:
            raise ValueError(f"phases: the last phase has until_tokens {ends[-1]:g}; it must be null")
        if None in ends[:-1]:
            raise ValueError("phases: only the last phase may have until_tokens null")
        if any(a >= b for a, b in pairwise(ends[:-1])):
            raise ValueError(f"phases: until_tokens must rise from phase to phase, got {ends[:-1]}")
        if sum(a.share for a in self.alternates) >= 1:
            raise ValueError("alternates: shares sum to 1 or more; nothing is left for sequence_length")
        return self
