"""Rollouts -> micro-batches: every label carries its own log-prob, advantage and version."""

import torch

from micro import micro_engine
from nemotron_ultra.config.advantage import AdvantageConfig
from nemotron_ultra.rl.rollout import Group, Problem, Rollout
from nemotron_ultra.trainers.experience import anchor, pack, with_gap


def rollout(prompt, tokens, first=0.5, version=3):
    return Rollout(
        prompt=prompt,
        tokens=tokens,
        logprobs=[-first - i for i in range(len(tokens))],
        versions=[version] * len(tokens),
        finish_reason="stop",
        text="",
        reward=1.0,
    )


def groups():
    problems = [Problem(domain=d, index=i, question="", answer="") for i, d in enumerate(["a", "b"])]
    drawn = [[rollout([5, 6, 7], [8, 2]), rollout([5, 6, 7], [9])], [rollout([10], [11, 12, 2], version=4)]]
    return [Group(problem=p, rollouts=r) for p, r in zip(problems, drawn, strict=True)]


def test_labels_weights_and_log_probs_are_aligned():
    (batch,) = pack(groups(), torch.tensor([1.0, -1.0, 0.5]), torch.tensor([True, True, False]), 3)
    assert batch.tokens_T.tolist() == [5, 6, 7, 8, 2, 5, 6, 7, 9, 10, 11, 12, 2]
    assert batch.labels_T.tolist() == [6, 7, 8, 2, 0, 6, 7, 9, 0, 11, 12, 2, 0]
    assert batch.weight_T.tolist() == [0, 0, 1, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0]
    assert batch.behavior_logprob_T[[2, 3, 7, 9]].tolist() == [-0.5, -1.5, -0.5, -0.5]
    assert batch.advantage_T[[2, 3, 7, 9]].tolist() == [1, 1, -1, 0.5]
    assert batch.version_T.tolist() == [-1, -1, 3, 3, -1, -1, -1, 3, -1, 4, 4, 4, -1]


def test_micro_batches_hold_the_rollouts_in_order():
    first, second = pack(groups(), torch.zeros(3), torch.ones(3, dtype=torch.bool), 2)
    assert first.stats["documents"] == ["a:0/0", "a:0/1"]
    assert (second.stats["documents"], second.stats["domains"]) == (["b:1/0"], ["b"])
    assert torch.cat([first.tokens_T, second.tokens_T]).tolist()[-4:] == [10, 11, 12, 2]


def test_anchor_is_the_learner_of_now():
    engine = micro_engine()
    (batch,) = pack(groups(), torch.zeros(3), torch.ones(3, dtype=torch.bool), 3)
    logits_TV = engine.model(batch.tokens_T, batch.cu_seqlens).logits_TV
    expected_T = logits_TV.log_softmax(-1).gather(1, batch.labels_T[:, None])[:, 0]
    found_T = anchor(batch, engine).proximal_logprob_T
    torch.testing.assert_close(found_T[batch.weight_T > 0], expected_T[batch.weight_T > 0].detach())


def test_gap_is_teacher_minus_anchor_by_domain():
    engine = micro_engine()
    batches = [anchor(b, engine) for b in pack(groups(), torch.zeros(3), torch.ones(3, dtype=torch.bool), 2)]
    teacher = [batch.proximal_logprob_T + shift for batch, shift in zip(batches, (0.25, -0.5), strict=True)]
    judged, metrics = with_gap(batches, teacher, AdvantageConfig(name="teacher_gap"))
    torch.testing.assert_close(judged[0].advantage_T, 0.25 * batches[0].weight_T, atol=1e-6, rtol=0)
    torch.testing.assert_close(judged[1].advantage_T, -0.5 * batches[1].weight_T, atol=1e-6, rtol=0)
    assert abs(metrics["teacher/a/gap_mean"] - 0.25) < 1e-6
    assert abs(metrics["teacher/b/gap_mean"] + 0.5) < 1e-6
