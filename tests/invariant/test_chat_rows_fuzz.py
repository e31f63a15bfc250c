"""A row of a chat data set, however broken, becomes rows or a counted drop, and never another error."""

from __future__ import annotations

import copy
import datetime
import decimal
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from nemotron_ultra.data.chat import ChatTemplate
from nemotron_ultra.data.jinja_chat import JinjaTemplate
from nemotron_ultra.data.messages import RowDropped, read_conversation
from nemotron_ultra.data.prompt_rows import read_prompt
from nemotron_ultra.data.tokenizer import load_tokenizer
from nemotron_ultra.data.training_rows import MaskOptions, training_rows

TOKENIZER = load_tokenizer("builtin")
JINJA = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>
{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
TEMPLATES = [ChatTemplate(TOKENIZER), JinjaTemplate(TOKENIZER, JINJA, name="jinja", where="here")]
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": [1, "é"]}'}}
PARAMETERS = {"type": "object", "properties": {"x": {"type": "string", "enum": ["a"]}}, "required": ["x"]}
ROW = {
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": None, "reasoning_content": "r", "tool_calls": [CALL]},
        {"role": "tool", "content": "t", "tool_call_id": "1"},
        {"role": "assistant", "content": "<think>q</think>b", "reasoning_truncated": False},
        {"role": "user", "content": "c<|im_end|>"},
        {"role": "assistant", "content": "d", "reasoning": "e", "reasoning_truncated": True},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "description": "d", "parameters": PARAMETERS}}],
}
SHARE = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "<think>b</think>c"}]}
NESTED: Any = 1
for _ in range(700):  # json.loads reads nearly 1000 levels
    NESTED = [NESTED]
ODD = (None, True, 0, -1.5, float("nan"), "", " ", "[", "{}", "[" * 5000, "\ud800", "\0", "<think>", [], {})
# What tables hold besides the types of JSON.
ODD += ([None], {"a": {}}, [[]], NESTED, b"x", datetime.date(2026, 1, 1), decimal.Decimal(1))


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of everything in a row."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        yield value, key
        if inner != NESTED:
            yield from places(inner)


def broken_rows() -> Iterator[dict[str, Any]]:
    """Every place of a row with every odd value, then some with several."""
    for row in (ROW, SHARE):
        for number in range(len(list(places(row)))):
            for odd in ODD:
                changed = copy.deepcopy(row)
                container, key = list(places(changed))[number]
                container[key] = copy.copy(odd)
                yield changed
    draw = random.Random(0)
    for _ in range(300):
        changed = copy.deepcopy(ROW)
        for _ in range(draw.randint(2, 5)):
            container, key = draw.choice(list(places(changed)))
            container[key] = copy.copy(draw.choice(ODD))
        yield changed


@pytest.mark.parametrize("template", TEMPLATES, ids=["builtin", "jinja"])
def test_a_broken_row_is_dropped_or_read(template):
    made = dropped = 0
    for row in broken_rows():
        try:
            read = read_conversation(row)
        except RowDropped:
            dropped += 1
            continue
        rows = training_rows(template, [read], MaskOptions())[0]
        assert isinstance(rows, RowDropped) or all(
            len(r.tokens) == len(r.mask) and r.mask.any() for r in rows
        )
        made += 1
    assert made > 100 and dropped > 100


def test_a_broken_prompt_is_dropped_or_read():
    made = dropped = 0
    for row in broken_rows():
        try:
            prompt = read_prompt(row, "d", "e")
            assert json.dumps(prompt.row(), default=str) and prompt.key()
        except RowDropped:
            dropped += 1
        else:
            made += 1
    assert made > 100 and dropped > 100
