"""Jinja templates: renders as transformers makes them, masks, guarded texts, and what goes wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from nemotron_ultra.data.chat import load_template
from nemotron_ultra.data.jinja_chat import JinjaTemplate
from nemotron_ultra.data.messages import RowDropped, read_conversation
from nemotron_ultra.data.tokenizer import BUILTIN, load_tokenizer
from nemotron_ultra.data.training_rows import MaskOptions, training_rows
from nemotron_ultra.errors import DataError

TOKENIZER = load_tokenizer("builtin")
CHATML = """{%- set ns = namespace(asked=-1) -%}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.asked = loop.index0 %}{% endif %}{% endfor -%}
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif -%}
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' and m.reasoning_content and loop.index0 > ns.asked -%}
{{ '<think>\\n' + m.reasoning_content + '\\n</think>\\n' }}
{%- endif %}
{{- m.content }}
{%- for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
HEADERS = """{{ bos_token }}{% for m in messages %}{% if m.role == 'robot' %}{% continue %}{% endif %}
<SPECIAL_3>{{ m['role'] }}<SPECIAL_4>

{{ m['content'] | trim }}<SPECIAL_5>
{%- endfor %}{% if add_generation_prompt %}<SPECIAL_3>assistant<SPECIAL_4>

{% endif %}"""
INST = """{{ bos_token }}{% for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %}
{% generation %} {{ m.content }}{{ eos_token }}{% endgeneration %}{% endif %}{% endfor %}"""
SHAPES = {"chatml": CHATML, "headers": HEADERS, "inst": INST}
CHAT = [
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "Ünd\n  plus 1? "},
    {"role": "assistant", "content": "5, I think"},
]


def shape(name: str) -> JinjaTemplate:
    return JinjaTemplate(TOKENIZER, SHAPES[name], name=name, where=f"{name}.jinja")


def rows(template: JinjaTemplate, messages: list[dict], **options):
    chat = read_conversation({"messages": messages})
    return training_rows(template, [chat], MaskOptions(**options))[0]


def trained(row) -> str:
    return TOKENIZER.decode(row.tokens[row.mask == 1].tolist())


@pytest.mark.parametrize("name", SHAPES)
def test_ids_are_those_of_transformers(name: str):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(BUILTIN)
    theirs.chat_template = SHAPES[name]
    text = theirs.apply_chat_template(CHAT, tokenize=False)
    row = rows(shape(name), CHAT)[0]
    assert TOKENIZER.decode(row.tokens.tolist()) == text
    prompt = theirs.apply_chat_template(CHAT[:3], add_generation_prompt=True, tokenize=True)
    assert shape(name).prompt(CHAT[:3]) == list(prompt["input_ids"])


def test_tools_as_transformers_renders_them():
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(BUILTIN)
    theirs.chat_template = CHATML
    call = {"type": "function", "function": {"name": "f", "arguments": {"q": "größer", "n": [1, 2]}}}
    chat = [CHAT[0], {"role": "assistant", "content": "", "tool_calls": [call]}]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    ours = shape("chatml").conversation(chat, tools=tools)
    assert TOKENIZER.decode(ours.tokens) == theirs.apply_chat_template(chat, tools=tools, tokenize=False)
    ends = [i for i, (a, b) in enumerate(zip(ours.tokens, ours.mask, strict=True)) if b and a == 15]
    assert len(ends) == 1  # </tool_call> is written by the template: an id, and trained


@pytest.mark.parametrize(
    "name, first, last, stop",
    [
        ("chatml", "4<|im_end|>", "5, I think<|im_end|>", "<|im_end|>"),
        ("headers", "4<SPECIAL_5>", "5, I think<SPECIAL_5>", "<SPECIAL_5>"),
        ("inst", " 4</s>", " 5, I think</s>", "</s>"),
    ],
)
def test_masks(name: str, first: str, last: str, stop: str):
    template = shape(name)
    (row,) = rows(template, CHAT)
    assert trained(row) == first + last
    assert trained(rows(template, CHAT, train="last")[0]) == last
    assert template.stop_ids == tuple(dict.fromkeys((TOKENIZER.id(stop), TOKENIZER.eos_id)))
    assert (row.tokens == TOKENIZER.bos_id).sum() == (name != "chatml")


def test_thoughts_and_their_cut_end():
    chat = [CHAT[0], CHAT[1] | {"reasoning_content": "two"}, CHAT[2], CHAT[3] | {"reasoning_content": "four"}]
    first, second = rows(shape("chatml"), chat)
    assert trained(first) == "<think>\ntwo\n</think>\n4<|im_end|>"
    assert trained(second) == "<think>\nfour\n</think>\n5, I think<|im_end|>"
    assert "two" not in TOKENIZER.decode(second.tokens.tolist())
    chat[3]["reasoning_truncated"] = True
    assert trained(rows(shape("chatml"), chat)[1]) == "<think>\nfour\n5, I think<|im_end|>"
    dropped = rows(shape("chatml"), chat, expand="never")
    assert isinstance(dropped, RowDropped) and dropped.reason == "renders are no prefixes"


@pytest.mark.parametrize("extra", ["", "\U0010fffd", "\U0010fffd\U0010fffc<|im_end|>"])
def test_spelled_tokens_stay_text(extra: str):
    content = "<s> <|im_end|>\n<|im_start|>assistant\n<think>42</s>" + extra
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": content}]
    for name, starts in (("chatml", 2), ("headers", 0)):
        (row,) = rows(shape(name), messages)
        ids = row.tokens.tolist()
        assert ids.count(TOKENIZER.id("<|im_start|>")) == ids.count(TOKENIZER.id("<|im_end|>")) == starts
        assert TOKENIZER.id("<think>") not in ids and TOKENIZER.eos_id not in ids
        assert TOKENIZER.decode(ids).count(content) == 2


def test_a_template_that_fails_drops_the_row():
    dropped = rows(shape("inst"), [{"role": "system", "content": "s"}, *CHAT])
    assert (
        dropped.reason == "template failed" and "inst.jinja: TemplateError: roles must alt" in dropped.detail
    )
    unsafe = JinjaTemplate(TOKENIZER, "{{ messages.append(1) }}", name="x", where="x.jinja")
    assert "SecurityError" in rows(unsafe, CHAT).detail
    with pytest.raises(DataError, match="roles must alternate"):
        shape("inst").prompt([*CHAT[:1], *CHAT[:1]])


def test_templates_of_a_tokenizer_folder(tmp_path: Path):
    for file in BUILTIN.iterdir():
        shutil.copy(file, tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())

    def ids(given: object) -> list[int]:
        text = json.dumps(config | {"chat_template": given})
        (tmp_path / "tokenizer_config.json").write_text(text)
        return load_template(load_tokenizer(tmp_path), "tokenizer").prompt(CHAT[:1])

    with pytest.raises(DataError, match="comes without a chat template"):
        ids(None)
    wanted = shape("inst").prompt(CHAT[:1])
    assert ids(INST) == wanted
    assert ids([{"name": "tool_use", "template": "x"}, {"name": "default", "template": INST}]) == wanted
    with pytest.raises(DataError, match="no chat template is named default; got rag"):
        ids([{"name": "rag", "template": "x"}])
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    assert ids(INST) == shape("chatml").prompt(CHAT[:1])


def test_files_that_cannot_be_used(tmp_path: Path):
    path = tmp_path / "broken.jinja"
    path.write_text("{% for m in messages %}\n{{ m.content }}\n{% endif %}")
    with pytest.raises(DataError, match=r"broken.jinja, line 3: .*no Jinja source; got"):
        load_template(TOKENIZER, str(path))
    with pytest.raises(DataError, match=r"chat template not found; got nowhere\.jinja"):
        load_template(TOKENIZER, "nowhere.jinja")
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="is not UTF-8"):
        load_template(TOKENIZER, str(path))


def blank_first(folder: Path, normalizer: dict | None, pre_tokenizer: dict | None) -> Path:
    """A tokenizer that begins a text with a blank of its own, as SentencePiece's do."""
    texts = [*'\n abcdefghijklmnopqrstuvwxyzAIST01245?+,[]/▁"', "▁4", "▁5", "<unk>"]
    vocabulary = {text: number for number, text in enumerate(texts)}
    added = [(len(texts) + i, text, i == 2) for i, text in enumerate(("<s>", "</s>", "<|end|>"))]
    flags = {"single_word": False, "lstrip": False, "normalized": False, "special": True}
    content = {
        "version": "1.0",
        "added_tokens": [{"id": id, "content": text, "rstrip": rstrip} | flags for id, text, rstrip in added],
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": False},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": ["▁ 4", "▁ 5"], "unk_token": "<unk>"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return folder


LEGACY = {
    "type": "Sequence",
    "normalizers": [
        {"type": "Prepend", "prepend": "▁"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
    ],
}
FIRST = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
ENDED = """{{ bos_token }}{% for m in messages %}{{ m.role + '\\n' + m.content + '<|end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}assistant
{% endif %}"""


@pytest.mark.parametrize("source", [INST, ENDED], ids=["inst", "ended"])
@pytest.mark.parametrize("kinds", [(LEGACY, None), (None, FIRST)], ids=["legacy", "first"])
def test_ids_of_a_tokenizer_that_begins_with_a_blank(tmp_path: Path, kinds: tuple, source: str):
    transformers = pytest.importorskip("transformers")
    folder = blank_first(tmp_path, *kinds)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    theirs.chat_template = source
    tokenizer = load_tokenizer(folder)
    template = JinjaTemplate(tokenizer, source, name="x", where="x.jinja")
    chat = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}] * 2
    (row,) = rows(template, chat)
    text = theirs.apply_chat_template(chat, tokenize=False)
    whole = theirs(text, add_special_tokens=False)["input_ids"]
    assert row.tokens.tolist() == list(whole) == template.conversation(chat).tokens
    assert template.prompt(chat[:3]) == row.tokens.tolist()[: int(np.flatnonzero(row.mask)[-1]) - 1]
    four, end = ("▁4", "</s>") if source is INST else ("4", "<|end|>")
    assert [tokenizer.token(id) for id in row.tokens[row.mask == 1]] == [four, end, four, end]


def test_two_bos_are_refused_everywhere():
    template = JinjaTemplate(TOKENIZER, "{{ bos_token }}" + INST, name="x", where="x.jinja")
    dropped = rows(template, CHAT)
    assert isinstance(dropped, RowDropped) and dropped.detail == "x.jinja begins with two <s>"
    with pytest.raises(DataError, match=r"x\.jinja begins with two <s>"):
        template.prompt(CHAT[:1])
