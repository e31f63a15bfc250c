"""Rows of SFT: a function of (seed, step), trained on what an assistant wrote and on nothing else."""

from dataclasses import replace

import pytest

from nemotron_ultra.config.tasks import TasksConfig
from nemotron_ultra.data.chat import ChatTemplate
from nemotron_ultra.data.tokenizer import load_tokenizer
from nemotron_ultra.errors import DataError
from nemotron_ultra.rl.environments import make_environments
from nemotron_ultra.rl.problems import ProblemStream
from nemotron_ultra.trainers.conversations import Conversations

TOKENIZER = load_tokenizer("builtin")
SUMS = {"name": "chain_sum", "args": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}
TASKS = TasksConfig(domains={"sums": SUMS}, validation_problems=3)
ENVIRONMENTS = make_environments(TASKS, seed=1)


def conversations(longest=64, **facts):
    problems = ProblemStream.of(TASKS, ENVIRONMENTS, 1, 4)
    template = ChatTemplate(TOKENIZER)
    return Conversations(problems, template, TASKS, micro_batch_size=2, longest=longest, facts=facts)


def test_trained_labels_are_the_answers():
    first, second = next(conversations())
    problems = [ENVIRONMENTS["sums"].problem(i) for i in range(4)]
    trained = [TOKENIZER.decode(b.labels_T[b.weight_T > 0].tolist()) for b in (first, second)]
    pairs = (problems[:2], problems[2:])
    assert trained == ["".join(f"{p.answer}<|im_end|>" for p in pair) for pair in pairs]
    assert first.stats["documents"] == ["sums:0", "sums:1"]


def test_resumed_stream_goes_on():
    whole, resumed = conversations(seed=1), conversations(seed=1)
    for _ in range(2):
        next(whole)
    resumed.load_state_dict(whole.state_dict())
    assert [b.tokens_T.tolist() for b in next(resumed)] == [b.tokens_T.tolist() for b in next(whole)]
    with pytest.raises(DataError, match="seed: 1 then, 2 now"):
        conversations(seed=2).load_state_dict(whole.state_dict())


def test_held_out_conversations_are_not_trained_on():
    held_out = [d for batch in conversations().held_out(ENVIRONMENTS) for d in batch.stats["documents"]]
    assert held_out == ["sums:0", "sums:1", "sums:2"]
    asked = {ENVIRONMENTS["sums"].problem(i).question for i in range(100)}
    assert not asked & {ENVIRONMENTS["sums"].held_out(i).question for i in range(3)}


def test_a_conversation_that_does_not_fit_is_named():
    with pytest.raises(DataError, match=r"problem 0 of domain sums.*data.sequence_length = 12"):
        next(conversations(longest=12))


def test_a_problem_without_a_solution_is_named():
    unsolved = replace(ENVIRONMENTS["sums"].problem(0), answer="")
    with pytest.raises(DataError, match="problem 0 of domain sums comes without a solution"):
        conversations().pack([unsolved])
