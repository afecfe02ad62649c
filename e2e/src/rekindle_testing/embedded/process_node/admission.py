"""Whether a node admits a pod: supported fields, and free capacity.  Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal

from rekindle_testing.embedded.process_node import quantities, supported_fields
from rekindle_testing.embedded.process_node.fields import Json

UNSUPPORTED = "UnsupportedByProcessNode"


@dataclass(frozen=True, slots=True)
class PodRefusal:
    """The reason and message of a pod that fails before it starts."""

    reason: str
    message: str


def requests(pod: Json) -> dict[str, Decimal]:
    """What a pod requests: its containers together, or its largest init container,
    whichever is more, and the overhead."""
    spec = pod["spec"]
    total = _sum(_requests_of(c) for c in spec["containers"])
    for container in spec.get("initContainers") or []:
        for resource, amount in _requests_of(container).items():
            total[resource] = max(total.get(resource, Decimal(0)), amount)
    overhead = {r: quantities.parse(q) for r, q in (spec.get("overhead") or {}).items()}
    return _sum([total, overhead])


def admit(pod: Json, others: Iterable[Json], allocatable: Mapping[str, str]) -> PodRefusal | None:
    """`others` are the admitted pods of the node that have not ended."""
    if problems := supported_fields.refused(pod):
        return PodRefusal(UNSUPPORTED, "; ".join(problems))
    others = list(others)
    if len(others) + 1 > quantities.parse_rounded_up(allocatable["pods"]):
        return PodRefusal("OutOfpods", f"Node has room for {allocatable['pods']} pods, all taken")
    used = _sum(requests(other) for other in others)
    for resource, amount in sorted(requests(pod).items()):
        free = quantities.parse(allocatable.get(resource, "0")) - used.get(resource, Decimal(0))
        if amount > 0 and amount > free:
            return PodRefusal(
                f"OutOf{resource}",
                f"Node didn't have enough resource: {resource}, requested: {amount:f}, "
                f"free: {free:f}, capacity: {allocatable.get(resource, '0')}",
            )
    return None


def _requests_of(container: Json) -> dict[str, Decimal]:
    resources: Json = container.get("resources") or {}
    wanted = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    return {resource: quantities.parse(quantity) for resource, quantity in wanted.items()}


def _sum(parts: Iterable[Mapping[str, Decimal]]) -> dict[str, Decimal]:
    total: dict[str, Decimal] = {}
    for part in parts:
        for resource, amount in part.items():
            total[resource] = total.get(resource, Decimal(0)) + amount
    return total
