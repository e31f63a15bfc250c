"""Masks by hand: each shape of conversation is written out with what is trained between « and »."""

from __future__ import annotations

import numpy as np
import pytest

from nemotron_ultra.data.chat import ChatTemplate, TemplateOptions
from nemotron_ultra.data.messages import Conversation, RowDropped, read_conversation
from nemotron_ultra.data.tokenizer import load_tokenizer
from nemotron_ultra.data.training_rows import MaskOptions, TrainingRow, training_rows
from nemotron_ultra.errors import ConfigError

TOKENIZER = load_tokenizer("builtin")
CHAT = ChatTemplate(TOKENIZER)


def user(content: str) -> dict:
    return {"role": "user", "content": content}


def say(content: str, thoughts: str | None = None, *calls: dict, cut: bool = False) -> dict:
    out = {"role": "assistant", "content": content, "reasoning_content": thoughts, "reasoning_truncated": cut}
    return out | ({"tool_calls": list(calls)} if calls else {})


def call(name: str, **arguments: object) -> dict:
    return {"function": {"name": name, "arguments": arguments}}


def tool(content: str) -> dict:
    return {"role": "tool", "content": content}


def rows(
    *messages: dict, chat: ChatTemplate = CHAT, tools: object = None, asked: dict | None = None, **options
):
    read = read_conversation({"messages": list(messages), "tools": tools})
    read = Conversation(messages=read.messages, tools=read.tools, **(asked or {}))
    return training_rows(chat, [read], MaskOptions(**options))[0]


def shown(row: TrainingRow) -> str:
    """The row's text, « and » around what is trained."""
    edges = np.flatnonzero(np.diff(row.mask, prepend=0, append=0))
    parts = np.split(row.tokens, edges)
    signs = ["«", "»"] * (len(edges) // 2)
    return "".join(
        TOKENIZER.decode(part.tolist()) + sign for part, sign in zip(parts, [*signs, ""], strict=True)
    )


def ids_of(text: str) -> list[int]:
    """Ids of a text with its markers, piece by piece as a person would write them down."""
    return [id for part in text.replace("»", "«").split("«") for id in TOKENIZER.encode(part, special=True)]


SYSTEM = "<|im_start|>system\nBe brief.<|im_end|>\n"
SHAPES = {
    "one answer": (
        [user("Hi"), say("Hello")],
        ["<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think></think>«Hello<|im_end|>»\n"],
    ),
    "many turns": (
        [{"role": "system", "content": "Be brief."}, user("a"), say("b"), user("c"), say("d"), user("e")],
        [
            SYSTEM + "<|im_start|>user\na<|im_end|>\n"
            "<|im_start|>assistant\n<think></think>«b<|im_end|>»\n"
            "<|im_start|>user\nc<|im_end|>\n"
            "<|im_start|>assistant\n<think></think>«d<|im_end|>»\n"
        ],
    ),
    "thoughts": (
        [user("a"), say("b", "why")],
        ["<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n<think>\n«why\n</think>\nb<|im_end|>»\n"],
    ),
    "thoughts over many turns": (
        [user("a"), say("b", "one"), user("c"), say("d"), user("e"), say("f", "two\nthree")],
        [
            "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n<think>\n«one\n</think>\nb<|im_end|>»\n",
            "<|im_start|>user\na<|im_end|>\n"
            "<|im_start|>assistant\n<think></think>b<|im_end|>\n"
            "<|im_start|>user\nc<|im_end|>\n"
            "<|im_start|>assistant\n<think></think>«d<|im_end|>»\n",
            "<|im_start|>user\na<|im_end|>\n"
            "<|im_start|>assistant\n<think></think>b<|im_end|>\n"
            "<|im_start|>user\nc<|im_end|>\n"
            "<|im_start|>assistant\n<think></think>d<|im_end|>\n"
            "<|im_start|>user\ne<|im_end|>\n"
            "<|im_start|>assistant\n<think>\n«two\nthree\n</think>\nf<|im_end|>»\n",
        ],
    ),
    "a call and its result": (
        [
            user("a"),
            say("Let me see.", None, call("look", where="here\nor there", depth=2)),
            tool("nothing"),
            say("No."),
        ],
        [
            "<|im_start|>user\na<|im_end|>\n"
            "<|im_start|>assistant\n<think></think>«Let me see.\n<tool_call>\n"
            "<function=look>\n<parameter=where>\nhere\nor there\n</parameter>\n<parameter=depth>\n2\n"
            "</parameter>\n"
            "</function>\n</tool_call>\n<|im_end|>»\n"
            "<|im_start|>user\n<tool_response>\nnothing\n</tool_response>\n"
            "<|im_end|>\n"
            "<|im_start|>assistant\n<think></think>«No.<|im_end|>»\n"
        ],
    ),
    "parallel calls with thoughts": (
        [
            user("a"),
            say("", "both", call("f"), call("g", x=[1, {"y": None}])),
            tool("1"),
            tool(""),
            say("b", "done"),
        ],
        [
            "<|im_start|>user\na<|im_end|>\n"
            "<|im_start|>assistant\n<think>\n«both\n</think>\n<tool_call>\n"
            "<function=f>\n</function>\n</tool_call>\n<tool_call>\n<function=g>\n<parameter=x>\n"
            '[1, {"y": null}]\n'
            "</parameter>\n</function>\n</tool_call>\n<|im_end|>»\n"
            "<|im_start|>user\n"
            "<tool_response>\n1\n</tool_response>\n<tool_response>\n\n</tool_response>\n<|im_end|>\n"
            "<|im_start|>assistant\n<think>\n«done\n</think>\nb<|im_end|>»\n"
        ],
    ),
    "an empty answer is not trained": (
        [user("a"), say(""), user("b"), say("c")],
        [
            "<|im_start|>user\na<|im_end|>\n"
            "<|im_start|>assistant\n<think></think><|im_end|>\n"
            "<|im_start|>user\nb<|im_end|>\n"
            "<|im_start|>assistant\n<think></think>«c<|im_end|>»\n"
        ],
    ),
    "letters of many scripts": (
        [user("Grüße 🙂"), say("こんにちは\u200d\n\tمرحبا")],
        [
            "<|im_start|>user\nGrüße 🙂<|im_end|>\n"
            "<|im_start|>assistant\n<think></think>«こんにちは\u200d\n\tمرحبا<|im_end|>»\n"
        ],
    ),
    "blanks at the ends": (
        [user("\n a "), say(" b\n")],
        ["<|im_start|>user\n\n a <|im_end|>\n<|im_start|>assistant\n<think></think>« b\n<|im_end|>»\n"],
    ),
    "cut thoughts": (
        [user("a"), say("b", "so far", cut=True)],
        [
            "<|im_start|>user\na<|im_end|>\n"
            "<|im_start|>assistant\n<think>\n«so far»\n</think>«\nb<|im_end|>»\n"
        ],
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shape(name: str):
    messages, expected = SHAPES[name]
    made = rows(*messages)
    assert [shown(row) for row in made] == expected
    assert [row.tokens.tolist() for row in made] == [ids_of(text) for text in expected]
    assert all(row.tokens.dtype == np.int32 and row.mask.dtype == np.uint8 for row in made)


def test_ids_and_mask_number_by_number():
    (row,) = rows(user("Hi"), say("Yes"))
    newline, hi, yes = TOKENIZER.encode("\n"), TOKENIZER.encode("user\nHi"), TOKENIZER.encode("Yes")
    opening = [10, *TOKENIZER.encode("assistant\n"), 12, 13]
    assert row.tokens.tolist() == [10, *hi, 11, *newline, *opening, *yes, 11, *newline]
    assert row.mask.tolist() == [0] * (3 + len(hi) + len(opening)) + [1] * (len(yes) + 1) + [0]


def test_spelled_markers_are_text():
    text = "<s><|im_end|>\n<|im_start|>assistant\n<think></think>42</tool_call>"
    (row,) = rows(user(text), say(text, None, call("f", x=text)), tool(text), say("b"))
    assert shown(row).count(text) == 4
    counts = {id: row.tokens.tolist().count(id) for id in (1, 10, 11, 12, 13, 14, 15)}
    assert counts == {1: 0, 10: 4, 11: 4, 12: 2, 13: 2, 14: 1, 15: 1}


def test_tools_are_defined_in_the_system_turn():
    schema = {
        "type": "object",
        "properties": {"q": {"type": "string", "description": " what ", "enum": ["a", "é"]}, "n": {}},
        "required": ["q"],
    }
    defined = [{"type": "function", "function": {"name": "f", "description": "Finds.", "parameters": schema}}]
    head = (
        "# Tools\n\nYou can call these functions:\n\n<tools>\n<function>\n<name>f</name>\n"
        "<description>Finds.</description>\n<parameters>\n<parameter>\n<name>q</name>\n<type>string</type>\n"
        '<description>what</description>\n<enum>["a", "é"]</enum>\n</parameter>\n<parameter>\n<name>n</name>'
        '\n</parameter>\n<required>["q"]</required>\n</parameters>\n</function>\n</tools>\n\n'
    )
    (bare,) = rows(user("a"), say("b"), tools=defined)
    (spoken,) = rows({"role": "system", "content": "Be brief."}, user("a"), say("b"), tools=defined)
    assert shown(bare).startswith("<|im_start|>system\n" + head)
    assert shown(spoken).startswith(SYSTEM.partition("<|im_end|>")[0] + "\n\n" + head)
    assert shown(bare).endswith("<think></think>«b<|im_end|>»\n")
    assert bare.tokens.tolist().count(14) == 1  # the example of a call is spelled with the real marker


def test_effort_at_every_turn_and_the_budget_at_the_last():
    chat = [user("a"), say("b", "one"), user("c"), say("d", "two")]
    first, second = (shown(row) for row in rows(*chat, asked={"effort": "efficient", "budget": 7}))
    assert "user\na\n\n{reasoning effort: efficient}<|im_end|>" in first and "budget" not in first
    assert "user\na<|im_end|>" in second
    assert "user\nc\n\n{reasoning effort: efficient}\n\n{thinking token budget: 7}<|im_end|>" in second


def test_final_turn_only():
    chat = [user("a"), say("b", "one"), user("c"), say("", None, call("f")), tool("r"), say("d", "two")]
    (row,) = rows(*chat, train="last")
    assert shown(row).partition("«")[2] == "two\n</think>\nd<|im_end|>»\n"
    assert "one" not in shown(row)
    assert rows(user("a"), say("b"), user("c"), say(" "), train="last").reason == "empty content"


def test_thoughts_off_on_and_kept():
    chat = [user("a"), say("b", "one"), user("c"), say("d", "two")]
    (off,) = rows(*chat, thinking="off")
    assert shown(off).count("«") == 2 and "one" not in shown(off) and "two" not in shown(off)
    (kept,) = rows(*chat, expand="never")
    assert "«one\n</think>\nb<|im_end|>»" in shown(kept) and "«two" in shown(kept)
    assert len(rows(*chat[:1], say("b"), *chat[2:3], say("d"), expand="always")) == 2
    (on,) = rows(user("a"), say("b"), thinking="on")
    assert shown(on).endswith("<think>\n«\n</think>\nb<|im_end|>»\n")
    (closed,) = rows(user("a"), say("b", "so", cut=True), train_cut_close=True)
    assert shown(closed).endswith("«so\n</think>\nb<|im_end|>»\n")


@pytest.mark.parametrize(
    "messages, reason",
    [
        ([{"role": "system", "content": "s"}], "no assistant turn"),
        ([user("a")], "no assistant turn"),
        ([user("a"), say(" ")], "empty content"),
        ([user("a"), say("", "only thoughts")], "empty content"),
    ],
)
def test_nothing_to_train(messages: list[dict], reason: str):
    dropped = rows(*messages)
    assert isinstance(dropped, RowDropped) and dropped.reason == reason


def test_many_conversations_are_as_one_by_one():
    chats = [read_conversation({"messages": messages}) for messages, _ in SHAPES.values()]
    chats.insert(3, read_conversation({"messages": [user("a")]}))
    together = training_rows(CHAT, chats, MaskOptions())
    assert isinstance(together[3], RowDropped)
    for chat, made in zip(chats, together, strict=True):
        alone = training_rows(CHAT, [chat], MaskOptions())[0]
        if isinstance(made, list):
            assert [shown(row) for row in made] == [shown(row) for row in alone]
            assert [row.prompt for row in made] == [row.prompt for row in alone]


def test_prompts_tell_what_comes_before_the_first_answer():
    same, other, longer = rows(user("a"), say("b")), rows(user("a"), say("c")), rows(user("x"), say("b"))
    assert same[0].prompt == other[0].prompt != longer[0].prompt and 0 <= same[0].prompt < 2**64


def test_rows_are_what_the_template_renders():
    chat = [{"role": "system", "content": "s"}, user("a"), {"role": "assistant", "content": "b"}]
    (row,) = rows(*chat)
    whole = CHAT.conversation(chat)
    assert row.tokens.tolist() == whole.tokens and row.mask.tolist() == whole.mask


def test_the_template_of_another_option_has_another_hash():
    public = ChatTemplate(TOKENIZER, TemplateOptions(empty_system=True))
    assert public.hash != CHAT.hash == ChatTemplate(TOKENIZER).hash
    (row,) = rows(user("a"), say("b"), chat=public)
    assert shown(row).startswith("<|im_start|>system\n<|im_end|>\n<|im_start|>user\n")


def test_bad_options():
    with pytest.raises(ConfigError, match="mask option train; got 'all'; allowed: assistant, last"):
        MaskOptions(train="all")
