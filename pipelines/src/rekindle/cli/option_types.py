"""Types of options: each parses the text of an option, or raises an error that says what to write
instead.

Every text that a shell can pass is either a value that the command can use, or a usage error.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path

_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_SHOWN_CHARS = 60
"""Characters of a value that a message repeats."""


def number_from(least: int, most: int | None = None) -> Callable[[str], int]:
    """A whole number, at most `most` if that is given."""
    limits = f"at least {least}" + (f" and at most {most:,}" if most is not None else "")

    def parsed(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least or (most is not None and number > most):
            raise _refused(text, f"is not a whole number of {limits}")
        return number

    return parsed


def seconds_from(least: float, most: float) -> Callable[[str], float]:
    def parsed(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = least - 1
        if not least <= number <= most:  # also NaN
            raise _refused(text, f"is not a number of seconds from {least:g} to {most:g}")
        return number

    return parsed


def duration_us(text: str, longest: str = "3650d") -> int:
    """A duration as in a topology, such as `15m`, longer than 0."""
    from rekindle.topology.units import parse_duration

    try:
        number = parse_duration(text)
    except ValueError:
        number = 0
    if not 0 < number <= parse_duration(longest):
        raise _refused(text, f"is not a duration such as 90s, 15m or 2h, of at most {longest}")
    return number


def not_empty(text: str) -> str:
    """A text that must not be empty, as it is if a shell variable is not set."""
    if not text:
        raise argparse.ArgumentTypeError("is empty")
    return text


def host_and_port(text: str) -> str:
    host, _, port = text.rpartition(":")
    is_port = port.isascii() and port.isdigit() and 0 < int(port) < 2**16
    if not host or "/" in host or not is_port:
        raise _refused(text, "is not HOST:PORT, such as localhost:8816")
    return text


def path(text: str) -> Path:
    """A path that can be a part of a URL."""
    try:
        not_empty(text).encode()
    except UnicodeEncodeError:
        raise _refused(text, "is not UTF-8; rename it") from None
    return Path(text)


def path_with_ending(*endings: str) -> Callable[[str], Path]:
    """A path that ends with one of `endings` in any case."""

    def parsed(text: str) -> Path:
        found = path(text)
        if found.suffix.lower() not in endings:
            raise _refused(text, f"does not end in {', '.join(endings[:-1])} or {endings[-1]}")
        return found

    return parsed


def kubernetes_name(text: str) -> str:
    if not _NAME.fullmatch(text):
        what = "is not a name in Kubernetes: a-z, 0-9, - and ., with a letter or digit at both ends"
        raise _refused(text, what)
    return text


def _refused(text: str, what: str) -> argparse.ArgumentTypeError:
    plain = 0 < len(text) <= _SHOWN_CHARS and text.isprintable()
    shown = text if plain else repr(text[:_SHOWN_CHARS]) + "..." * (len(text) > _SHOWN_CHARS)
    return argparse.ArgumentTypeError(f"{shown} {what}")
