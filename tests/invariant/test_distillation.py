"""Distillation brings the student to its teachers: the exact KL of the next token falls, domain by domain."""

import copy

import pytest
import torch

from micro import micro_engine, micro_model
from nemotron_ultra.config.advantage import AdvantageConfig
from nemotron_ultra.config.loss import PolicyGradientOptions
from nemotron_ultra.generation.sampler import Sampler
from nemotron_ultra.model.score import score
from nemotron_ultra.objectives.policy_gradient import PolicyGradient
from nemotron_ultra.rl.rollout import Group, Problem, Rollout
from nemotron_ultra.trainers.experience import anchor, pack, with_gap

HALF = 64
DOMAINS = {"a": 5, "b": 6}  # domain -> the token its prompts begin with


def teacher_of(student, seed):
    """The student with another head."""
    teacher = copy.deepcopy(student)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        teacher.lm_head.weight += 0.3 * torch.randn(teacher.lm_head.weight.shape, generator=draw)
    return teacher


def rollouts(model, step):
    """Answers of 6 tokens, half of them of each domain."""
    prompts = [[DOMAINS[name], 9 + i % 8] for name in DOMAINS for i in range(HALF)]
    seeds = [1000 * step + i for i in range(2 * HALF)]
    drawn = Sampler(model).generate(prompts, max_new_tokens=6, seeds=seeds)
    groups = []
    for prompt, c in zip(prompts, drawn, strict=True):
        domain = "a" if prompt[0] == DOMAINS["a"] else "b"
        one = Rollout(
            prompt=prompt,
            tokens=c.tokens,
            logprobs=c.logprobs,
            versions=c.versions,
            finish_reason="length",
            text="",
            reward=0.0,
        )
        groups.append(Group(problem=Problem(domain=domain, index=0, question="", answer=""), rollouts=[one]))
    return groups


def divergence(student, teacher, domain):
    """KL(student || teacher) of the next token after a few fixed prefixes of the domain, in nats."""
    prefixes = torch.tensor([[DOMAINS[domain], 9 + i, 20 + i] for i in range(8)])
    with torch.no_grad():
        p, q = (m.logits(prefixes)[:, 1:].log_softmax(-1) for m in (student, teacher))
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.mark.parametrize("loss", ["mopd_paper", "mopd_recipe", "mopd_reinforce"])
def test_two_teachers_are_both_approached(loss):
    engine = micro_engine(micro_model(), lr=1e-2)
    teachers = {name: teacher_of(engine.model, seed) for seed, name in enumerate(DOMAINS)}
    before = {name: divergence(engine.model, teachers[name], name) for name in DOMAINS}
    objective = PolicyGradient(PolicyGradientOptions.preset(loss))
    for step in range(60):
        groups = rollouts(engine.model, step)
        halves = [group for name in DOMAINS for group in groups if group.problem.domain == name]
        packs = [
            anchor(b, engine)
            for b in pack(halves, torch.zeros(2 * HALF), torch.ones(2 * HALF, dtype=torch.bool), HALF)
        ]
        judges = [teachers[batch.stats["domains"][0]] for batch in packs]
        judged = [score(t, b.tokens_T, b.labels_T, b.cu_seqlens) for t, b in zip(judges, packs, strict=True)]
        batches, _ = with_gap(packs, judged, AdvantageConfig(name="teacher_gap"))
        engine.forward_backward(batches, objective)
        engine.optimizer_step()
    after = {name: divergence(engine.model, teachers[name], name) for name in DOMAINS}
    assert all(after[name] < 0.6 * before[name] for name in DOMAINS), (before, after)
