"""What a run on tasks measures beside its loss: held-out scores by domain, and answers for people to read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nemotron_ultra.config.compose import to_dict
from nemotron_ultra.config.run import RunConfig
from nemotron_ultra.data.chat import ChatTemplate
from nemotron_ultra.data.order import keyed
from nemotron_ultra.data.tokenizer import Tokenizer
from nemotron_ultra.generation.base import Generator
from nemotron_ultra.observe.metrics import MetricsLog
from nemotron_ultra.rl.environments import Environment
from nemotron_ultra.trainers.build import Run
from nemotron_ultra.trainers.evaluation import (
    Answer,
    answer_held_out,
    domain_means,
    exact_shares,
    longest_answer,
)
from nemotron_ultra.trainers.experience import Experience
from nemotron_ultra.trainers.hooks import Every, Hook, Measure, Rows

SAMPLES = 6  # answers shown for each sampled step


def task_seed(config: RunConfig) -> int:
    """Seed of the training problems: SFT, GRPO and MOPD of one run.seed draw different ones."""
    return keyed(config.run.seed, config.trainer.name)


def task_facts(config: RunConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """What the order and the text of problems depend on; plain JSON types."""
    tasks = to_dict(config.tasks)
    return {
        "seed": config.run.seed,
        "tokenizer": tokenizer.hash,
        "global_batch_size": config.trainer.global_batch_size,
        "only": tasks["only"],
        "domains": tasks["domains"],
        "validation_problems": tasks["validation_problems"],
    }


class Scoring:
    """`hook()` measures val/score, val/DOMAIN/score and val/DOMAIN/exact when trainer.validate_every says so.

    The generator must hold the weights of the step by then.
    """

    def __init__(
        self, run: Run, generator: Generator, chat: ChatTemplate, environments: Mapping[str, Environment]
    ):
        self.run, self.generator, self.chat, self.environments = run, generator, chat, environments
        self.answers: list[Answer] = []

    def hook(self) -> Hook:
        trainer = self.run.config.trainer
        return Measure(self.measure, Every(trainer.validate_every, trainer.steps))

    def measure(self) -> dict[str, float]:
        config = self.run.config
        self.answers = answer_held_out(
            self.generator,
            self.chat,
            self.environments,
            config.tasks,
            max_new_tokens=longest_answer(config, self.chat, self.environments, config.tasks),
            seed=config.run.seed,
        )
        means = domain_means(self.answers)
        exact = exact_shares(self.answers)
        scores = {f"val/{domain}/score": mean for domain, mean in means.items()}
        scores |= {f"val/{domain}/exact": share for domain, share in exact.items()}
        return {"val/score": sum(means.values()) / len(means)} | scores

    def samples(self) -> Hook:
        """Held-out answers of a validation, some of every domain, as rows of samples.jsonl."""
        trainer = self.run.config.trainer
        return self._rows(self._held_out_rows, Every(trainer.validate_every, trainer.steps))

    def rollouts(self, stream: Experience) -> Hook:
        """Rollouts of the step's batch, from all over it, as rows of samples.jsonl."""
        trainer = self.run.config.trainer
        return self._rows(lambda: _rollout_rows(stream), Every(trainer.sample_every, trainer.steps))

    def _rows(self, rows: Any, when: Every) -> Hook:
        return Rows(self.run.engine, MetricsLog(self.run.folder.path / "samples.jsonl"), rows, when)

    def _held_out_rows(self) -> list[dict[str, Any]]:
        return [
            {
                "domain": answer.domain,
                "prompt": answer.question,
                "text": answer.text,
                "reward": answer.score,
                "finish_reason": answer.finish_reason,
            }
            for answer in _spread_out(self.answers)
        ]


def _rollout_rows(stream: Experience) -> list[dict[str, Any]]:
    return [
        {
            "domain": group.problem.domain,
            "prompt": group.problem.question,
            "text": group.rollouts[0].text,
            "reward": group.rollouts[0].reward,
            "finish_reason": group.rollouts[0].finish_reason,
        }
        for group in _spread_out(stream.groups)
    ]


def _spread_out(items: list[Any]) -> list[Any]:
    """Up to SAMPLES of them, evenly from the whole list."""
    count = min(SAMPLES, len(items))
    return [items[i * len(items) // count] for i in range(count)]
