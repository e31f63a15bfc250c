"""The hooks of every run, in the order in which they see a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from nemotron_ultra.config.compose import to_dict
from nemotron_ultra.config.plan import flops_per_token
from nemotron_ultra.engine.base import Metrics
from nemotron_ultra.observe.machine import matmul_flops
from nemotron_ultra.observe.metrics import MetricsLog
from nemotron_ultra.observe.sinks import open_sinks
from nemotron_ultra.rl.publish import Publisher
from nemotron_ultra.trainers.build import Run, save_run
from nemotron_ultra.trainers.experience import Experience
from nemotron_ultra.trainers.hooks import (
    Checkpoint,
    Clock,
    Every,
    Hook,
    Log,
    Measure,
    Publish,
    Samples,
    Signals,
    Stability,
    Validation,
)
from nemotron_ultra.trainers.text import TextSampler


def standard_hooks(run: Run, *, measure: Sequence[Hook] = (), record: Sequence[Hook] = ()) -> list[Hook]:
    """Measure, validate, log, record, save, heed signals, and start the clock again.

    The hooks of `measure` add to what is logged; those of `record` come after the log and before the
    checkpoint.
    """
    trainer, path = run.config.trainer, run.folder.path
    training_flops = 3.0 * flops_per_token(run.config.model, run.config.data.sequence_length)
    limit = matmul_flops(torch.get_num_threads(), run.engine.device.type)
    clock = Clock(run.engine, training_flops, limit)
    log = Log(
        run.engine,
        MetricsLog(path / "metrics.jsonl"),
        run.console,
        open_sinks(run.config.log, path, to_dict(run.config), report=run.console.note),
    )
    hooks: list[Hook] = [clock, *measure, Stability(run.engine), *_validation(run), log, *record]
    checkpoint = Checkpoint(lambda: save_run(run, hooks), Every(trainer.checkpoint_every, trainer.steps))
    return [*hooks, checkpoint, Signals(checkpoint), clock.restart]


def text_samples(run: Run) -> list[Hook]:
    """Text written after the beginning of a validation document, as trainer.sample_tokens asks."""
    trainer = run.config.trainer
    if not trainer.sample_tokens:
        return []
    write_text = TextSampler(
        run.engine.model, run.tokenizer, run.validation[0], max_new_tokens=trainer.sample_tokens
    )
    samples = MetricsLog(run.folder.path / "samples.jsonl")
    return [Samples(run.engine, samples, run.console, write_text, Every(trainer.sample_every, trainer.steps))]


def publish_hooks(run: Run, publisher: Publisher, stream: Experience) -> list[Hook]:
    """New weights to the generator after every step, then what the stream says of its batch."""
    engine = run.engine

    def publish(step: int) -> None:
        publisher.publish(engine.export_weights(), step)

    def measure() -> Metrics:
        return stream.metrics | _acceptance(publisher.generator.stats)

    return [Publish(publish, close=stream.replay.close), Measure(measure)]


def _acceptance(stats: Mapping[str, float]) -> Metrics:
    """How the drafts of the latest generation fared; nothing without drafts."""
    names = [name for name in ("acceptance_length", "acceptance_rate") if name in stats]
    return {f"rollout/{name}": stats[name] for name in names}


def _validation(run: Run) -> list[Hook]:
    if not run.validation:
        return []
    trainer = run.config.trainer
    return [
        Validation(
            run.engine,
            run.objective,
            run.validation,
            run.tokenizer.byte_lengths(),
            Every(trainer.validate_every, trainer.steps),
        )
    ]
