"""Drawing tokens: one Generator protocol, and `generate` for a script or a notebook."""

from nemotron_ultra.generation.base import Completion
from nemotron_ultra.generation.sampler import Sampler, generate

__all__ = ["Completion", "Sampler", "generate"]
