"""The hooks of every run, in the order in which they see a step."""

from __future__ import annotations

import torch

from nemotron_ultra.config.compose import to_dict
from nemotron_ultra.config.plan import flops_per_token
from nemotron_ultra.observe.machine import matmul_flops
from nemotron_ultra.observe.metrics import MetricsLog
from nemotron_ultra.observe.sinks import open_sinks
from nemotron_ultra.trainers.build import Run, save_run
from nemotron_ultra.trainers.hooks import (
    Checkpoint,
    Clock,
    Every,
    Hook,
    Log,
    Samples,
    Signals,
    Stability,
    Validation,
)
from nemotron_ultra.trainers.text import TextSampler


def standard_hooks(run: Run) -> list[Hook]:
    """Measure, validate, log, sample, save, heed signals, and start the clock again."""
    trainer, console, path = run.config.trainer, run.console, run.folder.path
    training_flops = 3.0 * flops_per_token(run.config.model, run.config.data.sequence_length)
    limit = matmul_flops(torch.get_num_threads(), run.engine.device.type)
    clock = Clock(run.engine, training_flops, limit)
    hooks: list[Hook] = [
        clock,
        Stability(run.engine),
        Validation(
            run.engine,
            run.objective,
            run.validation,
            run.tokenizer.byte_lengths(),
            Every(trainer.validate_every, trainer.steps),
        ),
        Log(
            run.engine,
            MetricsLog(path / "metrics.jsonl"),
            console,
            open_sinks(run.config.log, path, to_dict(run.config), report=console.note),
        ),
    ]
    if trainer.sample_tokens:
        write_text = TextSampler(
            run.engine.model, run.tokenizer, run.validation[0], max_new_tokens=trainer.sample_tokens
        )
        samples = MetricsLog(path / "samples.jsonl")
        when = Every(trainer.sample_every, trainer.steps)
        hooks.append(Samples(run.engine, samples, console, write_text, when))
    checkpoint = Checkpoint(lambda: save_run(run, hooks), Every(trainer.checkpoint_every, trainer.steps))
    return [*hooks, checkpoint, Signals(checkpoint), clock.restart]
