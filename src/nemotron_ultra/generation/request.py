"""A request that cannot be is one error, before any work."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Sized
from numbers import Integral, Real
from typing import Any

from nemotron_ultra.errors import ConfigError, DataError
from nemotron_ultra.generation.base import Request

COLDEST = 1e-5  # logits are divided by the temperature


def check_request(request: Request, rows: int, *, decodes: bool, name: str = "prompt") -> None:
    """Raises DataError for the prompt, called `name` there, and ConfigError for anything else.

    rows: ids of the model. decodes: whether there is a `decode` to look for stop texts with.
    """
    check_options(request.max_new_tokens, request.temperature)
    if not _is_real(request.top_p) or not 0 < request.top_p <= 1:
        raise ConfigError("top_p: cannot be", got=request.top_p, allowed="above 0, up to 1 (all)")
    if not _is_real(request.min_p) or not 0 <= request.min_p <= 1:
        raise ConfigError("min_p: cannot be", got=request.min_p, allowed="0 (all) to 1")
    if not _is_whole(request.top_k) or request.top_k < 0:
        raise ConfigError("top_k: cannot be", got=request.top_k, allowed="a whole number, 0 (all) or more")
    check_seed(request.seed)
    check_prompt(request.prompt, rows, name)
    check_stops(request.stop_ids, request.stop_texts, rows, decodes)


def check_options(max_new_tokens: Any, temperature: Any) -> None:
    check_count("max_new_tokens", max_new_tokens)
    if not _is_real(temperature) or not (temperature == 0 or COLDEST <= temperature < math.inf):
        raise ConfigError(
            "temperature: cannot be",
            got=temperature,
            allowed=f"0 (the likeliest id), or {COLDEST:g} or more",
        )


def check_count(name: str, count: Any) -> None:
    if not _is_whole(count) or count < 1:
        raise ConfigError(f"{name}: too few", got=count, allowed="1 or more")


def check_seed(seed: Any) -> None:
    if not _is_whole(seed):
        raise ConfigError("seed: cannot be", got=repr(seed), allowed="a whole number")


def check_vocab_size(vocab_size: int | None, rows: int) -> int:
    """Ids that are drawn, None: all rows of the head."""
    size = rows if vocab_size is None else vocab_size
    if not _is_whole(size) or not 1 <= size <= rows:
        raise ConfigError("vocab_size: not ids of the model", got=vocab_size, allowed=f"1 to {rows}")
    return size


def check_prompt(prompt: Sequence[int], rows: int, name: str) -> None:
    if isinstance(prompt, str) or not isinstance(prompt, Sized):
        raise DataError(f"{name} is no list of token ids", got=repr(prompt)[:80])
    if not len(prompt):
        raise DataError(f"{name} is empty", do="begin it with at least one token, for instance the BOS id")
    if not _are_whole(prompt):
        raise DataError(
            f"{name}: what is no token id",
            got=repr(next(token for token in prompt if not _is_whole(token))),
            allowed="whole numbers",
        )
    if not 0 <= min(prompt) <= max(prompt) < rows:
        raise DataError(
            f"{name}: a token id the model does not have",
            got=next(token for token in prompt if not 0 <= token < rows),
            allowed=f"0 to {rows - 1}",
            do="encode the text with the tokenizer that the model was trained with",
        )


def check_stops(stop_ids: Sequence[int], stop_texts: Sequence[str], rows: int, decodes: bool) -> None:
    for name, stops in {"stop_ids": stop_ids, "stop_texts": stop_texts}.items():
        if isinstance(stops, str) or not isinstance(stops, Iterable):
            raise ConfigError(f"{name}: not a list", got=repr(stops), allowed="a list or tuple, also of one")
    for stop in stop_ids:
        if not _is_whole(stop) or not 0 <= stop < rows:
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


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _are_whole(values: Iterable[Any]) -> bool:
    """By kind, as prompts are long."""
    return all(issubclass(kind, Integral) and kind is not bool for kind in set(map(type, values)))


def _is_real(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
