"""s = sigmoid(W u) in float32; choose the top k of s + bias; weigh by s (report 1.5)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nemotron_ultra.config.model import ModelConfig
from nemotron_ultra.ops.routing import balance_loss, expert_counts, routing_weights, select_experts
from nemotron_ultra.ops.segments import Segments


@dataclass(frozen=True)
class Routing:
    """What one MoE layer decided. gate_out is before the sigmoid; indices are in no particular order."""

    gate_out_TE: Tensor
    indices_TK: Tensor
    weights_TK: Tensor
    counts_E: Tensor
    balance_loss: Tensor | None


@dataclass(frozen=True)
class RouterStats:
    """Routing of a forward pass, one row per MoE layer, backbone first, then MTP (summed over its depths).

    counts_LE int64: tokens per expert. balance_loss: the scalar of `ops.routing.balance_loss` summed over
    layers, or None when it was not asked for.
    """

    names: list[str]
    counts_LE: Tensor
    balance_loss: Tensor | None


class Router(nn.Module):
    """`e_score_correction_bias`, float32, moves by counts (`ops.routing.updated_bias`), not by gradient."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.groups = (config.n_group, config.topk_group)
        self.normalise = config.norm_topk_prob
        self.factor = config.routed_scaling_factor
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size))
        self.register_buffer(
            "e_score_correction_bias", torch.zeros(config.n_routed_experts, dtype=torch.float32)
        )

    def forward(self, x_TD: Tensor, segments: Segments, balance: bool = False) -> Routing:
        dtype = torch.promote_types(x_TD.dtype, torch.float32)
        gate_out_TE = x_TD.to(dtype) @ self.weight.to(dtype).T
        scores_TE = gate_out_TE.sigmoid()
        indices_TK = select_experts(scores_TE, self.e_score_correction_bias, self.top_k, *self.groups)
        weights_TK = routing_weights(scores_TE, indices_TK, self.normalise, self.factor)
        loss = balance_loss(scores_TE, self.top_k, segments) if balance else None
        counts_E = expert_counts(indices_TK, scores_TE.shape[1])
        return Routing(gate_out_TE, indices_TK, weights_TK, counts_E, loss)
