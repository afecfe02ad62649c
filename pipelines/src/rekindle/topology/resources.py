"""CPU and memory of a task, from the `resources` of its nodes and of the topology."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rekindle.topology.model import Resources
from rekindle.topology.units import parse_cpu, parse_size

DEFAULT = Resources(cpu_m=500, memory_bytes=1024**3)


PARSERS: dict[str, Callable[[Any], int]] = {"cpu": parse_cpu, "memory": parse_size}
RESOURCE_FIELDS = ("requests", "limits")


def task_resources(
    of_nodes: Iterable[Mapping[str, Any] | None], of_topology: Mapping[str, Any]
) -> Resources:
    """Requests of one task: the maximum of its nodes' requests, else the topology's default, else
    500m and 1Gi. As in Kubernetes, a limit without a request is the request."""
    nodes = list(of_nodes)

    def choose(name: str, fallback: int) -> int:
        requested = [v for v in (_requested(r or {}, name) for r in nodes) if v is not None]
        if requested:
            return max(requested)
        given = _requested(of_topology, name)
        return fallback if given is None else given

    return Resources(choose("cpu", DEFAULT.cpu_m), choose("memory", DEFAULT.memory_bytes))


def task_limits(
    of_nodes: Iterable[Mapping[str, Any] | None],
    of_topology: Mapping[str, Any],
    requests: Mapping[str, Any],
) -> dict[str, Any]:
    """Limits of a task as written: for each resource the maximum of its nodes' limits, else the
    topology's default; at least the request."""
    nodes = [r or {} for r in of_nodes]
    found: dict[str, Any] = {}
    for name, parse in PARSERS.items():
        given = [v for r in nodes if (v := given_value(r, "limits", name)) is not None]
        if not given and (fallback := given_value(of_topology, "limits", name)) is not None:
            given = [fallback]
        if given:
            found[name] = max(*given, requests[name], key=parse)
    return found


def _requested(resources: Mapping[str, Any], name: str) -> int | None:
    for field in RESOURCE_FIELDS:
        value = given_value(resources, field, name)
        if value is not None:
            return PARSERS[name](value)
    return None


def given_value(resources: Mapping[str, Any], field: str, name: str) -> Any:
    return (resources.get(field) or {}).get(name)
