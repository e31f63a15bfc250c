"""Conversations -> rows of ids and loss masks, by the report's rules (section 3.1.2; masks as in 3.2.2).

Without thoughts a conversation is one row in which every answer is trained. With thoughts it is one row per
user's turn: thoughts of earlier turns are left out, and only what follows that turn is trained. Differs
from the public recipe: messages after the last answer are left out (nothing there is trained), the newline
after <|im_end|> is no target, and an answer without text or call is shown but never trained.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from nemotron_ultra.data.messages import Conversation, RowDropped, depth_checked
from nemotron_ultra.data.render import Segment, Template, View, last_of, lay_out
from nemotron_ultra.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class MaskOptions:
    """What is shown and what is trained."""

    train: Literal["assistant", "last"] = "assistant"
    """Every answer, or the final one alone (the report's chat domain)."""
    thinking: Literal["auto", "on", "off"] = "auto"
    """auto: thoughts where a conversation has them; on: every answer opens with thoughts, if empty ones;
    off: none."""
    expand: Literal["auto", "always", "never"] = "auto"
    """One row per user's turn: where there are thoughts, always, or never (thoughts then stay in every
    turn)."""
    train_cut_close: bool = False
    """Train the </think> of thoughts that were cut at a budget (the report leaves it out)."""

    def __post_init__(self) -> None:
        allowed = {
            "train": ("assistant", "last"),
            "thinking": ("auto", "on", "off"),
            "expand": ("auto", "always", "never"),
        }
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise ConfigError(
                    f"mask option {name}", got=repr(getattr(self, name)), allowed=", ".join(values)
                )


@dataclass(frozen=True, kw_only=True)
class TrainingRow:
    """tokens int32 [n]; mask uint8 [n], 1 where tokens[i] is trained (not shifted); prompt, a 64-bit hash of
    the ids before the first trained one."""

    tokens: np.ndarray
    mask: np.ndarray
    prompt: int


def training_rows(
    template: Template, conversations: Sequence[Conversation], options: MaskOptions
) -> list[list[TrainingRow] | RowDropped]:
    """Rows of each conversation in order, or why it gives none.

    All texts of the call are encoded together: give a few hundred conversations at once (some MB of text).
    """
    out: list[Any] = []
    rows: list[list[Segment]] = []
    for conversation in conversations:
        try:
            with depth_checked():
                made = [template.segments(view) for view in views(conversation, options)]
        except RowDropped as dropped:
            out.append(dropped)
            continue
        out.append(range(len(rows), len(rows) + len(made)))
        rows += made
    laid = [_training_row(*row) for row in lay_out(template.tokenizer, rows, template.special)]
    return [entry if isinstance(entry, RowDropped) else [laid[i] for i in entry] for entry in out]


def views(conversation: Conversation, options: MaskOptions) -> list[View]:
    """What the rows of a conversation show and train. Raises RowDropped where nothing can be trained."""
    messages = conversation.messages
    last = last_of(messages, "assistant")
    if last < 0:
        raise RowDropped("no assistant turn", f"none of {len(messages)} messages is an assistant's")
    targets = [i for i, message in enumerate(messages) if _is_target(message)]
    targets = [i for i in targets if i == last] if options.train == "last" else targets
    if not targets:
        raise RowDropped("empty content", f"message {last} of the assistant has neither text nor a call")
    messages = messages[: targets[-1] + 1]
    reasons = conversation.reasons
    thinking = options.thinking != "off" and (reasons or options.thinking == "on")
    common = {
        "tools": conversation.tools,
        "thinking": thinking,
        "bare": options.thinking != "on",
        "close": options.train_cut_close,
        "effort": conversation.effort,
    }
    if options.expand == "never" or (options.expand == "auto" and not (thinking and reasons)):
        view = View(messages=messages, trained=frozenset(targets), budget=conversation.budget, **common)
        return [view]
    out = []
    asked = [i for i, message in enumerate(messages) if message["role"] == "user"]
    for user, end in zip(asked, [*asked[1:], len(messages)], strict=True):
        trained = frozenset(i for i in targets if user < i < end)
        budget = conversation.budget if end == len(messages) else None
        if trained:
            view = View(messages=messages[:end], trained=trained, thoughts_from=user, budget=budget, **common)
            out.append(view)
    return out


def _is_target(message: dict[str, Any]) -> bool:
    return message["role"] == "assistant" and bool(message["content"].strip() or message.get("tool_calls"))


def _training_row(tokens: np.ndarray, mask: np.ndarray, first: int) -> TrainingRow:
    digest = hashlib.blake2b(tokens[:first].data, digest_size=8).digest()
    return TrainingRow(tokens=tokens, mask=mask, prompt=int.from_bytes(digest, "little"))
