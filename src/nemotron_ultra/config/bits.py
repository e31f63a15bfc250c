"""Bits per weight element of a quantised checkpoint: sum of elements x bits / elements (report Table 12, 13).

Every weight counts, MTP included. NVFP4 is 4 bits and an 8-bit scale for each block of 16; the FP32 scale of
a tensor is left out. Routers are FP32: with that the shipped table comes to 5.03 bits, with BF16 routers to
5.02.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from nemotron_ultra.config.hf_tensors import state_tensors
from nemotron_ultra.config.model import ModelConfig
from nemotron_ultra.config.policy import module_kind

Storage = Literal["nvfp4", "fp8", "bf16", "fp32"]
BITS: dict[Storage, float] = {"nvfp4": 4 + 8 / 16, "fp8": 8, "bf16": 16, "fp32": 32}

Choice = Mapping[str, Storage]
"""Glob over names of modules -> format on disk; the first match wins, what none matches is BF16."""
_KEPT: Choice = {"mtp.*": "bf16", "*.mixer.gate": "fp32"}
_ROUTED: Choice = {**_KEPT, "*.mixer.experts": "nvfp4"}
_MAMBA = ("*.mixer.in_proj", "*.mixer.out_proj")

BASELINE: Choice = {}
ROUTED_EXPERTS = _ROUTED
"""Only routed experts in NVFP4 (the 5.43-bit point of report Table 13)."""
SHIPPED: Choice = {**_ROUTED, "*.shared_experts.*": "fp8", **dict.fromkeys(_MAMBA, "fp8")}
"""Report Table 12: routed experts NVFP4, shared experts and Mamba projections FP8 per tensor."""
EXPERTS_AND_MAMBA: Choice = {**_ROUTED, "*.shared_experts.*": "nvfp4", **dict.fromkeys(_MAMBA, "nvfp4")}
"""Shared experts and Mamba projections in NVFP4 too (the 4.85-bit point)."""
POINTS: dict[str, Choice] = {
    "all BF16": BASELINE,
    "routed experts NVFP4": ROUTED_EXPERTS,
    "shipped: shared experts and Mamba FP8 besides": SHIPPED,
    "shared experts and Mamba NVFP4 besides": EXPERTS_AND_MAMBA,
}


@dataclass(frozen=True)
class BitsRow:
    """Elements of one kind of module in one format."""

    kind: str
    format: Storage
    elements: int

    @property
    def bits(self) -> float:
        return self.elements * BITS[self.format]


@dataclass(frozen=True)
class BitsTable:
    """A checkpoint's elements by kind and format."""

    rows: tuple[BitsRow, ...]

    @property
    def elements(self) -> int:
        return sum(row.elements for row in self.rows)

    @property
    def bits_per_element(self) -> float:
        return sum(row.bits for row in self.rows) / self.elements

    @property
    def bytes(self) -> float:
        return sum(row.bits for row in self.rows) / 8


def count_bits(model: ModelConfig, choice: Choice = SHIPPED) -> BitsTable:
    """Elements and bits of the checkpoint of `model` in the formats of `choice`, largest kind first."""
    elements: dict[tuple[str, Storage], int] = {}
    for spec in state_tensors(model):
        module = spec.name.rpartition(".")[0]
        stored = "fp32" if spec.fp32 else _stored(module, choice)
        if len(spec.shape) == 1:  # biases and norms are never quantised
            stored = max(stored, "bf16", key=BITS.__getitem__)
        key = (module_kind(module), stored)
        elements[key] = elements.get(key, 0) + spec.numel
    rows = [BitsRow(kind, stored, count) for (kind, stored), count in elements.items()]
    return BitsTable(tuple(sorted(rows, key=lambda row: -row.elements)))


def points(model: ModelConfig) -> list[str]:
    """Bits per element and size of each point of POINTS, a line each."""
    counted = {name: count_bits(model, choice) for name, choice in POINTS.items()}
    return [
        f"{table.bits_per_element:6.2f} bits {table.bytes / 1e9:9.1f} GB   {name}"
        for name, table in counted.items()
    ]


def _stored(module: str, choice: Choice) -> Storage:
    return next((format for glob, format in choice.items() if fnmatchcase(module, glob)), "bf16")
