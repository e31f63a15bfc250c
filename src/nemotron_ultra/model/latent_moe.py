"""y = W_up(sum_k p_k expert_k(W_down x)) + shared(x) (report 1.5, LatentMoE).

Router and shared expert read the full width; only routed experts live in the latent, and the up-projection
comes after the combine. With moe_latent_size 0 the projections are absent: a plain mixture of experts.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nemotron_ultra.config.model import ModelConfig
from nemotron_ultra.model.linear import Linear
from nemotron_ultra.model.mlp import MLP
from nemotron_ultra.model.router import Router, Routing
from nemotron_ultra.ops.segments import Segments
from nemotron_ultra.ops.table import choose


class Experts(nn.Module):
    """The routed experts' matrices, stacked: up_proj [E, F, L], down_proj [E, L, F]; never a bias."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        experts, hidden, width = config.n_routed_experts, config.moe_intermediate_size, config.expert_width
        self.run = choose("experts").function
        self.up_proj = nn.Parameter(torch.empty(experts, hidden, width))
        self.down_proj = nn.Parameter(torch.empty(experts, width, hidden))

    def forward(self, x_TL: Tensor, routing: Routing) -> Tensor:
        return self.run(x_TL, routing.indices_TK, routing.weights_TK, self.up_proj, self.down_proj)


class LatentMoE(nn.Module):
    """forward(x_TD, segments) -> (y_TD, Routing of this layer)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        width, latent, bias = config.hidden_size, config.moe_latent_size, config.mlp_bias
        self.gate = Router(config)
        self.experts = Experts(config)
        self.fc1_latent_proj = Linear(width, latent, bias) if latent else None
        self.fc2_latent_proj = Linear(latent, width, bias) if latent else None
        shared = config.moe_shared_expert_intermediate_size
        self.shared_experts = MLP(config, shared) if shared else None

    def forward(self, x_TD: Tensor, segments: Segments, balance: bool = False) -> tuple[Tensor, Routing]:
        routing = self.gate(x_TD, segments, balance)
        x_TL = x_TD if self.fc1_latent_proj is None else self.fc1_latent_proj(x_TD)
        y = self.experts(x_TL, routing)
        if self.fc2_latent_proj is not None:
            y = self.fc2_latent_proj(y)
        if self.shared_experts is not None:
            y = y + self.shared_experts(x_TD)
        return y, routing
