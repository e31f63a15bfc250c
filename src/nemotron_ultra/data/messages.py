"""One row of a chat data set -> a Conversation in one fixed form, or RowDropped with a reason to count by.

Read are OpenAI messages (text or text parts, tool calls nested or flat, arguments as object or JSON text),
the {"from", "value"} turns of ShareGPT, and thoughts written as <think>...</think> before an answer; blank
thoughts are none. Roles are held to one order: system first, then user and assistant by turns, tool results
after the calls they answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

ROLES = ("system", "user", "assistant", "tool")
_SHAREGPT = {"human": "user", "gpt": "assistant", "observation": "tool"}
_THOUGHTS = re.compile(r"\s*<think>\n?(.*?)\n?</think>\s*(.*)", re.DOTALL)


class RowDropped(Exception):
    """A conversation that cannot be used: counted by `reason` and shown by `detail`, not fatal."""

    def __init__(self, reason: str, detail: str):
        self.reason, self.detail = reason, detail
        super().__init__(f"{reason}: {detail}")

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return RowDropped, (self.reason, self.detail)


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Messages and tools in one form, whatever file they came from.

    A message has role and content (text), and where they apply reasoning_content, tool_calls [{"id"?,
    "name", "arguments": object}], tool_call_id, and reasoning_truncated (true: the thoughts were cut at a
    budget, so their closing tag is no target). tools are {"type": "function", "function": {...}}. effort
    and budget are what the last user's turn asks for; the effort is asked for at every user's turn.
    """

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()
    effort: str | None = None
    budget: int | None = None

    @property
    def reasons(self) -> bool:
        """Whether any answer comes with thoughts."""
        return any(message.get("reasoning_content") for message in self.messages)


@contextmanager
def depth_checked() -> Iterator[None]:
    """What is nested too deeply for Python's stack is no conversation: RowDropped."""
    try:
        yield
    except RecursionError as error:
        raise RowDropped("nested too deeply", "lists or objects inside each other without end") from error


@depth_checked()
def read_conversation(
    row: Mapping[str, Any], *, messages_field: str = "messages", tools_field: str = "tools"
) -> Conversation:
    """The conversation of a row. Raises RowDropped."""
    given, share = row.get(messages_field), False
    if given is None and row.get("conversations") is not None:
        given, share = row["conversations"], True
    messages = []
    for number, message in enumerate(_listed(given, messages_field, "bad messages")):
        normal = normal_message(_from_sharegpt(message) if share else message, number)
        messages.append(split_thoughts(normal, number))
    if not messages:
        raise RowDropped("no messages", f"no messages under {messages_field!r}")
    _check_order(messages)
    return Conversation(messages=tuple(messages), tools=normal_tools(row.get(tools_field), tools_field))


def normal_message(message: Any, number: int) -> dict[str, Any]:
    """One message in the form of Conversation; `number` is its place. Raises RowDropped."""
    if type(message) is not dict and not isinstance(message, Mapping):
        raise RowDropped("bad messages", f"message {number} is no object; got {type(message).__name__}")
    role = message.get("role")
    role = "system" if role == "developer" else role
    if role not in ROLES:
        got, allowed = repr(role)[:80], ", ".join(ROLES)
        raise RowDropped(
            "unknown role", f"message {number} has an unknown role; got {got}; allowed: {allowed}"
        )
    if role == "system" and number > 0:
        raise RowDropped("role order", f"message {number} is a system message; give the system message first")
    calls = message.get("tool_calls") if role == "assistant" else None
    calls = () if calls is None else _listed(calls, "tool_calls", "bad tool call")
    content = message.get("content")
    out = {"role": role, "content": "" if content is None and calls else _text(content, number, "content")}
    if role == "assistant":
        thoughts = message.get("reasoning_content")
        thoughts = message.get("reasoning") if thoughts is None else thoughts
        if thoughts is not None:
            out["reasoning_content"] = _text(thoughts, number, "reasoning_content")
        if calls:
            out["tool_calls"] = [_call(call, number) for call in calls]
        if thoughts is not None and message.get("reasoning_truncated"):
            out["reasoning_truncated"] = True
    elif role == "tool" and message.get("tool_call_id") is not None:
        out["tool_call_id"] = str(message["tool_call_id"])
    return out


def split_thoughts(message: dict[str, Any], number: int) -> dict[str, Any]:
    """A normal message without blank thoughts, and <think>thoughts</think>answer as thoughts and answer where
    the thoughts do not come by themselves. Raises RowDropped."""
    content, thoughts = message["content"], message.get("reasoning_content")
    if thoughts is not None and not thoughts.strip():
        message = {key: value for key, value in message.items() if not key.startswith("reasoning")}
    elif thoughts:
        return message
    if message["role"] != "assistant" or not content[:64].lstrip().startswith("<think>"):
        return message
    found = _THOUGHTS.fullmatch(content)
    if found is None:
        raise RowDropped("unclosed thinking", f"message {number} opens <think> and never closes it")
    thoughts, answer = found.groups()
    return message | {"content": answer} | ({"reasoning_content": thoughts} if thoughts.strip() else {})


def normal_tools(given: Any, field: str = "tools") -> tuple[dict[str, Any], ...]:
    """Tool definitions, nested or flat, a list or JSON text -> the nested form. Raises RowDropped."""
    if given is None or (isinstance(given, str) and not given.strip()):
        return ()
    tools = []
    for number, tool in enumerate(_listed(given, field, "bad tools")):
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RowDropped("bad tools", f"tool {number} has no name; got {str(tool)[:80]}")
        schema = function.get("parameters") or {}
        if not isinstance(schema, Mapping) or not isinstance(schema.get("properties") or {}, Mapping):
            raise RowDropped("bad tools", f"tool {number}: parameters must be a JSON schema object")
        _check_encodable(function, "bad tools", f"tool {number}")
        kept = {key: value for key, value in function.items() if value is not None}
        tools.append({"type": "function", "function": kept})
    return tuple(tools)


def _listed(given: Any, field: str, reason: str) -> Sequence[Any]:
    if isinstance(given, str):
        given = _json(given, reason, f"{field} is text but not JSON")
    if type(given) is list:
        return given
    if given is None:
        raise RowDropped("no messages" if reason == "bad messages" else reason, f"no {field!r} in the row")
    if isinstance(given, Mapping | str | bytes) or not isinstance(given, Sequence):
        listed = getattr(given, "tolist", None)  # a numpy array, as parquet readers give lists
        given = given if listed is None else listed()
        if listed is None or not isinstance(given, list):
            raise RowDropped(reason, f"{field} must be a list; got {type(given).__name__}")
    return given


def _json(text: str, reason: str, problem: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise RowDropped(reason, f"{problem}; got {error}") from error


def _text(value: Any, number: int, key: str) -> str:
    if not isinstance(value, str):
        value = _joined(value, number, key)
    if not value.isascii():
        _check_encodable(value, "bad content", f"message {number}: {key}")
    return value


def _joined(value: Any, number: int, key: str) -> str:
    """Text of a list of {"type": "text", "text": ...} parts."""
    if not isinstance(value, list | tuple):
        raise RowDropped("bad content", f"message {number}: {key} must be text; got {type(value).__name__}")
    texts = []
    for part in value:
        text = part.get("text") if isinstance(part, Mapping) else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise RowDropped(
                "bad content", f"message {number}: {key} must be text; got a part of type {kind!r}"
            )
        texts.append(text)
    return "".join(texts)


def _check_encodable(value: Any, reason: str, where: str) -> None:
    """Refuse half surrogate pairs, which no UTF-8 text holds, and what JSON cannot carry."""
    try:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        text.encode()
    except (UnicodeEncodeError, TypeError, ValueError) as error:
        raise RowDropped(reason, f"{where} is no valid text; got {error}") from error


def _call(call: Any, number: int) -> dict[str, Any]:
    function = call.get("function") or call if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise RowDropped("bad tool call", f"message {number}: a tool call has no name; got {str(call)[:80]}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        problem = f"message {number}: arguments are no JSON"
        arguments = _json(arguments, "bad tool call", problem) if arguments.strip() else {}
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, Mapping):
        kind = type(arguments).__name__
        raise RowDropped("bad tool call", f"message {number}: arguments must be an object; got {kind}")
    _check_encodable([function["name"], arguments], "bad tool call", f"message {number}: a tool call")
    out = {} if call.get("id") is None else {"id": str(call["id"])}
    return out | {"name": function["name"], "arguments": dict(arguments)}


def _from_sharegpt(turn: Any) -> Any:
    if not isinstance(turn, Mapping) or "from" not in turn:
        return turn  # OpenAI's messages under ShareGPT's name
    role = turn["from"]
    return {"role": _SHAREGPT.get(str(role), role), "content": turn.get("value")}


def _check_order(messages: list[dict[str, Any]]) -> None:
    """Raises RowDropped where a message cannot follow the one before it."""
    before, open_calls = "system", []
    for number, message in enumerate(messages):
        role = message["role"]
        if role == "tool":
            _answer_call(message, number, before, open_calls)
        elif role == "user" and before == "user":
            raise RowDropped("role order", f"message {number} is the user's, and so is the one before it")
        elif role == "assistant" and before in ("assistant", "system"):
            raise RowDropped("role order", f"message {number} is the assistant's and follows no user or tool")
        elif role == "assistant":
            open_calls = [call.get("id") for call in message.get("tool_calls", ())]
        if role == "user" and not message["content"].strip():
            raise RowDropped("empty content", f"message {number} of the user is empty")
        before = role


def _answer_call(message: dict[str, Any], number: int, before: str, open_calls: list[str | None]) -> None:
    """Take the call that a tool result answers off `open_calls`."""
    if before not in ("assistant", "tool") or not open_calls:
        raise RowDropped(
            "tool result without call", f"message {number} is a tool result that no call asks for"
        )
    id = message.get("tool_call_id")
    if id is None or None in open_calls:
        open_calls.pop(0)
    elif id in open_calls:
        open_calls.remove(id)
    else:
        raise RowDropped(
            "tool result without call", f"message {number} answers call {id!r}; open: {open_calls}"
        )
