"""logits = head(RMS(x_L)), x_{i+1} = x_i + mixer_i(RMS(x_i)), x_0 = embeddings[tokens] (report 2.1, figure
2).

Names in `state_dict` are those of the Hugging Face checkpoint, but that routed experts are stacked.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nemotron_ultra.config.model import ModelConfig
from nemotron_ultra.model.block import Block
from nemotron_ultra.model.cache import Cache
from nemotron_ultra.model.init import init_weights
from nemotron_ultra.model.latent_moe import LatentMoE
from nemotron_ultra.model.linear import Linear
from nemotron_ultra.model.mtp import MTPHead
from nemotron_ultra.model.norm import RMSNorm
from nemotron_ultra.model.plan import reads_padded, through
from nemotron_ultra.model.router import RouterStats, Routing
from nemotron_ultra.model.whole import Parts, advance, verify
from nemotron_ultra.ops import decode_kernels as kernels
from nemotron_ultra.ops.decode_kernels import Verified
from nemotron_ultra.ops.segments import Segments, pad_rows

FEW_ROWS = 32  # of the head: above, the product of torch is as fast


@dataclass
class RouterTrace:
    """gate_out before the sigmoid, chosen experts in ascending order, and their weights in that order."""

    gate_out_TE: Tensor
    indices_TK: Tensor
    weights_TK: Tensor


@dataclass
class Trace:
    """hidden[i] is the residual stream before layer i, and after the last one; router is keyed by module
    name.

    MTP layers are keyed `name#depth`, depth from 1.
    """

    hidden: list[Tensor] = field(default_factory=list)
    router: dict[str, RouterTrace] = field(default_factory=dict)


@dataclass
class ModelOutput:
    """What an objective reads. hidden_TD is after the final norm; mtp_hidden_JTD after each depth's norm.

    residual_norm_L: root mean square of the residual stream after each layer, detached.
    """

    hidden_TD: Tensor
    mtp_hidden_JTD: Tensor | None
    head_VD: Tensor
    router: RouterStats
    residual_norm_L: Tensor
    segments: Segments
    trace: Trace | None = None

    @cached_property
    def logits_TV(self) -> Tensor:
        return apply_head(self.hidden_TD, self.head_VD)

    @cached_property
    def mtp_logits_JTV(self) -> Tensor | None:
        return None if self.mtp_hidden_JTD is None else apply_head(self.mtp_hidden_JTD, self.head_VD)


def apply_head(hidden: Tensor, head_VD: Tensor) -> Tensor:
    """Logits in float32, or float64 for float64 input."""
    logits = F.linear(hidden, head_VD.to(hidden.dtype))
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


class Backbone(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.embeddings = nn.Embedding(
            config.vocab_size, config.hidden_size, _weight=torch.empty(config.vocab_size, config.hidden_size)
        )
        self.layers = nn.ModuleList(Block(config, letter) for letter in config.pattern)
        self.norm_f = RMSNorm(config.hidden_size, config.layer_norm_epsilon)


class HybridLM(nn.Module):
    """The model of the pattern in `config`, weights drawn with seed 0 (on the meta device: none).

    `dtype` is that of the stored weights; correction biases stay float32.
    """

    def __init__(
        self,
        config: ModelConfig,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.config = config
        with _building(device, dtype):
            self.backbone = Backbone(config)
            self.lm_head = Linear(config.hidden_size, config.vocab_size)
            self.mtp = MTPHead(config) if config.num_nextn_predict_layers else None
        if not self.lm_head.weight.is_meta:
            self.init_weights(0)

    def init_weights(self, seed: int) -> None:
        """Draw every parameter anew by the table in `model/init.py`."""
        init_weights(self, self.config, seed)

    def moe_layers(self) -> list[tuple[str, LatentMoE]]:
        """(name, module) of each MoE layer, backbone then MTP: the rows of RouterStats."""
        return [(name, module) for name, module in self.named_modules() if isinstance(module, LatentMoE)]

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of activations: the weights', but float32 for 16-bit ones on a CPU (26 x slower there)."""
        weight = self.backbone.embeddings.weight
        return (
            torch.promote_types(weight.dtype, torch.float32) if weight.device.type == "cpu" else weight.dtype
        )

    def forward(
        self,
        tokens_T: Tensor,
        cu_seqlens: Tensor | None = None,
        *,
        mtp_depths: int | None = None,
        trace: bool = False,
        balance: bool | None = None,
    ) -> ModelOutput:
        """One pack of documents; `cu_seqlens` int32 [documents + 1], None for one document.

        mtp_depths: how often the MTP module is applied; None means config.depths, 0 leaves it out.
        balance: whether to make the balance loss; None means in training mode with gradients on.
        """
        segments = Segments(tokens_T.shape[0], cu_seqlens, tokens_T.device)
        depths = self.config.depths if mtp_depths is None else mtp_depths
        if balance is None:
            balance = self.training and torch.is_grad_enabled()
        recorder = _Recorder([name for name, _ in self.moe_layers()], Trace() if trace else None)
        x_TD, *ahead = self._embed(tokens_T, depths, segments)
        norms = []
        for i, layer in enumerate(self.backbone.layers):
            recorder.hidden(x_TD)
            x_TD, routing = layer(x_TD, segments, balance)
            recorder.routing(f"backbone.layers.{i}.mixer", routing)
            norms.append(torch.linalg.vector_norm(x_TD.detach()))
        recorder.hidden(x_TD)
        hidden_TD = self.backbone.norm_f(x_TD)
        mtp_hidden = self.mtp(hidden_TD, ahead, segments, balance, recorder.mtp_routing) if depths else None
        return ModelOutput(
            hidden_TD=hidden_TD,
            mtp_hidden_JTD=mtp_hidden,
            head_VD=self.lm_head.weight,
            router=recorder.stats(self.config.n_routed_experts, tokens_T.device),
            residual_norm_L=torch.stack(norms) / max(1, x_TD.numel()) ** 0.5,
            segments=segments,
            trace=recorder.trace,
        )

    def logits(self, input_ids_BS: Tensor, attention_mask_BS: Tensor | None = None) -> Tensor:
        """[B, S, V]; rows padded left or right (mask 0). Padding is left out; its logits are 0."""
        if attention_mask_BS is None:
            attention_mask_BS = torch.ones_like(input_ids_BS)
        real_BS = attention_mask_BS.bool()
        lengths = real_BS.sum(1)
        cu_seqlens = F.pad(lengths[lengths > 0].cumsum(0), (1, 0)).to(torch.int32)
        output = self(input_ids_BS[real_BS], cu_seqlens, mtp_depths=0, balance=False)
        logits_TV = output.logits_TV
        if bool(real_BS.all()):
            return logits_TV.view(*input_ids_BS.shape, -1)
        logits_BSV = logits_TV.new_zeros(*input_ids_BS.shape, logits_TV.shape[-1])
        logits_BSV[real_BS] = logits_TV
        return logits_BSV

    @torch.no_grad()
    def prefill(
        self, tokens_T: Tensor, cu_seqlens: Tensor | None, room: int | Cache, *, every: bool = False
    ) -> tuple[Tensor, Cache]:
        """Packed documents -> (hidden [documents, D] of each one's last token, a cache with a row for each).

        room: the most tokens that a row of a new cache will hold, or a cache whose live rows the documents
        continue, one each. every: the hidden states of all tokens, [T, D]. Raises DataError for a document
        longer than there is room.
        """
        segments = Segments(tokens_T.shape[0], cu_seqlens, tokens_T.device)
        cache = room
        if not isinstance(cache, Cache):
            cache = self.new_cache(segments.count, room)
            cache.admit_new(segments.count)
        (x_TD,) = self._embed(tokens_T, 0, segments)
        cache.open(segments.lengths)
        for layer, state in zip(self.backbone.layers, cache.layers, strict=True):
            x_TD = layer.prefill(x_TD, segments, state, cache)
        cache.close()
        ends = [end - 1 for end in segments.bounds[1:]]
        return self.backbone.norm_f(x_TD if every else x_TD[ends]), cache

    @torch.no_grad()
    def read(
        self, tokens_T: Tensor, lengths: list[int], room: int | Cache, *, every: bool = False
    ) -> tuple[Tensor, Cache]:
        """`prefill` of documents of so many tokens; few tokens are read by `extend` where that is faster."""
        cache = room
        if not isinstance(cache, Cache):
            cache = self.new_cache(len(lengths), room)
            cache.admit_new(len(lengths))
        if not reads_padded(self.backbone.layers, cache, lengths):
            bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
            return self.prefill(tokens_T, bounds, cache, every=every)
        tokens_BK, places_T = pad_rows(tokens_T, lengths)
        hidden_MD = self.extend(tokens_BK, cache).flatten(0, 1)
        cache.commit(lengths)
        if not every:
            places_T = places_T[torch.tensor(lengths, device=places_T.device).cumsum(0) - 1]
        return hidden_MD[places_T], cache

    @torch.no_grad()
    def step(self, tokens_B: Tensor, cache: Cache) -> Tensor:
        """One more token of every live row of the cache -> hidden [B, D] after the final norm."""
        hidden_BD = advance(self.parts, tokens_B[:, None], cache, waits=False)
        if hidden_BD is None:
            x_BD = F.embedding(tokens_B, self.backbone.embeddings.weight).to(self.compute_dtype)
            cache.open([1] * cache.size)
            hidden_BD = self.backbone.norm_f(through(self.backbone.layers, x_BD, cache, 1, waits=False))
        cache.close()
        return hidden_BD

    @torch.no_grad()
    def extend(self, tokens_BK: Tensor, cache: Cache) -> Tensor:
        """K more tokens of every live row -> hidden [B, K, D]; then `cache.commit(keep_B)` must follow."""
        hidden_MD = advance(self.parts, tokens_BK, cache, waits=True)
        if hidden_MD is None:
            x_MD = F.embedding(tokens_BK.flatten(), self.backbone.embeddings.weight).to(self.compute_dtype)
            count = tokens_BK.shape[1]
            cache.open([count] * cache.size)
            hidden_MD = self.backbone.norm_f(through(self.backbone.layers, x_MD, cache, count, waits=True))
        return hidden_MD.view(*tokens_BK.shape, -1)

    @torch.no_grad()
    def verify(self, tokens_BK: Tensor, cache: Cache, usable: int) -> Verified | None:
        """`extend`, `likeliest`, and `commit` of the drafts that are likeliest, in one call (`whole.py`)."""
        return verify(self.parts, tokens_BK, cache, usable) if tokens_BK.numel() <= FEW_ROWS else None

    @property
    def parts(self) -> Parts:
        """What `whole.py` runs in one call."""
        backbone = self.backbone
        return Parts(backbone.embeddings.weight, backbone.layers, backbone.norm_f, self.lm_head.weight)

    @torch.no_grad()
    def next_logits(self, hidden_BD: Tensor) -> Tensor:
        """`apply_head` without gradients, fast for the few rows of a decode step."""
        weight_VD = self.lm_head.weight
        if self._few(hidden_BD):
            return kernels.few_rows(hidden_BD, weight_VD)
        return apply_head(hidden_BD, weight_VD)

    @torch.no_grad()
    def likeliest(self, hidden_BD: Tensor, usable: int) -> tuple[Tensor, Tensor, Tensor] | None:
        """Greedy next ids below `usable` [B], their log-probabilities among those ids and among all.

        None where the kernels cannot: take `next_logits`.
        """
        return kernels.likeliest(hidden_BD, self.lm_head.weight, usable) if self._few(hidden_BD) else None

    def _few(self, hidden_BD: Tensor) -> bool:
        few = 0 < len(hidden_BD) <= FEW_ROWS and kernels.fits(hidden_BD, self.lm_head.weight)
        return few and kernels.library() is not None

    def new_cache(
        self, slots: int, capacity: int, ssm_format: str = "fp32", pattern: str | None = None
    ) -> Cache:
        """`Cache.empty` for this model; pattern=config.mtp_pattern: for its MTP module."""
        weight = self.lm_head.weight
        return Cache.empty(
            self.config,
            slots,
            capacity,
            ssm_format=ssm_format,
            dtype=torch.promote_types(weight.dtype, torch.float32),
            device=weight.device,
            pattern=pattern,
        )

    def _embed(self, tokens_T: Tensor, depths: int, segments: Segments) -> tuple[Tensor, ...]:
        """Embeddings of the tokens and of those 1..depths ahead: one lookup, so one gradient of the table."""
        ids = torch.stack([tokens_T, *(segments.roll_left(tokens_T, k) for k in range(1, depths + 1))])
        return F.embedding(ids, self.backbone.embeddings.weight).to(self.compute_dtype).unbind(0)


class _Recorder:
    """Collects what a forward pass says besides its output."""

    def __init__(self, names: list[str], trace: Trace | None):
        self.names = names
        self.trace = trace
        self.counts: dict[str, list[Tensor]] = defaultdict(list)
        self.losses: list[Tensor] = []

    def hidden(self, x_TD: Tensor) -> None:
        if self.trace is not None:
            self.trace.hidden.append(x_TD)

    def mtp_routing(self, depth: int, index: int, routing: Routing) -> None:
        self.routing(f"mtp.layers.{index}.mixer", routing, f"#{depth}")

    def routing(self, name: str, routing: Routing | None, suffix: str = "") -> None:
        if routing is None:
            return
        self.counts[name].append(routing.counts_E)
        if routing.balance_loss is not None:
            self.losses.append(routing.balance_loss)
        if self.trace is not None:
            indices_TK, order = routing.indices_TK.sort(-1)
            weights_TK = routing.weights_TK.gather(-1, order)
            self.trace.router[name + suffix] = RouterTrace(routing.gate_out_TE, indices_TK, weights_TK)

    def stats(self, experts: int, device: torch.device) -> RouterStats:
        empty = torch.zeros(experts, dtype=torch.int64, device=device)
        rows = [sum(self.counts[name], empty) for name in self.names]
        counts_LE = torch.stack(rows) if rows else empty[None][:0]
        return RouterStats(self.names, counts_LE, sum(self.losses) if self.losses else None)


@contextmanager
def _building(device: torch.device | str | None, dtype: torch.dtype | None) -> Iterator[None]:
    """Build modules on `device` with parameters of `dtype`, with no copy to move or cast afterwards."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        with torch.device(device or torch.get_default_device()):
            yield
    finally:
        torch.set_default_dtype(before)
