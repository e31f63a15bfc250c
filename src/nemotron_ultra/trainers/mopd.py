"""Multi-teacher on-policy distillation (report 3.3.1): the student writes, the teacher of the domain judges.

A_t  = sg[log pi_teacher - log pi_prox]                                                       (equation 2)
loss = -1/N sum_t m_t c_t min(r_t A_t, clip(r_t, 1 - eps, 1 + eps) A_t)                       (equation 3)
r_t  = pi_theta / pi_prox,  c_t = sg[pi_prox / pi_behav],  m_t = 1 where c_t lies in the IcePop bounds
"""

from __future__ import annotations

import torch

from nemotron_ultra.config.run import RunConfig
from nemotron_ultra.data.batch import TokenBatch
from nemotron_ultra.data.chat import ChatTemplate
from nemotron_ultra.data.tokenizer import load_tokenizer
from nemotron_ultra.objectives.policy_gradient import PolicyGradient
from nemotron_ultra.observe.console import Console
from nemotron_ultra.rl.advantage import kept_rollouts, reward_metrics
from nemotron_ultra.rl.collect import Collector
from nemotron_ultra.rl.environments import make_environments
from nemotron_ultra.rl.problems import ProblemStream
from nemotron_ultra.rl.publish import Publisher
from nemotron_ultra.rl.replay import Replay
from nemotron_ultra.rl.rollout import Group
from nemotron_ultra.trainers.build import (
    Run,
    build_engine,
    build_generator,
    build_model,
    build_teachers,
    check_vocabulary,
    choose_device,
    resume_run,
)
from nemotron_ultra.trainers.command import in_run_folder
from nemotron_ultra.trainers.experience import Experience, anchor, pack, with_gap
from nemotron_ultra.trainers.loop import fit
from nemotron_ultra.trainers.panel import describe
from nemotron_ultra.trainers.run_folder import RunFolder
from nemotron_ultra.trainers.scoring import Scoring, task_facts, task_seed
from nemotron_ultra.trainers.self_check import check_rollouts
from nemotron_ultra.trainers.wiring import publish_hooks, standard_hooks


def run(config: RunConfig) -> int:
    """Distil as `config` says, or go on with it. Returns the exit status of the process."""
    return in_run_folder(config, mopd)


def mopd(config: RunConfig, folder: RunFolder, console: Console) -> None:
    """From the configuration to the last step."""
    device, seed, per_step = choose_device(config), config.run.seed, config.rollout.prompts_per_step
    tokenizer = load_tokenizer(config.data.tokenizer)
    check_vocabulary(config, tokenizer)
    chat = ChatTemplate(tokenizer)

    # The student, the copy of it that writes, and a teacher for each domain (report 3.3.2).
    model = build_model(config, device, resuming=folder.checkpoint is not None)
    engine = build_engine(config, model)
    generator = build_generator(config, model)
    teachers = build_teachers(config, tokenizer, device)

    # Problems by domain, one rollout each (report 3.3.1: more gave nothing).
    environments = make_environments(config.tasks, task_seed(config))
    problems = ProblemStream.of(config.tasks, environments, seed, per_step)
    collect = Collector(generator, chat, environments, config.rollout, config.data.sequence_length, seed)
    replay = Replay(
        lambda step: collect(problems(step), step),
        max_age=config.rollout.max_age,
        steps=config.trainer.steps,
    )

    def learn_from(groups: list[Group]) -> tuple[list[TokenBatch], dict[str, float]]:
        """One pack a micro-batch, anchored at the learner, the advantage from each document's teacher."""
        keep_B = kept_rollouts(groups, config.advantage)
        packs = pack(groups, torch.zeros(len(keep_B)), keep_B, config.trainer.micro_batch_size)
        packs = [anchor(batch, engine) for batch in packs]
        judged = [teachers.score(batch, batch.stats["domains"]) for batch in packs]
        batches, metrics = with_gap(packs, judged, config.advantage)
        return batches, reward_metrics(groups) | metrics | teachers.metrics()

    stream = Experience(replay, learn_from, config.tasks, task_facts(config, tokenizer))
    objective = PolicyGradient(config.loss)

    run = Run(
        config=config,
        folder=folder,
        console=console,
        tokenizer=tokenizer,
        stream=stream,
        engine=engine,
        objective=objective,
        validation=(),
    )
    describe(run)
    scoring = Scoring(run, generator, chat, environments)
    publisher = Publisher(generator, replay)
    hooks = standard_hooks(
        run,
        measure=[*publish_hooks(run, publisher, stream), scoring.hook()],
        record=[scoring.rollouts(stream)],
    )
    resume_run(run, hooks)
    publisher.publish(engine.export_weights(), engine.step)
    check_rollouts(run, generator, collect, environments)
    fit(engine, stream, objective, steps=config.trainer.steps, hooks=hooks)
