"""Drafts change how fast tokens come, and not which: greedy, sampled, cut by stops, together and alone."""

from __future__ import annotations

import pytest
import torch

from drafting import agreeing_model
from micro import micro_model
from nemotron_ultra.errors import ConfigError
from nemotron_ultra.generation import Completion, Drafting, Request, Sampler, Scheduler, generate
from nemotron_ultra.generation.draft_length import FixedLength
from nemotron_ultra.generation.drafter import REACH
from nemotron_ultra.generation.speculative import Speculative, draft_metrics
from nemotron_ultra.model.hybrid import HybridLM

PROMPTS = [[5, 6, 7], [9], list(range(20, 60)), [9], [3, 3, 40, 41], [63]]
SEVERAL = Drafting(tokens=4)


def same(some: list[Completion], others: list[Completion]) -> None:
    for one, other in zip(some, others, strict=True):
        assert (one.tokens, one.finish_reason) == (other.tokens, other.finish_reason)
        for name in ("logprobs", "model_logprobs"):
            ours, theirs = (torch.tensor(getattr(c, name)) for c in (one, other))
            torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=0)


def run(scheduler: Scheduler) -> dict[int, Completion]:
    found = {}
    while not scheduler.idle:
        found |= {e.id: e.completion for e in scheduler.step() if e.completion is not None}
    return found


@pytest.mark.parametrize("drafts", [1, 2, 5, 7, Drafting(tokens=7, adaptive=True)])
@pytest.mark.parametrize("changes", [{}, {"pattern": "M*M"}, {"mtp_pattern": "*-*"}, {"pattern": "E-"}])
def test_greedy_tokens_are_those_without_drafts(changes, drafts):
    model = agreeing_model(**changes)
    options = dict(max_new_tokens=23, stop_ids=(11, 57), max_slots=4)
    same(generate(model, PROMPTS, draft_tokens=drafts, **options), generate(model, PROMPTS, **options))


@pytest.mark.parametrize(
    "drafting", [Drafting(tokens=3), Drafting(tokens=7), Drafting(tokens=4, sampled=True)]
)
def test_rows_that_leave_and_come_take_their_tokens_along(drafting):
    """In float32, where a round is one call, or more while rows are many."""
    model = agreeing_model(torch.float32)
    scheduler = Scheduler(model, max_slots=13, max_tokens=90, make_decoder=drafting.decoder(model))
    requests = [
        Request(prompt=tuple(range(2, 3 + 5 * n % 40)), max_new_tokens=1 + 7 * n % 33, temperature=0.0)
        for n in range(30)
    ]
    for request in requests:
        scheduler.submit(request)
    found = run(scheduler)
    for number, request in enumerate(requests):
        plain = generate(model, [request.prompt], request.max_new_tokens)[0]
        assert found[number].tokens == plain.tokens
        for name in ("logprobs", "model_logprobs"):
            assert getattr(found[number], name) == pytest.approx(getattr(plain, name), abs=1e-4)
    assert scheduler.stats["accepted"] > 30


@pytest.mark.parametrize("max_new_tokens", [1, 2, 3, 4, 6])
def test_few_tokens_are_exactly_as_many(max_new_tokens):
    model = agreeing_model()
    drafted = generate(model, PROMPTS, max_new_tokens, draft_tokens=5)
    assert [len(c.tokens) for c in drafted] == [max_new_tokens] * len(PROMPTS)
    same(drafted, generate(model, PROMPTS, max_new_tokens))


@pytest.mark.parametrize("options", [{"temperature": 1.0}, {"temperature": 0.6, "top_p": 0.9, "top_k": 9}])
def test_tokens_verified_by_match_are_those_without_drafts(options):
    model, sampler = agreeing_model(), Sampler(agreeing_model(), draft_tokens=3, max_slots=4)
    drafted = sampler.generate(PROMPTS, max_new_tokens=25, seeds=range(6), **options)
    same(drafted, generate(model, PROMPTS, 25, seeds=range(6), **options))
    assert sampler.stats["acceptance_length"] > 1.2


def test_a_stop_inside_a_run_cuts_it():
    """All drafts stay, so that the stop is the second token of a run of five."""
    model = agreeing_model(force=1.0)
    (whole,) = generate(model, [[5, 6]], 12)
    assert whole.tokens == [*range(7, 19)]
    (cut,) = generate(model, [[5, 6]], 12, draft_tokens=5, stop_ids=(9,))
    assert (cut.tokens, cut.finish_reason) == ([7, 8, 9], "stop")
    text = Sampler(model, draft_tokens=5, decode=lambda ids: "".join(chr(60 + i) for i in ids))
    (cut,) = text.generate([[5, 6]], max_new_tokens=12, temperature=0.0, stop_texts=["EF"])
    assert (cut.tokens, cut.finish_reason, cut.stats["stop_text"]) == ([7, 8, 9, 10], "stop", "EF")


def mixed() -> list[Request]:
    options = [{"temperature": 0.0}, {}, {"temperature": 0.7, "top_k": 5}, {"min_p": 0.1}, {"stop_ids": (8,)}]
    return [
        Request(prompt=tuple(prompt), max_new_tokens=7 + 5 * number, seed=number, **options[number % 5])
        for number, prompt in enumerate(PROMPTS)
    ]


@pytest.mark.parametrize("drafting", [SEVERAL, Drafting(tokens=3, sampled=True)])
def test_company_changes_nothing(drafting):
    """Requests of all kinds run together, one of them is cancelled, others come later."""
    model, requests = agreeing_model(), mixed()
    make = drafting.decoder(model)
    scheduler = Scheduler(model, max_slots=3, max_tokens=90, make_decoder=make)
    for request in requests[:4]:
        scheduler.submit(request)
    scheduler.step()
    scheduler.cancel(1)
    for request in requests[4:]:
        scheduler.submit(request)
    found = run(scheduler)
    assert found.pop(1).finish_reason == "cancelled" and len(found) == 5
    for id, completion in found.items():
        alone = Scheduler(model, max_slots=1, max_tokens=90, make_decoder=make)
        alone.submit(requests[id])
        same([completion], [run(alone)[0]])


def test_logprobs_of_sampled_drafts_are_those_of_the_target():
    model, temperature = agreeing_model(), 0.8
    for completion, prompt in zip(
        generate(model, PROMPTS, 20, temperature, draft_tokens=Drafting(tokens=3, sampled=True)),
        PROMPTS,
        strict=True,
    ):
        ids = torch.tensor(prompt + completion.tokens)
        with torch.no_grad():
            logits_TV = model(ids, mtp_depths=0).logits_TV[len(prompt) - 1 : -1]
        for name, heat in (("logprobs", temperature), ("model_logprobs", 1.0)):
            expected_T = (logits_TV / heat).log_softmax(-1).gather(1, ids[len(prompt) :, None])[:, 0]
            torch.testing.assert_close(torch.tensor(getattr(completion, name)).double(), expected_T)


def test_metrics_add_up():
    sampler = Sampler(agreeing_model(), draft_tokens=4)
    completions = sampler.generate(PROMPTS, max_new_tokens=30, temperature=0.0)
    stats, rows = sampler.stats, len(PROMPTS)
    assert stats["new_tokens"] == 30 * rows == sum(len(c.tokens) for c in completions)
    assert stats["rounds"] + stats["accepted"] == 30 * rows - rows  # the first tokens come with the prompts
    assert stats["accepted"] == sum(stats[f"accepted_{place}"] for place in range(1, 5))
    assert stats["drafted"] == sum(stats[f"drafted_{place}"] for place in range(1, 5))
    assert stats["acceptance_length"] == 1 + stats["accepted"] / stats["rounds"] > 1.5
    stayed = [stats[f"accepted_{place}"] for place in range(1, 5)]
    assert stayed == sorted(stayed, reverse=True) and 0 < stats["acceptance_rate"] < 1
    assert stats["acceptance_rate_1"] == stats["accepted_1"] / stats["drafted_1"]
    assert draft_metrics({}) == {}


def test_drafts_take_fewer_steps():
    model, steps = agreeing_model(force=1.0), {}
    for drafts in (0, 1, 3, 7):
        sampler = Sampler(model, draft_tokens=drafts)
        sampler.generate([[5], [9]], max_new_tokens=33, temperature=0.0)
        steps[drafts] = sampler.stats["steps"]
    assert steps == {0: 32, 1: 16, 3: 8, 7: 4}


class Alternating(FixedLength):
    """Many rounds without drafts, then one with them."""

    def __init__(self) -> None:
        super().__init__(3)
        self.round = 0

    def choose(self, rows: int) -> int:
        self.round += 1
        return 3 if self.round == REACH + 20 else 0


def test_rounds_without_drafts_may_come_between():
    model, request = agreeing_model(), Request(prompt=(5, 6), max_new_tokens=REACH + 60, temperature=0.0)
    scheduler = Scheduler(
        model, max_slots=1, max_tokens=500, make_decoder=lambda s: Speculative(s, Alternating())
    )
    scheduler.submit(request)
    same([run(scheduler)[0]], generate(model, [request.prompt], request.max_new_tokens))
    assert scheduler.stats["drafted"] == 3


@pytest.mark.parametrize(
    "drafting", [Drafting(tokens=1), Drafting(tokens=3), Drafting(tokens=3, sampled=True)]
)
def test_a_request_for_one_token_may_fill_its_slot(drafting):
    """Beside one that has tokens to go, both as long as a slot may be."""
    model = agreeing_model()
    scheduler = Scheduler(model, max_slots=4, max_tokens=20, make_decoder=drafting.decoder(model))
    requests = [
        Request(prompt=(1, 2, 3), max_new_tokens=17, temperature=0.0),
        Request(prompt=tuple(range(3, 22)), max_new_tokens=1, temperature=0.0),
    ]
    for request in requests:
        scheduler.submit(request)
    found = run(scheduler)
    for number, request in enumerate(requests):
        same([found[number]], generate(model, [request.prompt], request.max_new_tokens))


@pytest.mark.parametrize(
    ("changes", "drafts", "message"),
    [
        ({"num_nextn_predict_layers": 0}, 3, r"no MTP module.*got 3.*allowed: 0"),
        ({}, -1, r"draft_tokens.*got -1.*0 \(no drafts\) or more"),
        ({}, 1.5, r"draft_tokens.*got 1.5"),
        ({"num_nextn_predict_layers": 2}, 3, r"one MTP module.*num_nextn_predict_layers 2"),
        ({"mtp_pattern": "M*"}, Drafting(tokens=2), r"Mamba.*mtp_pattern 'M\*'"),
    ],
)
def test_models_that_cannot_draft_are_refused(changes, drafts, message):
    model: HybridLM = micro_model(**changes)
    with pytest.raises(ConfigError, match=message):
        generate(model, [[5]], 3, draft_tokens=drafts)
    assert generate(model, [[5]], 3, draft_tokens=0)[0].finish_reason == "length"
