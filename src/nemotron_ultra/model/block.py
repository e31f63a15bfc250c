"""x + mixer(RMS(x)): one mixer per layer, chosen by its letter in the pattern (report 1.3)."""

from __future__ import annotations

from torch import Tensor, nn

from nemotron_ultra.config.model import ModelConfig
from nemotron_ultra.model.attention import Attention
from nemotron_ultra.model.cache import Cache, State
from nemotron_ultra.model.latent_moe import LatentMoE
from nemotron_ultra.model.mamba2 import Mamba2Mixer
from nemotron_ultra.model.mlp import MLP
from nemotron_ultra.model.norm import RMSNorm
from nemotron_ultra.model.router import Routing
from nemotron_ultra.ops.segments import Segments

MIXERS = {"M": Mamba2Mixer, "E": LatentMoE, "*": Attention, "-": MLP}


class Block(nn.Module):
    """forward(x_TD, segments, balance) -> (x_TD, Routing of a MoE layer or None)."""

    def __init__(self, config: ModelConfig, letter: str):
        super().__init__()
        self.letter = letter
        self.norm = RMSNorm(config.hidden_size, config.layer_norm_epsilon)
        self.mixer = MIXERS[letter](config)

    def forward(
        self, x_TD: Tensor, segments: Segments, balance: bool = False
    ) -> tuple[Tensor, Routing | None]:
        routing = None
        if self.letter == "E":
            y_TD, routing = self.mixer(self.norm(x_TD), segments, balance)
        else:
            y_TD = self.mixer(self.norm(x_TD), segments)
        return x_TD + y_TD, routing

    def prefill(self, x_TD: Tensor, segments: Segments, state: State | None, cache: Cache) -> Tensor:
        """`forward`, document b continuing row b of the layer's state, which moves on."""
        if state is None:
            return self(x_TD, segments)[0]
        return x_TD + self.mixer.prefill(self.norm(x_TD), segments, state, cache)

    def step(self, x_BD: Tensor, state: State | None, cache: Cache) -> Tensor:
        """The next token of every live row of the cache, [B, D] -> [B, D]."""
        if state is None:
            return self._without_memory(x_BD)
        return x_BD + self.mixer.step(self.norm(x_BD), state, cache)

    def extend(self, x_BKD: Tensor, state: State | None, cache: Cache) -> Tensor:
        """The next K tokens of every live row, [B, K, D] -> [B, K, D]; `Cache.commit` says how many stay."""
        if state is None:
            return self._without_memory(x_BKD.flatten(0, 1)).view(x_BKD.shape)
        return x_BKD + self.mixer.extend(self.norm(x_BKD), state, cache)

    def _without_memory(self, x_TD: Tensor) -> Tensor:
        y_TD = self.mixer(self.norm(x_TD), None)
        return x_TD + (y_TD[0] if self.letter == "E" else y_TD)
