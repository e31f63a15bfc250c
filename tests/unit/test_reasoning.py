"""Reasoning transforms: shares, draws that depend on the row alone, and budgets that hold."""

from __future__ import annotations

import pytest

from nemotron_ultra.data.messages import Conversation, read_conversation
from nemotron_ultra.data.reasoning import ReasoningOptions, transform
from nemotron_ultra.data.tokenizer import load_tokenizer
from nemotron_ultra.errors import ConfigError

TOKENIZER = load_tokenizer("builtin")
THOUGHTS = "First, list the cases.\nÜber 🙂🙂 all of them: 12, 13 and 14 are left. " * 9
CHAT = read_conversation(
    {
        "messages": [
            {"role": "user", "content": "How many?"},
            {"role": "assistant", "content": "Two.", "reasoning_content": "one and one"},
            {"role": "user", "content": "And now?"},
            {"role": "assistant", "content": "Three.", "reasoning_content": THOUGHTS},
        ]
    }
)


def run(key: str = "row 1", chat: Conversation = CHAT, **options) -> Conversation:
    return transform(chat, ReasoningOptions(**options), key, TOKENIZER)


def test_strip_leaves_no_thoughts():
    out = run(strip_share=1.0)
    assert not out.reasons and all("reasoning_content" not in message for message in out.messages)
    assert [m["content"] for m in out.messages] == [m["content"] for m in CHAT.messages]


def test_effort_is_asked_for_and_the_messages_stay():
    out = run(effort_share=1.0)
    assert out.effort == "efficient" and out.messages == CHAT.messages


@pytest.mark.parametrize("key", [f"row {i}" for i in range(40)])
def test_truncated_thoughts_begin_the_whole_and_hold_the_budget(key: str):
    out = run(key, truncate_share=1.0, min_budget=5)
    cut = out.messages[-1]
    assert cut["reasoning_truncated"] and cut["content"] == "Three."
    assert THOUGHTS.startswith(cut["reasoning_content"]) and cut["reasoning_content"] != THOUGHTS
    length = len(TOKENIZER.encode(cut["reasoning_content"]))
    assert max(5, length) <= out.budget <= length + 8
    assert out.messages[:3] == CHAT.messages[:3]


def test_budgets_reach_from_the_smallest_to_the_longest_thoughts():
    budgets = {run(str(i), truncate_share=1.0, min_budget=5, max_budget=14).budget for i in range(200)}
    assert budgets == set(range(5, 15))
    longest = len(TOKENIZER.encode(THOUGHTS))
    assert run(truncate_share=1.0, min_budget=longest) is CHAT
    assert run(truncate_share=1.0, min_budget=longest - 1).budget == longest - 1


def test_shares_are_kept_and_depend_on_seed_and_key_alone():
    options = {"strip_share": 0.2, "effort_share": 0.3, "truncate_share": 0.1, "min_budget": 5}
    keys = [f"file:{i}" for i in range(2000)]
    made = {key: run(key, **options) for key in keys}
    counts = [
        sum(not out.reasons for out in made.values()),
        sum(out.effort is not None for out in made.values()),
        sum(out.budget is not None for out in made.values()),
    ]
    assert all(abs(count / 2000 - share) < 0.03 for count, share in zip(counts, (0.2, 0.3, 0.1), strict=True))
    assert all(run(key, **options) == made[key] for key in reversed(keys[:50]))
    assert any(run(key, **options, seed=1) != made[key] for key in keys[:50])


def test_a_chat_without_thoughts_stays():
    plain = Conversation(messages=(*CHAT.messages[:1], {"role": "assistant", "content": "x"}))
    assert run(chat=plain, strip_share=0.5, truncate_share=0.5) is plain


@pytest.mark.parametrize(
    "options, words",
    [
        ({"strip_share": 0.6, "effort_share": 0.6}, "together at most 1; got 0.6, 0.6, 0"),
        ({"truncate_share": -0.1}, "at least 0"),
        ({"strip_share": float("nan")}, "at least 0"),
        ({"min_budget": 9, "max_budget": 8}, "min_budget <= max_budget; got 9, 8"),
    ],
)
def test_bad_options(options: dict, words: str):
    with pytest.raises(ConfigError, match=words):
        ReasoningOptions(**options)
