"""Three kinds of rows -> one form of RL prompt.

  our own     {messages, domain, environment: {name, args}, answer, pass_rate, tools, extra}
  a chat      {messages, ...}: the prompt is what comes before the last answer, which becomes `answer`
  NeMo Gym    {responses_create_params: {input, tools, ...}, agent_ref: {type, name}, ...}: agent_ref.name is
              the environment's, and the other fields of the row, with which its server verifies, become its
              args (of `verifier_metadata`, where there is one, its content)

The report names the domains (section 3.2); how their rows look is NeMo Gym's public format.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nemotron_ultra.data.messages import (
    RowDropped,
    depth_checked,
    normal_message,
    normal_tools,
    split_thoughts,
)
from nemotron_ultra.data.ngrams import content_text

ANSWERS = ("answer", "expected_answer", "ground_truth", "ground_truth_answer")
NESTED = ("responses_create_params", "messages", "environment", "agent_ref", "tools")
# Fields of a Gym row that describe it or count something; its server does not verify with them.
_BOOKKEEPING = ("uuid", "id", "source", "dataset", "domain", "license", "used_in", "messages", "tools")
_COUNTERS = ("pass_rate", "_ng_", "raw_rewards", "reward_profiles", "input_tokens/", "output_tokens/")
_COUNTERS += ("total_tokens/",)


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt of RL. messages: OpenAI's form, the last one a user's or a tool's. answer: the reference,
    None where the environment needs none. pass_rate: share of a reference model's answers that were right."""

    messages: list[dict[str, Any]]
    domain: str
    environment: dict[str, Any]
    answer: str | None = None
    pass_rate: float | None = None
    tools: list[dict[str, Any]] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)

    def row(self) -> dict[str, Any]:
        """The line of JSONL: fields that say nothing are left out."""
        row = {"messages": self.messages, "domain": self.domain, "environment": self.environment}
        row["answer"] = self.answer
        if self.pass_rate is not None:
            row["pass_rate"] = self.pass_rate
        return row | {key: value for key in ("tools", "extra") if (value := getattr(self, key))}

    def key(self) -> bytes:
        """What makes two prompts the same: messages and tools."""
        return json.dumps([self.messages, self.tools], sort_keys=True, ensure_ascii=True).encode()


@depth_checked()
def read_prompt(row: Mapping[str, Any], domain: str | None = None, environment: str | None = None) -> Prompt:
    """The prompt of a row. domain, environment: for rows that name none. Raises RowDropped."""
    row = {key: _parsed(key, value) for key, value in row.items()}
    if "responses_create_params" in row:
        return _gym(row, domain, environment)
    messages = _messages(row.get("messages"))
    tools = _tools(row.get("tools"))
    answer = _answer(row)
    if messages and messages[-1]["role"] == "assistant":
        last = split_thoughts(messages.pop(), len(messages))
        answer = (last["content"] or None) if answer is None else answer
    _check(messages)
    known = ("messages", "tools", "domain", "environment", "pass_rate", "pass_rate_passed", "pass_rate_total")
    extra = {key: value for key, value in row.items() if key not in (*known, *ANSWERS, "extra")}
    return Prompt(
        messages=messages,
        domain=_name("domain", row.get("domain") or domain),
        environment=_environment(row.get("environment") or environment),
        answer=answer,
        pass_rate=_pass_rate(row),
        tools=tools,
        extra=extra | (row["extra"] if isinstance(row.get("extra"), dict) else {}),
    )


def _gym(row: Mapping[str, Any], domain: str | None, environment: str | None) -> Prompt:
    params = row["responses_create_params"]
    if not isinstance(params, Mapping):
        raise RowDropped("no messages", f"responses_create_params is {type(params).__name__}")
    messages = _items(params.get("input"))
    if params.get("instructions"):
        messages.insert(0, {"role": "system", "content": str(params["instructions"])})
    _check(messages)
    agent = row.get("agent_ref")
    name = agent.get("name") if isinstance(agent, Mapping) else None
    metadata = row.get("verifier_metadata")
    skipped = ("responses_create_params", "agent_ref", "verifier_metadata", "environment")
    rest = {key: value for key, value in row.items() if key not in skipped}
    extra = {key: value for key, value in rest.items() if key in _BOOKKEEPING or key.startswith(_COUNTERS)}
    args = {key: value for key, value in rest.items() if key not in extra}
    extra = {
        key: value for key, value in extra.items() if key not in ("messages", "tools", "domain", "pass_rate")
    }
    others = {
        k: v for k, v in params.items() if k not in ("input", "tools", "instructions") and v is not None
    }
    if others:
        extra["responses_create_params"] = others
    nested = metadata if isinstance(metadata, Mapping) else {}
    answer = _answer(row)
    return Prompt(
        messages=messages,
        domain=_name("domain", row.get("domain") or domain or row.get("dataset") or _domain_of(name)),
        environment=_environment(_gym_environment(name, args | dict(nested)) or environment),
        answer=_answer(nested) if answer is None else answer,
        pass_rate=_pass_rate(row),
        tools=_tools(params.get("tools")),
        extra=extra,
    )


def _items(items: Any) -> list[dict[str, Any]]:
    """Input items of the Responses API -> messages of the chat API."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    if not isinstance(items, list) or not items:
        raise RowDropped("no messages", "responses_create_params.input is empty")
    messages: list[dict[str, Any]] = []
    thoughts = ""
    for number, item in enumerate(items):
        if not isinstance(item, Mapping):
            raise RowDropped("no messages", f"input item {number} is {type(item).__name__}")
        kind = item.get("type", "message")
        if kind == "reasoning":
            parts = item.get("summary") or item.get("content") or []
            thoughts += content_text(parts)
            continue
        message = _message_of(item, kind, number)
        if thoughts and message["role"] == "assistant":
            message["reasoning_content"], thoughts = thoughts, ""
        if kind == "function_call" and messages and messages[-1]["role"] == "assistant":
            messages[-1].setdefault("tool_calls", []).extend(message["tool_calls"])
            continue
        messages.append(message)
    return messages


def _message_of(item: Mapping[str, Any], kind: str, number: int) -> dict[str, Any]:
    if kind == "function_call":
        call = {"id": item.get("call_id"), "name": item.get("name"), "arguments": item.get("arguments")}
        return _message({"role": "assistant", "content": "", "tool_calls": [call]}, number)
    if kind == "function_call_output":
        result = {"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")}
        return _message(result, number)
    if kind != "message":
        raise RowDropped("unknown kind of input", f"input item {number} has type {kind!r}")
    return _message(item, number)


def _messages(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise RowDropped("no messages", "the row has none")
    return [_message(message, number) for number, message in enumerate(value)]


def _message(message: Any, number: int) -> dict[str, Any]:
    """As `normal_message`, with tool calls in the chat API's nesting."""
    made = normal_message(message, number)
    if "tool_calls" in made:
        made["tool_calls"] = [_nested(call) for call in made["tool_calls"]]
    return made


def _nested(call: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": call["name"], "arguments": json.dumps(call["arguments"], ensure_ascii=False)}
    return {key: call[key] for key in ("id",) if key in call} | {"type": "function", "function": function}


def _check(messages: list[dict[str, Any]]) -> None:
    """Raises RowDropped unless the messages can be answered."""
    if not any(message["role"] == "user" for message in messages):
        raise RowDropped("no user message", " ".join(message["role"] for message in messages) or "none")
    if messages[-1]["role"] not in ("user", "tool"):
        raise RowDropped("nothing to answer", f"the last message is the {messages[-1]['role']}'s")
    for number, message in enumerate(messages):
        if message["role"] == "system" and number > 0:
            raise RowDropped("role order", f"message {number} is a system message")
        if message["role"] == "user" and not message["content"].strip():
            raise RowDropped("empty content", f"message {number} of the user")


def _tools(value: Any) -> list[dict[str, Any]]:
    """Tools of either API in the chat API's nesting."""
    flat = value if isinstance(value, list) else []
    if any(isinstance(tool, Mapping) and "function" not in tool and "name" in tool for tool in flat):
        value = [{k: v for k, v in tool.items() if k != "type"} if "name" in tool else tool for tool in flat]
    return list(normal_tools(value))


def _gym_environment(name: Any, args: dict[str, Any]) -> dict[str, Any] | None:
    return {"name": name, "args": args} if name else None


def _environment(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        value = {"name": value, "args": {}}
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str) or not value["name"]:
        raise RowDropped("no environment", "none in the row; --environment NAME gives one")
    args = value.get("args") or {}
    if not isinstance(args, Mapping):
        raise RowDropped("environment args are not an object", type(args).__name__)
    return {"name": value["name"], "args": dict(args)}


def _answer(row: Mapping[str, Any]) -> str | None:
    for field_name in ANSWERS:
        value = row.get(field_name)
        if value is not None:
            return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return None


def _pass_rate(row: Mapping[str, Any]) -> float | None:
    value = row.get("pass_rate")
    total, passed = row.get("pass_rate_total"), row.get("pass_rate_passed")
    if value is None and isinstance(total, int) and isinstance(passed, int) and total > 0:
        value = passed / total
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise RowDropped("pass rate is not in 0 to 1", repr(value))
    return float(value)


def _domain_of(agent: Any) -> str | None:
    return agent.removesuffix("_agent").removesuffix("_simple") if isinstance(agent, str) else None


def _name(what: str, value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise RowDropped(f"no {what}", f"none in the row; --{what} NAME gives one")
    return value.strip()


def _parsed(key: str, value: Any) -> Any:
    """Tables hold nested fields as JSON text sometimes."""
    if key not in NESTED or not isinstance(value, str) or value[:1] not in ("{", "["):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise RowDropped("a field's JSON text is malformed", f"{key}: {error}") from error
