"""The scheduler: slots that are refilled, stops, cancelling, events, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from micro import micro_model
from nemotron_ultra.errors import ConfigError, DataError
from nemotron_ultra.generation import Completion, Event, Request, Scheduler, generate
from nemotron_ultra.generation.sampling import RowOptions, heated
from nemotron_ultra.model.hybrid import HybridLM
from nemotron_ultra.model.score import score

LETTERS = "abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789."


def text(ids: list[int]) -> str:
    """One character for each id, but none for 0 to 2, two for 3."""
    return "".join({3: "é!"}.get(id, LETTERS[id]) for id in ids if id > 2)


def request(prompt: list[int], max_new_tokens: int = 12, **options) -> Request:
    return Request(prompt=tuple(prompt), max_new_tokens=max_new_tokens, **options)


def run(scheduler: Scheduler) -> list[Event]:
    events = []
    while not scheduler.idle:
        events += scheduler.step()
    return events


def completions(events: list[Event]) -> dict[int, Completion]:
    return {event.id: event.completion for event in events if event.completion is not None}


def alone(model: HybridLM, asked: Request, **options) -> Completion:
    scheduler = Scheduler(model, max_slots=1, max_tokens=200, **options)
    scheduler.submit(asked)
    return completions(run(scheduler))[0]


def test_events_add_up_to_the_completion():
    model, asked = micro_model(), [request([5, 6], 9, seed=1), request([7], 4, stop_ids=(9, 11), seed=2)]
    scheduler = Scheduler(model, max_slots=2, max_tokens=20, version=3)
    ids = [scheduler.submit(r) for r in asked]
    events = run(scheduler)
    assert sorted(completions(events)) == ids == [0, 1] and scheduler.step() == []
    for id, completion in completions(events).items():
        own = [event for event in events if event.id == id]
        assert [t for e in own for t in e.tokens] == completion.tokens
        assert [p for e in own for p in e.logprobs] == completion.logprobs
        assert [p for e in own for p in e.model_logprobs] == completion.model_logprobs
        assert completion.versions == [3] * len(completion.tokens)
        assert 0 <= completion.stats["first_token_seconds"] <= completion.stats["seconds"]
        assert completion.stats["prompt_tokens"] == len(asked[id].prompt)


def test_a_request_that_comes_later_joins_those_that_run():
    model = micro_model()
    scheduler = Scheduler(model, max_slots=2, max_tokens=60)
    late = {0: request([5, 6], 30, seed=1), 3: request([9] * 11, 8, seed=2), 7: request([4], 20, seed=3)}
    events, round = [], 0
    while not scheduler.idle or round < 8:
        if round in late:
            scheduler.submit(late[round])
        events += scheduler.step()
        round += 1
    assert round < 45  # 58 tokens, two at a time
    for id, asked in enumerate(late.values()):
        assert completions(events)[id].tokens == alone(model, asked).tokens


def test_logprobs_of_the_cut_distribution_and_of_the_model():
    model = micro_model(torch.float64)
    asked = request([5, 6, 7], 20, temperature=0.8, top_k=12, top_p=0.9, min_p=0.02)
    completion = alone(model, asked)
    ids = torch.tensor([*asked.prompt, *completion.tokens])
    logits_TV = model(ids, mtp_depths=0).logits_TV[2:-1]
    log_TV = heated(logits_TV, RowOptions.of([asked] * 20, "cpu")).log_softmax(-1)
    expected = log_TV.gather(1, ids[3:, None])[:, 0]
    assert completion.logprobs == pytest.approx(expected.tolist(), abs=1e-9)
    own = score(model, ids[:-1], ids[1:])[2:]
    assert completion.model_logprobs == pytest.approx(own.tolist(), abs=1e-9)


def test_model_logprobs_are_over_all_rows_of_the_head():
    (completion,) = generate(micro_model(torch.float64), [[5, 6]], 8, temperature=1.0, vocab_size=10)
    ids = torch.tensor([5, 6, *completion.tokens])
    own = score(micro_model(torch.float64), ids[:-1], ids[1:])[1:]
    assert completion.model_logprobs == pytest.approx(own.tolist(), abs=1e-9)
    assert all(a > b for a, b in zip(completion.logprobs, completion.model_logprobs, strict=True))


@pytest.mark.parametrize("length", [1, 2, 3])
def test_stop_texts_are_found_over_token_boundaries(length):
    """The text of tokens 5, 6, .. of a free run; tokens after the one that completes it are not there."""
    model = micro_model()
    free = alone(model, request([5, 6], 30, seed=4))
    stop = text(free.tokens[5 : 5 + length])
    found = alone(model, request([5, 6], 30, seed=4, stop_texts=("never", stop)), decode=text)
    end = next(n for n in range(1, 31) if stop in text(free.tokens[:n]))
    assert found.tokens == free.tokens[:end] and found.finish_reason == "stop"
    assert found.stats["stop_text"] == stop and len(found.logprobs) == end
    (again,) = generate(model, [[5, 6]], 30, temperature=1.0, seeds=[4], stop_texts=[stop], decode=text)
    assert again.tokens == found.tokens


def test_any_of_several_stop_ids_ends_a_request():
    model = micro_model()
    free = alone(model, request([5, 6], 30, seed=4)).tokens
    stops = (free[9], free[4], free[20])
    found = alone(model, request([5, 6], 30, seed=4, stop_ids=stops))
    assert found.tokens == free[: min(map(free.index, stops)) + 1] and found.finish_reason == "stop"


def test_cancelled_requests_leave_their_slots_and_the_others_alone():
    """One that runs, one whose long prompt is being read, one in the queue, and one that is finished."""
    model = micro_model()
    asked = [request([5, 6], 25, seed=1), request([7], 25, seed=2), request([9] * 40, 9), request([8], 9)]
    scheduler = Scheduler(model, max_slots=3, max_tokens=60, prefill_chunk=8)
    ids = [scheduler.submit(r) for r in asked]
    events = scheduler.step() + scheduler.step()
    for id in (1, 2, 3):
        scheduler.cancel(id)
    assert len(scheduler.rows.live) == 1 and scheduler.rows.cache.free == 2
    events += run(scheduler)
    found = completions(events)
    assert [found[id].finish_reason for id in ids] == ["length", "cancelled", "cancelled", "cancelled"]
    assert found[0].tokens == alone(model, asked[0]).tokens
    assert found[1].tokens == alone(model, asked[1]).tokens[: len(found[1].tokens)] != []
    assert found[2].tokens == found[3].tokens == []
    assert scheduler.stats["prefill_tokens"] < 3 + 40  # the rest of the long prompt was not read
    scheduler.cancel(0), scheduler.cancel(77)
    assert scheduler.idle and scheduler.step() == []


def test_a_long_prompt_does_not_stop_those_that_run():
    scheduler = Scheduler(micro_model(), max_slots=2, max_tokens=60, prefill_chunk=8)
    scheduler.submit(request([5, 6], 20))
    scheduler.step()
    scheduler.submit(request([9] * 40, 3))
    for _ in range(4):  # five pieces
        assert [event.id for event in scheduler.step()] == [0]
    assert [event.id for event in scheduler.step()] == [0, 1]
    assert scheduler.stats["prefills"] == 6 and scheduler.stats["prefill_tokens"] == 42


def test_states_of_sixteen_bits_run_too():
    model = micro_model()
    scheduler = Scheduler(model, max_slots=2, max_tokens=60, ssm_format="fp16_sr")
    for seed in range(4):
        scheduler.submit(request([5, 6, 7], 12, seed=seed))
    found = completions(run(scheduler))
    assert found[2].tokens == alone(model, request([5, 6, 7], 12, seed=2), ssm_format="fp16_sr").tokens


def test_a_request_is_cancelled_once_also_while_its_prompt_is_read():
    scheduler = Scheduler(micro_model(), max_slots=2, max_tokens=64, prefill_chunk=4)
    id = scheduler.submit(request(range(3, 23), 4))
    assert scheduler.step() == []
    scheduler.cancel(id)
    scheduler.cancel(id)
    (event,) = scheduler.step()
    assert event.completion.finish_reason == "cancelled" and scheduler.idle


def test_top_k_beyond_all_ids_cuts_nothing():
    model = micro_model()
    own = alone(model, request([5, 6], 8, temperature=1.0))
    assert alone(model, request([5, 6], 8, temperature=1.0, top_k=10**30)).tokens == own.tokens


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"prompt": ()}, DataError, "prompt is empty"),
        ({"prompt": (3, 64)}, DataError, r"a token id.*got 64.*0 to 63"),
        ({"prompt": (3, 4.0)}, DataError, r"no token id.*got 4.0"),
        ({"prompt": (True, 4)}, DataError, r"no token id.*got True"),
        ({"prompt": "text"}, DataError, r"no list of token ids.*got 'text'"),
        ({"prompt": (3,) * 10}, DataError, r"longer than the limit.*10 prompt tokens.*7.*16 together"),
        ({"max_new_tokens": 0}, ConfigError, r"max_new_tokens.*got 0"),
        ({"max_new_tokens": 1.5}, ConfigError, r"max_new_tokens.*got 1.5"),
        ({"max_new_tokens": True}, ConfigError, r"max_new_tokens.*got True"),
        ({"temperature": -1.0}, ConfigError, r"temperature.*got -1"),
        ({"temperature": 1e-40}, ConfigError, r"temperature.*got 1e-40.*1e-05 or more"),
        ({"temperature": "hot"}, ConfigError, r"temperature.*got hot"),
        ({"top_p": 0.0}, ConfigError, r"top_p.*got 0.0"),
        ({"top_p": 1.1}, ConfigError, r"top_p.*got 1.1"),
        ({"top_p": "all"}, ConfigError, r"top_p.*got all"),
        ({"top_k": -1}, ConfigError, r"top_k.*got -1"),
        ({"top_k": 1.5}, ConfigError, r"top_k.*got 1.5"),
        ({"min_p": 2}, ConfigError, r"min_p.*got 2"),
        ({"seed": "0"}, ConfigError, r"seed.*got '0'"),
        ({"stop_ids": (64,)}, ConfigError, r"stop_ids.*got 64"),
        ({"stop_ids": (3.0,)}, ConfigError, r"stop_ids.*got 3.0"),
        ({"stop_ids": 3}, ConfigError, r"stop_ids: not a list.*got 3"),
        ({"stop_texts": "ab"}, ConfigError, r"stop_texts: not a list.*got 'ab'"),
        ({"stop_texts": ("a",)}, ConfigError, r"stop_texts.*decode"),
        ({"stop_texts": ("",)}, ConfigError, r"stop_texts.*got ''"),
    ],
)
def test_what_cannot_be_is_refused_at_once(changes, error, message):
    scheduler = Scheduler(micro_model(), max_slots=2, max_tokens=16)
    with pytest.raises(error, match=message):
        scheduler.submit(Request(**{"prompt": (3, 4), "max_new_tokens": 7} | changes))
    assert scheduler.idle


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_slots": 0}, r"max_slots.*got 0"),
        ({"prefill_chunk": 0}, r"prefill_chunk.*got 0"),
        ({"vocab_size": 65}, r"vocab_size.*got 65"),
        ({"max_slots": 10**6, "max_tokens": 10**6}, r"slots.*more memory than is free.*at most \d+ slots"),
        ({"ssm_format": "fp8"}, r"ssm_format.*got 'fp8'"),
    ],
)
def test_options_that_cannot_be(options, message):
    with pytest.raises(ConfigError, match=message):
        Scheduler(micro_model(), **options)
