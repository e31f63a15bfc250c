"""--prompts: a file of prompts -> a file of answers, a line each, in the same order.

With --out lines are written as soon as their turn has come. Where the file is there already, the lines of the
same prompts, options and weights are kept and the rest is added; anything else in it is an error.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import io
import json
import os
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from filelock import FileLock, Timeout

from nemotron_ultra.errors import ConfigError, DataError, NemotronError
from nemotron_ultra.generate.asking import (
    MAX_TOKENS,
    Speed,
    chat_prompt,
    check_turn,
    drawing,
    text_prompt,
    turn_of,
)
from nemotron_ultra.generate.load import Loaded
from nemotron_ultra.generation.answers import MODES, Answers, Turn
from nemotron_ultra.generation.base import Completion
from nemotron_ultra.generation.text import AnswerText

SLOTS = 8
INPUTS = ("prompt", "messages", "tokens")
WORDS = {"top_p": float, "min_p": float, "temperature": float, "top_k": int, "seed": int, "max_tokens": int}
IGNORED = ("domain", "environment", "answer", "pass_rate", "extra")  # of rows of `prep prompts`
KEYS = (*INPUTS, *WORDS, "id", "tools", "stop", "thinking", "budget")


@dataclass(frozen=True)
class Asked:
    """A line of the input. `key` is of all that its answer depends on."""

    index: int
    id: Any
    turn: Turn
    thinking: bool
    key: str


def answer_file(loaded: Loaded, asked: argparse.Namespace) -> int:
    rows = read_prompts(loaded, asked)
    with _output(asked.out, rows) as (out, done):
        waiting = deque(rows[done:])
        if done:
            print(f"{asked.out}: {done} of {len(rows)} answers are there already", file=sys.stderr)
        if not waiting:
            return 0
        sizes = [len(row.turn.request.prompt) + row.turn.request.max_new_tokens for row in waiting]
        slots = min(asked.slots or SLOTS, len(waiting))
        answers = Answers(loaded.scheduler(slots, max(sizes)))
        with Speed(answers) as speed:
            for line in _lines(loaded, answers, waiting):
                out.write(json.dumps(line, ensure_ascii=False) + "\n")
                out.flush()
        speed.say()
    return 0


def read_prompts(loaded: Loaded, asked: argparse.Namespace) -> list[Asked]:
    """Every line, checked. Raises DataError that names file and line."""
    try:
        lines = asked.prompts.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{asked.prompts} is not UTF-8", got=error) from error
    rows: list[Asked] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            rows.append(_row(loaded, asked, line, number, len(rows)))
    if not rows:
        raise DataError(f"{asked.prompts} has no prompts", do='give lines such as {"prompt": "..."}')
    return rows


def _row(loaded: Loaded, asked: argparse.Namespace, line: str, number: int, index: int) -> Asked:
    where = f"{asked.prompts}:{number}"
    try:
        row = json.loads(line)
        if "\\u" in line:
            json.dumps(row, ensure_ascii=False).encode()  # halves of a character are no text
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not JSON", got=error) from error
    if not isinstance(row, dict):
        raise DataError(f"{where} is not a JSON object", got=type(row).__name__)
    _check_keys(row, where)
    thinking = row.get("thinking", asked.thinking)
    if "budget" in row and not MODES[thinking].thinking:
        raise DataError(f"{where}: budget is for thoughts", got="thinking off", do="set thinking to regular")
    budget = row.get("budget", asked.budget) if MODES[thinking].thinking else None
    options = drawing(asked) | {
        key: row[key] for key in ("temperature", "top_p", "top_k", "min_p") if key in row
    }
    if "stop" in row:
        options["stop_texts"] = (row["stop"],) if isinstance(row["stop"], str) else tuple(row["stop"])
    most = row.get("max_tokens", asked.max_tokens or MAX_TOKENS)
    seed = row.get("seed", asked.seed * 1_000_003 + index)
    try:
        prompt = _prompt(loaded, asked, row, thinking, budget)
        turn = turn_of(loaded, prompt, options, max_new_tokens=most, seed=seed, budget=budget)
        check_turn(loaded, turn, asked.context)
    except NemotronError as error:
        raise type(error)(f"{where}: {error}") from error
    except RecursionError as error:
        raise DataError(f"{where}: nested too deeply", got=error) from error
    facts = json.dumps([loaded.digest, repr(turn.request), budget, loaded.ssm_format])
    key = hashlib.blake2b(facts.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
    shows = MODES[thinking].thinking and (loaded.chat or "messages" in row)
    return Asked(index, row.get("id"), turn, shows, key)


def _check_keys(row: dict[str, Any], where: str) -> None:
    for key in row:
        if key not in KEYS and key not in IGNORED:
            close = difflib.get_close_matches(key, KEYS, 1)
            hint = f" (did you mean '{close[0]}'?)" if close else ""
            raise DataError(f"{where}: unknown key '{key}'{hint}", allowed=", ".join(KEYS))
    given = [key for key in INPUTS if key in row]
    if len(given) != 1:
        raise DataError(
            f"{where}: needs one of prompt, messages and tokens", got=", ".join(given) or "none of them"
        )
    for key, kind in WORDS.items():
        value = row.get(key, kind())
        if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else int):
            raise DataError(f"{where}: {key} is no number of its kind", got=json.dumps(value))
    stop = row.get("stop", [])
    if not isinstance(stop, str) and not (isinstance(stop, list) and all(isinstance(s, str) for s in stop)):
        raise DataError(f"{where}: stop is neither a text nor a list of texts", got=json.dumps(stop))
    if row.get("thinking", "off") not in tuple(MODES):
        raise DataError(f"{where}: unknown thinking", got=row["thinking"], allowed=", ".join(MODES))
    budget = row.get("budget", 1)
    if isinstance(budget, bool) or not isinstance(budget, int) or budget < 1:
        raise DataError(
            f"{where}: budget is no number of tokens", got=json.dumps(budget), allowed="1 or more"
        )


def _prompt(
    loaded: Loaded, asked: argparse.Namespace, row: dict[str, Any], thinking: str, budget: int | None
) -> list[int]:
    if "tokens" in row:
        if "thinking" in row and MODES[thinking].thinking and not loaded.chat:
            raise ConfigError(
                "thinking belongs to the chat template, and texts are continued here", do="add --chat"
            )
        return _ids(row["tokens"])
    if "messages" in row:
        messages, tools = _objects(row, "messages"), _objects(row, "tools") if row.get("tools") else []
        return chat_prompt(loaded, messages, thinking, budget, tools)
    if not isinstance(row["prompt"], str):
        raise DataError("prompt is not a text", got=json.dumps(row["prompt"])[:80])
    return text_prompt(loaded, row["prompt"], thinking, budget, asked.system)


def _objects(row: dict[str, Any], key: str) -> list[dict[str, Any]]:
    if not isinstance(row[key], list) or not all(isinstance(item, dict) for item in row[key]):
        raise DataError(f"{key} is not a list of objects", got=json.dumps(row[key])[:80])
    return row[key]


def _ids(tokens: Any) -> list[int]:
    whole = isinstance(tokens, list) and all(type(token) is int for token in tokens)
    if not whole:
        raise DataError("tokens is not a list of token ids", got=json.dumps(tokens)[:80])
    return tokens


def _lines(loaded: Loaded, answers: Answers, waiting: deque[Asked]) -> Iterator[dict[str, Any]]:
    """Lines of the output in order; at most two requests a slot are handed over at once."""
    rows = {row.index: row for row in waiting}
    order, found = deque(rows), {}
    while order:
        while waiting and len(answers) < 2 * answers.scheduler.max_slots:
            row = waiting.popleft()
            answers.submit(row.index, row.turn)
        for index, event in answers.step():
            if event.completion is not None:
                found[index] = event.completion
        while order and order[0] in found:
            index = order.popleft()
            yield _line(loaded, rows.pop(index), found.pop(index))


def _line(loaded: Loaded, row: Asked, found: Completion) -> dict[str, Any]:
    text = AnswerText(loaded.tokenizer, loaded.stop_ids, row.turn.request.stop_texts, row.thinking)
    pieces = [text.push(found.tokens), text.finish()]
    line: dict[str, Any] = {"index": row.index}
    if row.id is not None:
        line["id"] = row.id
    line["text"] = "".join(piece.text for piece in pieces)
    if row.thinking:
        line["thoughts"] = "".join(piece.thoughts for piece in pieces)
    model = [None if logprob != logprob else logprob for logprob in found.model_logprobs]
    return line | {
        "tokens": found.tokens,
        "logprobs": found.logprobs,
        "model_logprobs": model,
        "finish_reason": found.finish_reason,
        "prompt_tokens": len(row.turn.request.prompt),
        "key": row.key,
    }


@contextmanager
def _output(path: Path | None, rows: list[Asked]) -> Iterator[tuple[TextIO, int]]:
    """(where to write, answers that are there). A last line without its end is cut off."""
    if path is None:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(encoding="utf-8")
        yield sys.stdout, 0
        return
    try:
        with FileLock(path.with_name(f".{path.name}.lock"), timeout=0):
            done, size = _known(path, rows) if path.exists() else (0, 0)
            with open(path, "a", encoding="utf-8") as out:
                os.truncate(path, size)
                yield out, done
    except Timeout as error:
        raise DataError(f"another process writes {path}", do="wait for it, or name another --out") from error


def _is_begun(line: bytes, row: Asked) -> bool:
    """Whether a last line is the beginning of an answer, and not somebody's text that has no end."""
    begin = json.dumps({"index": row.index})[:-1].encode() + b", "
    return not line.endswith(b"\n") and line[: len(begin)] == begin[: len(line)]


def _known(path: Path, rows: list[Asked]) -> tuple[int, int]:
    """(answers, bytes) of a file that these rows are the continuation of. Raises DataError for any other."""
    size = done = 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if done < len(rows) and _is_begun(line, rows[done]):
                break
            try:
                content = json.loads(line)
            except (ValueError, RecursionError):
                content = None
            mine = done < len(rows) and isinstance(content, dict) and content.get("key") == rows[done].key
            if not mine:
                raise DataError(
                    f"{path}:{number} is not an answer to these prompts with these options and weights",
                    do="name another --out; nothing is overwritten",
                )
            done, size = done + 1, size + len(line)
    return done, size
