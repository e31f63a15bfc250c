"""Numbers for people: few digits where they fit, powers of ten where not, words for the non-finite."""

from __future__ import annotations

import math

_UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def fixed(value: object, digits: int = 3) -> str:
    """`digits` decimals from 0.01 to 9999; powers of ten outside; nan, inf, or - for what is no number."""
    number = _number(value)
    if number is None:
        return "-"
    if not math.isfinite(number):
        return _special(number)
    if number == 0 or 10.0**-digits <= abs(number) < 1e4:
        return f"{number:.{digits}f}"
    return scientific(number)


def scientific(value: object) -> str:
    """6.0e-5 rather than Python's 6.0e-05."""
    number = _number(value)
    if number is None:
        return "-"
    if not math.isfinite(number):
        return _special(number)
    if number == 0:
        return "0"
    mantissa, exponent = f"{number:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def compact(value: object) -> str:
    """Three digits and a unit: 941, 9.1k, 1.64M, 20.0T; above that powers of ten."""
    number = _number(value)
    if number is None:
        return "-"
    if not math.isfinite(number):
        return _special(number)
    if abs(number) >= 1e15 or 0 < abs(number) < 1e-2:
        return scientific(number)
    for size, unit in _UNITS:
        if abs(number) >= 0.9995 * size:
            return _three(number / size) + unit
    return _three(number) if number != int(number) else str(int(number))


def duration(seconds: object) -> str:
    """0:54, 12:03, 3:25:10, 2d 4h; -:-- where it is unknown."""
    number = _number(seconds)
    if number is None or not math.isfinite(number) or number < 0:
        return "-:--"
    whole = round(number)
    days, rest = divmod(whole, 86400)
    hours, rest = divmod(rest, 3600)
    minutes, second = divmod(rest, 60)
    if days:
        return f"{days}d {hours}h" if days < 10000 else "-:--"
    return f"{hours}:{minutes:02}:{second:02}" if hours else f"{minutes}:{second:02}"


def _three(number: float) -> str:
    size = abs(number)
    return f"{number:.0f}" if size >= 99.95 else f"{number:.1f}" if size >= 9.995 else f"{number:.2f}"


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _special(number: float) -> str:
    return "nan" if math.isnan(number) else "inf" if number > 0 else "-inf"
