"""Drawing tokens: one Generator protocol, and `generate` for a script or a notebook."""

from nemotron_ultra.generation.base import Completion, Event, Request
from nemotron_ultra.generation.sampler import Sampler, generate
from nemotron_ultra.generation.scheduler import Scheduler
from nemotron_ultra.generation.speculative import Drafting

__all__ = ["Completion", "Drafting", "Event", "Request", "Sampler", "Scheduler", "generate"]
