"""Which layers of a decode step run together in `ops/decode_kernels`, and where their tensors lie.

A layer takes part if its weights and its state are float32 on a CPU and its products are the plain ones; a
precision policy keeps its own products, layer by layer. Weights are read where they lie, so that new values
need no new plan; weights that move or are replaced, and other products, do (`is_still`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor, nn

from nemotron_ultra.model.attention import Attention
from nemotron_ultra.model.block import Block
from nemotron_ultra.model.cache import Cache, KeyValues, MambaState, State
from nemotron_ultra.model.latent_moe import LatentMoE
from nemotron_ultra.model.linear import Linear, plain_product
from nemotron_ultra.model.mamba2 import Mamba2Mixer, recycling_product
from nemotron_ultra.model.mlp import MLP
from nemotron_ultra.ops import decode_kernels as kernels
from nemotron_ultra.ops.experts import routed_experts
from nemotron_ultra.ops.ssm_store import PlainStore

PLAIN = (plain_product, recycling_product)
PADDING = 64  # floats between the work memory of threads


@dataclass
class Entry:
    """One layer: what the kernels are told, the tensors that they read, and floats of work memory.

    matrices: those of `tensors` that may be read in lower precision where results are checked.
    """

    layer: kernels.Layer
    tensors: list[Tensor]
    matrices: list[Tensor]
    wide: int
    narrow: int = 0
    hidden: int = 0
    mixed: int = 0
    scratch: Callable[[int], int] = lambda rows: 0


class Pool:
    """Flat float32 buffers that serve every number of rows: as large as the largest needed so far."""

    def __init__(self) -> None:
        self.buffers: list[Tensor] = []

    def grow(self, sizes: list[int]) -> bool:
        """Room for `sizes` floats -> whether buffers moved: what points into them must be made anew."""
        there = [len(buffer) for buffer in self.buffers] or [0] * len(sizes)
        if all(size <= had for size, had in zip(sizes, there, strict=True)) and self.buffers:
            return False
        self.buffers = [torch.empty(max(1, *pair)) for pair in zip(sizes, there, strict=True)]
        return True


class Watch:
    """Finds out when a part, a tensor or a product of modules has been replaced, or a tensor has moved."""

    def __init__(self, modules: list[nn.Module], tensors: list[Tensor]):
        inner = [one for module in modules for one in module.modules()]
        dicts = [d for one in inner for d in (one._modules, one._parameters, one._buffers)]
        places = [(d, name) for d in dicts for name in d]
        places += [(vars(one), "product") for one in inner if isinstance(one, Linear)]
        places += [(vars(one), "run") for one in inner if "run" in vars(one)]
        self.dicts, self.names = [d for d, _ in places], [name for _, name in places]
        self.objects = list(map(dict.get, self.dicts, self.names))
        self.tensors = [found for found in self.objects if isinstance(found, Tensor)] + tensors
        self.addresses = list(map(Tensor.data_ptr, self.tensors))

    def is_still(self) -> bool:
        return (
            all(map(operator.is_, map(dict.get, self.dicts, self.names), self.objects))
            and list(map(Tensor.data_ptr, self.tensors)) == self.addresses
        )


class DecodePlan:
    """The layers of a model as they are stepped with one cache.

    segments: (first layer, one past the last, whether the kernels run them).
    """

    def __init__(self, layers: nn.ModuleList, cache: Cache):
        self.layers, self.cache = list(layers), cache
        self.entries = entries = [
            _entry(block, state) for block, state in zip(layers, cache.layers, strict=True)
        ]
        self.segments: list[tuple[int, int, bool]] = []
        self.model, self.outer = kernels.Model(), None  # of `whole.py`
        for fast, group in groupby(range(len(entries)), lambda i: entries[i] is not None):
            numbers = list(group)
            self.segments.append((numbers[0], numbers[-1] + 1, fast))
        fitting = [entry for entry in entries if entry is not None]
        self.structs = (kernels.Layer * len(entries))(
            *(kernels.Layer() if entry is None else entry.layer for entry in entries)
        )
        self.fitting = fitting
        self.watch = Watch(self.layers, [t for state in cache.layers if state for t in state.tensors()])
        self.width = layers[0].norm.weight.shape[0] if len(layers) else 0
        self.works: dict[tuple[int, int, int], kernels.Work] = {}
        self.work_pool = Pool()
        self.kept_pools = [Pool() for _ in entries]  # of Mamba layers: window and tokens, SsdTokens
        self.reserved: set[tuple[int, int]] = set()
        self.waits, self.latest = False, kernels.Work()

    @property
    def is_whole(self) -> bool:
        """Whether the kernels run all layers."""
        return len(self.fitting) == len(self.entries)

    def is_still(self, layers: nn.ModuleList) -> bool:
        """Whether these are its layers, with the same parts, and all tensors lie where they lay."""
        return list(layers) == self.layers and self.watch.is_still()

    def run(self, x_MD: Tensor, tokens: int, first: int, last: int) -> None:
        """Layers of a fast segment on x [B * tokens, D], contiguous, in place."""
        work = self.aim(x_MD.data_ptr(), len(x_MD), tokens)
        kernels.run_layers(self.structs, first, last - first, work)

    def aim(self, x: int, rows: int, tokens: int) -> kernels.Work:
        """The work of `begin`, on the residual stream at address x, [rows, D]."""
        work = self.work(rows, tokens)
        self.latest, work.waits = work, self.waits
        work.x, work.length = x, self.cache.length_B.data_ptr()
        return work

    def begin(self, rows: int, tokens: int, *, waits: bool) -> None:
        """Before new tokens. waits: Mamba layers keep what a commit needs and let their states be."""
        self.waits = waits
        if not waits or (rows, tokens) in self.reserved:
            return
        self.reserved.add((rows, tokens))
        for entry, layer, pool, struct in zip(
            self.entries, self.layers, self.kept_pools, self.structs, strict=True
        ):
            if entry is None or not isinstance(layer.mixer, Mamba2Mixer):
                continue
            s, before = layer.mixer.sizes, layer.mixer.conv1d.weight.shape[-1] - 1
            numbers = rows * tokens
            kept = [numbers * s.inner, numbers * s.groups * s.state, numbers * s.heads]
            if pool.grow([rows * (before + tokens) * s.channels, *kept]):
                struct.full, struct.u, struct.b, struct.log_decay = map(Tensor.data_ptr, pool.buffers)

    def commit(self, keep_B: Tensor) -> None:
        """`MambaState.commit` of the layers that the kernels ran."""
        kernels.commit_layers(self.structs, self.latest, keep_B)
        self.waits = False

    def work(self, rows: int, tokens: int) -> kernels.Work:
        threads = torch.get_num_threads()
        key = (rows, tokens, threads)
        if key not in self.works:
            names = ("wide", "narrow", "hidden", "mixed")
            most = [rows * max(getattr(entry, name) for entry in self.fitting) for name in names]
            normed = rows * self.width
            scratch = max(entry.scratch(rows) for entry in self.fitting) + PADDING
            if self.work_pool.grow([threads * normed, *most, threads * scratch]):
                self.works.clear()
            work = kernels.Work(batch=rows // tokens, tokens=tokens, width=self.width)
            for name, buffer in zip(("normed", *names, "scratch"), self.work_pool.buffers, strict=True):
                setattr(work, name, buffer.data_ptr())
            work.normed_size, work.scratch_size = normed, scratch
            self.works[key] = work
        return self.works[key]


def through(layers: nn.ModuleList, x_MD: Tensor, cache: Cache, tokens: int, *, waits: bool) -> Tensor:
    """x [B * tokens, D] of new tokens through all layers. waits: the state waits for `Cache.commit`."""
    plan = plan_of(layers, cache, len(x_MD))
    if plan is None:
        segments = [(0, len(layers), False)]
    else:
        segments = plan.segments
        x_MD = x_MD.contiguous()
        plan.begin(len(x_MD) // tokens, tokens, waits=waits)
    for first, last, fast in segments:
        if fast:
            plan.run(x_MD, tokens, first, last)
        else:
            x_MD = _slow(layers[first:last], x_MD, cache, cache.layers[first:last], tokens if waits else 0)
    return x_MD


def reads_padded(layers: nn.ModuleList, cache: Cache, lengths: list[int]) -> bool:
    """Whether lengths[b] more tokens of row b are best read padded: they are few, all layers compiled."""
    most = max(lengths)
    if not min(lengths) or max(cache.lengths) + most > cache.capacity:
        return False
    plan = plan_of(layers, cache, len(lengths) * most)
    return plan is not None and plan.is_whole


def _slow(
    layers: nn.ModuleList, x_MD: Tensor, cache: Cache, states: list[State | None], tokens: int
) -> Tensor:
    x = x_MD.unflatten(0, (-1, tokens)) if tokens else x_MD
    for layer, state in zip(layers, states, strict=True):
        x = layer.extend(x, state, cache) if tokens else layer.step(x, state, cache)
    return (x.flatten(0, 1) if tokens else x).contiguous()


def plan_of(layers: nn.ModuleList, cache: Cache, rows: int) -> DecodePlan | None:
    """The plan of these layers with this cache, made when it is first needed and when tensors have moved."""
    if (
        not 0 < rows <= kernels.MOST_ROWS
        or layers[0].norm.weight.device.type != "cpu"
        or kernels.library() is None
    ):
        return None
    if cache.plan is None or not cache.plan.is_still(layers):
        cache.plan = DecodePlan(layers, cache)
    return cache.plan


def _entry(block: Block, state: State | None) -> Entry | None:
    """None: the layer has to run by itself."""
    makers = {Mamba2Mixer: _mamba, Attention: _attention, LatentMoE: _moe, MLP: _mlp}
    maker = makers.get(type(block.mixer))
    if maker is None or not all(m.product in PLAIN for m in block.modules() if isinstance(m, Linear)):
        return None
    entry = maker(block.mixer, state)
    if entry is None or not kernels.fits(block.norm.weight, *entry.tensors):
        return None
    entry.tensors.append(block.norm.weight)
    entry.layer.norm, entry.layer.eps = block.norm.weight.data_ptr(), block.norm.eps
    return entry


def _matrices(layer: kernels.Layer, *linears: nn.Module | None) -> list[Tensor]:
    """Write the weights into `layer` -> all tensors."""
    tensors: list[Tensor] = []
    for place, linear in enumerate(linears):
        if linear is None:
            continue
        bias = getattr(linear, "bias", None)
        layer.w[place] = kernels.matrix(linear.weight, bias=bias)
        tensors += [linear.weight] + ([] if bias is None else [bias])
    return tensors


def _mamba(mixer: Mamba2Mixer, state: MambaState) -> Entry | None:
    if type(state.ssm) is not PlainStore:
        return None
    s, layer = mixer.sizes, kernels.Layer(kind=kernels.MAMBA)
    tensors = _matrices(layer, mixer.in_proj, mixer.out_proj)
    named = {
        "conv": mixer.conv1d.weight,
        "conv_bias": mixer.conv1d.bias,
        "a_log": mixer.A_log,
        "skip": mixer.D,
        "dt_bias": mixer.dt_bias,
        "gate_norm": mixer.norm.weight,
        "window": state.window_BKC,
        "state": state.ssm.state,
    }
    for name, tensor in named.items():
        setattr(layer, name, kernels.address(tensor))
    layer.dt_low, layer.dt_high = s.dt_limit
    layer.heads, layer.head_dim, layer.groups, layer.columns = s.heads, s.head_dim, s.groups, s.state
    layer.taps = mixer.conv1d.weight.shape[-1]
    width = s.inner // s.groups
    floats = 4 * width + 2 * s.state + s.heads // s.groups + s.state * width
    return Entry(
        layer,
        tensors + [t for t in named.values() if t is not None],
        [mixer.in_proj.weight, mixer.out_proj.weight],
        wide=len(mixer.in_proj.weight),
        narrow=s.inner,
        scratch=lambda rows: floats,
    )


def _attention(mixer: Attention, state: KeyValues) -> Entry | None:
    layer = kernels.Layer(kind=kernels.ATTENTION)
    linears = (mixer.q_proj, mixer.k_proj, mixer.v_proj, mixer.o_proj)
    tensors = _matrices(layer, *linears)
    layer.key, layer.value = state.key_BGSP.data_ptr(), state.value_BGSP.data_ptr()
    layer.capacity, layer.groups, layer.head_dim = (
        state.key_BGSP.shape[2],
        state.key_BGSP.shape[1],
        mixer.head_dim,
    )
    layer.heads = len(mixer.q_proj.weight) // mixer.head_dim
    floats = layer.heads // layer.groups * layer.capacity
    return Entry(
        layer,
        tensors + state.tensors(),
        [linear.weight for linear in linears],
        wide=sum(matrix.outs for matrix in layer.w[:3]),
        narrow=layer.w[0].outs,
        scratch=lambda rows: floats,
    )


def _moe(mixer: LatentMoE, state: None) -> Entry | None:
    experts, gate = mixer.experts, mixer.gate
    if experts.run is not routed_experts or gate.groups[1] < gate.groups[0]:
        return None
    shared, layer = mixer.shared_experts, kernels.Layer(kind=kernels.MOE)
    up, down = (None, None) if shared is None else (shared.up_proj, shared.down_proj)
    linears = (mixer.fc1_latent_proj, mixer.fc2_latent_proj, up, down)
    tensors = _matrices(layer, gate, *linears)
    weights = (experts.up_proj, experts.down_proj)
    layer.expert_up, layer.expert_down = map(kernels.matrix, weights)
    layer.correction = gate.e_score_correction_bias.data_ptr()
    layer.experts, layer.expert_hidden, layer.expert_width = experts.up_proj.shape
    layer.chosen, layer.normalise, layer.factor = gate.top_k, bool(gate.normalise), gate.factor
    return Entry(
        layer,
        [*tensors, *weights, gate.e_score_correction_bias],
        [*weights, *(linear.weight for linear in linears if linear is not None)],
        wide=layer.experts + layer.w[1].outs + layer.w[3].outs,
        hidden=layer.chosen * layer.expert_hidden,
        mixed=layer.expert_width,
        scratch=lambda rows: 3 * rows * layer.chosen + 2 * layer.experts + 2,
    )


def _mlp(mixer: MLP, state: None) -> Entry:
    layer = kernels.Layer(kind=kernels.MLP)
    linears = (mixer.up_proj, mixer.down_proj)
    weights = [linear.weight for linear in linears]
    return Entry(layer, _matrices(layer, *linears), weights, wide=len(mixer.up_proj.weight))
