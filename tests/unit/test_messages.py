"""Rows of chat data sets: the forms that are read, and why others are dropped."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest

from nemotron_ultra.data.messages import RowDropped, read_conversation

ASK = {"role": "user", "content": "a"}
SAY = {"role": "assistant", "content": "b"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": [1, "é"]}'}}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "r", "tool_call_id": "c1"}
TOOL = {"name": "f", "description": None, "parameters": {"type": "object"}}


def read(*messages: object, **row: object):
    return read_conversation({"messages": list(messages), **row})


def test_openai_messages():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "!"}]
    developer = {"role": "developer", "content": ""}
    chat = read(developer, {"role": "user", "content": parts}, CALLS, RESULT, SAY, tools=[TOOL])
    assert chat.messages == (
        {"role": "system", "content": ""},
        {"role": "user", "content": "a!"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c1", "name": "f", "arguments": {"x": [1, "é"]}}],
        },
        {"role": "tool", "content": "r", "tool_call_id": "c1"},
        {"role": "assistant", "content": "b"},
    )
    assert chat.tools == ({"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}},)


def test_other_spellings_of_the_same():
    flat = {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {"x": 1}}]}
    wanted = read(ASK, flat, tools=[TOOL])
    text = read_conversation({"messages": json.dumps([ASK, flat]), "tools": json.dumps([{"function": TOOL}])})
    assert (
        text
        == wanted
        == read_conversation({"chat": [ASK, flat], "t": [TOOL]}, messages_field="chat", tools_field="t")
    )
    array = read_conversation(
        {"messages": np.array([ASK, SAY | {"tool_calls": None, "reasoning_content": None}])}
    )
    share = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    assert array == read(ASK, SAY) == read_conversation({"conversations": share})
    named = {"conversations": [ASK, SAY]}
    assert (
        read_conversation(named) == read(ASK, SAY, tools="") == read(ASK, SAY, tools=None) == read(ASK, SAY)
    )


def test_blank_thoughts_are_none():
    blank = {"reasoning_content": " \n", "reasoning_truncated": True}
    cut_of_none = {"reasoning_truncated": True}
    assert read(ASK, SAY | blank) == read(ASK, SAY | cut_of_none) == read(ASK, SAY)
    message = read(ASK, blank | SAY | {"content": "<think>why</think>b"}).messages[1]
    assert message == SAY | {"reasoning_content": "why"}


@pytest.mark.parametrize(
    "content, answer, thoughts",
    [
        ("<think>\nwhy\nso\n</think>\n\nb", "b", "why\nso"),
        ("\n<think>why</think>b", "b", "why"),
        ("<think>\n\n</think>\n\nb", "b", None),
        ("b <think>why</think>", "b <think>why</think>", None),
    ],
)
def test_thoughts_before_an_answer(content: str, answer: str, thoughts: str | None):
    message = read(ASK, SAY | {"content": content}).messages[1]
    assert message["content"] == answer and message.get("reasoning_content") == thoughts


def test_thoughts_by_themselves_come_first():
    message = read(ASK, SAY | {"content": "<think>x</think>b", "reasoning": "why"}).messages[1]
    assert message == {"role": "assistant", "content": "<think>x</think>b", "reasoning_content": "why"}


def test_parallel_calls_are_answered_in_any_order():
    other = CALL | {"id": "c2"}
    calls = CALLS | {"tool_calls": [CALL, other]}
    read(ASK, calls, RESULT | {"tool_call_id": "c2"}, RESULT, SAY)
    read(ASK, calls, {"role": "tool", "content": ""}, {"role": "tool", "content": ""}, SAY)


@pytest.mark.parametrize(
    "messages, reason, words",
    [
        ([], "no messages", "'messages'"),
        (["hi"], "bad messages", "message 0 is no object; got str"),
        ([{"role": "robot", "content": "a"}], "unknown role", "message 0 .* got 'robot'"),
        ([{"content": "a"}], "unknown role", "got None"),
        ([SAY, ASK], "role order", "message 0 is the assistant's"),
        ([ASK, ASK, SAY], "role order", "message 1 is the user's"),
        ([ASK, SAY, SAY], "role order", "message 2 is the assistant's"),
        ([ASK, {"role": "system", "content": "s"}, SAY], "role order", "message 1 is a system message"),
        ([{"role": "user", "content": " \n"}, SAY], "empty content", "message 0 of the user is empty"),
        ([{"role": "user", "content": None}, SAY], "bad content", "got NoneType"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "bad content", "part of type 'image_url'"),
        ([{"role": "user", "content": "\ud800"}, SAY], "bad content", "message 0: content is no valid text"),
        ([ASK, SAY | {"content": "<think>oh"}], "unclosed thinking", "message 1"),
        ([ASK, RESULT], "tool result without call", "message 1"),
        ([ASK, SAY, RESULT], "tool result without call", "message 2"),
        ([ASK, CALLS, RESULT, RESULT], "tool result without call", "message 3"),
        ([ASK, CALLS, RESULT | {"tool_call_id": "c9"}], "tool result without call", "'c9'; open: .'c1'"),
        ([ASK, CALLS | {"tool_calls": 5}], "bad tool call", "must be a list; got int"),
        ([ASK, CALLS | {"tool_calls": [{"id": "x"}]}], "bad tool call", "no name"),
        ([ASK, CALLS | {"tool_calls": [{"name": "f", "arguments": "{"}]}], "bad tool call", "no JSON"),
        ([ASK, CALLS | {"tool_calls": [{"name": "f", "arguments": "[1]"}]}], "bad tool call", "got list"),
    ],
)
def test_dropped(messages: list, reason: str, words: str):
    with pytest.raises(RowDropped, match=words) as dropped:
        read(*messages)
    assert dropped.value.reason == reason


@pytest.mark.parametrize(
    "row, reason",
    [
        ({}, "no messages"),
        ({"messages": "{"}, "bad messages"),
        ({"messages": {"role": "user"}}, "bad messages"),
        ({"messages": [ASK, SAY], "tools": [{"type": "function"}]}, "bad tools"),
        ({"messages": [ASK, SAY], "tools": "["}, "bad tools"),
        ({"messages": [ASK, SAY], "tools": [{"name": "f", "parameters": [1]}]}, "bad tools"),
        ({"messages": [ASK, SAY], "tools": [{"name": "f", "parameters": {"properties": [1]}}]}, "bad tools"),
        ({"messages": np.array(5)}, "bad messages"),
        ({"messages": "[" * 10_000}, "nested too deeply"),
        ({"conversations": [{"from": ["gpt"], "value": "a"}]}, "unknown role"),
    ],
)
def test_rows_without_a_conversation(row: dict, reason: str):
    with pytest.raises(RowDropped) as dropped:
        read_conversation(row)
    assert dropped.value.reason == reason


def test_a_drop_travels_between_processes():
    again = pickle.loads(pickle.dumps(RowDropped("role order", "message 1")))
    assert (again.reason, again.detail, str(again)) == ("role order", "message 1", "role order: message 1")
