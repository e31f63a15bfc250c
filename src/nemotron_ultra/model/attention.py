"""o(softmax(q k^T / sqrt(P)) v), causal, grouped, no positions, no biases, no q/k norms (report 1.3)."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from nemotron_ultra.config.model import ModelConfig
from nemotron_ultra.model.cache import Cache, KeyValues
from nemotron_ultra.model.linear import Linear
from nemotron_ultra.ops.segments import Segments
from nemotron_ultra.ops.step import attention_extend
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

    def prefill(self, x_TD: Tensor, segments: Segments, state: KeyValues, cache: Cache) -> Tensor:
        """`forward`, each document continuing its row of `state`; keys and values are added there."""
        q, k, v = self._heads(x_TD)
        place_T = segments.position_T + cache.length_B[segments.index_T]
        for home, rows in zip(state.tensors(), (k, v), strict=True):
            home[segments.index_T, :, place_T] = rows.to(home.dtype)
        if any(cache.lengths):
            y_THP = self._continued(q.to(state.key_BGSP.dtype), segments, state, cache).to(q.dtype)
        else:
            y_THP = self.attend(q, k, v, segments)
        return self.o_proj(y_THP.flatten(1))

    def _continued(self, q_THP: Tensor, segments: Segments, state: KeyValues, cache: Cache) -> Tensor:
        """Attention of each document to all that its row holds, [T, H, P]."""
        parts = []
        for row, (begin, end) in enumerate(pairwise(segments.bounds)):
            total = cache.lengths[row] + end - begin
            mask_KS = torch.ones(end - begin, total, dtype=torch.bool, device=q_THP.device)
            mask_KS = mask_KS.tril(cache.lengths[row])
            key, value = (home[row : row + 1, :, :total] for home in state.tensors())
            parts.append(attention_extend(q_THP[None, begin:end], key, value, mask_KS[None])[0])
        return torch.cat(parts)

    def step(self, x_BD: Tensor, state: KeyValues, cache: Cache) -> Tensor:
        """The next token of every row, [B, D] -> [B, D]; its key and value are added to `state`."""
        return self.extend(x_BD[:, None], state, cache)[:, 0]

    def extend(self, x_BKD: Tensor, state: KeyValues, cache: Cache) -> Tensor:
        """The next K tokens of every row, [B, K, D] -> [B, K, D]."""
        dtype = state.key_BGSP.dtype
        q, k, v = (rows.unflatten(0, x_BKD.shape[:2]).to(dtype) for rows in self._heads(x_BKD.flatten(0, 1)))
        place_BK = cache.places_BK(x_BKD.shape[1])
        for home, rows in zip(state.tensors(), (k, v), strict=True):
            home[cache.rows_B[:, None], :, place_BK] = rows
        key, value = (home[: cache.size, :, : cache.longest] for home in state.tensors())
        y_BKHP = attention_extend(q, key, value, cache.mask_BKS)
        return self.o_proj(y_BKHP.flatten(2).flatten(0, 1).to(x_BKD.dtype)).unflatten(0, x_BKD.shape[:2])

    def _heads(self, x_TD: Tensor) -> tuple[Tensor, ...]:
        projections = (self.q_proj, self.k_proj, self.v_proj)
        return tuple(project(x_TD).unflatten(-1, (-1, self.head_dim)) for project in projections)
