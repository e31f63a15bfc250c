"""Tools as the shipped template spells them: definitions and calls in XML (report 3.1; parser qwen3_coder).

Differs from the public template: the text that explains the format of a call is our own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

CALL, CALL_END = "<tool_call>", "</tool_call>"
RESPONSE, RESPONSE_END = "<tool_response>", "</tool_response>"

_FORMAT = (
    "To call a function, end your turn with one block of this form for every call:\n\n",
    CALL,
    "\n<function=NAME>\n<parameter=FIRST>\nvalue, over as many lines as it takes\n</parameter>\n"
    "<parameter=SECOND>\nvalue\n</parameter>\n</function>\n",
    CALL_END,
    "\n\nGive every required parameter, and write what you have to say before the first block.",
)


def definitions(tools: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """The "# Tools" section of the system turn for {"type": "function", "function": {...}} definitions.

    In pieces: the second is <tool_call> and the fourth </tool_call>, the others are text.
    """
    blocks = "".join(_definition(tool["function"]) for tool in tools)
    begin, *others = _FORMAT
    return (f"# Tools\n\nYou can call these functions:\n\n<tools>{blocks}\n</tools>\n\n{begin}", *others)


def call_body(call: Mapping[str, Any]) -> str:
    """What stands between <tool_call> and </tool_call>; text arguments as they are, others as JSON."""
    parameters = "".join(
        f"<parameter={name}>\n{value if isinstance(value, str) else dumps(value)}\n</parameter>\n"
        for name, value in call["arguments"].items()
    )
    return f"\n<function={call['name']}>\n{parameters}</function>\n"


def dumps(value: Any) -> str:
    """JSON as it is written for people: letters as they are, a space after , and :"""
    return json.dumps(value, ensure_ascii=False)


def _definition(function: Mapping[str, Any]) -> str:
    lines = ["", "<function>", f"<name>{function['name']}</name>"]
    if function.get("description"):
        lines.append(f"<description>{str(function['description']).strip()}</description>")
    schema = function.get("parameters") or {}
    lines.append("<parameters>")
    for name, fields in (schema.get("properties") or {}).items():
        lines += ["<parameter>", f"<name>{name}</name>"]
        lines += _fields(fields, ("type", "description", "enum")) if isinstance(fields, Mapping) else []
        lines.append("</parameter>")
    lines += _fields({k: v for k, v in schema.items() if k not in ("type", "properties")}, ())
    lines.append("</parameters>")
    lines += _fields(
        {k: v for k, v in function.items() if k not in ("name", "description", "parameters")}, ()
    )
    return "\n".join([*lines, "</function>"])


def _fields(fields: Mapping[str, Any], first: Sequence[str]) -> list[str]:
    """<key>value</key> of a schema's entries, those named in `first` before the others."""
    order = [key for key in first if key in fields] + [key for key in fields if key not in first]
    values = {key: fields[key] for key in order if fields[key] is not None}
    return [
        f"<{key}>{value.strip() if isinstance(value, str) else dumps(value)}</{key}>"
        for key, value in values.items()
    ]
