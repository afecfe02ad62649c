"""Empty nodes as the planner sees them."""

from __future__ import annotations

from collections.abc import Mapping

from rekindle_operator.cluster.amounts import ResourceAmounts, total
from rekindle_operator.cluster.model import NodeView
from rekindle_operator.recovery.misfits import NodeCapacity
from rekindle_operator.recovery.pack import Capacity

ZONE = "topology.kubernetes.io/zone"


def empty_nodes(allocatable: Mapping[str, ResourceAmounts], zones: int = 0) -> Capacity:
    """By name. `zones`: which they are in, one after the other; 0: no labels."""
    views = [
        NodeView(
            name=name,
            uid=name,
            version=1,
            ready=True,
            readiness_changed_at=0.0,
            cordoned=False,
            taints=(),
            labels={ZONE: f"zone-{at % zones}"} if zones else {},
            allocatable=amounts,
        )
        for at, (name, amounts) in enumerate(allocatable.items())
    ]
    return Capacity(
        {v.name: NodeCapacity(v, v.allocatable) for v in views}, total(allocatable.values())
    )
