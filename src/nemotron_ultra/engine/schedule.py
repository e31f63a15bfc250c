"""Learning rate as a pure function of consumed tokens (report 2.4; decay form as Megatron-LM).

    warmup   lr = initial + (peak - initial) t / T_warmup
    wsd      lr = peak, then min + (peak - min)(1 - sqrt(t_decay / T_decay)) over the last T_decay tokens
    cosine   lr = min + (peak - min)(1 + cos(pi t / T)) / 2 from the end of the warmup to the end

A step uses the tokens consumed before it, as Megatron-LM does: the first step of a warmup from 0 has rate 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from nemotron_ultra.config.optim import ScheduleConfig
from nemotron_ultra.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Learning rate over tokens. All token counts are floats, so that 20e12 is exact and readable.

    Raises ConfigError if warmup and decay do not fit into the schedule or the floor lies above the peak.
    """

    name: Literal["wsd", "cosine", "constant"]
    peak: float
    total_tokens: float
    warmup_tokens: float = 0.0
    decay_tokens: float = 0.0
    initial: float = 0.0
    minimum: float = 0.0

    def __post_init__(self):
        needed = self.warmup_tokens + (self.decay_tokens if self.name == "wsd" else 0)
        if needed > self.total_tokens:
            raise ConfigError(
                "schedule: warmup_tokens + decay_tokens is longer than the schedule",
                got=f"{needed:g} tokens of {self.total_tokens:g}",
                do="shorten them, or train more steps, or set schedule.total_tokens",
            )
        if self.minimum > self.peak and self.name != "constant":
            raise ConfigError(
                "schedule.min_lr is above optim.lr",
                got=f"{self.minimum:g} > {self.peak:g}",
                do="lower schedule.min_lr",
            )

    @classmethod
    def from_config(cls, config: ScheduleConfig, *, peak: float, run_tokens: float) -> Schedule:
        """The schedule of a run of `run_tokens` tokens with the peak learning rate `peak`."""
        return cls(
            name=config.name,
            peak=peak,
            total_tokens=config.total_tokens or run_tokens,
            warmup_tokens=config.warmup_tokens,
            decay_tokens=config.decay_tokens,
            initial=config.initial_lr,
            minimum=config.min_lr,
        )

    @property
    def decay_start(self) -> float:
        """Tokens at which the learning rate begins to fall."""
        if self.name == "wsd":
            return self.total_tokens - self.decay_tokens
        return self.warmup_tokens if self.name == "cosine" else math.inf

    def __call__(self, tokens: float) -> float:
        """Learning rate after `tokens` consumed tokens."""
        if tokens < self.warmup_tokens:
            return self.initial + (self.peak - self.initial) * tokens / self.warmup_tokens
        if tokens <= self.decay_start or self.decay_start >= self.total_tokens:
            return self.peak
        left = 1.0 - self._decayed(
            min(1.0, (tokens - self.decay_start) / (self.total_tokens - self.decay_start))
        )
        return self.minimum + (self.peak - self.minimum) * left

    def _decayed(self, progress: float) -> float:
        """Share of the way from peak to minimum at `progress` (0 to 1) of the decay."""
        return math.sqrt(progress) if self.name == "wsd" else 0.5 * (1.0 - math.cos(math.pi * progress))
