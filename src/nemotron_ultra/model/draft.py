"""All drafts of a round in one call: d_j = argmax head(g_j), g_j = MTP(e(d_{j-1}), g_{j-1}) (report 2.1).

The matrices of the MTP module and the head are read as bytes, with a scale for each row: drafts are checked
anyway, and reading weights is the most of what a draft costs. The copies take a quarter of what they are made
of. For a model in float32 on a CPU whose MTP layers all run in `ops/decode_kernels`.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from nemotron_ultra.model.cache import Cache
from nemotron_ultra.model.hybrid import HybridLM
from nemotron_ultra.model.plan import PLAIN, DecodePlan, Pool, plan_of
from nemotron_ultra.ops import decode_kernels as kernels


class ByteWeights:
    """int8 copies of weights [..., n, k] as they were: w = scale * code, a scale for each row."""

    def __init__(self, sources: list[Tensor]):
        self.sources = [source.detach() for source in sources]
        self.addresses = [source.data_ptr() for source in sources]
        self.versions = list(map(_version, sources))
        self.copies = [_bytes(source) for source in self.sources]
        self.places = {address: number for number, address in enumerate(self.addresses)}

    def are_of(self, sources: list[Tensor]) -> bool:
        return (
            list(map(Tensor.data_ptr, sources)) == self.addresses
            and list(map(_version, sources)) == self.versions
        )

    def of(self, matrix: kernels.Matrix) -> kernels.Matrix:
        """The copy of a matrix; the same where there is none."""
        if matrix.data not in self.places:
            return matrix
        codes, scale = self.copies[self.places[matrix.data]]
        return kernels.Matrix(codes.data_ptr(), scale.data_ptr(), matrix.bias, matrix.outs)


def _version(tensor: Tensor) -> int:
    """How often its values have changed; inference tensors do not count, and cannot be trained."""
    return 0 if tensor.is_inference() else tensor._version


def _bytes(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[..., n, k] -> codes in -127..127, scale [..., n]."""
    scale = weight.abs().amax(-1, keepdim=True).clamp_(min=1e-30) / 127
    return (weight / scale).round_().to(torch.int8), scale.squeeze(-1).contiguous()


_copies: WeakKeyDictionary[HybridLM, ByteWeights] = WeakKeyDictionary()


class DraftPlan:
    """Where the tensors of a model's MTP module lie, and memory to draft with.

    layers: how its layers run with a cache. `fits`: whether it can run at all.
    """

    def __init__(self, model: HybridLM, layers: DecodePlan, vocab_size: int):
        self.layers, self.vocab_size, self.pool = layers, vocab_size, Pool()
        block, last = model.mtp.layers[0], model.mtp.layers[-1]
        tensors = {
            "embedding": model.backbone.embeddings.weight,
            "embedded_norm": block.enorm.weight,
            "hidden_norm": block.hnorm.weight,
            "last_norm": last.final_layernorm.weight,
        }
        join, head_VD = block.eh_proj, model.lm_head.weight
        bias = getattr(join, "bias", None)
        self.tensors = [*tensors.values()] + ([] if bias is None else [bias])
        self.fits = join.product in PLAIN and kernels.fits(head_VD, join.weight, *self.tensors)
        self.addresses = list(map(Tensor.data_ptr, self.tensors))
        self.sources = [head_VD, join.weight, *(w for entry in layers.fitting for w in entry.matrices)]
        self.width = len(join.weight)
        if not self.fits:
            return
        copies = _copies.get(model)
        if copies is None or not copies.are_of(self.sources):
            copies = _copies[model] = ByteWeights(self.sources)
        self.copies = copies
        self.structs = (kernels.Layer * len(layers.structs))(*map(self._lowered, layers.structs))
        self.what = kernels.Draft(layers=kernels.start(self.structs), count=len(self.structs))
        for name, tensor in tensors.items():
            setattr(self.what, name, tensor.data_ptr())
        self.what.join = copies.of(kernels.matrix(join.weight, bias=bias))
        self.what.head = copies.of(kernels.matrix(head_VD))
        self.what.head.outs = vocab_size
        eps = (block.enorm.eps, block.hnorm.eps, last.final_layernorm.eps)
        self.what.embedded_eps, self.what.hidden_eps, self.what.last_eps = eps

    def _lowered(self, layer: kernels.Layer) -> kernels.Layer:
        lowered = kernels.Layer.from_buffer_copy(layer)
        for place, matrix in enumerate(lowered.w):
            lowered.w[place] = self.copies.of(matrix)
        lowered.expert_up = self.copies.of(lowered.expert_up)
        lowered.expert_down = self.copies.of(lowered.expert_down)
        return lowered

    def is_still(self, model: HybridLM, layers: DecodePlan) -> bool:
        """Whether everything lies where it lay, and the copies are of the weights as they are."""
        return (
            layers is self.layers
            and model.backbone.embeddings.weight is self.tensors[0]
            and model.lm_head.weight is self.sources[0]
            and list(map(Tensor.data_ptr, self.tensors)) == self.addresses
            and (not self.fits or self.copies.are_of(self.sources))
        )

    def run(self, hidden_BKD: Tensor, token_BK: Tensor, counts: list[int], drafts: int) -> Tensor:
        plan, what = self.layers, self.what
        rows, most, _ = hidden_BKD.shape
        places = rows * most
        sizes = (places * self.width, 2 * places * self.width, rows * self.width, rows * self.vocab_size)
        self.pool.grow(list(sizes))
        x, joined, last, logits = (buffer.data_ptr() for buffer in self.pool.buffers)
        token_BK = token_BK.contiguous()
        count_B, out_BJ = torch.tensor(counts), torch.empty(rows, drafts, dtype=torch.int64)
        length_B = plan.cache.length_B
        what.hidden, what.hidden_stride = hidden_BKD.data_ptr(), most * self.width
        what.token, what.token_stride = token_BK.data_ptr(), most
        what.counts, what.out, what.drafts = count_B.data_ptr(), out_BJ.data_ptr(), drafts
        what.length, what.joined, what.last, what.logits = length_B.data_ptr(), joined, last, logits
        works = [plan.work(rows * most, most), plan.work(rows, 1)]
        for work in works:
            work.x, work.length, work.waits = x, length_B.data_ptr(), 0
        kernels.draft(what, *works)
        return out_BJ


class Drafts:
    """`DraftPlan` of a model, made anew when its tensors have moved or changed."""

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
        if layers is None or not layers.is_whole:
            _copies.pop(self.model, None)
            return None
        if self.plan is None or not self.plan.is_still(self.model, layers):
            self.plan = DraftPlan(self.model, layers, self.vocab_size)
        hidden_BKD = hidden_BKD.contiguous()
        if not self.plan.fits or not kernels.fits(hidden_BKD):
            return None
        assert max(cache.lengths) + most + drafts - 1 <= cache.capacity, "drafts do not fit their slots"
        found = self.plan.run(hidden_BKD, token_BK, counts, drafts)
        cache.open(counts)
        cache.close()
        return found
