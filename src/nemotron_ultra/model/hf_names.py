"""Names of tensors: hub checkpoints <-> our state dict.

The two agree but for the experts: the hub stores `...experts.7.up_proj.weight` [F, L], the model holds
`...experts.up_proj` [E, F, L]. State dicts of transformers say `model.` for `backbone.`, and old exports
`embedding.` for `embeddings.`; those are read too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import Tensor

CORRECTION_BIAS = "gate.e_score_correction_bias"
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(up_proj|down_proj)\.weight")
_STACKED = re.compile(r"(.+\.experts)\.(up_proj|down_proj)")


def canonical_name(key: str) -> str:
    """Hub spelling of a key: `backbone.` for `model.`, `embeddings.` for `embedding.`."""
    if key.startswith("model."):
        key = "backbone." + key.removeprefix("model.")
    return key.replace("backbone.embedding.", "backbone.embeddings.", 1)


def state_name(key: str) -> tuple[str, int | None]:
    """(key of our state dict, expert) of a hub key; expert is None where the tensor is whole."""
    key = canonical_name(key)
    match = _EXPERT.fullmatch(key)
    if match is None:
        return key, None
    stem, expert, kind = match.groups()
    return f"{stem}.{kind}", int(expert)


def hub_items(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """(hub key, tensor) of an entry of our state dict: stacked experts one by one, as views."""
    match = _STACKED.fullmatch(name)
    if match is None:
        yield name, tensor
        return
    stem, kind = match.groups()
    for expert in range(tensor.shape[0]):
        yield f"{stem}.{expert}.{kind}.weight", tensor[expert]


def stays_fp32(name: str) -> bool:
    """Whether a tensor keeps float32 in a checkpoint of any dtype (the router's selection bias)."""
    return name.endswith(CORRECTION_BIAS)
