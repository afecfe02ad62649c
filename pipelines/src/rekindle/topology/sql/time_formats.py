"""Compiles Spark's time formats, such as `dd/MM/yyyy HH:mm`, to regular expressions.

Letters have the meaning of Spark's `to_timestamp`; those that depend on a locale or on time zone
names are refused. A format must have a year, a month and a day, so that no clock is needed. Pure.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NoReturn

from rekindle.errors import Problem
from rekindle.topology.problems import InvalidSql

MONTHS = (
    "January February March April May June July August September October November December".split()  # noqa: SIM905 - a table of words
)
_ONE_OR_TWO = r"\d{1,2}"
_TWO = r"\d{2}"
_LETTERS = {
    "yyyy": ("year", r"\d{4}"),
    "y": ("year", r"\d{1,4}"),
    "yy": ("year_of_century", _TWO),
    "MM": ("month", _TWO),
    "M": ("month", _ONE_OR_TWO),
    "MMM": ("month_name", "|".join(name[:3] for name in MONTHS)),
    "MMMM": ("month_name", "|".join(MONTHS)),
    "dd": ("day", _TWO),
    "d": ("day", _ONE_OR_TWO),
    "HH": ("hour", _TWO),
    "H": ("hour", _ONE_OR_TWO),
    "hh": ("clock_hour", _TWO),
    "h": ("clock_hour", _ONE_OR_TWO),
    "mm": ("minute", _TWO),
    "m": ("minute", _ONE_OR_TWO),
    "ss": ("second", _TWO),
    "s": ("second", _ONE_OR_TWO),
    "a": ("am_pm", "AM|PM"),
    "X": ("zone", r"Z|[+-]\d{2}(?:\d{2})?"),
    "XX": ("zone", r"Z|[+-]\d{4}"),
    "XXX": ("zone", r"Z|[+-]\d{2}:\d{2}"),
    "Z": ("zone", r"[+-]\d{4}"),
}
_LETTERS |= {"S" * most: ("fraction", rf"\d{{1,{most}}}") for most in range(1, 7)}
_DATE = (("year", "year_of_century"), ("month", "month_name"), ("day",))
_KNOWN = "use y, M, d, H, h, m, s, S, a, X, Z, text in 'quotes' and optional parts in [brackets]"
_CORRECTIONS = {wrong: f"write {wrong.lower()}" for wrong in ("YYYY", "YY", "DD", "D")}
_STRFTIME = re.compile(r"%[A-Za-z]")
_TOKEN = re.compile(r"'((?:[^']|'')*)'|(([A-Za-z])\3*)|(.)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class TimeFormat:
    """`regex` (RE2) matches a whole string, with one named group for each of `parts`."""

    pattern: str
    regex: str
    parts: tuple[str, ...]

    @property
    def has_zone(self) -> bool:
        return "zone" in self.parts


def parse_format(pattern: str) -> TimeFormat:
    """Raises InvalidSql."""
    if directive := _STRFTIME.search(pattern):
        _refuse(pattern, f"has {directive[0]}", "write it like yyyy-MM-dd HH:mm:ss")
    regex: list[str] = []
    parts: list[str] = []
    optional: set[str] = set()
    depth = 0
    for quoted, letters, _, other in _TOKEN.findall(pattern):
        if letters:
            part, expression = _LETTERS.get(letters) or _refuse(
                pattern, f"has {letters}", _CORRECTIONS.get(letters, _KNOWN)
            )
            if part in parts:
                _refuse(pattern, f"has {part.replace('_', ' ')} twice", "write each part once")
            parts.append(part)
            optional.update([part] if depth else [])
            regex.append(f"(?P<{part}>{expression})")
        elif other in ("[", "]"):
            depth += 1 if other == "[" else -1
            if depth < 0:
                break
            regex.append("(?:" if other == "[" else ")?")
        elif other == "'":
            _refuse(pattern, "has an unclosed quote", "write it like 'T'")
        else:
            text = other or quoted.replace("''", "'") or "'"
            regex.append(re.escape(text))
    if depth:
        _refuse(pattern, "has brackets that do not match", "write them like [:ss]")
    for names in _DATE:
        if sum(name in parts for name in names) > 1:
            _refuse(pattern, f"has {names[0]} twice", "write each part once")
        if not any(name in parts and name not in optional for name in names):
            what = f"has no {names[0]}"
            hint = "a time without its date is not an event time: join the columns with concat"
            _refuse(pattern, what, hint)
    if ("clock_hour" in parts) != ("am_pm" in parts):
        _refuse(pattern, "has h without a, or a without h", "use H for 0 to 23, or h with a")
    return TimeFormat(pattern, f"(?i)^(?:{''.join(regex)})$", tuple(parts))


def _refuse(pattern: str, what: str, hint: str) -> NoReturn:
    raise InvalidSql([Problem("", "InvalidExpression", f"the format {pattern!r} {what}", hint)])
