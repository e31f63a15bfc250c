"""Worked steps to the answer of a problem, by rule, where the rule is a plain one; "" where there is none.

Each rule ends in a result of its own, and the steps count only if that is the library's answer.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from typing import Any

Steps = tuple[list[str], str]  # (lines, result)


def explain(name: str, entry: Mapping[str, Any]) -> str:
    """Steps for an entry of the reasoning-gym generator `name`."""
    rule = RULES.get(name)
    found = rule(entry["metadata"]) if rule else None
    if found is None:
        return ""
    lines, result = found
    return "\n".join(lines) if result == str(entry["answer"]).strip() else ""


def _sum(facts: Mapping[str, Any]) -> Steps | None:
    """Running totals of a chain of + and - from left to right."""
    parts = facts["expression"].split()
    try:
        numbers = [int(part) for part in parts[::2]]
    except ValueError:
        return None
    signs = parts[1::2]
    if set(signs) - {"+", "-"} or len(signs) != len(numbers) - 1:
        return None
    total, lines = numbers[0], []
    for sign, number in zip(signs, numbers[1:], strict=True):
        after = total + number if sign == "+" else total - number
        lines.append(f"{total} {sign} {number} = {after}")
        total = after
    return lines, str(total)


def _product(facts: Mapping[str, Any]) -> Steps | None:
    """Long multiplication by the digits of the second factor."""
    parts = facts["expression"].split(" * ")
    if len(parts) != 2 or not all(part.isdigit() for part in parts):
        return None
    first, second = (int(part) for part in parts)
    lines, total = [], 0
    for place, digit in enumerate(reversed(parts[1])):
        if digit != "0":
            part = first * int(digit) * 10**place
            lines.append(f"{first} * {int(digit) * 10**place} = {part}, together {total + part}")
            total += part
    return lines or [f"{first} * {second} = 0"], str(total)


def _euclid(a: int, b: int) -> list[str]:
    lines = []
    while b:
        lines.append(f"{a} = {a // b} * {b} + {a % b}")
        a, b = b, a % b
    return lines


def _gcd(facts: Mapping[str, Any]) -> Steps:
    lines, result = [], facts["numbers"][0]
    for number in facts["numbers"][1:]:
        lines += _euclid(max(result, number), min(result, number))
        result = math.gcd(result, number)
        lines.append(f"The greatest common divisor so far is {result}.")
    return lines, str(result)


def _lcm(facts: Mapping[str, Any]) -> Steps:
    lines, result = [], facts["numbers"][0]
    for number in facts["numbers"][1:]:
        common = math.gcd(result, number)
        after = result // common * number
        lines.append(f"gcd({result}, {number}) = {common}, so lcm = {result} / {common} * {number} = {after}")
        result = after
    return lines, str(result)


def _factors(facts: Mapping[str, Any]) -> Steps:
    rest, divisor, lines, found = facts["number"], 2, [], []
    while rest > 1:
        while rest % divisor == 0:
            if rest != divisor:
                lines.append(f"{rest} = {divisor} * {rest // divisor}")
            found.append(str(divisor))
            rest //= divisor
        divisor += 1
    return [*lines, f"{found[-1]} is prime."], " × ".join(found)


def _bits(facts: Mapping[str, Any]) -> Steps:
    text = f"{facts['number']:b}"
    return [f"{facts['number']} in binary is {text}.", f"It has {text.count('1')} ones."], str(
        text.count("1")
    )


def _letters(facts: Mapping[str, Any]) -> Steps:
    letter, total, lines = facts["target_letter"], 0, []
    for word in facts["span"]:
        count = word.lower().count(letter.lower())
        total += count
        if count:
            lines.append(f"{word}: {count}, together {total}")
    return lines or [f"No word has the letter {letter}."], str(total)


def _backward(facts: Mapping[str, Any]) -> Steps:
    word = facts["word"]
    return [f"The letters are {' '.join(word)}.", f"Backward: {' '.join(reversed(word))}."], word[::-1]


def _base(facts: Mapping[str, Any]) -> Steps:
    digits = "0123456789abcdefghijklmnopqrstuvwxyz"
    source, target, text = facts["source_base"], facts["target_base"], str(facts["source_repr"])
    value, lines = 0, []
    for digit in text:
        after = value * source + digits.index(digit)
        lines.append(f"{value} * {source} + {digits.index(digit)} = {after}")
        value = after
    rest, found = value, ""
    while target != 10 and rest:
        lines.append(f"{rest} = {rest // target} * {target} + {rest % target}")
        rest, found = rest // target, digits[rest % target] + found
    return lines, (str(value) if target == 10 else found or "0")


def _fraction(facts: Mapping[str, Any]) -> Steps | None:
    top, bottom = facts["numerator"], facts["denominator"]
    common = math.gcd(top, bottom)
    lines = [*_euclid(max(top, bottom), min(top, bottom)), f"The greatest common divisor is {common}."]
    lines += [f"{top} / {common} = {top // common}", f"{bottom} / {common} = {bottom // common}"]
    plain = f"{top // common}/{bottom // common}"
    forms = {"plain": plain, "latex_inline": f"${plain}$"}
    frac = f"{{{top // common}}}{{{bottom // common}}}$"
    forms |= {"latex_frac": f"$\\frac{frac}", "latex_dfrac": f"$\\dfrac{frac}"}
    return (lines, forms[facts["style"]]) if facts["style"] in forms else None


def _legs(facts: Mapping[str, Any]) -> Steps | None:
    table = getattr(importlib.import_module("reasoning_gym.arithmetic.leg_counting"), "ANIMALS", {})
    total, lines = 0, []
    for animal, count in facts["animals"].items():
        if animal not in table:
            return None
        total += count * table[animal]
        lines.append(f"{animal}: {count} * {table[animal]} = {count * table[animal]}, together {total}")
    return lines, str(total)


RULES: dict[str, Callable[[Mapping[str, Any]], Steps | None]] = {
    "chain_sum": _sum,
    "basic_arithmetic": _sum,
    "products": _product,
    "gcd": _gcd,
    "lcm": _lcm,
    "prime_factorization": _factors,
    "count_bits": _bits,
    "letter_counting": _letters,
    "spell_backward": _backward,
    "base_conversion": _base,
    "fraction_simplification": _fraction,
    "leg_counting": _legs,
}
