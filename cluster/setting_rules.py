"""What a setting may hold: a check for typed values, a parser for text, and words for both.

The module knows kinds of values (whole numbers, sizes, names ...), not which settings there are.
A check returns the value in its final form; checks and parsers raise ValueError, and the caller,
who knows the setting and its source, turns that into the user's error.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple, NoReturn

_UNITS = {
    "": 1,
    "b": 1,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([a-zA-Z]*)")
_WHOLE = re.compile(r"[+-]?\d+")
_NAME = re.compile(r"[A-Za-z0-9_.-]+")


class Rule(NamedTuple):
    """What one setting may hold."""

    allowed: str
    """For the error: "a whole number >= 1"."""
    check: Callable[[object], Any]
    """From a typed value to its final form; raises ValueError."""
    parse: Callable[[str], Any]
    """From text to the typed value that `check` looks at; raises ValueError."""


def text() -> Rule:
    """Text that is not empty."""

    def check(value: object) -> str:
        return value if isinstance(value, str) and value.strip() else _unfit()

    return Rule("text that is not empty", check, str)


def name_text() -> Rule:
    """A name that can be part of an actor's name and of a path."""

    def check(value: object) -> str:
        return value if isinstance(value, str) and _NAME.fullmatch(value) else _unfit()

    return Rule("a name of letters, digits, '_', '.' and '-'", check, str)


def one_of(*choices: str) -> Rule:
    """One of some words."""

    def check(value: object) -> str:
        return value if isinstance(value, str) and value in choices else _unfit()

    return Rule("one of " + ", ".join(repr(choice) for choice in choices), check, str)


def flag() -> Rule:
    """True or False."""

    def check(value: object) -> bool:
        return value if isinstance(value, bool) else _unfit()

    def parse(written: str) -> bool:
        words = {"true": True, "1": True, "false": False, "0": False}
        return words[written.lower()] if written.lower() in words else _unfit()

    return Rule("true or false (1 or 0 in the environment)", check, parse)


def whole(low: int) -> Rule:
    """A whole number from `low` on; neither a float nor a bool."""

    def check(value: object) -> int:
        return value if type(value) is int and value >= low else _unfit()

    def parse(written: str) -> int:
        return int(written) if _WHOLE.fullmatch(written) else _unfit()

    return Rule(f"a whole number >= {low}", check, parse)


def number(low: float, *, exclusive: bool = False, whole_above_one: bool = False) -> Rule:
    """A finite number; with `whole_above_one` as Ray wants resources: a fraction of one, or n."""

    def check(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError
        found = float(value)
        if not math.isfinite(found) or found < low or (exclusive and found == low):
            raise ValueError
        if whole_above_one and found > 1 and not found.is_integer():
            raise ValueError
        return found

    bound = f"{'>' if exclusive else '>='} {low:g}"
    more = ", a whole one where it is above 1" if whole_above_one else ""
    return Rule(f"a number {bound}{more}", check, float)


def size(low: int) -> Rule:
    """A number of bytes, as a whole number or as text with a unit."""

    def check(value: object) -> int:
        found = _bytes_of(value) if isinstance(value, str) else value
        return found if type(found) is int and found >= low else _unfit()

    return Rule(f"bytes >= {low}, as a whole number or like '512MiB', '2GiB', '2GB'", check, str)


def optional(rule: Rule) -> Rule:
    """What `rule` allows, or None ("none" in text)."""

    def check(value: object) -> Any:
        return None if value is None else rule.check(value)

    def parse(written: str) -> Any:
        return None if written.lower() == "none" else rule.parse(written)

    return Rule(f"{rule.allowed}, or none", check, parse)


def _bytes_of(written: str) -> int:
    match = _SIZE.fullmatch(written.strip())
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError
    found = Fraction(match[1]) * _UNITS[match[2].lower()]
    return int(found) if found.denominator == 1 else _unfit()


def _unfit() -> NoReturn:
    raise ValueError
