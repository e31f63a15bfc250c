"""Pretraining (report 2): next token, MTP and balance losses on a blend of texts, AdamW, WSD over tokens.

loss  = CE + (mtp_loss_scale / depths) sum_k CE_k + router_balance_coefficient * balance
lr    = warmup, stable, minus-sqrt decay over consumed tokens
bias += router_bias_rate * sign(mean load - load), once per global batch
"""

from __future__ import annotations

from nemotron_ultra.config.run import RunConfig
from nemotron_ultra.data.blend import BlendStream
from nemotron_ultra.data.tokenizer import load_tokenizer
from nemotron_ultra.objectives.next_token import NextToken
from nemotron_ultra.observe.console import Console
from nemotron_ultra.trainers.build import (
    Run,
    build_engine,
    build_model,
    check_vocabulary,
    choose_device,
    resume_run,
)
from nemotron_ultra.trainers.command import in_run_folder
from nemotron_ultra.trainers.loop import fit
from nemotron_ultra.trainers.panel import describe
from nemotron_ultra.trainers.run_folder import RunFolder
from nemotron_ultra.trainers.wiring import standard_hooks, text_samples


def run(config: RunConfig) -> int:
    """Train the run that `config` names, or continue it. Returns the exit status of the process."""
    return in_run_folder(config, pretrain)


def pretrain(config: RunConfig, folder: RunFolder, console: Console) -> None:
    """From the configuration to the last step."""
    device = choose_device(config)
    tokenizer = load_tokenizer(config.data.tokenizer)
    check_vocabulary(config, tokenizer)

    # Data (report 2.3): a weighted blend of sources, other weights from a token count on.
    stream = BlendStream(
        config.data,
        micro_batch_size=config.trainer.micro_batch_size,
        global_batch_size=config.trainer.global_batch_size,
        seed=config.run.seed,
        tokenizer=tokenizer,
    )

    # Model and optimizer (report 2.1, 2.4): FP32 gradients and masters, matrices decay, vectors do not.
    model = build_model(config, device, resuming=folder.checkpoint is not None)
    engine = build_engine(config, model)

    # Objective (report 1.5, 1.6): the MTP scale is shared by the depths.
    objective = NextToken(
        config.trainer.mtp_loss_scale,
        config.trainer.router_balance_coefficient,
        config.model.depths,
    )

    run = Run(
        config=config,
        folder=folder,
        console=console,
        tokenizer=tokenizer,
        stream=stream,
        engine=engine,
        objective=objective,
        validation=stream.validation_batches(config.trainer.validate_rows),
    )
    describe(run)
    hooks = standard_hooks(run, record=text_samples(run))
    resume_run(run, hooks)
    fit(engine, stream, objective, steps=config.trainer.steps, hooks=hooks)
