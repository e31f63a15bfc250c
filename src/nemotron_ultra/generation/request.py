"""A request that cannot be is one error, before any work."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

from nemotron_ultra.errors import ConfigError, DataError
from nemotron_ultra.generation.base import Request


def check_request(request: Request, rows: int, *, decodes: bool, name: str = "prompt") -> None:
    """Raises DataError for the prompt, called `name` there, and ConfigError for anything else.

    rows: ids of the model. decodes: whether there is a `decode` to look for stop texts with.
    """
    check_options(request.max_new_tokens, request.temperature)
    _check_range("top_p", request.top_p, 0 < request.top_p <= 1, "above 0, up to 1 (all)")
    _check_range("min_p", request.min_p, 0 <= request.min_p <= 1, "0 (all) to 1")
    whole = isinstance(request.top_k, Integral) and request.top_k >= 0
    _check_range("top_k", request.top_k, whole, "a whole number, 0 (all) or more")
    check_prompt(request.prompt, rows, name)
    check_stops(request.stop_ids, request.stop_texts, rows, decodes)


def check_options(max_new_tokens: Any, temperature: Any) -> None:
    if not isinstance(max_new_tokens, Integral) or max_new_tokens < 1:
        raise ConfigError("max_new_tokens: too few", got=max_new_tokens, allowed="1 or more")
    if not isinstance(temperature, Real) or not 0 <= temperature < float("inf"):
        raise ConfigError("temperature: cannot be", got=temperature, allowed="0 (the likeliest id) or more")


def check_prompt(prompt: Sequence[int], rows: int, name: str) -> None:
    if not len(prompt):
        raise DataError(f"{name} is empty", do="begin it with at least one token, for instance the BOS id")
    if not 0 <= min(prompt) <= max(prompt) < rows:
        raise DataError(
            f"{name}: a token id the model does not have",
            got=next(token for token in prompt if not 0 <= token < rows),
            allowed=f"0 to {rows - 1}",
            do="encode the text with the tokenizer that the model was trained with",
        )


def check_stops(stop_ids: Sequence[int], stop_texts: Sequence[str], rows: int, decodes: bool) -> None:
    for stop in stop_ids:
        if not 0 <= stop < rows:
            raise ConfigError("stop_ids: an id the model does not have", got=stop, allowed=f"0 to {rows - 1}")
    for text in stop_texts:
        if not isinstance(text, str) or not text:
            raise ConfigError("stop_texts: not a text", got=repr(text), allowed="one character or more")
    if stop_texts and not decodes:
        raise ConfigError(
            "stop_texts: token ids cannot be read as text here",
            got=list(stop_texts),
            do="give the generator `decode`, or stop at ids with stop_ids",
        )


def check_room(request: Request, max_tokens: int, name: str = "prompt") -> None:
    """Prompt and answer must fit a slot together."""
    if len(request.prompt) + request.max_new_tokens > max_tokens:
        raise DataError(
            f"{name}: longer than the limit with the tokens asked for",
            got=f"{len(request.prompt)} prompt tokens and max_new_tokens {request.max_new_tokens}",
            allowed=f"{max_tokens} together (max_tokens)",
            do="shorten the prompt, ask for fewer tokens, or raise max_tokens",
        )


def _check_range(name: str, value: Any, fits: bool, allowed: str) -> None:
    if not isinstance(value, Real) or not fits:
        raise ConfigError(f"{name}: cannot be", got=value, allowed=allowed)
