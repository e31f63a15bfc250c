"""RLVR by GRPO (report 3.2): verifiable rewards, leave-one-out advantages, a clipped policy gradient.

A_i  = R_i - mean_{j != i} R_j                                  rewards of the G rollouts of one problem
loss = -1/N sum_t w_t min(r_t A, clip(r_t, 1 - low, 1 + high) A)
r_t  = pi_theta / pi_prox,  w_t = weight of pi_prox / pi_behav,  N = answer tokens of the global batch
"""

from __future__ import annotations

from nemotron_ultra.config.run import RunConfig
from nemotron_ultra.data.batch import TokenBatch
from nemotron_ultra.data.chat import ChatTemplate
from nemotron_ultra.data.tokenizer import load_tokenizer
from nemotron_ultra.objectives.policy_gradient import PolicyGradient
from nemotron_ultra.observe.console import Console
from nemotron_ultra.rl.advantage import rollout_advantages
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
    check_vocabulary,
    choose_device,
    resume_run,
)
from nemotron_ultra.trainers.command import in_run_folder
from nemotron_ultra.trainers.experience import Experience, anchor, pack
from nemotron_ultra.trainers.loop import fit
from nemotron_ultra.trainers.panel import describe
from nemotron_ultra.trainers.run_folder import RunFolder
from nemotron_ultra.trainers.scoring import Scoring, task_facts, task_seed
from nemotron_ultra.trainers.self_check import check_rollouts
from nemotron_ultra.trainers.wiring import publish_hooks, standard_hooks


def run(config: RunConfig) -> int:
    """Train on rewards as `config` says, or go on with it. Returns the exit status of the process."""
    return in_run_folder(config, grpo)


def grpo(config: RunConfig, folder: RunFolder, console: Console) -> None:
    """From the configuration to the last step."""
    device, seed, per_step = choose_device(config), config.run.seed, config.rollout.prompts_per_step
    tokenizer = load_tokenizer(config.data.tokenizer)
    check_vocabulary(config, tokenizer)
    chat = ChatTemplate(tokenizer)

    # The policy that learns, and the copy of it that writes.
    model = build_model(config, device, resuming=folder.checkpoint is not None)
    engine = build_engine(config, model)
    generator = build_generator(config, model)

    # Problems, G rollouts each, and a wait of at most max_age versions (report 3.2: one step off-policy).
    environments = make_environments(config.tasks, task_seed(config))
    problems = ProblemStream.of(config.tasks, environments, seed, per_step)
    collect = Collector(generator, chat, environments, config.rollout, config.data.sequence_length, seed)
    replay = Replay(
        lambda step: collect(problems(step), step),
        max_age=config.rollout.max_age,
        steps=config.trainer.steps,
    )

    def learn_from(groups: list[Group]) -> tuple[list[TokenBatch], dict[str, float]]:
        """Credit by the group, one pack a micro-batch, anchored at the learner's own log-probs."""
        credit = rollout_advantages(groups, config.advantage, max_new_tokens=config.rollout.max_new_tokens)
        batches = pack(groups, credit.advantage_B, credit.keep_B, config.trainer.micro_batch_size)
        return [anchor(batch, engine) for batch in batches], credit.metrics

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
