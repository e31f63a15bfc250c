"""All drafts of a round in one call: d_j = argmax head(g_j), g_j = MTP(e(d_{j-1}), g_{j-1}) (report 2.1).

The head is read as bytes, with a scale for each row: drafts are checked anyway, and it is the most of what a
draft reads. For a model in float32 on a CPU whose MTP layers all run in `ops/decode_kernels`.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from nemotron_ultra.model.cache import Cache
from nemotron_ultra.model.hybrid import HybridLM
from nemotron_ultra.model.plan import PLAIN, DecodePlan, Pool, plan_of
from nemotron_ultra.ops import decode_kernels as kernels


class DraftPlan:
    """Where the tensors of a model's MTP module lie, and memory to draft with."""

    def __init__(self, model: HybridLM, vocab_size: int):
        block, last = model.mtp.layers[0], model.mtp.layers[-1]
        self.vocab_size, join = vocab_size, block.eh_proj
        tensors = {
            "embedding": model.backbone.embeddings.weight,
            "embedded_norm": block.enorm.weight,
            "hidden_norm": block.hnorm.weight,
            "join": join.weight,
            "join_bias": getattr(join, "bias", None),
            "last_norm": last.final_layernorm.weight,
        }
        head_VD = model.lm_head.weight
        self.fits = join.product in PLAIN and kernels.fits(head_VD, *tensors.values())
        if self.fits:
            tensors["head"], tensors["scale"] = _bytes_of(model)
        self.width, self.what = join.weight.shape[0], kernels.Draft(count=len(model.mtp.layers))
        for name, tensor in tensors.items():
            setattr(self.what, name, kernels.address(tensor))
        eps = (block.enorm.eps, block.hnorm.eps, last.final_layernorm.eps)
        self.what.embedded_eps, self.what.hidden_eps, self.what.last_eps = eps
        self.what.vocabulary = vocab_size
        self.tensors = [tensor for tensor in tensors.values() if tensor is not None]
        self.addresses = [tensor.data_ptr() for tensor in self.tensors]
        self.pool = Pool()

    def is_still(self) -> bool:
        return list(map(Tensor.data_ptr, self.tensors)) == self.addresses

    def run(
        self, plan: DecodePlan, hidden_BKD: Tensor, token_BK: Tensor, counts: list[int], drafts: int
    ) -> Tensor:
        rows, most, _ = hidden_BKD.shape
        what, places = self.what, rows * most
        sizes = (places * self.width, 2 * places * self.width, rows * self.width, rows * self.vocab_size)
        self.pool.grow(list(sizes))
        x, joined, last, logits = (buffer.data_ptr() for buffer in self.pool.buffers)
        hidden_BKD, token_BK = hidden_BKD.contiguous(), token_BK.contiguous()
        count_B, out_BJ = torch.tensor(counts), torch.empty(rows, drafts, dtype=torch.int64)
        length_B = plan.cache.length_B.clone()
        what.hidden, what.hidden_stride = hidden_BKD.data_ptr(), most * self.width
        what.token, what.token_stride = token_BK.data_ptr(), most
        what.counts, what.out, what.drafts = count_B.data_ptr(), out_BJ.data_ptr(), drafts
        what.length, what.joined, what.last, what.logits = length_B.data_ptr(), joined, last, logits
        works = [plan.work(rows * most, most), plan.work(rows, 1)]
        for work in works:
            work.x, work.length = x, length_B.data_ptr()
        what.layers = kernels.start(plan.structs)
        plan.pend(0, 0)
        kernels.draft(what, *works)
        return out_BJ


_heads: WeakKeyDictionary[HybridLM, tuple[tuple[int, int], Tensor, Tensor]] = WeakKeyDictionary()


def _bytes_of(model: HybridLM) -> tuple[Tensor, Tensor]:
    """Head as int8 [V, D] and scales [V], made anew when it has changed."""
    weight_VD = model.lm_head.weight.detach()
    key = (weight_VD.data_ptr(), model.lm_head.weight._version)
    if model not in _heads or _heads[model][0] != key:
        scale_V1 = weight_VD.abs().amax(1, keepdim=True).clamp_(min=1e-30) / 127
        codes_VD = (weight_VD / scale_V1).round_().to(torch.int8)
        _heads[model] = (key, codes_VD, scale_V1[:, 0].contiguous())
    return _heads[model][1:]


class Drafts:
    """`DraftPlan` of a model, made anew when its tensors have moved."""

    def __init__(self, model: HybridLM, vocab_size: int):
        self.model, self.vocab_size = model, vocab_size
        self.plan: DraftPlan | None = None

    def run(
        self, cache: Cache, hidden_BKD: Tensor, token_BK: Tensor, counts: list[int], drafts: int
    ) -> Tensor | None:
        """The cache takes in counts[b] pairs of row b -> `drafts` ids after them, [B, drafts].

        None, and nothing done, where the kernels cannot.
        """
        rows, most, _ = hidden_BKD.shape
        layers = plan_of(self.model.mtp.layers, cache, rows * most)
        if layers is None or not all(fast for *_, fast in layers.segments):
            return None
        if self.plan is None or not self.plan.is_still():
            self.plan = DraftPlan(self.model, self.vocab_size)
        if not self.plan.fits or not kernels.fits(hidden_BKD.contiguous()):
            return None
        assert max(cache.lengths) + most + drafts - 1 <= cache.capacity, "drafts do not fit their slots"
        found = self.plan.run(layers, hidden_BKD, token_BK, counts, drafts)
        cache.open(counts)
        cache.close()
        return found
