"""Parses durations, sizes and CPU quantities to integers, and formats durations and sizes.

Durations are microseconds, sizes bytes, CPUs milli-CPU. Does not know fields.
"""

from __future__ import annotations

import re
from typing import Any

from rekindle.quantities import parse_quantity

MILLISECOND = 1_000
SECOND = 1_000_000

_DURATION_UNITS = {"us": 1, "ms": 1_000, "s": SECOND, "m": 60 * SECOND, "h": 3600 * SECOND}
_DURATION_UNITS["d"] = 24 * _DURATION_UNITS["h"]
_DURATION_PART = re.compile(r"(\d+)(us|ms|s|m|h|d)")
_CPU = re.compile(r"\d+(\.\d+)?m?")
_SIZE = re.compile(r"\d+(\.\d+)?([kMGTP]|[KMGTP]i)?")  # not 512m, which is half a byte


def parse_duration(value: Any) -> int:
    """`"1h30m"` -> microseconds. Integers are returned unchanged (already microseconds)."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    parts = _DURATION_PART.findall(value) if isinstance(value, str) else []
    if not parts or "".join(n + u for n, u in parts) != value:
        raise ValueError(f"{value!r} is not a duration; write it like 250ms, 10s, 1h30m or 2d")
    return sum(int(n) * _DURATION_UNITS[u] for n, u in parts)


def parse_size(value: Any) -> int:
    """`"1Gi"` -> bytes. Integers are returned unchanged."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if not isinstance(value, str) or not _SIZE.fullmatch(value):
        raise ValueError(f"{value!r} is not a size; write it like 512Mi or 1Gi")
    return int(parse_quantity(value))


def parse_cpu(value: Any) -> int:
    """`"500m"`, `"1.5"`, `2` -> milli-CPU, rounded; at least 1, unless it is 0."""
    if isinstance(value, bool) or not _CPU.fullmatch(str(value)):
        raise ValueError(f"{value!r} is not a number of CPUs; write it like 500m or 2")
    cpus = parse_quantity(str(value))
    return max(1, round(cpus * 1000)) if cpus else 0


def format_size(size: int) -> str:
    """Formats bytes as in a resource."""
    for unit, factor in (("Gi", 1024**3), ("Mi", 1024**2), ("Ki", 1024)):
        if size and size % factor == 0:
            return f"{size // factor}{unit}"
    return str(size)


def format_duration(us: int) -> str:
    """Formats microseconds as in a resource."""
    for unit, size in (("d", 86400 * SECOND), ("h", 3600 * SECOND), ("m", 60 * SECOND)):
        if us and us % size == 0:
            return f"{us // size}{unit}"
    for unit, size in (("s", SECOND), ("ms", MILLISECOND)):
        if us % size == 0:
            return f"{us // size}{unit}"
    return f"{us}us"
