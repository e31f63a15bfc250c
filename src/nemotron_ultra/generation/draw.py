"""token = F^-1(u), F the cumulative softmax(logits / temperature), u one uniform number per (seed, place).

With numbers that depend on nothing but (seed, place), a request draws the same tokens alone and in company.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 64  # ids summed before the search, so that only one block of a row is summed id by id


def uniforms(seeds: Sequence[int], count: int) -> Tensor:
    """[len(seeds), count] float64 in [0, 1); row b depends on seeds[b] alone, its start not on `count`."""
    rows = [np.random.Generator(np.random.Philox(key=int(seed) % 2**64)).random(count) for seed in seeds]
    return torch.from_numpy(np.stack(rows))


class Uniforms:
    """The numbers of one seed, in turn: `next()` gives those of `uniforms([seed], ...)` from the first on.

    stream: 0, or another one for numbers of the same seed that have nothing to do with those.
    """

    ahead = 64

    def __init__(self, seed: int, stream: int = 0):
        self.source = np.random.Generator(np.random.Philox(key=int(seed) % 2**64 + (stream << 64)))
        self.block: list[float] = []

    def next(self) -> float:
        if not self.block:
            self.block = self.source.random(self.ahead)[::-1].tolist()
        return self.block.pop()

    def peek(self, count: int) -> list[float]:
        """The next `count` numbers, which stay the next ones."""
        while len(self.block) < count:
            self.block = self.source.random(self.ahead)[::-1].tolist() + self.block
        return self.block[: -count - 1 : -1]

    def skip(self, count: int) -> None:
        """Over the next `count` numbers, which have been seen by `peek`."""
        del self.block[len(self.block) - count :]


def draw(logits_BV: Tensor, temperature: float, uniform_B: Tensor) -> tuple[Tensor, Tensor]:
    """-> token [B] and its log-probability [B] under softmax(logits / temperature).

    Temperature 0 takes the likeliest id, its log-probability that of temperature 1.
    """
    if not temperature:
        token_B = logits_BV.argmax(-1)
        total_B = logits_BV.logsumexp(-1)
        return token_B, logits_BV.gather(1, token_B[:, None])[:, 0] - total_B
    return draw_scaled(logits_BV / temperature, uniform_B)


def draw_scaled(scaled_BV: Tensor, uniform_B: Tensor) -> tuple[Tensor, Tensor]:
    """`draw` at temperature 1; takes the memory of `scaled_BV`. Ids of -inf are never drawn."""
    scaled_BV -= scaled_BV.amax(-1, keepdim=True)
    odds_BKI = F.pad(scaled_BV.exp(), (0, -scaled_BV.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    edges_BK = odds_BKI.sum(-1, dtype=torch.float64).cumsum(-1)
    total_B1 = edges_BK[:, -1:]
    target_B1 = uniform_B[:, None] * total_B1
    block_B1 = _first_above(edges_BK, target_B1)
    before_B1 = F.pad(edges_BK, (1, 0)).gather(1, block_B1)
    odds_BI = odds_BKI[torch.arange(len(block_B1), device=block_B1.device), block_B1[:, 0]]
    inside_B1 = _first_above(odds_BI.double().cumsum(-1), target_B1 - before_B1)
    token_B1 = block_B1 * BLOCK + inside_B1
    logprob_B1 = scaled_BV.gather(1, token_B1).double() - total_B1.log()
    return token_B1[:, 0], logprob_B1[:, 0]


def _first_above(edges_BK: Tensor, target_B1: Tensor) -> Tensor:
    """[B, 1]: first k with edges[k] > target, or the last k that adds anything: never an id without odds."""
    above_B1 = (edges_BK <= target_B1).sum(-1, keepdim=True)
    return torch.minimum(above_B1, (edges_BK < edges_BK[:, -1:]).sum(-1, keepdim=True))
