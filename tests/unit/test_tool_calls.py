"""Calls in an answer: what a template spells is read back, and nothing else becomes a call."""

from __future__ import annotations

import json

import pytest

from nemotron_ultra.data.tool_text import CALL, CALL_END, call_body
from nemotron_ultra.generation.answers import Turn
from nemotron_ultra.generation.base import Completion, Event, Request
from nemotron_ultra.serve.asks import Ask, Served
from nemotron_ultra.serve.replies import Choice, Delta
from nemotron_ultra.serve.tool_calls import parse_calls
from serving import TEMPLATE, TOKENIZER

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "parameters": {"properties": {"word": {"type": "string"}, "times": {"type": "integer"}}},
        },
    }
]
ARGUMENTS = {"word": "12", "times": 3, "more": {"a": [1, None]}, "text": "two\nlines"}
BLOCK = CALL + call_body({"name": "look_up", "arguments": ARGUMENTS}) + CALL_END


def test_a_call_is_read_as_it_was_written():
    calls, rest = parse_calls(f"{BLOCK}\n{BLOCK}\n", TOOLS)
    assert rest == "" and [call["function"]["name"] for call in calls] == ["look_up"] * 2
    assert all(json.loads(call["function"]["arguments"]) == ARGUMENTS for call in calls)
    assert len({call["id"] for call in calls}) == 2


@pytest.mark.parametrize("text", [CALL, BLOCK[:-3], f"{CALL}\nlook_up(3)\n{CALL_END}"])
def test_what_is_no_call_stays_text(text):
    assert parse_calls(text, TOOLS) == ([], text)


def told(text: str, size: int, stream: bool) -> tuple[list[str], Delta]:
    """(texts of the deltas, all of them as one) of an answer that comes in events of `size` tokens."""
    turn = Turn(Request(prompt=(1,), max_new_tokens=500, stop_ids=TEMPLATE.stop_ids))
    ask = Ask(
        chat=True,
        turns=[turn],
        n=1,
        stream=stream,
        include_usage=False,
        logprobs=False,
        return_token_ids=False,
        tools=TOOLS,
    )
    served = Served(name="m", tokenizer=TOKENIZER, template=TEMPLATE, rows=4096, context=500, choices=1)
    choice, whole, texts = Choice(0, ask, served), Delta(), []
    ids = [*TOKENIZER.encode(text, special=True), TEMPLATE.stop_ids[0]]
    done = Completion(tokens=ids, logprobs=[0.0] * len(ids), finish_reason="stop")
    for start in range(0, len(ids), size):
        part = ids[start : start + size]
        last = start + size >= len(ids)
        zeros = [0.0] * len(part)
        delta = choice.take(Event(0, part, zeros, zeros, done if last else None))
        texts.append(delta.text)
        whole.add(delta)
    return texts, whole


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_calls_in_a_stream_are_held_back_and_told_at_the_end(size):
    texts, whole = told(f"I look.\n{BLOCK}\n", size, stream=True)
    assert whole.text == "I look." and whole.finish_reason == "tool_calls"
    assert json.loads(whole.calls[0]["function"]["arguments"]) == ARGUMENTS
    texts, whole = told("a < b, a <tool> or\n<tool_cal", size, stream=True)
    assert whole.text == "a < b, a <tool> or\n<tool_cal" and whole.finish_reason == "stop"
    assert size > 7 or sum(map(bool, texts)) > 1
