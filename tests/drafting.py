"""A micro model whose MTP module and backbone agree often: both tend to say that after id t comes t + 1."""

from __future__ import annotations

import torch
from torch.nn.functional import normalize

from micro import micro_model
from nemotron_ultra.model.hybrid import HybridLM


@torch.no_grad()
def agreeing_model(
    dtype: torch.dtype = torch.float64, force: float = 0.25, sharp: float = 2.0, **changes
) -> HybridLM:
    """force: how much this rule weighs against the random layers; sharp: the size of logits."""
    model = micro_model(dtype, **changes)
    random = torch.Generator().manual_seed(1)
    shape = model.lm_head.weight.shape
    table_VD = normalize(torch.randn(shape, generator=random, dtype=dtype), dim=-1)
    model.backbone.embeddings.weight.copy_(force * table_VD)
    model.lm_head.weight.copy_(sharp * table_VD.roll(1, 0))
    project = model.mtp.layers[0].eh_proj.weight
    project[:, : shape[1]] += 0.2 * torch.eye(shape[1], dtype=dtype)
    return model
