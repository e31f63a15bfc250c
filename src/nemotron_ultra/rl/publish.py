"""generator weights := learner weights, version s after s optimizer steps; never in the middle of a batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import Tensor

from nemotron_ultra.errors import BackendError
from nemotron_ultra.rl.replay import Replay

if TYPE_CHECKING:
    from nemotron_ultra.generation.base import Generator


class Publisher:
    """Moves weights to a generator and tells the replay, which may make the next batches then."""

    def __init__(self, generator: Generator, replay: Replay | None = None):
        self.generator, self.replay = generator, replay

    def publish(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Load `weights` as `version`. Waits for batches that the weights in use still have to make.

        Raises BackendError if the generator does not say that it holds that version.
        """
        if self.replay is not None:
            self.replay.settle()
        self.generator.load_weights(weights, version)
        if self.generator.version != version:
            raise BackendError(
                "the generator did not take the weights that were published",
                got=f"version {self.generator.version}",
                allowed=f"version {version}",
                do="rollouts would come from older weights than they say; nothing was drawn",
            )
        if self.replay is not None:
            self.replay.published(version)
