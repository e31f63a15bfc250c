"""<tool_call> blocks of an answer -> OpenAI's tool_calls; the format is that of `data/tool_text.py`."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from nemotron_ultra.data.tool_text import CALL, CALL_END

_BLOCK = re.compile(
    re.escape(CALL) + r"\s*<function=([^>\n]+)>\s*(.*?)\s*</function>\s*" + re.escape(CALL_END), re.DOTALL
)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


def parse_calls(text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """(calls, the text that is left) of an answer's end, from its first <tool_call> on.

    What is no complete call of this form stays text.
    """
    calls = []
    for name, body in _BLOCK.findall(text):
        kinds = _kinds(name, tools)
        arguments = {key: _value(value, kinds.get(key)) for key, value in _PARAMETER.findall(body)}
        function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
        calls.append({"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function})
    return calls, _BLOCK.sub("", text).strip("\n") if calls else text


def _kinds(name: str, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Parameter -> type in the JSON schema of the tool of this name."""
    for tool in tools:
        function = tool.get("function", tool)
        if function.get("name") == name:
            properties = (function.get("parameters") or {}).get("properties") or {}
            return {key: field.get("type") for key, field in properties.items() if isinstance(field, Mapping)}
    return {}


def _value(text: str, kind: Any) -> Any:
    """Texts are written as they are, everything else as JSON."""
    if kind == "string":
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text
