"""Texts and options of a person -> turns, and what is said about speed in the end."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nemotron_ultra.errors import ConfigError, DataError
from nemotron_ultra.generate.load import Loaded
from nemotron_ultra.generation.answers import MODES, Answers, Budget, Turn
from nemotron_ultra.generation.base import Event, Request
from nemotron_ultra.generation.speculative import draft_metrics

MAX_TOKENS = 256
CONTEXT = 4096


def text_prompt(
    loaded: Loaded, text: str, thinking: str, budget: int | None, system: str | None = None
) -> list[int]:
    """Ids of one text: as it is, with special tokens that are spelled in it, or as a user's message.

    Raises ConfigError for thoughts and a system message where texts are continued.
    """
    if not loaded.chat:
        if MODES[thinking].thinking or system:
            raise ConfigError(
                "thinking and --system belong to the chat template, and texts are continued here",
                do="add --chat",
            )
        return raw_ids(loaded, text)
    messages = [{"role": "system", "content": system}] if system else []
    return chat_prompt(loaded, [*messages, {"role": "user", "content": text}], thinking, budget)


def raw_ids(loaded: Loaded, text: str) -> list[int]:
    """Raises DataError for what is no Unicode text: bytes of a command line, escapes of JSON."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError("prompt is no valid text", got=error) from error
    return loaded.tokenizer.encode(text, special=True)


def chat_prompt(
    loaded: Loaded,
    messages: Sequence[Mapping[str, Any]],
    thinking: str,
    budget: int | None,
    tools: Sequence[Mapping[str, Any]] = (),
) -> list[int]:
    mode = MODES[thinking]
    asked = {"tools": tools, "budget": budget if mode.thinking else None, "effort": mode.effort}
    return loaded.asking().prompt(messages, mode.thinking, **asked)


def drawing(asked: argparse.Namespace) -> dict[str, Any]:
    """The options of the command line by the names of `Request`."""
    return {
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "top_k": asked.top_k,
        "min_p": asked.min_p,
        "stop_texts": tuple(asked.stop),
    }


def turn_of(
    loaded: Loaded,
    prompt: Sequence[int],
    options: Mapping[str, Any],
    *,
    max_new_tokens: int,
    seed: int,
    budget: int | None = None,
) -> Turn:
    request = Request(
        prompt=tuple(prompt),
        max_new_tokens=max_new_tokens,
        stop_ids=loaded.stop_ids,
        seed=seed,
        **{**options, "top_k": min(options["top_k"], loaded.rows)},
    )
    return Turn(request, Budget.of(budget, loaded.tokenizer) if budget else None)


def check_turn(loaded: Loaded, turn: Turn, context: int | None) -> int:
    """Tokens that the turn needs room for: `context`, or its own. Raises DataError where they are too few,
    ConfigError and DataError for what no scheduler would take.
    """
    prompt, most = len(turn.request.prompt), turn.request.max_new_tokens
    room = context or prompt + most
    turn.check(loaded.rows, max(room, prompt + most), decodes=True)
    if prompt + most > room:
        raise DataError(
            "prompt: longer than the limit with the tokens asked for",
            got=f"{prompt} prompt tokens and --max-tokens {most}",
            allowed=f"{room} together (--context)",
            do="shorten the prompt, ask for fewer tokens, or raise --context",
        )
    return room


def run_turn(answers: Answers, turn: Turn) -> Iterator[Event]:
    """Events of one turn, to its completion; left early it is cancelled."""
    answers.submit(0, turn)
    try:
        while not answers.idle:
            yield from (event for _, event in answers.step())
    finally:
        answers.cancel([0])
        while not answers.idle:
            answers.step()


class Speed:
    """Tokens and seconds of drawing, said on standard error."""

    def __init__(self, answers: Answers):
        self.stats = answers.scheduler.stats
        self.seconds = 0.0
        self._since = 0.0

    def __enter__(self) -> Speed:
        self._since = time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        self.seconds += time.perf_counter() - self._since

    def line(self) -> str:
        new, read = self.stats["new_tokens"], self.stats["prefill_tokens"]
        rate = new / self.seconds if self.seconds else 0.0
        text = f"{new:,} tokens in {self.seconds:.2f} s ({rate:,.1f} tokens/s), {read:,} prompt tokens read"
        found = draft_metrics(self.stats)
        if found:
            text += f", acceptance length {found['acceptance_length']:.2f}"
        if "acceptance_rate" in found:
            text += f", {found['acceptance_rate']:.0%} of drafts stayed"
        return text

    def say(self) -> None:
        if self.stats["new_tokens"]:
            print(self.line(), file=sys.stderr)


def check_fits(prompt: Sequence[int], context: int, do: str) -> int:
    """Tokens left for an answer. Raises DataError where there are none."""
    left = context - len(prompt)
    if left < 1:
        raise DataError(
            "the prompt leaves no room for an answer",
            got=f"{len(prompt)} tokens",
            allowed=f"less than {context} (--context)",
            do=do,
        )
    return left
