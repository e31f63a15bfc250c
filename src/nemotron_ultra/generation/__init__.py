"""Drawing tokens: one Generator protocol, and `generate` for a script or a notebook."""

from nemotron_ultra.generation.base import Completion, Event, Request
from nemotron_ultra.generation.sampler import Sampler, generate
from nemotron_ultra.generation.scheduler import Scheduler

__all__ = ["Completion", "Event", "Request", "Sampler", "Scheduler", "generate"]
