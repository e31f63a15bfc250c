"""Wrong answers for multiple choice: slips near the right answer, and right answers of other problems."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from typing import Any

from nemotron_ultra.data.order import keyed

_INTEGER = re.compile(r"-?\d{1,15}")
_NUMBER = re.compile(r"\d+")
FEW = 0.6


def wrong_answers(
    answer: str,
    others: Iterable[str],
    count: int,
    key: str,
    right: Callable[[str], bool],
    near: bool = True,
) -> list[str]:
    """Up to `count` different answers, none of them `answer` and none that `right` accepts.

    The order, and with it the choice, is a function of `key`: near misses and others' answers mixed. Where
    others' answers repeat (father, aunt, ...), the answer is one of a few words, and a misspelt one would
    give itself away: no near misses then, unless it is a number. near=False: none at all.
    """
    theirs = [other.strip() for other in others]
    few = len(set(theirs)) <= FEW * len(theirs) and not _INTEGER.fullmatch(answer)
    candidates = dict.fromkeys([*(_near(answer) if near and not few else []), *theirs])
    order = sorted(candidates, key=lambda text: keyed("wrong", key, text))
    chosen: list[str] = []
    taken = {_plain(answer)}
    for text in order:
        if len(chosen) == count:
            break
        if text and _plain(text) not in taken and not right(text):
            taken.add(_plain(text))
            chosen.append(text)
    return chosen


def others_of(name: str, entry: Mapping[str, Any]) -> list[str]:
    """All other answers to this very problem where the generator's answers are few and known; else []."""
    if name != "knights_knaves":
        return []
    facts = entry["metadata"]
    made = {
        right: _island(facts["names"], facts["knight_knave_terms"], right)
        for right in product((True, False), repeat=len(facts["names"]))
    }
    solution = tuple(bool(part) for part in facts["solution"])
    return (
        [text for right, text in made.items() if right != solution]
        if made[solution] == entry["answer"]
        else []
    )


def _island(names: Sequence[str], terms: Mapping[str, str], knights: Sequence[bool]) -> str:
    says = [f"{n} is {terms['a_knight' if k else 'a_knave']}" for n, k in zip(names, knights, strict=True)]
    return f"{', '.join(says[:-1])}, and {says[-1]}."


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())


def _near(answer: str) -> list[str]:
    if _INTEGER.fullmatch(answer):
        return _near_integer(int(answer))
    items = answer.split(", ")
    if len(items) > 2:
        swaps = [[*items[:i], items[i + 1], items[i], *items[i + 2 :]] for i in range(len(items) - 1)]
        return [", ".join(swapped) for swapped in swaps]
    if answer.isalpha() and len(answer) > 2:
        return [answer[:i] + answer[i + 1] + answer[i] + answer[i + 2 :] for i in range(len(answer) - 1)]
    found = list(_NUMBER.finditer(answer))
    return [
        answer[: match.start()] + str(value) + answer[match.end() :]
        for match in found[:4]
        for value in _near_integer(int(match.group()))[:4]
    ]


def _near_integer(value: int) -> list[str]:
    text = str(abs(value))
    swapped = {int(text[:i] + text[i + 1] + text[i] + text[i + 2 :]) for i in range(len(text) - 1)}
    near = [value + 1, value - 1, value + 2, value - 2, value + 10, value - 10]
    near += [number if value >= 0 else -number for number in sorted(swapped)]
    if value < 0:
        near.append(-value)
    return [str(number) for number in near if number != value and (number >= 0 or value < 0)]
