"""Slot j of step s is row s x per_step + j of a golden-ratio blend of the domains, a function of the seed.

Nothing is remembered, so that any step can be asked for at any time: a resumed run, a run that generates
ahead and a plain loop get the same problems. A domain's problems come in order, each once.
"""

from __future__ import annotations

from collections.abc import Mapping

from nemotron_ultra.config.tasks import TasksConfig
from nemotron_ultra.data.order import Draws
from nemotron_ultra.errors import ConfigError
from nemotron_ultra.rl.environments import Environment
from nemotron_ultra.rl.rollout import Problem


class ProblemStream:
    """stream(step) -> the `per_step` problems of that step, the same ones at every call.

    weights: share of each domain, need not sum to 1; after n problems a domain has had its share of n within
    a few problems. environments may hold further domains.
    """

    def __init__(
        self, environments: Mapping[str, Environment], weights: Mapping[str, float], seed: int, per_step: int
    ):
        self.weights = {domain: weight for domain, weight in weights.items() if weight > 0}
        if not self.weights:
            raise ConfigError("no domain to draw problems from", got=dict(weights))
        assert not self.weights.keys() - environments.keys(), "a domain without an environment"
        self.environments, self.per_step = environments, per_step
        self._domains = list(self.weights)
        self._draws = Draws(list(self.weights.values()), seed, "problems")

    @classmethod
    def of(
        cls, tasks: TasksConfig, environments: Mapping[str, Environment], seed: int, per_step: int
    ) -> ProblemStream:
        """The domains that are trained on, by their weights."""
        weights = {domain: task.weight for domain, task in tasks.trained.items()}
        return cls(environments, weights, seed, per_step)

    def __call__(self, step: int) -> list[Problem]:
        problems = []
        for row in range(step * self.per_step, (step + 1) * self.per_step):
            source = self._draws.source(row)
            environment = self.environments[self._domains[source]]
            problems.append(environment.problem(self._draws.drawn(source, row)))
        return problems
