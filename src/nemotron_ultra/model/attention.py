"""o(softmax(q k^T / sqrt(P)) v), causal, grouped, no positions, no biases, no q/k norms (report 1.3)."""

from __future__ import annotations

from torch import Tensor, nn

from nemotron_ultra.config.model import ModelConfig
from nemotron_ultra.model.linear import Linear
from nemotron_ultra.ops.segments import Segments
from nemotron_ultra.ops.table import choose


class Attention(nn.Module):
    """Queries H x P, keys and values G x P; heads x head_dim need not equal the model width."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.head_dim = config.head_dim
        self.attend = choose("attention").function
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        self.q_proj = Linear(config.hidden_size, queries)
        self.k_proj = Linear(config.hidden_size, keys)
        self.v_proj = Linear(config.hidden_size, keys)
        self.o_proj = Linear(queries, config.hidden_size)

    def forward(self, x_TD: Tensor, segments: Segments) -> Tensor:
        q, k, v = (
            proj(x_TD).unflatten(-1, (-1, self.head_dim)) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.o_proj(self.attend(q, k, v, segments).flatten(1))
