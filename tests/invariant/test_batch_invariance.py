"""The tokens and log-probabilities of a request are its own: alone = in company, in float32."""

from __future__ import annotations

import random

import pytest

from micro import micro_model
from nemotron_ultra.generation import Request, Scheduler


def requests(seed: int) -> list[Request]:
    """Lengths from 1 to 70, some prompts equal, all kinds of sampling."""
    draw = random.Random(seed)
    prompts = [tuple(draw.choices(range(3, 64), k=draw.choice([1, 2, 5, 17, 40, 70]))) for _ in range(6)]
    kinds = [{"temperature": 0.0}, {}, {"temperature": 0.6}, {"top_p": 0.8}, {"top_k": 5, "min_p": 0.1}]
    return [
        Request(
            prompt=draw.choice(prompts),
            max_new_tokens=draw.randint(1, 25),
            stop_ids=tuple(draw.sample(range(3, 64), 2)),
            seed=number,
            **draw.choice(kinds),
        )
        for number in range(14)
    ]


def run(model, asked: list[Request], **options):
    scheduler = Scheduler(model, max_tokens=100, **options)
    ids = [scheduler.submit(request) for request in asked]
    found = {}
    while not scheduler.idle:
        found |= {e.id: e.completion for e in scheduler.step() if e.completion is not None}
    return [found[id] for id in ids]


@pytest.mark.parametrize(
    "options", [{"max_slots": 14}, {"max_slots": 3}, {"max_slots": 5, "prefill_chunk": 16}]
)
def test_alone_and_in_company(options):
    model, asked = micro_model(), requests(options["max_slots"])
    alone = [run(model, [request], max_slots=1)[0] for request in asked]
    together = run(model, asked, **options)
    for one, other in zip(alone, together, strict=True):
        assert one.tokens == other.tokens and one.finish_reason == other.finish_reason
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
        assert one.model_logprobs == pytest.approx(other.model_logprobs, abs=1e-5)
    assert {"stop", "length"} >= {c.finish_reason for c in together}
