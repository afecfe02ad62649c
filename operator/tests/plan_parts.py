"""Short constructors of nodes, pods and queries as the planner sees them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rekindle_operator.cluster.amounts import ResourceAmounts, total
from rekindle_operator.cluster.model import NodeView
from rekindle_operator.recovery.misfits import NodeCapacity, PodToPlace
from rekindle_operator.recovery.pack import Capacity
from rekindle_operator.recovery.plan import DownQuery


def node(name: str, cpu_m: int, memory: int = 100, pods: int = 10, **more: Any) -> NodeView:
    return NodeView(
        name=name,
        uid=name,
        version=1,
        ready=True,
        readiness_changed_at=0.0,
        cordoned=False,
        taints=more.get("taints", ()),
        labels=more.get("labels", {}),
        allocatable=ResourceAmounts(cpu_m, memory, pods),
    )


def capacity(*nodes: NodeView) -> Capacity:
    return Capacity(
        {n.name: NodeCapacity(n, n.allocatable) for n in nodes}, total(n.allocatable for n in nodes)
    )


def pod(key: str, cpu_m: int = 1, memory: int = 1, group: str = "", replica: int = 0) -> PodToPlace:
    """`group`: the partition; replicas of one group never share a node. Default: its own."""
    return PodToPlace(key, ResourceAmounts(cpu_m, memory, 1), group or key, replica)


def query(
    name: str,
    priority: int,
    *needs: str,
    capacity_reservation_is_over: bool = False,
    paths: Iterable[Iterable[str]] = (),
) -> DownQuery:
    """`needs`: keys of missing pods. `capacity_reservation_is_over`: it has waited for so long that
    spare replicas may use what was reserved for it. `paths`: needs on the path from each source
    (`DownQuery`)."""
    found = tuple(frozenset(path) for path in paths)
    return DownQuery(
        ("ns/t", name), priority, frozenset(needs), capacity_reservation_is_over, found
    )


def started(plan: Any) -> list[str]:
    return [r.key[1] for r in plan.starting_now]
