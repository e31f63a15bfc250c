"""Supervised fine-tuning (report 3.1): next token on the assistant's answers alone, MTP at scale 0.1.

loss = sum_t w_t CE_t / W + (mtp_loss_scale / depths) sum_k CE_k / W_k,  W = sum of w over the global batch
w    = 1 where an assistant wrote the token; with loss_mean=conversations 1 / such tokens of the conversation
"""

from __future__ import annotations

from collections.abc import Mapping

from nemotron_ultra.config.run import RunConfig
from nemotron_ultra.data.chat import ChatTemplate
from nemotron_ultra.data.loss_mean import LossMean
from nemotron_ultra.data.pack_stream import PackStream
from nemotron_ultra.data.tokenizer import Tokenizer, load_tokenizer
from nemotron_ultra.generation.sampler import Sampler
from nemotron_ultra.objectives.next_token import NextToken
from nemotron_ultra.observe.console import Console
from nemotron_ultra.rl.environments import Environment, make_environments
from nemotron_ultra.rl.problems import ProblemStream
from nemotron_ultra.trainers.build import (
    Run,
    build_engine,
    build_model,
    check_vocabulary,
    choose_device,
    resume_run,
)
from nemotron_ultra.trainers.command import in_run_folder
from nemotron_ultra.trainers.conversations import Conversations
from nemotron_ultra.trainers.hooks import Measure
from nemotron_ultra.trainers.loop import fit
from nemotron_ultra.trainers.pack_answers import pack_answers
from nemotron_ultra.trainers.panel import describe
from nemotron_ultra.trainers.run_folder import RunFolder
from nemotron_ultra.trainers.scoring import Scoring, task_facts, task_seed
from nemotron_ultra.trainers.wiring import standard_hooks


def run(config: RunConfig) -> int:
    """Fine-tune as `config` says, or go on with it. Returns the exit status of the process."""
    return in_run_folder(config, sft)


def sft(config: RunConfig, folder: RunFolder, console: Console) -> None:
    """From the configuration to the last step."""
    device = choose_device(config)
    tokenizer = load_tokenizer(config.data.tokenizer)
    check_vocabulary(config, tokenizer)

    # Data (report 3.1.1, 3.1.2): packed conversations, or problems with an answer of full marks.
    environments = make_environments(config.tasks, task_seed(config)) if config.tasks else {}
    if config.data.packs is not None:
        stream = packed(config, tokenizer)
        validation = stream.validation_batches(config.trainer.validate_rows)
    else:
        stream = answered(config, tokenizer, environments)
        validation = stream.held_out(environments)

    # Model and optimizer: as in pretraining, from its weights.
    model = build_model(config, device, resuming=folder.checkpoint is not None)
    engine = build_engine(config, model)

    # Objective (report 3.1, 2.4): MTP labels and masks are shifted inside each conversation.
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
        validation=validation,
    )
    describe(run)
    measure, record, sampler = [], [], Sampler(model)
    if config.data.packs is not None:
        measure.append(Measure(lambda: stream.metrics))
        record += pack_answers(run, sampler)
    if environments:
        scoring = Scoring(run, sampler, ChatTemplate(tokenizer), environments)
        measure.append(scoring.hook())
        record.append(scoring.samples())
    hooks = standard_hooks(run, measure=measure, record=record)
    resume_run(run, hooks)
    fit(engine, stream, objective, steps=config.trainer.steps, hooks=hooks)


def packed(config: RunConfig, tokenizer: Tokenizer) -> PackStream:
    """Packs of whole conversations, made beforehand; shuffled anew in every pass."""
    return PackStream(
        config.data.packs,
        sequence_length=config.data.sequence_length,
        micro_batch_size=config.trainer.micro_batch_size,
        global_batch_size=config.trainer.global_batch_size,
        seed=config.run.seed,
        tokenizer=tokenizer,
        mean=LossMean.of(config.trainer),
    )


def answered(
    config: RunConfig, tokenizer: Tokenizer, environments: Mapping[str, Environment]
) -> Conversations:
    """Questions of the tasks' environments, each with an answer that they give full marks."""
    return Conversations(
        ProblemStream.of(config.tasks, environments, config.run.seed, config.trainer.global_batch_size),
        ChatTemplate(tokenizer),
        config.tasks,
        micro_batch_size=config.trainer.micro_batch_size,
        longest=config.data.sequence_length,
        facts=task_facts(config, tokenizer),
        mean=LossMean.of(config.trainer),
    )
