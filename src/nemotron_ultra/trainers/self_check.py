"""Before step 1: the sampler and the learner say the same of the same tokens, and nothing is off by one.

Each of these was a silent fault of a published system: log-probs of another temperature or of older weights,
teacher scores one position late, two BOS, another tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from nemotron_ultra.data.batch import TokenBatch
from nemotron_ultra.errors import BackendError, DataError
from nemotron_ultra.generation.base import Generator
from nemotron_ultra.generation.sampler import Sampler
from nemotron_ultra.model.score import score
from nemotron_ultra.rl.advantage import teacher_gap
from nemotron_ultra.rl.collect import Collector
from nemotron_ultra.rl.environments import Environment
from nemotron_ultra.rl.rollout import Group, Rollout
from nemotron_ultra.trainers.build import Run
from nemotron_ultra.trainers.experience import anchor, pack

SAMPLER_TOLERANCE = {"fp32": 1e-4, "bf16": 0.1}  # largest |log p difference|; bf16 has 8 bits of mantissa
TEACHER_TOLERANCE = {"fp32": 1e-5, "bf16": 0.1}
PROBLEMS, TOKENS = 2, 16  # of each domain, of each answer


def check_rollouts(
    run: Run, generator: Generator, collect: Collector, environments: Mapping[str, Environment]
) -> None:
    """Draw a few answers with the weights of now and compare. Raises BackendError or DataError; on success
    the largest differences are noted on the screen and in run.json.
    """
    check_scorers(environments)
    groups = _short_answers(generator, collect, environments)
    check_bos([g.rollouts[0].prompt for g in groups], run.tokenizer.bos_id)
    rows = torch.zeros(len(groups))
    (batch,) = pack(groups, rows, torch.ones(len(groups), dtype=torch.bool), len(groups))
    check_labels(batch, groups)
    batch = anchor(batch, run.engine)
    precision = run.config.precision.weights
    sampler = _largest(batch, batch.behavior_logprob_T - batch.proximal_logprob_T)
    if not sampler <= SAMPLER_TOLERANCE[precision]:
        raise BackendError(
            "self-check: the generator and the learner give other log-probs to the same tokens",
            got=f"a difference of {sampler:.3g} at temperature 1",
            allowed=f"{SAMPLER_TOLERANCE[precision]:g} with precision.weights={precision}",
            do="the generator holds other weights or computes another model; nothing was trained",
        )
    # vLLM has no model object of ours; its log-probs were compared above.
    judge = generator.model if isinstance(generator, Sampler) else run.engine.model
    own_T = score(judge, batch.tokens_T, batch.labels_T, batch.cu_seqlens).float().cpu()
    gap = _largest(batch, teacher_gap(own_T, batch.proximal_logprob_T, batch.weight_T))
    if not gap <= TEACHER_TOLERANCE[precision]:
        raise BackendError(
            "self-check: the student as its own teacher has an advantage",
            got=f"{gap:.3g}",
            allowed=f"{TEACHER_TOLERANCE[precision]:g} with precision.weights={precision}",
            do="teacher and learner score other positions or other weights; nothing was trained",
        )
    run.folder.record(self_checks={"sampler_minus_learner": sampler, "student_as_teacher": gap})
    run.console.note(
        f"self-checks: sampler = learner within {sampler:.1e}, student as its own teacher {gap:.1e}, "
        "labels follow tokens, at most one BOS, every scorer knows its own answer"
    )


def check_scorers(environments: Mapping[str, Environment]) -> None:
    """Raises BackendError if a domain's scorer gives its own solution nothing.

    A scorer that fails scores 0, so a broken one would look like a policy that is always wrong. Asked from
    another thread, as rollouts drawn ahead are: scorers that use signals fail there alone.
    """
    with ThreadPoolExecutor(1) as pool:
        for domain, environment in environments.items():
            problem = environment.held_out(0)
            if problem.answer and pool.submit(environment.score, problem, problem.answer).result() <= 0:
                raise BackendError(
                    f"self-check: the scorer of domain {domain} gives its own solution nothing",
                    got=f"a score of 0 for {problem.answer!r} to {problem.question!r}",
                    do="the generator or its library is broken here; leave the domain out",
                )


def check_bos(prompts: Sequence[Sequence[int]], bos_id: int | None) -> None:
    """Raises DataError if a prompt holds the BOS id twice, or elsewhere than in front."""
    for prompt in prompts:
        places = [place for place, token in enumerate(prompt) if token == bos_id]
        if places not in ([], [0]):
            raise DataError(
                "self-check: a prompt has its BOS twice or in the middle",
                got=f"id {bos_id} at positions {places}",
                allowed="none, or one at position 0",
                do="the chat template and the tokenizer both add one; let only one of them do it",
            )


def check_labels(batch: TokenBatch, groups: Sequence[Group]) -> None:
    """Raises DataError unless the trained labels are exactly the drawn tokens, each after its predecessor."""
    bounds = batch.cu_seqlens.tolist()
    for number, group in enumerate(groups):
        rollout, here = group.rollouts[0], slice(bounds[number], bounds[number + 1])
        trained = batch.labels_T[here][batch.weight_T[here] > 0].tolist()
        before = batch.tokens_T[here][batch.weight_T[here] > 0].tolist()
        if trained != rollout.tokens or before != [rollout.prompt[-1], *rollout.tokens[:-1]]:
            raise DataError(
                "self-check: labels are not the tokens that follow",
                got=f"{trained[:8]} after {before[:8]}",
                allowed=f"{rollout.tokens[:8]} after {[rollout.prompt[-1], *rollout.tokens[:-1]][:8]}",
            )


def _short_answers(
    generator: Generator, collect: Collector, environments: Mapping[str, Environment]
) -> list[Group]:
    """One short answer at temperature 1 to the first held-out problems of every domain."""
    problems = [env.held_out(i) for env in environments.values() for i in range(PROBLEMS)]
    prompts = [collect.prompt(problem) for problem in problems]
    drawn = generator.generate(
        prompts,
        max_new_tokens=min(TOKENS, collect.options.max_new_tokens),
        temperature=1.0,
        stop_ids=collect.chat.stop_ids,
    )
    return [
        Group(
            problem=problem,
            rollouts=[
                Rollout(
                    prompt=prompt,
                    tokens=c.tokens,
                    logprobs=c.logprobs,
                    versions=c.versions,
                    finish_reason=c.finish_reason,
                    text="",
                    reward=0.0,
                )
            ],
        )
        for problem, prompt, c in zip(problems, prompts, drawn, strict=True)
    ]


def _largest(batch: TokenBatch, difference_T: torch.Tensor) -> float:
    return float(difference_T[batch.weight_T > 0].abs().max())
