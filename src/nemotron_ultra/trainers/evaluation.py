"""score(domain) = mean over held-out problems of the environment's score of one answer to each.

An answer that is empty or was cut at the limit scores 0, as in training.
Every problem has a random seed of its own, so that scores are a function of weights and seed alone: not of
the batch, the number of problems or what was drawn before.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from nemotron_ultra.config.run import RunConfig
from nemotron_ultra.config.tasks import TasksConfig
from nemotron_ultra.data.chat import ChatTemplate
from nemotron_ultra.data.order import keyed
from nemotron_ultra.data.tokenizer import load_tokenizer
from nemotron_ultra.engine.checkpoint import latest_checkpoint, list_checkpoints
from nemotron_ultra.errors import ConfigError, DataError
from nemotron_ultra.generation.base import Generator
from nemotron_ultra.generation.sampler import Sampler
from nemotron_ultra.model.hf_folder import load_model
from nemotron_ultra.rl.environments import Environment, make_environments
from nemotron_ultra.rl.rollout import Problem
from nemotron_ultra.trainers.build import DTYPES, choose_device
from nemotron_ultra.trainers.self_check import check_scorers
from nemotron_ultra.trainers.weights import check_tokenizer, weights_folder

SCORES, ANSWERS = "scores.json", "answers.jsonl"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One held-out problem and what the model made of it. `tokens` counts those of the answer."""

    domain: str
    index: int
    question: str
    text: str
    score: float
    finish_reason: str
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Mean score by domain in [0, 1], and what it was measured with."""

    step: int | None
    scores: dict[str, float]
    problems: int
    temperature: float
    max_new_tokens: int
    seed: int
    seconds: float
    answers: list[Answer]

    @property
    def mean(self) -> float:
        """Mean of the domains."""
        return sum(self.scores.values()) / len(self.scores)

    def settings(self) -> dict[str, Any]:
        """All that the scores depend on but for the weights of `step`."""
        names = ("problems", "temperature", "max_new_tokens", "seed")
        return {"domains": list(self.scores)} | {name: getattr(self, name) for name in names}

    def summary(self) -> dict[str, Any]:
        """The content of scores.json."""
        lengths = [answer.tokens for answer in self.answers]
        cut = [answer.finish_reason == "length" for answer in self.answers]
        return {
            "step": self.step,
            "scores": self.scores,
            "mean": self.mean,
            "settings": self.settings(),
            "truncated": sum(cut) / len(cut),
            "answer_tokens": sum(lengths) / len(lengths),
            "seconds": round(self.seconds, 3),
        }


def evaluate(
    generator: Generator,
    chat: ChatTemplate,
    environments: Mapping[str, Environment],
    tasks: TasksConfig,
    *,
    max_new_tokens: int,
    seed: int,
) -> dict[str, float]:
    """Mean score of each domain, each in [0, 1]; what a validation hook asks for."""
    found = answer_held_out(generator, chat, environments, tasks, max_new_tokens=max_new_tokens, seed=seed)
    return domain_means(found)


def answer_held_out(
    generator: Generator,
    chat: ChatTemplate,
    environments: Mapping[str, Environment],
    tasks: TasksConfig,
    *,
    max_new_tokens: int,
    seed: int,
) -> list[Answer]:
    """One answer to each of the first `tasks.validation_problems` held-out problems of every environment."""
    problems = [
        environment.held_out(index)
        for environment in environments.values()
        for index in range(tasks.validation_problems)
    ]
    completions = generator.generate(
        [prompt_of(chat, problem) for problem in problems],
        max_new_tokens=max_new_tokens,
        temperature=tasks.validation_temperature,
        stop_ids=chat.stop_ids,
        seeds=[problem_seed(seed, problem) for problem in problems],
    )
    answers = []
    for problem, completion in zip(problems, completions, strict=True):
        text = chat.text(completion.tokens)
        finished = completion.finish_reason == "stop" and bool(text.strip())
        answers.append(
            Answer(
                domain=problem.domain,
                index=problem.index,
                question=problem.question,
                text=text,
                score=environments[problem.domain].score(problem, text) if finished else 0.0,
                finish_reason=completion.finish_reason,
                tokens=len(completion.tokens),
            )
        )
    return answers


def prompt_of(chat: ChatTemplate, problem: Problem) -> list[int]:
    """Token ids of the question as a user's only message."""
    return chat.prompt([{"role": "user", "content": problem.question}])


def problem_seed(seed: int, problem: Problem) -> int:
    """The seed of one held-out problem's answer."""
    return keyed(seed, "held out", problem.domain, problem.index) >> 1  # a signed 64-bit number


def domain_means(answers: Sequence[Answer]) -> dict[str, float]:
    """Mean score by domain, in the order of the answers."""
    by_domain: dict[str, list[float]] = {}
    for answer in answers:
        by_domain.setdefault(answer.domain, []).append(answer.score)
    return {domain: sum(scores) / len(scores) for domain, scores in by_domain.items()}


def exact_shares(answers: Sequence[Answer]) -> dict[str, float]:
    """Share of answers with full marks by domain: what is left of a score whose scorer grades nearness."""
    return domain_means([replace(answer, score=float(answer.score == 1.0)) for answer in answers])


def score_weights(
    path: str | Path, config: RunConfig, *, problems: int | None = None, max_new_tokens: int | None = None
) -> Scores:
    """Load a run's newest checkpoint, or a weights folder, and score it on all domains of `config.tasks`.

    problems: held-out problems a domain, tasks.validation_problems if not given. max_new_tokens:
    rollout.max_new_tokens if not given, else what the longest prompt leaves of data.sequence_length.
    Raises ConfigError for a configuration without tasks or of another tokenizer, CheckpointError without
    weights.
    """
    path, tasks = Path(path), config.tasks
    if tasks is None:
        raise ConfigError(
            f"{path}: its configuration has no tasks to be scored on", do="choose some: tasks=NAME"
        )
    weights = weights_folder(path, key=str(path))
    tokenizer = load_tokenizer(config.data.tokenizer)
    check_tokenizer(weights, tokenizer, key=str(path))
    model = load_model(weights, dtype=DTYPES[config.precision.weights], device=choose_device(config))
    _check_rows(weights, model.config.vocab_size, tokenizer.vocab_size)
    tasks = replace(tasks, validation_problems=problems or tasks.validation_problems)
    environments = make_environments(tasks, config.run.seed)
    check_scorers(environments)
    chat, begun = ChatTemplate(tokenizer), time.perf_counter()
    limit = max_new_tokens or longest_answer(config, chat, environments, tasks)
    answers = answer_held_out(
        Sampler(model, vocab_size=tokenizer.vocab_size),
        chat,
        environments,
        tasks,
        max_new_tokens=limit,
        seed=config.run.seed,
    )
    return Scores(
        step=newest_step(path),
        scores=domain_means(answers),
        problems=tasks.validation_problems,
        temperature=tasks.validation_temperature,
        max_new_tokens=limit,
        seed=config.run.seed,
        seconds=time.perf_counter() - begun,
        answers=answers,
    )


def longest_answer(
    config: RunConfig, chat: ChatTemplate, environments: Mapping[str, Environment], tasks: TasksConfig
) -> int:
    """rollout.max_new_tokens; without rollouts what the longest prompt leaves of data.sequence_length."""
    if config.rollout is not None:
        return config.rollout.max_new_tokens
    count = tasks.validation_problems
    longest = max(len(prompt_of(chat, e.held_out(i))) for e in environments.values() for i in range(count))
    if longest >= config.data.sequence_length:
        raise DataError(
            "a held-out problem leaves no room for an answer",
            got=f"a prompt of {longest} tokens, data.sequence_length {config.data.sequence_length}",
            do="say how long answers may be: --max-new-tokens N",
        )
    return config.data.sequence_length - longest


def save_scores(scores: Scores, folder: Path) -> Path:
    """Write answers.jsonl, then scores.json, each whole or not at all."""
    write_text(folder / ANSWERS, "".join(json.dumps(asdict(answer)) + "\n" for answer in scores.answers))
    return write_json(folder / SCORES, scores.summary())


def newest_step(run_dir: Path) -> int | None:
    """Step of a run's newest checkpoint; None for a run without one and for a weights folder."""
    return list_checkpoints(run_dir)[-1][0] if latest_checkpoint(run_dir) else None


def read_json(path: Path) -> dict[str, Any] | None:
    """The object of a JSON file; None where there is none or it is no JSON object."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def write_json(path: Path, value: dict[str, Any]) -> Path:
    return write_text(path, json.dumps(value, indent=1) + "\n")


def write_text(path: Path, text: str) -> Path:
    """Write, flush and rename: the file is absent, old or whole. Raises DataError (disk full, read-only)."""
    fresh = path.with_name(f".{path.name}.tmp")
    try:
        with fresh.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except OSError as error:
        do = "free space on that disk" if error.errno == errno.ENOSPC else "make the folder writable"
        raise DataError(f"cannot write {path}", got=error.strerror, do=do) from error
    return path


def _check_rows(weights: Path, rows: int, ids: int) -> None:
    if ids > rows:
        raise ConfigError(
            f"{weights}: the tokenizer makes ids that the model has no row for",
            got=f"{rows} rows for {ids} ids",
            do="set data.tokenizer to the one that the weights were trained with",
        )
