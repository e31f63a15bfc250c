"""o(softmax(q k^T / sqrt(P)) v), causal, grouped, no positions, no biases, no q/k norms (report 1.3)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nemotron_ultra.config.model import ModelConfig
from nemotron_ultra.model.cache import Cache, KeyValues
from nemotron_ultra.model.linear import Linear
from nemotron_ultra.ops.segments import Segments
from nemotron_ultra.ops.step import attention_step
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
        q, k, v = self._heads(x_TD)
        return self.o_proj(self.attend(q, k, v, segments).flatten(1))

    def prefill(self, x_TD: Tensor, segments: Segments, capacity: int) -> tuple[Tensor, KeyValues]:
        """`forward`, and the keys and values of each document with room for `capacity` tokens."""
        q, k, v = self._heads(x_TD)
        dtype = torch.promote_types(k.dtype, torch.float32)
        shape = (segments.count, k.shape[1], capacity, self.head_dim)
        state = KeyValues(*(torch.zeros(shape, dtype=dtype, device=k.device) for _ in range(2)))
        for home, rows in zip(state.tensors(), (k, v), strict=True):
            home[segments.index_T, :, segments.position_T] = rows.to(dtype)
        return self.o_proj(self.attend(q, k, v, segments).flatten(1)), state

    def step(self, x_BD: Tensor, state: KeyValues, cache: Cache) -> Tensor:
        """The next token of every row, [B, D] -> [B, D]; its key and value are added to `state`."""
        q, k, v = (rows.to(state.key_BGSP.dtype) for rows in self._heads(x_BD))
        for home, rows in zip(state.tensors(), (k, v), strict=True):
            home[cache.rows_B, :, cache.length_B] = rows
        key, value = (home[: cache.size, :, : cache.longest] for home in state.tensors())
        y_BHP = attention_step(q, key, value, cache.mask_BS)
        return self.o_proj(y_BHP.flatten(1).to(x_BD.dtype))

    def _heads(self, x_TD: Tensor) -> tuple[Tensor, ...]:
        projections = (self.q_proj, self.k_proj, self.v_proj)
        return tuple(project(x_TD).unflatten(-1, (-1, self.head_dim)) for project in projections)
