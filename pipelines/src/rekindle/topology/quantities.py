"""Kubernetes quantities of a task's resources: milli-CPU and bytes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from rekindle.errors import Problem
from rekindle.quantities import parse_quantity
from rekindle.topology.findings import did_you_mean, nearest
from rekindle.topology.model import Resources
from rekindle.topology.spec import parse_size

DEFAULT = Resources(cpu_m=500, memory=1024**3)
_CPU = re.compile(r"\d+(\.\d+)?m?")


def parse_cpu(value: Any) -> int:
    """`"500m"`, `"1.5"`, `2` -> milli-CPU, rounded up to 1; 0 stays 0."""
    if isinstance(value, bool) or not _CPU.fullmatch(str(value)):
        raise ValueError(f"{value!r} is not a number of CPUs; write it like 500m or 2")
    cpus = parse_quantity(str(value))
    return max(1, round(cpus * 1000)) if cpus else 0


_PARSERS: dict[str, Callable[[Any], int]] = {"cpu": parse_cpu, "memory": parse_size}
_PARTS = ("requests", "limits")
_ALIKE = 0.7  # more than gpu and cpu


def check_resources(resources: Mapping[str, Any], path: str) -> list[Problem]:
    """What cannot be read, would be dropped, or leaves a task nothing."""
    found = [
        Problem(f"{path}.{part}", "UnknownField", f"unknown field {part}", nearest(part, _PARTS))
        for part in resources
        if part not in _PARTS
    ]
    for part in _PARTS:
        values = resources.get(part)
        if values is not None and not isinstance(values, Mapping):
            found.append(Problem(f"{path}.{part}", "InvalidValue", "is not a mapping"))
            continue
        for name, value in (values or {}).items():
            found += _check_quantity(name, value, f"{path}.{part}")
    return found or list(_check_limits(resources, path))


def _check_quantity(name: str, value: Any, path: str) -> Iterator[Problem]:
    if name not in _PARSERS:
        elsewhere = "write it in spec.podTemplate.spec, resources of the container task"
        hint = did_you_mean(str(name), _PARSERS, _ALIKE) or elsewhere
        yield Problem(f"{path}[{name}]", "UnknownField", f"{name} is not cpu or memory", hint)
        return
    try:
        if _PARSERS[name](value) <= 0:
            what, hint = f"{value!r} is not more than 0", "leave it out, or write what a task needs"
            yield Problem(f"{path}.{name}", "InvalidQuantity", what, hint)
    except ValueError as error:
        yield Problem(f"{path}.{name}", "InvalidQuantity", str(error))


def _check_limits(resources: Mapping[str, Any], path: str) -> Iterator[Problem]:
    for name, parse in _PARSERS.items():
        request, limit = (_given(resources, part, name) for part in _PARTS)
        if request is not None and limit is not None and parse(limit) < parse(request):
            what = f"{limit!r} is less than the request, {request!r}"
            yield Problem(f"{path}.limits.{name}", "InvalidQuantity", what, "write at least that")


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


def task_limits(
    own: Iterable[Mapping[str, Any] | None], default: Mapping[str, Any], requests: Mapping[str, Any]
) -> dict[str, Any]:
    """A task's limits as they were written: of each resource the highest that any of its nodes
    has, else the topology's default; the request where that is higher still."""
    nodes = [r or {} for r in own]
    found: dict[str, Any] = {}
    for name, parse in _PARSERS.items():
        given = [v for r in nodes if (v := _given(r, "limits", name)) is not None]
        if not given and (fallback := _given(default, "limits", name)) is not None:
            given = [fallback]
        if given:
            found[name] = max(*given, requests[name], key=parse)
    return found


def _asked(resources: Mapping[str, Any], name: str) -> int | None:
    for part in _PARTS:
        value = _given(resources, part, name)
        if value is not None:
            return _PARSERS[name](value)
    return None


def _given(resources: Mapping[str, Any], part: str, name: str) -> Any:
    return (resources.get(part) or {}).get(name)
