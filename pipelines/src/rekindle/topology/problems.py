"""What is wrong with a piece of SQL, before it is known where in a manifest it stands."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rekindle.errors import Problem, RekindleError

NOT_SUPPORTED_YET = "NotSupportedYet"
TOO_DEEP = "TooDeep"


@dataclass(frozen=True, slots=True)
class Finding:
    """A `Problem` without its path."""

    reason: str
    message: str
    hint: str = ""

    def at(self, path: str) -> Problem:
        return Problem(path, self.reason, self.message, self.hint)


class InvalidSql(RekindleError):
    """SQL or DDL that cannot be used; `findings` lists all that was found."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        super().__init__("; ".join(f.message for f in findings))
        self.findings = tuple(findings)


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint that names the nearest known word, or all of them if they are few."""
    options = list(dict.fromkeys(known))
    listed = f"known are {', '.join(options)}" if 0 < len(options) <= 16 else ""
    return did_you_mean(word, options) or listed


def did_you_mean(word: str, known: Iterable[str], likeness: float = 0.6) -> str:
    """A hint that names the nearest known word, "" if none is alike enough."""
    lower = {o.lower(): o for o in known}
    close = difflib.get_close_matches(word.lower(), list(lower), n=1, cutoff=likeness)
    return f"did you mean {lower[close[0]]}?" if close else ""
