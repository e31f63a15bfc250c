"""h_k = RMS(blocks(W_eh [RMS(e_{t+k}), RMS(h_{k-1})])): one module applied at every depth (report 2.1, MTP).

h_0 is the output of the final norm. Depth k predicts token t + 1 + k through the shared head.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from nemotron_ultra.config.model import ModelConfig
from nemotron_ultra.model.block import Block
from nemotron_ultra.model.linear import Linear
from nemotron_ultra.model.norm import RMSNorm
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
            first = self.length * (min(depth, self.modules_stored) - 1)
            layers = self.layers[first : first + self.length]
            pair = torch.cat([layers[0].enorm(e_TD), layers[0].hnorm(hidden_TD)], -1)
            x_TD = layers[0].eh_proj(pair)
            for index, layer in enumerate(layers, first):
                x_TD, routing = layer(x_TD, segments, balance)
                if routing is not None:
                    on_routing(depth, index, routing)
            hidden_TD = layers[-1].final_layernorm(x_TD)
            outputs.append(hidden_TD)
        return torch.stack(outputs)
