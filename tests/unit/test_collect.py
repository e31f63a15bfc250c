"""Problems -> rollouts: one seed each, rewards by the environment, nothing for cut or empty answers."""

import pytest

from micro import micro_model
from nemotron_ultra.config.rollout import RolloutConfig
from nemotron_ultra.config.tasks import TasksConfig
from nemotron_ultra.data.chat import ChatTemplate
from nemotron_ultra.data.tokenizer import load_tokenizer
from nemotron_ultra.errors import DataError
from nemotron_ultra.generation.base import Completion
from nemotron_ultra.generation.sampler import Sampler
from nemotron_ultra.rl.collect import Collector, rollout_metrics
from nemotron_ultra.rl.environments import make_environments

CHAT = ChatTemplate(load_tokenizer("builtin"))
SUMS = {"name": "chain_sum", "args": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}


@pytest.fixture(scope="module")
def environments():
    return make_environments(TasksConfig(domains={"sums": SUMS}, validation_problems=2), seed=1)


def collector(environments, generator=None, longest=64, **options):
    values = {"prompts_per_step": 2, "group_size": 3, "max_new_tokens": 5} | options
    generator = generator or Sampler(micro_model(vocab_size=4096))
    return Collector(generator, CHAT, environments, RolloutConfig(**values), longest, seed=7)


def problems(environments, count=2):
    return [environments["sums"].problem(i) for i in range(count)]


def test_same_step_same_rollouts_and_every_sample_its_own(environments):
    collect = collector(environments)
    first, again = (collect(problems(environments), step=4) for _ in range(2))
    assert first == again
    assert first != collect(problems(environments), step=5)
    assert [len(group.rollouts) for group in first] == [3, 3]
    assert len({tuple(r.tokens) for group in first for r in group.rollouts}) > 3


class Written:
    """Writes what it is told to, one answer after another."""

    def __init__(self, *answers):
        self.answers, self.version = answers, 0

    def generate(self, prompts, **options):
        ended = [(CHAT.tokenizer.encode(text), end) for text, end in self.answers]
        return [
            Completion(
                tokens=tokens + ([CHAT.stop_ids[0]] if end == "stop" else []),
                logprobs=[-1.0] * (len(tokens) + (end == "stop")),
                finish_reason=end,
                versions=[0] * (len(tokens) + (end == "stop")),
            )
            for tokens, end in ended
        ]


def test_rewards(environments):
    problem = environments["sums"].problem(0)
    generator = Written((problem.answer, "stop"), (problem.answer, "length"), ("", "stop"))
    (group,) = collector(environments, generator)([problem], step=0)
    assert [rollout.reward for rollout in group.rollouts] == [1.0, 0.0, 0.0]
    metrics = rollout_metrics([group])
    assert metrics["rollout/truncated"] == metrics["rollout/empty"] == pytest.approx(1 / 3)
    assert metrics["rollout/entropy"] == 1.0


def test_prompt_longer_than_the_limit(environments):
    with pytest.raises(DataError, match=r"domain sums.*got \d+ tokens.*rollout.long_prompts=skip"):
        collector(environments, longest=16)(problems(environments), step=0)
    with pytest.raises(DataError, match="every prompt is longer"):
        collector(environments, longest=16, long_prompts="skip")(problems(environments), step=0)


def test_skipped_prompts_are_counted(environments):
    asked = problems(environments, 6)
    lengths = [len(collector(environments).prompt(problem)) for problem in asked]
    collect = collector(environments, longest=min(lengths) + 5, long_prompts="skip")
    groups = collect(asked, step=0)
    assert len(groups) == sum(n == min(lengths) for n in lengths) and collect.skipped == 6 - len(groups)
