"""The time zones that SQL and `eventTime.expression` may name: those of the package `tzdata`, which
is the same in all tasks, and offsets. The machine's own files are not used.

Design: docs/design/engine.md#time-zones.
"""

from __future__ import annotations

import datetime as dt
import functools
import re
import zoneinfo
from collections.abc import Iterator
from importlib.resources import files

from sqlglot import exp

from rekindle.errors import Problem
from rekindle.topology.problems import did_you_mean

_ZONE = re.compile(r"[A-Za-z][A-Za-z0-9_+-]*(/[A-Za-z0-9_+-]+)*")
_OFFSET = re.compile(r"(?P<sign>[+-])(?P<hours>\d{2}):(?P<minutes>\d{2})")
_UP_TO_18 = r"(18(:?00){0,2}|(0?\d|1[0-7])(:?[0-5]\d){0,2})"
_OFFSET_IN_SPARK = re.compile(rf"Z|(UTC|GMT|UT)?[+-]{_UP_TO_18}")
"""Spark reads more forms than `eventTime.expression` does."""
_FIXED = {"EST": "-05:00", "HST": "-10:00", "MST": "-07:00"}
"""Spark takes these names for offsets; in the package they are the zones of cities."""
_MAX_OFFSET = dt.timedelta(hours=18)
_OF_PARTS = frozenset(
    {"make_timestamp", "make_timestamp_ltz", "try_make_timestamp", "try_make_timestamp_ltz"}
)
_PARTS_AND_ZONE = 7


def find_zone(name: str) -> dt.tzinfo | None:
    """A zone by its name, or by an offset such as +02:00; None if there is none."""
    offset = _OFFSET.fullmatch(_FIXED.get(name, name))
    if offset is not None:
        delta = dt.timedelta(hours=int(offset["hours"]), minutes=int(offset["minutes"]))
        if delta > _MAX_OFFSET or int(offset["minutes"]) >= 60:
            return None
        return dt.timezone(-delta if offset["sign"] == "-" else delta)
    return _named(name) if _ZONE.fullmatch(name) else None


@functools.cache
def _named(name: str) -> dt.tzinfo | None:
    try:
        with files("tzdata").joinpath("zoneinfo", *name.split("/")).open("rb") as rules:
            return zoneinfo.ZoneInfo.from_file(rules, key=name)
    except (ValueError, OSError):
        return None


def unknown_zone(name: str) -> Problem:
    is_abbreviation = name.isupper() and "/" not in name  # a similar one is another zone
    known = () if is_abbreviation else (files("tzdata") / "zones").read_text().split()
    hint = did_you_mean(name, known)
    what = f"unknown time zone {name!r}"
    return Problem("", "UnknownTimeZone", what, hint or "write it like Europe/Paris or +02:00")


def check_zones(tree: exp.Expr) -> list[Problem]:
    """The zones in quotes that Spark would not know when the first row comes, or that it would not
    find in the package: abbreviations such as PST have no one meaning."""
    names = dict.fromkeys(_zones_in(tree))
    unknown = (n for n in names if find_zone(n) is None and not _OFFSET_IN_SPARK.fullmatch(n))
    return [unknown_zone(name) for name in unknown]


def _zones_in(tree: exp.Expr) -> Iterator[str]:
    for node in tree.find_all(
        exp.FromTimeZone, exp.AtTimeZone, exp.ConvertTimezone, exp.TimestampFromParts, exp.Anonymous
    ):
        match node:
            case exp.ConvertTimezone():
                zones = [node.args.get("source_tz"), node.args.get("target_tz")]
            case exp.TimestampFromParts():
                zones = [node.args.get("nano")]  # the seventh argument, for sqlglot
            case exp.Anonymous():
                is_of_parts = node.name.lower() in _OF_PARTS
                zones = node.expressions[_PARTS_AND_ZONE - 1 :] if is_of_parts else []
            case _:
                zones = [node.args.get("zone")]
        yield from (z.name for z in zones if isinstance(z, exp.Literal) and z.is_string)
