"""Reasoning modes by data: thoughts left out, less effort asked for, thoughts cut at a random budget
(report 3.1.2).

Each conversation with thoughts is given at most one of the three by a draw that depends on (seed, its key)
alone, so that neither the order of rows nor the number of workers changes what becomes of it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any

from nemotron_ultra.data.messages import Conversation
from nemotron_ultra.data.render import last_of
from nemotron_ultra.data.tokenizer import Tokenizer
from nemotron_ultra.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ReasoningOptions:
    """Shares of the conversations that come with thoughts; together at most 1."""

    strip_share: float = 0.0
    """Thoughts left out of every turn: answers with reasoning off."""
    effort_share: float = 0.0
    """The last user's turn asks for `effort`; the thoughts stay as they are, so give traces of that
    effort."""
    truncate_share: float = 0.0
    """Thoughts cut at a random budget that the last user's turn names; the answer is kept."""
    effort: str = "efficient"
    """Spelled in the marker."""
    min_budget: int = 64
    """Smallest budget, in tokens. Conversations whose thoughts are no longer than it are left as they are."""
    max_budget: int = 32_768
    """Largest budget, in tokens."""
    seed: int = 0
    """Of all draws."""

    def __post_init__(self) -> None:
        shares = (self.strip_share, self.effort_share, self.truncate_share)
        if not (min(shares) >= 0 and sum(shares) <= 1 + 1e-9):  # so that NaN is none
            raise ConfigError(
                "shares of reasoning transforms must be at least 0 and together at most 1",
                got=", ".join(f"{share:g}" for share in shares),
                do="lower strip_share, effort_share or truncate_share",
            )
        if not 1 <= self.min_budget <= self.max_budget:
            raise ConfigError(
                "a budget of thoughts needs 1 <= min_budget <= max_budget",
                got=f"{self.min_budget}, {self.max_budget}",
            )


def transform(
    conversation: Conversation, options: ReasoningOptions, key: str, tokenizer: Tokenizer
) -> Conversation:
    """The conversation as its draw wants it; `key` names the row (its hash, or file and line)."""
    if not conversation.reasons:
        return conversation
    draw = _uniform(options.seed, key, "which")
    if draw < options.strip_share:
        return strip(conversation)
    draw -= options.strip_share
    if draw < options.effort_share:
        return replace(conversation, effort=options.effort)
    if draw - options.effort_share < options.truncate_share:
        return truncate(conversation, options, _uniform(options.seed, key, "budget"), tokenizer)
    return conversation


def strip(conversation: Conversation) -> Conversation:
    """The conversation without thoughts."""
    left_out = ("reasoning_content", "reasoning_truncated")
    messages = tuple({k: v for k, v in m.items() if k not in left_out} for m in conversation.messages)
    return replace(conversation, messages=messages, budget=None)


def truncate(
    conversation: Conversation, options: ReasoningOptions, draw: float, tokenizer: Tokenizer
) -> Conversation:
    """Thoughts after the last user's message cut at a budget; those cut carry reasoning_truncated.

    The budget is min_budget + draw x the room up to max_budget or one token less than the longest of those
    thoughts, so at least one is cut; `draw` is in [0, 1).
    """
    asked = last_of(conversation.messages[: 1 + last_of(conversation.messages, "assistant")], "user")
    numbers = [i for i, m in enumerate(conversation.messages) if i > asked and m.get("reasoning_content")]
    backend = tokenizer.backend()
    encoded = {
        i: backend.encode(conversation.messages[i]["reasoning_content"], add_special_tokens=False)
        for i in numbers
    }
    most = min(options.max_budget, max((len(e.ids) for e in encoded.values()), default=0) - 1)
    if most < options.min_budget:
        return conversation
    budget = options.min_budget + int(draw * (most - options.min_budget + 1))
    messages = list(conversation.messages)
    for i, encoding in encoded.items():
        if len(encoding.ids) > budget:
            text = messages[i]["reasoning_content"]
            messages[i] = messages[i] | {
                "reasoning_content": _cut(text, encoding, budget, tokenizer),
                "reasoning_truncated": True,
            }
    return replace(conversation, messages=tuple(messages), budget=budget)


def _cut(text: str, encoding: Any, budget: int, tokenizer: Tokenizer) -> str:
    """The longest beginning of the text that ends between two of its tokens and encodes to at most
    `budget`."""
    offsets = encoding.offsets
    for size in range(budget, 0, -1):
        end = offsets[size][0]
        # Tokens inside one character share its offsets; what they stand for is no text by itself.
        if offsets[size - 1][1] <= end and len(tokenizer.encode(text[:end])) <= budget:
            return text[:end]
    return ""


def _uniform(seed: int, key: str, what: str) -> float:
    """A number in [0, 1) that depends on the three alone."""
    digest = hashlib.blake2b(
        f"{seed}\n{what}\n{key}".encode("utf-8", "surrogatepass"), digest_size=8
    ).digest()
    return int.from_bytes(digest, "little") / 2**64
