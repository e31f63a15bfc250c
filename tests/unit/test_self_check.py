"""Self-checks before step 1 refuse a sampler of other weights, labels that are off by one, and two BOS."""

from dataclasses import replace

import pytest
import torch

from micro import rollout_overrides, task_overrides
from nemotron_ultra import train
from nemotron_ultra.errors import BackendError, DataError
from nemotron_ultra.rl.publish import Publisher
from nemotron_ultra.rl.rollout import Group, Problem, Rollout
from nemotron_ultra.trainers import self_check
from nemotron_ultra.trainers.experience import pack
from nemotron_ultra.trainers.self_check import check_bos, check_labels

WORDS = {"run.from": "null", "trainer.steps": 1, "trainer.checkpoint_every": 0}


class HalfPublisher(Publisher):
    """Publishes weights of which one matrix is another one's: a run that forgot to move it."""

    def publish(self, weights, version):
        wrong = {
            name: tensor * 1.5 if name == "lm_head.weight" else tensor
            for name, tensor in dict(weights).items()
        }
        super().publish(wrong.items(), version)


def groups():
    rollout = Rollout(
        prompt=[5, 6],
        tokens=[7, 2],
        logprobs=[-1.0, -1.0],
        versions=[0, 0],
        finish_reason="stop",
        text="",
        reward=0.0,
    )
    return [Group(problem=Problem(domain="a", index=0, question="", answer=""), rollouts=[rollout])]


@pytest.mark.parametrize("recipe", ["grpo", "mopd"])
def test_a_generator_of_other_weights_is_refused(recipe, tmp_path, monkeypatch, capsys):
    sft = ["recipe=sft", *task_overrides(tmp_path, **WORDS), "trainer.global_batch_size=4"]
    assert train.main(sft) == 0
    monkeypatch.setattr(f"nemotron_ultra.trainers.{recipe}.Publisher", HalfPublisher)
    teachers = [f"teachers.folders.{d}={tmp_path}/sft" for d in ("sums", "equations", "complex")]
    one = {"rollout.prompts_per_step": 4, "rollout.group_size": 1} if recipe == "mopd" else {}
    words = rollout_overrides(tmp_path, **WORDS | one)
    code = train.main([f"recipe={recipe}", *words, *(teachers if recipe == "mopd" else [])])
    assert code == BackendError.exit_code
    assert "the generator and the learner give other log-probs" in capsys.readouterr().err
    assert not (tmp_path / recipe).exists()


def test_differences_are_recorded(tmp_path):
    assert train.main(["recipe=grpo", *rollout_overrides(tmp_path, **WORDS)]) == 0
    facts = (tmp_path / "grpo" / "run.json").read_text()
    assert "sampler_minus_learner" in facts and "student_as_teacher" in facts
    assert self_check.SAMPLER_TOLERANCE["fp32"] == 1e-4 and self_check.TEACHER_TOLERANCE["fp32"] == 1e-5


def test_a_broken_scorer_is_refused(tmp_path, monkeypatch, capsys):
    """It raises on everything, which counts as 0: without the check every answer would be wrong."""

    def fails(self, answer, entry):
        raise ValueError("signal only works in main thread")

    monkeypatch.setattr(
        "reasoning_gym.arithmetic.basic_arithmetic.BasicArithmeticDataset.score_answer", fails
    )
    monkeypatch.setattr("reasoning_gym.dataset.ProceduralDataset.score_answer", fails)
    assert train.main(["recipe=grpo", *rollout_overrides(tmp_path, **WORDS)]) == BackendError.exit_code
    assert "the scorer of domain sums gives its own solution nothing" in capsys.readouterr().err


@pytest.mark.parametrize("prompt", [[1, 1, 5], [5, 1], [1, 5, 1]])
def test_bos_twice_or_in_the_middle(prompt):
    check_bos([[1, 5, 6], [5, 6]], bos_id=1)
    check_bos([prompt], bos_id=None)
    with pytest.raises(DataError, match="BOS twice or in the middle"):
        check_bos([prompt], bos_id=1)


def test_labels_off_by_one():
    (batch,) = pack(groups(), torch.zeros(1), torch.ones(1, dtype=torch.bool), 1)
    check_labels(batch, groups())
    with pytest.raises(DataError, match="labels are not the tokens that follow"):
        check_labels(replace(batch, labels_T=batch.labels_T.roll(1)), groups())
    with pytest.raises(DataError, match="labels are not the tokens that follow"):
        check_labels(replace(batch, weight_T=batch.weight_T.roll(-1)), groups())
