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
WITH_MEMORY = "M*"


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

    def prefill(self, x_TD: Tensor, segments: Segments, capacity: int) -> tuple[Tensor, State | None]:
        """`forward`, and what the layer remembers of each document."""
        if self.letter not in WITH_MEMORY:
            return self(x_TD, segments)[0], None
        y_TD, state = self.mixer.prefill(self.norm(x_TD), segments, capacity)
        return x_TD + y_TD, state

    def step(self, x_BD: Tensor, state: State | None, cache: Cache) -> Tensor:
        """The next token of every live row of the cache, [B, D] -> [B, D]."""
        u_BD = self.norm(x_BD)
        if state is not None:
            return self.mixer.step(u_BD, state, cache).add_(x_BD)
        y_BD = self.mixer(u_BD, None)
        return x_BD + (y_BD[0] if self.letter == "E" else y_BD)
