"""Events of turns -> the objects of OpenAI's API, whole or as chunks.

`logprob` is that under the unmodified model at temperature 1. With return_token_ids choices also carry
token_ids, and sampling_logprobs: those of the distribution the tokens were drawn from.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from nemotron_ultra.data.tool_text import CALL
from nemotron_ultra.generation.base import Event
from nemotron_ultra.generation.text import BROKEN, AnswerText, overlap
from nemotron_ultra.serve.asks import Ask, Served
from nemotron_ultra.serve.tool_calls import parse_calls


@dataclass
class Delta:
    """What is new of a choice. offsets: characters of text shown before each token."""

    thoughts: str = ""
    text: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sampling: list[float] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, other: Delta) -> None:
        self.thoughts += other.thoughts
        self.text += other.text
        self.calls += other.calls
        for name in ("tokens", "logprobs", "sampling", "offsets"):
            getattr(self, name).extend(getattr(other, name))
        self.finish_reason = other.finish_reason


class Choice:
    """One answer as it comes. A tool call is held back until it is whole."""

    def __init__(self, index: int, ask: Ask, served: Served):
        request = ask.turns[index].request
        self.index, self.ask = index, ask
        stops = request.stop_ids
        self._text = AnswerText(served.tokenizer, stops, request.stop_texts, ask.thinking)
        self._held = ""
        self._shown = 0
        self.tokens = self.thought_tokens = 0

    def take(self, event: Event) -> Delta:
        out = Delta(tokens=event.tokens, logprobs=event.model_logprobs, sampling=event.logprobs)
        for token in event.tokens:
            out.offsets.append(self._shown + len(self._held) + len(out.text))
            self.thought_tokens += self._text.thinking
            piece = self._text.push([token])
            out.thoughts += piece.thoughts
            out.text += piece.text
        self.tokens += len(event.tokens)
        if event.completion is not None:
            piece = self._text.finish()
            out.thoughts += piece.thoughts
            out.text += piece.text
            out.finish_reason = event.completion.finish_reason
        if self.ask.tools:
            self._hold_calls(out)
        self._shown += len(out.text)
        return out

    def _hold_calls(self, out: Delta) -> None:
        text = self._held + out.text
        place = text.find(CALL)
        if out.finish_reason is not None:
            before, calls = (text, "") if place < 0 else (text[:place], text[place:])
            out.calls, rest = parse_calls(calls, self.ask.tools)
            out.text, self._held = (before.removesuffix("\n") if out.calls else before) + rest, ""
            if out.calls and out.finish_reason == "stop":
                out.finish_reason = "tool_calls"
            return
        # The newline before a call is the format's.
        kept = len(text) - place if place >= 0 else max(overlap(text, "\n" + CALL), overlap(text, CALL))
        if place > 0 and text[place - 1] == "\n":
            kept += 1
        out.text, self._held = text[: len(text) - kept], text[len(text) - kept :]


class Reply:
    """Builds all objects of one request; they share id and time."""

    def __init__(self, ask: Ask, served: Served):
        self.ask, self.served = ask, served
        kind = "chat.completion" if ask.chat else "text_completion"
        self._object = kind + ".chunk" if ask.chat and ask.stream else kind
        self._id = f"{'chatcmpl' if ask.chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self.choices = [Choice(index, ask, served) for index in range(len(ask.turns))]

    def whole(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        choices = [self._choice(index, delta) for index, delta in enumerate(deltas)]
        return self._envelope(choices) | {"usage": self.usage()} | self._prompt_ids()

    def first(self) -> list[dict[str, Any]]:
        """Chunks before any token: the role of each choice."""
        if not self.ask.chat:
            return []
        roles = [
            {
                "index": index,
                "delta": {"role": "assistant", "content": ""},
                "logprobs": None,
                "finish_reason": None,
            }
            for index in range(len(self.choices))
        ]
        return [self._envelope([role]) | self._prompt_ids() for role in roles]

    def chunk(self, index: int, delta: Delta) -> dict[str, Any]:
        return self._envelope([self._choice(index, delta)])

    def last(self) -> list[dict[str, Any]]:
        """The chunk of the usage, if it is asked for."""
        return [self._envelope([]) | {"usage": self.usage()}] if self.ask.include_usage else []

    def usage(self) -> dict[str, Any]:
        prompt = sum(map(len, self.ask.prompts))
        new = sum(choice.tokens for choice in self.choices)
        thoughts = sum(choice.thought_tokens for choice in self.choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "completion_tokens_details": {"reasoning_tokens": thoughts},
        }

    def _envelope(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": self._object,
            "created": self._created,
            "model": self.served.name,
            "system_fingerprint": self.served.digest,
            "choices": choices,
        }

    def _prompt_ids(self) -> dict[str, Any]:
        return (
            {"prompt_token_ids": self.ask.prompts[0]} if self.ask.chat and self.ask.return_token_ids else {}
        )

    def _choice(self, index: int, delta: Delta) -> dict[str, Any]:
        out: dict[str, Any] = {"index": index}
        if self.ask.chat:
            out["delta" if self.ask.stream else "message"] = self._message(delta)
        else:
            out["text"] = delta.text
        out["logprobs"] = self._logprobs(delta) if self.ask.logprobs else None
        out["finish_reason"] = delta.finish_reason
        if self.ask.return_token_ids:
            out |= {"token_ids": delta.tokens, "sampling_logprobs": [_finite(x) for x in delta.sampling]}
            if not self.ask.chat:
                out["prompt_token_ids"] = self.ask.turns[index].request.prompt
        return out

    def _message(self, delta: Delta) -> dict[str, Any]:
        calls = delta.calls
        if self.ask.stream:
            calls = [call | {"index": number} for number, call in enumerate(calls)]
            words = {"content": delta.text, "reasoning_content": delta.thoughts, "tool_calls": calls}
            return {name: value for name, value in words.items() if value}
        message: dict[str, Any] = {"role": "assistant", "content": delta.text}
        if self.ask.thinking:
            message["reasoning_content"] = delta.thoughts
        if calls:
            message |= {"content": delta.text or None, "tool_calls": calls}
        return message

    def _logprobs(self, delta: Delta) -> dict[str, Any]:
        texts = [self.served.tokenizer.decode([token]) for token in delta.tokens]
        logprobs = [_finite(logprob) for logprob in delta.logprobs]
        if self.ask.chat:
            rows = [
                {"token": text, "logprob": logprob, "bytes": _bytes(text), "top_logprobs": []}
                for text, logprob in zip(texts, logprobs, strict=True)
            ]
            return {"content": rows, "refusal": None}
        return {
            "tokens": texts,
            "token_logprobs": logprobs,
            "top_logprobs": None,
            "text_offset": delta.offsets,
        }


def _finite(logprob: float) -> float | None:
    """None for a token that was put in, not drawn."""
    return None if logprob != logprob else logprob


def _bytes(text: str) -> list[int] | None:
    """None for a token that is part of a character."""
    return None if BROKEN in text else list(text.encode())
