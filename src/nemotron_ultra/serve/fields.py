"""Fields of a request's body: what each may be, checked before anything is done.

A field that would change the answer and that this server cannot honour is an error, not ignored.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from nemotron_ultra.serve.errors import ApiError

# Stops are looked for at every token of every answer.
MOST_STOPS, MOST_STOP_LETTERS = 64, 256
TOP_LOGPROBS = "log-probabilities are of the tokens drawn; those of other tokens are not kept"


@dataclass(frozen=True)
class Field:
    """`fits` says whether a value is allowed, `allowed` says it to people; null is the default."""

    allowed: str
    fits: Callable[[Any], bool]
    default: Any = None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def number(low: float, high: float, default: float) -> Field:
    return Field(f"a number from {low:g} to {high:g}", lambda v: _is_number(v) and low <= v <= high, default)


def whole(low: int, high: int | None = None, default: int | None = None) -> Field:
    allowed = f"a whole number of {low} or more" if high is None else f"a whole number from {low} to {high}"
    return Field(allowed, lambda v: _is_whole(v) and low <= v and (high is None or v <= high), default)


def flag() -> Field:
    return Field("true or false", lambda v: isinstance(v, bool), False)


def text(*choices: str) -> Field:
    allowed = ", ".join(choices) if choices else "a text"
    return Field(allowed, lambda v: isinstance(v, str) and (not choices or v in choices))


def objects() -> Field:
    return Field(
        "a list of objects", lambda v: isinstance(v, list) and all(isinstance(item, dict) for item in v)
    )


def mapping() -> Field:
    return Field("an object", lambda v: isinstance(v, dict))


def only(value: Any, why: str) -> Field:
    """What this server cannot do: only the value that asks for nothing is allowed."""
    return Field(f"{json.dumps(value)} or left out: {why}", lambda v: v == value, value)


def anything() -> Field:
    """Changes no answer."""
    return Field("anything", lambda v: True)


def _is_stop(value: Any) -> bool:
    texts = [value] if isinstance(value, str) else value
    return (
        isinstance(texts, list)
        and len(texts) <= MOST_STOPS
        and all(isinstance(text, str) and 0 < len(text) <= MOST_STOP_LETTERS for text in texts)
    )


def _is_stop_ids(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= MOST_STOPS and all(map(_is_whole, value))


def _is_prompt(value: Any) -> bool:
    if isinstance(value, str):
        return True
    if not isinstance(value, list) or not value:
        return False
    kinds = (
        lambda item: isinstance(item, str),
        _is_whole,
        lambda item: isinstance(item, list) and all(map(_is_whole, item)),
    )
    return any(all(map(kind, value)) for kind in kinds)


PENALTY = "penalties on repetition are not computed"
COMMON: dict[str, Field] = {
    "model": text(),
    "max_tokens": whole(1),
    "temperature": Field(
        "0, or a number from 0.00001 to 1000", lambda v: _is_number(v) and (v == 0 or 1e-5 <= v <= 1000), 1.0
    ),
    "top_p": Field("a number above 0, up to 1", lambda v: _is_number(v) and 0 < v <= 1, 1.0),
    "top_k": Field("a whole number of 0 or more, 0 or -1 for all", lambda v: _is_whole(v) and v >= -1, 0),
    "min_p": number(0, 1, 0.0),
    "seed": Field("a whole number", _is_whole),
    "n": whole(1, 128, 1),
    "stop": Field(
        f"a text, or a list of up to {MOST_STOPS}, of 1 to {MOST_STOP_LETTERS} letters each", _is_stop, []
    ),
    "stop_token_ids": Field(f"a list of up to {MOST_STOPS} token ids", _is_stop_ids, []),
    "ignore_eos": flag(),
    "stream": flag(),
    "stream_options": mapping(),
    "return_token_ids": flag(),
    "presence_penalty": only(0, PENALTY),
    "frequency_penalty": only(0, PENALTY),
    "repetition_penalty": only(1, PENALTY),
    "logit_bias": only({}, "logits are not changed"),
    "user": anything(),
    "metadata": anything(),
    "store": only(False, "nothing is stored"),
    "service_tier": anything(),
}
CHAT: dict[str, Field] = COMMON | {
    "messages": objects(),
    "max_completion_tokens": whole(1),
    "logprobs": flag(),
    "top_logprobs": only(0, TOP_LOGPROBS),
    "tools": objects(),
    "tool_choice": Field('"auto" or "none"', lambda v: v in ("auto", "none"), "auto"),
    "parallel_tool_calls": anything(),
    "reasoning_effort": text("none", "minimal", "low", "medium", "high"),
    "thinking_budget": whole(1),
    "chat_template_kwargs": mapping(),
    "response_format": only({"type": "text"}, "answers are not held to a form"),
    "modalities": only(["text"], "answers are text"),
}
COMPLETIONS: dict[str, Field] = COMMON | {
    "prompt": Field("a text, a list of texts, a list of token ids, or a list of such lists", _is_prompt),
    "logprobs": whole(0, 1),
    "echo": only(False, "the prompt is not part of the answer"),
    "suffix": only("", "text is continued, not filled in"),
    "best_of": whole(1),
}
TEMPLATE_WORDS: dict[str, Field] = {
    "enable_thinking": flag(),
    "reasoning_budget": whole(1),
    "reasoning_effort": CHAT["reasoning_effort"],
}
STREAM_WORDS: dict[str, Field] = {"include_usage": flag(), "include_obfuscation": anything()}


def read(content: Any, known: Mapping[str, Field], prefix: str = "") -> dict[str, Any]:
    """Every known field, null and what is missing as its default. Raises ApiError."""
    if not isinstance(content, dict):
        raise ApiError(f"the body must be a JSON object; got {type(content).__name__}")
    for name, value in content.items():
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f" (did you mean '{close[0]}'?)" if close else ""
            raise ApiError(
                f"unknown field '{prefix}{name}'{hint}", param=prefix + name, code="unknown_parameter"
            )
        if value is not None and not known[name].fits(value):
            shown = json.dumps(value)
            shown = shown if len(shown) <= 80 else shown[:77] + "..."
            message = f"{prefix}{name}: got {shown}; allowed: {known[name].allowed}"
            raise ApiError(message, param=prefix + name, code="invalid_value")
    given = {name: value for name, value in content.items() if value is not None}
    return {name: given.get(name, field.default) for name, field in known.items()}
