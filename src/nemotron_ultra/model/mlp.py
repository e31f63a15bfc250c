"""down(relu(up x)^2): the dense layer `-`, and the shared expert of a MoE layer (report 1.3)."""

from __future__ import annotations

from torch import Tensor, nn

from nemotron_ultra.config.model import ModelConfig
from nemotron_ultra.model.linear import Linear
from nemotron_ultra.ops.experts import relu_squared
from nemotron_ultra.ops.segments import Segments


class MLP(nn.Module):
    """Squared-ReLU MLP of hidden width `width`, default config.intermediate_size."""

    def __init__(self, config: ModelConfig, width: int | None = None):
        super().__init__()
        width = config.intermediate_size if width is None else width
        self.up_proj = Linear(config.hidden_size, width, bias=config.mlp_bias)
        self.down_proj = Linear(width, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x_TD: Tensor, segments: Segments | None = None) -> Tensor:
        return self.down_proj(relu_squared(self.up_proj(x_TD)))
