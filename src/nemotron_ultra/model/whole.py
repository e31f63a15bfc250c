"""New tokens through a whole model in one call, for a float32 model on a CPU whose layers all run in
`ops/decode_kernels`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nemotron_ultra.model.cache import Cache
from nemotron_ultra.model.norm import RMSNorm
from nemotron_ultra.model.plan import DecodePlan, plan_of
from nemotron_ultra.ops import decode_kernels as kernels


@dataclass(frozen=True)
class Parts:
    """What a model is made of: embedding [V, D], layers, the norm after them, head [V, D]."""

    embedding_VD: Tensor
    layers: nn.ModuleList
    norm: RMSNorm
    head_VD: Tensor


def advance(parts: Parts, tokens_BK: Tensor, cache: Cache, *, waits: bool) -> Tensor | None:
    """K more tokens of every live row, opened here -> hidden [B * K, D] after the norm.

    None, and nothing done, where the kernels cannot. waits: states wait for `Cache.commit`; False: K is 1,
    and `Cache.close` follows. Raises DataError for an id that the model does not have.
    """
    plan = whole_plan(parts, cache, tokens_BK.numel())
    if plan is None:
        return None
    ids_BK, work, _x = _opened(plan, tokens_BK, cache, waits=waits)
    return kernels.advance(plan.model, work, ids_BK, plan.width)


def verify(parts: Parts, tokens_BK: Tensor, cache: Cache, usable: int) -> kernels.Verified | None:
    """A pending token and K - 1 drafts of every live row, and the commit of those drafts that are likeliest,
    among ids below `usable`, after what is before them. None and errors as above.
    """
    plan = whole_plan(parts, cache, tokens_BK.numel())
    if plan is None:
        return None
    ids_BK, work, _x = _opened(plan, tokens_BK, cache, waits=tokens_BK.shape[1] > 1)
    found = kernels.verify(plan.model, work, ids_BK, plan.width, usable)
    plan.waits = False
    if tokens_BK.shape[1] > 1:
        cache.commit(found.keep_B)
    else:
        cache.close()
    return found


def whole_plan(parts: Parts, cache: Cache, rows: int) -> DecodePlan | None:
    """How the kernels run all of it on so many rows; None: they cannot."""
    plan = plan_of(parts.layers, cache, rows)
    if plan is None or not plan.is_whole:
        return None
    tensors = (parts.embedding_VD, parts.norm.weight, parts.head_VD)
    if not kernels.fits(*tensors):
        return None
    addresses = [tensor.data_ptr() for tensor in tensors]
    if plan.outer != addresses:
        plan.outer, plan.model.layers, plan.model.count = (
            addresses,
            kernels.start(plan.structs),
            len(plan.structs),
        )
        plan.model.embedding, plan.model.norm, plan.model.head = addresses
        plan.model.eps, plan.model.vocabulary = parts.norm.eps, len(parts.head_VD)
    return plan


def _opened(
    plan: DecodePlan, tokens_BK: Tensor, cache: Cache, *, waits: bool
) -> tuple[Tensor, kernels.Work, Tensor]:
    """The ids, what the kernels are told, and the residual stream, which must live as long."""
    rows, tokens = tokens_BK.shape
    ids_BK = tokens_BK.to(torch.int64).contiguous()
    kernels.check_ids(plan.model, ids_BK)
    cache.open([tokens] * rows)
    plan.begin(rows, tokens, waits=waits)
    x_MD = torch.empty(rows * tokens, plan.width)
    return ids_BK, plan.aim(x_MD.data_ptr(), len(x_MD), tokens), x_MD
