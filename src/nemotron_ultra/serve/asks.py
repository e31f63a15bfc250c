"""Bodies of requests -> turns for the worker. Anything that cannot be is an ApiError that names the field."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nemotron_ultra.data.render import Template
from nemotron_ultra.data.tokenizer import Tokenizer
from nemotron_ultra.errors import NemotronError
from nemotron_ultra.generation.answers import MODES, Budget, Mode, Turn
from nemotron_ultra.generation.base import Request
from nemotron_ultra.generation.dialog import continued
from nemotron_ultra.serve.errors import ApiError
from nemotron_ultra.serve.fields import CHAT, COMPLETIONS, STREAM_WORDS, TEMPLATE_WORDS, read

COMPLETION_TOKENS = 16  # OpenAI's default of /v1/completions
NEXT_SEED = 1_000_003
EFFORTS = {"none": "off", "minimal": "off", "low": "medium", "medium": "medium", "high": "regular"}


@dataclass(frozen=True, kw_only=True)
class Served:
    """The model as requests see it. context: most tokens of prompt and answer; choices: most of
    one request; most: new tokens of an answer
    where a request does not say; thinking, budget: how chats are asked where a request does not say.
    """

    name: str
    tokenizer: Tokenizer
    template: Template | None
    rows: int
    context: int
    choices: int
    thinking: str = "off"
    budget: int | None = None
    most: int | None = None
    digest: str = ""


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One request: the turns of its choices, prompt by prompt with n of each, and how they are told."""

    chat: bool
    turns: list[Turn]
    n: int
    stream: bool
    include_usage: bool
    logprobs: bool
    return_token_ids: bool
    thinking: bool = False
    tools: Sequence[dict[str, Any]] = ()

    @property
    def prompts(self) -> list[tuple[int, ...]]:
        return [turn.request.prompt for turn in self.turns[:: self.n]]


def parse(body: bytes) -> Any:
    """Raises ApiError for what is no JSON, or no text."""
    try:
        words = body.decode("utf-8-sig")
        content = json.loads(words, parse_constant=_no_number)
        if "\\u" in words:
            json.dumps(content, ensure_ascii=False).encode()
    except ValueError as error:
        raise ApiError(f"the body is not JSON: {error}", code="invalid_json") from error
    return content


def chat_ask(content: Any, served: Served) -> Ask:
    given = read(content, CHAT)
    _check_model(given["model"], served)
    _check_choices(given["n"], served)
    if served.template is None:
        raise ApiError("this model has no chat template: use /v1/completions", status=404)
    if not given["messages"]:
        raise ApiError("messages: needed, at least one", param="messages")
    kwargs = read(given["chat_template_kwargs"] or {}, TEMPLATE_WORDS, "chat_template_kwargs.")
    mode = _mode(given, kwargs, served)
    budget = _budget(given["thinking_budget"] or kwargs["reasoning_budget"], mode, served)
    tools = given["tools"] or [] if given["tool_choice"] == "auto" else []
    try:
        prompt = _chat_prompt(given["messages"], mode, tools, budget.tokens if budget else None, served)
    except NemotronError as error:
        raise ApiError.of(error, "messages") from error
    most = given["max_completion_tokens"] or given["max_tokens"]
    limit = most or min(served.most or served.context, max(1, served.context - len(prompt)))
    turns = _turns([prompt], given, limit, served, served.template.stop_ids, budget)
    return Ask(
        chat=True,
        turns=turns,
        n=given["n"],
        logprobs=given["logprobs"],
        thinking=mode.thinking,
        tools=tools,
        **_telling(given),
    )


def _chat_prompt(
    messages: list[dict[str, Any]],
    mode: Mode,
    tools: Sequence[dict[str, Any]],
    budget: int | None,
    served: Served,
) -> list[int]:
    """An answer that comes with the ids it was asked and drawn with, as they were told, is not encoded anew:
    they begin the prompt, in place of it and of all messages before it.
    """
    drawn = [place for place, message in enumerate(messages) if message.get("token_ids") is not None]
    if not drawn:
        return served.template.prompt(messages, mode.thinking, tools=tools, budget=budget, effort=mode.effort)
    place, ids = drawn[-1], []
    for name in ("prompt_token_ids", "token_ids"):
        given = messages[place].get(name)
        if not isinstance(given, list) or not given or not all(type(id) is int for id in given):
            raise ApiError(f"messages[{place}].{name}: must be a list of token ids", param="messages")
        ids += given
    after = messages[place + 1 :]
    return continued(served.template, ids, after, mode, tools=tools, budget=budget)


def completion_ask(content: Any, served: Served) -> Ask:
    given = read(content, COMPLETIONS)
    _check_model(given["model"], served)
    if given["prompt"] is None:
        raise ApiError("prompt: needed", param="prompt")
    if given["best_of"] not in (None, given["n"]):
        raise ApiError("best_of: all n choices are returned, none is chosen", param="best_of")
    prompt = given["prompt"]
    several = isinstance(prompt, list) and not isinstance(prompt[0], int)
    _check_choices(given["n"] * (len(prompt) if several else 1), served)
    prompts = [_ids(item, served.tokenizer) for item in (prompt if several else [prompt])]
    limit = given["max_tokens"] or served.most or COMPLETION_TOKENS
    turns = _turns(prompts, given, limit, served, (served.tokenizer.eos_id,), None)
    logprobs = given["logprobs"] is not None
    return Ask(chat=False, turns=turns, n=given["n"], logprobs=logprobs, **_telling(given))


def _telling(given: dict[str, Any]) -> dict[str, bool]:
    words = read(given["stream_options"] or {}, STREAM_WORDS, "stream_options.")
    return {
        "stream": given["stream"],
        "include_usage": words["include_usage"],
        "return_token_ids": given["return_token_ids"],
    }


def _turns(
    prompts: Sequence[Sequence[int]],
    given: dict[str, Any],
    most: int,
    served: Served,
    ends: Sequence[int],
    budget: Budget | None,
) -> list[Turn]:
    stops = [given["stop"]] if isinstance(given["stop"], str) else given["stop"]
    ends = () if given["ignore_eos"] else [id for id in ends if id < served.rows]
    first = secrets.randbits(48) if given["seed"] is None else given["seed"]
    turns = []
    for number in range(len(prompts) * given["n"]):
        request = Request(
            prompt=tuple(prompts[number // given["n"]]),
            max_new_tokens=most,
            temperature=float(given["temperature"]),
            top_p=float(given["top_p"]),
            top_k=min(max(0, given["top_k"]), served.rows),
            min_p=float(given["min_p"]),
            stop_ids=(*ends, *given["stop_token_ids"]),
            stop_texts=tuple(stops),
            seed=first + number * NEXT_SEED,
        )
        turns.append(Turn(request, budget))
    for turn in turns[:: given["n"]]:
        _check(turn, served)
    return turns


def _check(turn: Turn, served: Served) -> None:
    request = turn.request
    if len(request.prompt) + request.max_new_tokens > served.context:
        raise ApiError(
            f"this model's context is {served.context} tokens; got a prompt of {len(request.prompt)} and "
            f"{request.max_new_tokens} new ones to make",
            param="max_tokens" if len(request.prompt) < served.context else None,
            code="context_length_exceeded",
        )
    try:
        turn.check(served.rows, served.context, decodes=True)
    except NemotronError as error:
        raise ApiError.of(error) from error


def _mode(given: dict[str, Any], kwargs: dict[str, Any], served: Served) -> Mode:
    """The effort named, else thoughts on or off, else the server's."""
    effort = given["reasoning_effort"] or kwargs["reasoning_effort"]
    asked = (given["chat_template_kwargs"] or {}).get("enable_thinking")
    if asked is False:
        return MODES["off"]
    if effort is not None:
        return MODES[EFFORTS[effort]]
    if asked is True and served.thinking == "off":
        return MODES["regular"]
    return MODES[served.thinking]


def _budget(tokens: int | None, mode: Mode, served: Served) -> Budget | None:
    tokens = tokens or served.budget
    if not mode.thinking or tokens is None:
        return None
    try:
        return Budget.of(tokens, served.tokenizer)
    except NemotronError as error:
        raise ApiError.of(error, "thinking_budget") from error


def _ids(prompt: Any, tokenizer: Tokenizer) -> list[int]:
    """Special tokens spelled in a text are read as such, as the caller makes the whole prompt."""
    return tokenizer.encode(prompt, special=True) if isinstance(prompt, str) else prompt


def _check_model(name: str | None, served: Served) -> None:
    if name is not None and name != served.name:
        raise ApiError(
            f"no model '{name}' here; there is '{served.name}'",
            status=404,
            param="model",
            code="model_not_found",
        )


def _check_choices(count: int, served: Served) -> None:
    if count > served.choices:
        raise ApiError(f"{count} choices in one request; at most {served.choices} are taken", param="n")


def _no_number(word: str) -> None:
    raise ValueError(f"{word} is no JSON number")
