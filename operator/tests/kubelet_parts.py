"""A node with a kubelet, and a task on it, as a snapshot has them."""

from __future__ import annotations

from dataclasses import replace

from rekindle import names
from rekindle.topology.model import Slot
from rekindle_operator.cluster.amounts import ResourceAmounts
from rekindle_operator.cluster.model import (
    NodeView,
    PodEndpoint,
    PodView,
)

START = 1_800_000_000.0


def node(name: str, **more: object) -> NodeView:
    made = NodeView(
        name=name,
        uid=f"uid-{name}",
        version=1,
        ready=True,
        readiness_changed_at=0.0,
        cordoned=False,
        taints=(),
        labels={},
        allocatable=ResourceAmounts(cpu_m=4000, memory=8 << 30, pods=50),
    )
    usual = {"kubelet": PodEndpoint("127.0.0.1", 10250)}
    return replace(made, **{**usual, **more})  # type: ignore[arg-type]


def task(number: int, on: str) -> PodView:
    """The one task of its segment."""
    return PodView(
        namespace="default",
        name=f"t-{number}",
        uid=f"uid-t-{number}",
        version=1,
        created_at=START,
        phase="Running",
        node=on,
        requests=ResourceAmounts(),
        ready=True,
        was_ready=True,
        ip=f"127.1.{number // 250}.{number % 250 + 1}",
        owner_uid="uid-t",
        topology="t",
        role=names.ROLE_TASK,
        slot=Slot(f"s{number}", 0, 0),
        incarnation=1,
    )
