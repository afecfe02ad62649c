"""Reasons that several checks use, the error for invalid SQL, and did-you-mean hints."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from rekindle.errors import Problem, RekindleError

NOT_SUPPORTED_YET = "NotSupportedYet"
TOO_DEEP = "TooDeep"
MISTAKES = frozenset({"NotANumber", "Replaced", "SharedPlace", "UnknownTimeZone"})
"""Reasons of what can run, and is probably wrong: it is refused in a new generation only."""


class InvalidSql(RekindleError):
    """Invalid SQL or DDL; `problems` lists all problems found."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("; ".join(p.message for p in problems))
        self.problems = tuple(problems)


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint that names the nearest known word, or all of them if they are few."""
    options = list(dict.fromkeys(known))
    listed = f"known are {', '.join(options)}" if 0 < len(options) <= 16 else ""
    return did_you_mean(word, options) or listed


def did_you_mean(word: str, known: Iterable[str], similarity: float = 0.6) -> str:
    """A hint that names the nearest known word, "" if none is similar enough."""
    lower = {o.lower(): o for o in known}
    close = difflib.get_close_matches(word.lower(), list(lower), n=1, cutoff=similarity)
    return f"did you mean {lower[close[0]]}?" if close else ""
