"""h_k = RMS(blocks(W_eh [RMS(e_{t+k}), RMS(h_{k-1})])): one module applied at every depth (report 2.1, MTP).

h_0 is the output of the final norm. Depth k predicts token t + 1 + k through the shared head.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from nemotron_ultra.config.model import ModelConfig
from nemotron_ultra.model.block import Block
from nemotron_ultra.model.cache import Cache
from nemotron_ultra.model.linear import Linear
from nemotron_ultra.model.norm import RMSNorm
from nemotron_ultra.model.plan import through
from nemotron_ultra.model.router import Routing
from nemotron_ultra.ops.segments import Segments

# Called with (depth from 1, flat index of the layer, its routing).
OnRouting = Callable[[int, int, Routing], None]


class MTPBlock(Block):
    """A block that also carries the module's input projection (first layer) or output norm (last layer)."""

    def __init__(self, config: ModelConfig, position: int):
        super().__init__(config, config.mtp_pattern[position])
        width, eps = config.hidden_size, config.layer_norm_epsilon
        self.enorm = self.hnorm = self.eh_proj = self.final_layernorm = None
        if position == 0:
            self.enorm, self.hnorm = RMSNorm(width, eps), RMSNorm(width, eps)
            self.eh_proj = Linear(2 * width, width)
        if position == len(config.mtp_pattern) - 1:
            self.final_layernorm = RMSNorm(width, eps)


class MTPHead(nn.Module):
    """The stored modules, flat: layer = module * len(pattern) + position.

    With fewer modules than depths the last one serves all further depths (one module in every release).
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.modules_stored = config.num_nextn_predict_layers
        self.length = len(config.mtp_pattern)
        self.layers = nn.ModuleList(
            MTPBlock(config, position) for _ in range(self.modules_stored) for position in range(self.length)
        )

    @property
    def _blocks(self) -> list[MTPBlock]:
        """The layers as a list: slicing a ModuleList takes as long as a layer of a decode step."""
        return list(self.layers._modules.values())

    def forward(
        self,
        hidden_TD: Tensor,
        embedded: list[Tensor],
        segments: Segments,
        balance: bool,
        on_routing: OnRouting,
    ) -> Tensor:
        """hidden_TD after the final norm; embedded[k-1] [T, D] of the tokens k ahead. Returns [J, T, D]."""
        outputs = []
        for depth, e_TD in enumerate(embedded, 1):
            first, layers = self._module(depth)
            x_TD = _joined(layers, hidden_TD, e_TD)
            for index, layer in enumerate(layers, first):
                x_TD, routing = layer(x_TD, segments, balance)
                if routing is not None:
                    on_routing(depth, index, routing)
            hidden_TD = layers[-1].final_layernorm(x_TD)
            outputs.append(hidden_TD)
        return torch.stack(outputs)

    @torch.no_grad()
    def prefill(
        self, hidden_TD: Tensor, embedded_TD: Tensor, segments: Segments, cache: Cache, depth: int = 1
    ) -> Tensor:
        """One module over packed documents, each continuing its row of a cache of config.mtp_pattern.

        hidden_TD: of the depth before (0: after the final norm); embedded_TD: of the tokens `depth` ahead.
        -> [T, D], of which the shared head predicts the tokens depth + 1 ahead.
        """
        _, layers = self._module(depth)
        cache.open(segments.lengths)
        x_TD = _joined(layers, hidden_TD, embedded_TD)
        for layer, state in zip(layers, cache.layers, strict=True):
            x_TD = layer.prefill(x_TD, segments, state, cache)
        cache.close()
        return layers[-1].final_layernorm(x_TD)

    @torch.no_grad()
    def extend(self, hidden_BKD: Tensor, embedded_BKD: Tensor, cache: Cache, depth: int = 1) -> Tensor:
        """`prefill` of K more tokens of every live row, [B, K, D]; `cache.commit(keep_B)` must follow."""
        _, layers = self._module(depth)
        cache.open([hidden_BKD.shape[1]] * cache.size)
        x_MD = _joined(layers, hidden_BKD.flatten(0, 1), embedded_BKD.flatten(0, 1))
        x_MD = through(layers, x_MD, cache, hidden_BKD.shape[1], waits=True)
        return layers[-1].final_layernorm(x_MD).view(hidden_BKD.shape)

    def _module(self, depth: int) -> tuple[int, list[MTPBlock]]:
        """The module that serves a depth, and the flat index of its first layer."""
        first = self.length * (min(depth, self.modules_stored) - 1)
        return first, self._blocks[first : first + self.length]


def _joined(layers: list[MTPBlock], hidden: Tensor, embedded: Tensor) -> Tensor:
    head = layers[0]
    return head.eh_proj(torch.cat([head.enorm(embedded), head.hnorm(hidden)], -1))
