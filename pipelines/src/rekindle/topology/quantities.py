"""Kubernetes quantities of a task's resources: milli-CPU and bytes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from rekindle.errors import Problem
from rekindle.topology.model import Resources
from rekindle.topology.spec import parse_quantity

DEFAULT = Resources(cpu_m=500, memory=1024**3)
_CPU = re.compile(r"(\d+(?:\.\d+)?)(m?)")


def parse_cpu(value: Any) -> int:
    """`"500m"`, `"1.5"`, `2` -> milli-CPU, rounded up to 1."""
    match = _CPU.fullmatch(str(value)) if not isinstance(value, bool) else None
    if match is None:
        raise ValueError(f"{value!r} is not a number of CPUs; write it like 500m or 2")
    return max(1, round(float(match[1]) * (1 if match[2] else 1000)))


_PARSERS = {"cpu": parse_cpu, "memory": parse_quantity}


def check_resources(resources: Mapping[str, Any], path: str) -> list[Problem]:
    """Quantities of requests and limits that cannot be read."""
    found = []
    for part in ("requests", "limits"):
        values = resources.get(part)
        if values is not None and not isinstance(values, Mapping):
            found.append(Problem(f"{path}.{part}", "InvalidValue", "is not a mapping"))
            continue
        for name, parse in _PARSERS.items():
            try:
                if values and name in values:
                    parse(values[name])
            except ValueError as error:
                found.append(Problem(f"{path}.{part}.{name}", "InvalidQuantity", str(error)))
    return found


def task_resources(
    own: Iterable[Mapping[str, Any] | None], default: Mapping[str, Any]
) -> Resources:
    """What one task asks for: the most that any of its nodes asks, else the topology's default,
    else 500m and 1Gi. As in Kubernetes, a limit is the request where there is none."""
    nodes = list(own)

    def choose(name: str, fallback: int) -> int:
        asked = [v for v in (_asked(r or {}, name) for r in nodes) if v is not None]
        if asked:
            return max(asked)
        given = _asked(default, name)
        return fallback if given is None else given

    return Resources(choose("cpu", DEFAULT.cpu_m), choose("memory", DEFAULT.memory))


def _asked(resources: Mapping[str, Any], name: str) -> int | None:
    for part in ("requests", "limits"):
        value = (resources.get(part) or {}).get(name)
        if value is not None:
            return _PARSERS[name](value)
    return None
