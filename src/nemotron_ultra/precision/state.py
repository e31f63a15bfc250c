"""What the low-precision products of one model share: random state of stochastic rounding, and a count."""

from __future__ import annotations

from typing import Any

import torch

from nemotron_ultra.ops.nvfp4 import Tally

SEEDS = (1 << 63) - 1


class PrecisionState:
    """`generator` feeds stochastic rounding and is part of the checkpoint; `tally` counts NaN and infinities.

    Only gradients are rounded stochastically, so a forward pass leaves the generator alone.
    default_generator: take torch's own of the device, which products of other libraries draw from.
    """

    def __init__(self, device: torch.device | str = "cpu", seed: int = 0, *, default_generator: bool = False):
        generator = _default_generator(device) if default_generator else torch.Generator(device)
        self.generator = generator.manual_seed(seed)
        self.tally = Tally()

    def seeds(self, count: int) -> list[int]:
        """Seeds for pieces of work that may run in any order, each with a generator of its own."""
        device = self.generator.device
        return torch.randint(SEEDS, (count,), generator=self.generator, device=device).tolist()

    def take_non_finite(self) -> int:
        """NaN and infinite elements that were quantised since the last call: their codes hide them."""
        count, self.tally.elements, self.tally.tensors = self.tally.elements, 0, 0
        return count

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])


def _default_generator(device: torch.device | str) -> torch.Generator:
    device = torch.device(device)
    if device.type != "cuda":
        return torch.default_generator
    torch.cuda.init()
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]
