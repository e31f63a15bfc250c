"""<|im_start|>ROLE\\nTEXT<|im_end|>\\n, with <think></think> or <think>\\n before an answer (report 3.5).

Everything is spans of token ids: markers are put in by id, text is encoded as ordinary characters, and the
mask says which ids an assistant wrote. Nothing is found again by searching a string, and no BOS is added.
Differs from the report's template: thinking is kept in every turn or in none, so that ids only ever grow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nemotron_ultra.data.tokenizer import Tokenizer
from nemotron_ultra.errors import DataError

Message = Mapping[str, str]

ROLES = ("system", "user", "assistant")
_MARKERS = ("<|im_start|>", "<|im_end|>", "<think>", "</think>")


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """Ids of a conversation. mask[i] is 1 where an assistant wrote tokens[i], its <|im_end|> included."""

    tokens: list[int]
    mask: list[int]


class ChatTemplate:
    """Messages {"role": "system" | "user" | "assistant", "content": text} -> ids of one tokenizer.

    An assistant's message may carry its thoughts as "reasoning_content"; they are rendered with
    thinking=True and replaced by the empty <think></think> with thinking=False.
    """

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        ids = {marker: tokenizer.id(marker) for marker in _MARKERS}
        missing = [marker for marker, id in ids.items() if id is None]
        if missing:
            raise DataError(
                f"tokenizer {tokenizer.name} has no token for the chat template's " + ", ".join(missing),
                do='add them as special tokens, or use data.tokenizer="builtin"',
            )
        self._start, self._end, self._think, self._unthink = ids.values()
        self.stop_ids = tuple(dict.fromkeys((self._end, tokenizer.eos_id)))

    def prompt(self, messages: Sequence[Message], thinking: bool = False) -> list[int]:
        """Ids that an answer to the last message is drawn after. Raises DataError."""
        if not messages or messages[-1].get("role") != "user":
            raise DataError(
                "a prompt must end with a message of the user",
                got="no messages" if not messages else f"the last one's role {messages[-1].get('role')!r}",
                do="add the question, or render the whole with conversation()",
            )
        return self.conversation(messages, thinking).tokens + self._opening(thinking)

    def conversation(self, messages: Sequence[Message], thinking: bool = False) -> Rendered:
        """Ids and mask of whole messages.

        `prompt(messages)` followed by the ids of an answer is how `conversation` begins for the messages
        with that answer. Raises DataError for no messages, an unknown role or a message without text.
        """
        if not messages:
            raise DataError("a conversation needs at least one message", got="none")
        tokens: list[int] = []
        mask: list[int] = []
        for number, message in enumerate(messages):
            _check(message, number)
            before, answer = self._spans(message, thinking)
            after = self.tokenizer.encode("\n")
            tokens += before + answer + after
            mask += [0] * len(before) + [1] * len(answer) + [0] * len(after)
        return Rendered(tokens=tokens, mask=mask)

    def text(self, tokens: Sequence[int], thinking: bool = False) -> str:
        """Text of an answer's ids without the stop id at its end; other special tokens stay readable.

        thinking=True: only what follows </think>, or nothing where the thoughts were never closed.
        """
        ids = list(tokens)
        if ids and ids[-1] in self.stop_ids:
            ids.pop()
        if thinking:
            ids = ids[ids.index(self._unthink) + 1 :] if self._unthink in ids else []
        return self.tokenizer.decode(ids)

    def _spans(self, message: Message, thinking: bool) -> tuple[list[int], list[int]]:
        """(ids that are given, ids that an assistant writes) of one message."""
        encode = self.tokenizer.encode
        role, content = message["role"], message["content"]
        if role != "assistant":
            return [self._start, *encode(f"{role}\n{content}"), self._end], []
        if not thinking:
            return self._opening(False), [*encode(content), self._end]
        thoughts = encode(message.get("reasoning_content", "") + "\n")
        return self._opening(True), [*thoughts, self._unthink, *encode("\n" + content), self._end]

    def _opening(self, thinking: bool) -> list[int]:
        after = self.tokenizer.encode("\n") if thinking else [self._unthink]
        return [self._start, *self.tokenizer.encode("assistant\n"), self._think, *after]


def _check(message: Message, number: int) -> None:
    if message.get("role") not in ROLES:
        raise DataError(
            f"message {number} has an unknown role", got=repr(message.get("role")), allowed=", ".join(ROLES)
        )
    if message["role"] == "system" and number > 0:
        raise DataError(f"message {number} is a system message", do="give the system message first")
    for key in ("content", *(["reasoning_content"] if "reasoning_content" in message else [])):
        if not isinstance(message.get(key), str):
            raise DataError(f"message {number}: {key} must be text", got=type(message.get(key)).__name__)
