"""Publisher: the generator holds what the learner exports, in version order, never while a batch is drawn."""

from __future__ import annotations

import time

import pytest
import torch

from micro import micro_engine, micro_model
from nemotron_ultra.errors import BackendError
from nemotron_ultra.generation.sampler import Sampler
from nemotron_ultra.rl.publish import Publisher
from nemotron_ultra.rl.replay import Replay
from nemotron_ultra.rl.rollout import Group, Problem, Rollout


def test_generator_gets_the_learners_weights_and_their_version():
    engine, generator = micro_engine(), Sampler(micro_model())
    with torch.no_grad():
        engine.model.lm_head.weight.mul_(2.0)
    Publisher(generator).publish(engine.export_weights(), 5)
    assert generator.version == 5
    for name, tensor in engine.model.state_dict().items():
        assert torch.equal(generator.model.state_dict()[name], tensor), name
    assert generator.model.lm_head.weight.data_ptr() != engine.model.lm_head.weight.data_ptr()


def test_generator_that_keeps_its_weights_is_found_out():
    class Deaf(Sampler):
        def load_weights(self, weights, version):
            pass

    with pytest.raises(BackendError, match=r"did not take the weights.*version 0; allowed: version 3"):
        Publisher(Deaf(micro_model())).publish([], 3)


def test_weights_wait_for_the_batch_that_is_drawn_with_the_old_ones():
    model, generator = micro_model(), Sampler(micro_model())

    def produce(step: int) -> list[Group]:
        rollouts = []
        for sample in range(3):  # new weights could come in between
            time.sleep(0.005)
            (c,) = generator.generate([[1, 2, 3]], max_new_tokens=2, seeds=[step * 3 + sample])
            rollouts.append(
                Rollout(
                    prompt=[1, 2, 3],
                    tokens=c.tokens,
                    logprobs=c.logprobs,
                    versions=c.versions,
                    finish_reason=c.finish_reason,
                    text="",
                    reward=0.0,
                )
            )
        problem = Problem(domain="d", index=step, question="", answer="")
        return [Group(problem=problem, rollouts=rollouts)]

    replay = Replay(produce, max_age=1, steps=4)
    publisher = Publisher(generator, replay)
    publisher.publish(model.state_dict().items(), 0)
    found = []
    for step in range(4):
        found.append({v for group in next(replay) for r in group.rollouts for v in r.versions})
        publisher.publish(model.state_dict().items(), step + 1)
    replay.close()
    assert found == [{0}, {0}, {1}, {2}]
