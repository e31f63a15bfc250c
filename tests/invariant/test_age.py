"""Age 0 is the plain loop, bit for bit; age 1 depends on no timing; 1 x 8 rollouts are 8 x 1."""

import copy
import time

import pytest
import torch

from micro import micro_engine, micro_model, weights
from nemotron_ultra.config.advantage import AdvantageConfig
from nemotron_ultra.config.loss import PolicyGradientOptions
from nemotron_ultra.config.rollout import RolloutConfig
from nemotron_ultra.config.tasks import TasksConfig
from nemotron_ultra.data.chat import ChatTemplate
from nemotron_ultra.data.tokenizer import load_tokenizer
from nemotron_ultra.generation.sampler import Sampler
from nemotron_ultra.objectives.policy_gradient import PolicyGradient
from nemotron_ultra.rl.advantage import rollout_advantages
from nemotron_ultra.rl.collect import Collector
from nemotron_ultra.rl.environments import make_environments
from nemotron_ultra.rl.problems import ProblemStream
from nemotron_ultra.rl.publish import Publisher
from nemotron_ultra.rl.replay import Replay
from nemotron_ultra.trainers.experience import Experience, anchor, pack
from nemotron_ultra.trainers.hooks import Hook
from nemotron_ultra.trainers.loop import fit

STEPS, OPTIONS = 4, RolloutConfig(prompts_per_step=2, group_size=4, max_new_tokens=6)
SUMS = {"name": "chain_sum", "args": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}
TASKS = TasksConfig(domains={"sums": SUMS}, validation_problems=2)
CHAT = ChatTemplate(load_tokenizer("builtin"))
OBJECTIVE = PolicyGradient(PolicyGradientOptions.preset("grpo"))


def parts():
    """(engine, generator with a model of its own, collector, problems): the same at every call."""
    engine = micro_engine(micro_model(vocab_size=4096))
    generator = Sampler(copy.deepcopy(engine.model))
    environments = make_environments(TASKS, seed=3)
    collect = Collector(generator, CHAT, environments, OPTIONS, 64, seed=3)
    return engine, generator, collect, ProblemStream.of(TASKS, environments, 3, 2)


def lesson(engine, micro_batch_size=8):
    """Groups -> anchored micro-batches; a reward for even token ids, so that there is something to learn."""

    def learn_from(groups):
        rollouts = [r for g in groups for r in g.rollouts]
        even = torch.tensor([sum(t % 2 == 0 for t in r.tokens) / len(r.tokens) for r in rollouts])
        credit = rollout_advantages(groups, AdvantageConfig(name="leave_one_out"))
        batches = pack(groups, even - even.mean(), credit.keep_B, micro_batch_size)
        return [anchor(batch, engine) for batch in batches], credit.metrics

    return learn_from


def through_replay(max_age, slow=0.0):
    engine, generator, collect, problems = parts()

    def produce(step):
        time.sleep(slow * (step % 2))
        return collect(problems(step), step)

    replay = Replay(produce, max_age=max_age, steps=STEPS)
    publisher = Publisher(generator, replay)
    publish = Hook()
    publish.after_step = lambda step, metrics: publisher.publish(engine.export_weights(), step)
    publish.finish = replay.close
    publisher.publish(engine.export_weights(), 0)
    stream = Experience(replay, lesson(engine), TASKS, {})
    fit(engine, stream, OBJECTIVE, steps=STEPS, hooks=[publish])
    return weights(engine.model)


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


def test_age_zero_is_a_plain_loop():
    engine, _, collect, problems = parts()
    collect.generator = Sampler(engine.model)  # no copy, no replay, no publishing
    before = weights(engine.model)
    for step in range(STEPS):
        batches, _ = lesson(engine)(collect(problems(step), step))
        engine.forward_backward(batches, OBJECTIVE)
        engine.optimizer_step()
    plain = weights(engine.model)
    assert same(plain, through_replay(max_age=0))
    assert not same(plain, before)


def test_age_one_depends_on_no_timing():
    assert same(through_replay(max_age=1), through_replay(max_age=1, slow=0.2))


def test_age_one_is_one_step_behind():
    assert not same(through_replay(max_age=1), through_replay(max_age=0))


@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "gspo", "cispo", "mopd_paper", "mopd_recipe"])
def test_one_times_eight_is_eight_times_one(loss):
    engine, _, collect, problems = parts()
    groups = collect(problems(0), 0)
    changes = {"row_length": 6} if loss == "dr_grpo" else {}
    objective = PolicyGradient(PolicyGradientOptions.preset(loss, **changes))
    found = {}
    for size in (8, 1):
        batches, _ = lesson(engine, size)(groups)
        metrics = engine.forward_backward(batches, objective)
        found[size] = metrics, {n: g.clone() for n, g in engine.master.gradients().items()}
        engine.master.clear()
    for name, value in found[8][0].items():
        assert found[1][0][name] == pytest.approx(value, abs=2e-6), name
    for name, gradient in found[8][1].items():
        torch.testing.assert_close(found[1][1][name], gradient, atol=1e-6, rtol=1e-4, msg=name)
