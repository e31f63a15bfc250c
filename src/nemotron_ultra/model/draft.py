"""All drafts of a round in one call: d_j = argmax head(g_j), g_j = MTP(e(d_{j-1}), g_{j-1}) (report 2.1); and
the whole round, with the check of the drafts.

The matrices of the MTP module and the head are read as bytes, with a scale for each row: drafts are checked
anyway, and reading weights is the most of what a draft costs. The copies take a quarter of what they are made
of. For a model in float32 on a CPU whose MTP layers all run in `ops/decode_kernels`.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from nemotron_ultra.model.cache import Cache
from nemotron_ultra.model.hybrid import FEW_ROWS, HybridLM
from nemotron_ultra.model.plan import PLAIN, DecodePlan, Pool, plan_of
from nemotron_ultra.model.whole import whole_plan
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
    """How often its values have changed; inference tensors do not count."""
    return 0 if tensor.is_inference() else tensor._version


def _bytes(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[..., n, k] -> codes in -127..127, scale [..., n]."""
    scale = weight.abs().amax(-1, keepdim=True).clamp_(min=1e-30) / 127
    return (weight / scale).round_().to(torch.int8), scale.squeeze(-1).contiguous()


_copies: WeakKeyDictionary[HybridLM, ByteWeights] = WeakKeyDictionary()


def forget_copies(model: HybridLM) -> None:
    """After new values where nobody counts changes: drafts are made with the weights as they are now."""
    copies = _copies.pop(model, None)
    if copies is not None:
        copies.versions.clear()


@dataclass(frozen=True)
class Pairs:
    """Hidden states [B, K, D] and the tokens after them [B, K]; the first counts[b] of row b count.

    most: of `counts`.
    """

    hidden_BKD: Tensor
    token_BK: Tensor
    counts: list[int]
    count_B: Tensor
    most: int

    @classmethod
    def of(cls, hidden_BKD: Tensor, token_BK: Tensor, counts: list[int]) -> Pairs:
        tensors = hidden_BKD.contiguous(), token_BK.contiguous()
        return cls(*tensors, counts, torch.tensor(counts), max(counts))


class DraftPlan:
    """Where the tensors of a model's MTP module lie, and memory to draft with.

    layers: how its layers run with a cache. `fits`: whether it can run at all.
    """

    def __init__(self, model: HybridLM, layers: DecodePlan, vocab_size: int):
        self.layers, self.vocab_size, self.pool, self.checks = layers, vocab_size, Pool(), Pool()
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
        self.fits &= len(layers.structs) <= kernels.MOST_DRAFT_LAYERS
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

    def aim(self, pairs: Pairs, drafts: int) -> tuple[kernels.Work, kernels.Work]:
        """For `drafts` ids after these pairs -> the work of the pairs and that of a later id."""
        plan, what = self.layers, self.what
        rows, wide, _ = pairs.hidden_BKD.shape
        places = rows * pairs.most
        sizes = [places * self.width, 2 * places * self.width, rows * self.width, rows * self.vocab_size]
        self.pool.grow(sizes)
        x, joined, last, logits = (buffer.data_ptr() for buffer in self.pool.buffers)
        length = plan.cache.length_B.data_ptr()
        what.hidden, what.hidden_stride = pairs.hidden_BKD.data_ptr(), wide * self.width
        what.token, what.token_stride = pairs.token_BK.data_ptr(), wide
        what.counts, what.drafts, what.length = pairs.count_B.data_ptr(), drafts, length
        what.joined, what.last, what.logits = joined, last, logits
        works = plan.work(places, pairs.most), plan.work(rows, 1)
        for work in works:
            work.x, work.length, work.waits = x, length, 0
        return works


class Drafts:
    """`DraftPlan` of a model, made anew when its tensors have moved or changed."""

    def __init__(self, model: HybridLM, vocab_size: int):
        self.model, self.vocab_size = model, vocab_size
        self.plan: DraftPlan | None = None

    def run(self, cache: Cache, pairs: Pairs, drafts: int) -> Tensor | None:
        """The cache takes in the pairs -> `drafts` ids after those of each row, [B, drafts].

        None, and nothing done, where the kernels cannot.
        """
        plan = self._ready(cache, pairs, drafts)
        if plan is None:
            return None
        works = plan.aim(pairs, drafts)
        out_BJ = torch.empty(len(pairs.counts), drafts, dtype=torch.int64)
        plan.what.out, plan.what.out_stride = out_BJ.data_ptr(), drafts
        kernels.draft(plan.what, *works)
        cache.moved(pairs.counts)
        return out_BJ

    def round(
        self, cache: Cache, pairs: Pairs, drafts: int, main: Cache, pending_B: Tensor
    ) -> kernels.Round | None:
        """`run`, then `HybridLM.verify` of pending tokens and drafts with the model's own cache `main`.

        None, and nothing done, where the kernels cannot.
        """
        model, rows, tokens = self.model, len(pending_B), drafts + 1
        if rows * tokens > FEW_ROWS:
            return None
        whole = whole_plan(model.parts, main, rows * tokens)
        plan = None if whole is None else self._ready(cache, pairs, drafts)
        if plan is None:
            return None
        main.check_room(tokens)
        works = plan.aim(pairs, drafts)
        plan.checks.grow([rows * tokens * plan.width, rows * tokens * len(model.lm_head.weight)])
        x, logits = (buffer.data_ptr() for buffer in plan.checks.buffers)
        whole.begin(rows, tokens, waits=True)
        work = whole.aim(x, rows * tokens, tokens)
        found = kernels.draft_and_verify(
            plan.what, (*works, work), whole.model, pending_B, logits, self.vocab_size
        )
        whole.waits = False
        cache.moved(pairs.counts)
        main.moved(found.keep)
        return found

    def _ready(self, cache: Cache, pairs: Pairs, drafts: int) -> DraftPlan | None:
        layers = plan_of(self.model.mtp.layers, cache, len(pairs.counts) * pairs.most)
        if layers is None or not layers.is_whole:
            _copies.pop(self.model, None)
            return None
        if self.plan is None or not self.plan.is_still(self.model, layers):
            self.plan = DraftPlan(self.model, layers, self.vocab_size)
        if not self.plan.fits or not kernels.fits(pairs.hidden_BKD):
            return None
        assert max(cache.lengths) + pairs.most + drafts - 1 <= cache.capacity, "drafts do not fit their slots"
        return self.plan
