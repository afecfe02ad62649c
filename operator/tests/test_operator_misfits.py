"""Why a pod has no node, in `status` and Events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from flights_example import with_replicas
from model_cluster import ModelCluster
from plan_parts import node, pod

from rekindle_operator.cluster.amounts import ResourceAmounts
from rekindle_operator.cluster.model import Taint
from rekindle_operator.cluster.uncreated_pods import UncreatedPods
from rekindle_operator.reconcile.actions import WriteStatus
from rekindle_operator.reconcile.core import reconcile
from rekindle_operator.recovery.affinity import Requirement
from rekindle_operator.recovery.misfits import Misfits, NodeCapacity, PodToPlace

GI = 1 << 30
BIG = replace(pod("p"), requests=ResourceAmounts(3000, 4 * GI, 1, (("nvidia.com/gpu", 1),)))
ZONE = (Requirement("topology.kubernetes.io/zone", "In", ("a", "b")),)


def wait(cluster: ModelCluster) -> None:
    """Until it is no matter of moments."""
    for _ in range(3):
        cluster.pass_time(6.0)
        cluster.settle()


def requested(cluster: ModelCluster, **requests: str) -> None:
    nodes = with_replicas(2)
    for each in [*nodes["sources"], *nodes["operators"]]:
        each.pop("resources", None)
    cluster.edit("flights", **nodes, resources={"requests": requests})


def empty(cpu_m: int, memory: int, **more: Any) -> NodeCapacity:
    view = node(f"n{cpu_m}-{memory}-{len(more)}", cpu_m, memory, **more)
    return NodeCapacity(view, view.allocatable)


@pytest.mark.parametrize(
    ("wanted", "nodes", "why"),
    [
        (pod("p"), [], "usable nodes: none"),
        (
            replace(BIG, requests=ResourceAmounts(3000, GI, 1)),
            [empty(1300, 8 * GI), empty(900, 8 * GI)],
            "cpu 3: 1300m at most, on 2 nodes",
        ),
        (
            replace(BIG, requests=ResourceAmounts(100, 4 * GI, 1)),
            [empty(1300, 4 * GI - 1), empty(8000, GI)],
            "memory 4Gi: 3.99Gi at most, on 2 nodes",
        ),
        (BIG, [empty(8000, 8 * GI)], "nvidia.com/gpu 1: no node"),
        (
            replace(pod("p"), node_selector=(("kubernetes.io/arch", "arm64"),)),
            [empty(1, 1), empty(2, 2, labels={"kubernetes.io/arch": "amd64"})],
            "arch arm64: no node",
        ),
        (
            replace(BIG, node_selector=(("disktype", "ssd"),)),
            [empty(1, 1), empty(9000, 1), empty(9001, 1)],
            "memory 4Gi: 1 at most, on 2 nodes; cpu 3: 1m at most, on 1 node",
        ),
        (
            replace(pod("p"), node_selector=(("disktype", "ssd"),)),
            [empty(1, 1), empty(0, 1, labels={"disktype": "ssd"})],
            "cpu 1m: not on 1 node; disktype ssd: not on 1 node",
        ),
        (
            replace(pod("p"), affinity=(ZONE,)),
            [empty(1, 1)],
            "node affinity topology.kubernetes.io/zone In (a, b): no node",
        ),
        (
            pod("p"),
            [empty(1, 1, taints=(Taint("dedicated", "db", "NoSchedule"),))],
            "taint dedicated=db:NoSchedule is not tolerated: on 1 node",
        ),
        (
            pod("p", group="g", replica=1),
            [replace(empty(0, 9), free=ResourceAmounts(), replicas=frozenset({("g", 0)}))],
            "cpu 1m: no node",
        ),
        (
            pod("p", group="g", replica=1),
            [replace(empty(9, 9), free=ResourceAmounts(), replicas=frozenset({("g", 0)}))],
            "another replica of its partition: on 1 node",
        ),
        (
            pod("p"),
            [replace(empty(9, 9), free=ResourceAmounts())],
            "cpu 1m: too little is free, on 1 node",
        ),
        (
            replace(pod("p"), avoid=frozenset({"n9-9-0"})),
            [empty(9, 9)],
            "pods like it did not run: on 1 node",
        ),
        (pod("p"), [empty(0, 9), empty(9, 9)], ""),
    ],
)
def test_what_no_node_has_is_named(wanted: PodToPlace, nodes: list[NodeCapacity], why: str) -> None:
    assert Misfits({n.node.name: n for n in nodes}).why(wanted) == why


def test_a_query_and_the_condition_name_what_no_node_has(cluster: ModelCluster) -> None:
    requested(cluster, cpu="3")
    for name in "abcd":
        cluster.add_node(name, cpu_m=1300)
    cluster.settle()
    wait(cluster)
    why = "(cpu 3: 1300m at most, on 4 nodes)"
    assert all(q["waitingFor"].endswith(why) for q in cluster.status()["queries"])
    assert cluster.condition("Redundant")["message"].endswith(why)
    notes = [e.note for e in cluster.events if e.reason == "Unschedulable"]
    assert len(notes) == 1
    assert notes[0].endswith(": cpu 3: 1300m at most, on 4 nodes")


def test_a_shortage_of_moments_is_not_reported(cluster: ModelCluster) -> None:
    """Capacity of pods that are being deleted is free in a moment."""
    cluster.add_node("a")
    cluster.settle()
    assert cluster.condition("Redundant")["status"] == "False"
    assert "Unschedulable" not in cluster.event_reasons()
    wait(cluster)
    assert "Unschedulable" in cluster.event_reasons()


def test_an_event_follows_a_change_of_the_reason_alone(cluster: ModelCluster) -> None:
    def reasons() -> int:
        notes = (e.note for e in cluster.events if e.reason == "Unschedulable")
        return sum("coordinator" not in note for note in notes)

    requested(cluster, cpu="3")
    cluster.add_node("a", cpu_m=1300)
    cluster.settle()
    wait(cluster)
    assert reasons() == 1
    cluster.add_node("b", cpu_m=1400)  # another number, and more nodes
    wait(cluster)
    assert "1400m at most, on 2 nodes" in cluster.condition("Redundant")["message"]
    assert reasons() == 1
    cluster.nodes = {name: replace(n, cordoned=True) for name, n in cluster.nodes.items()}
    wait(cluster)
    assert reasons() == 2


def test_a_replica_without_a_node_of_its_own_says_so(cluster: ModelCluster) -> None:
    cluster.edit("flights", **with_replicas(4))
    for name in "abc":
        cluster.add_node(name, cpu_m=64000, memory=64 * GI)
    cluster.settle()
    wait(cluster)
    message = cluster.condition("Redundant")["message"]
    assert set(cluster.query_states().values()) == {"Live"}
    assert message.endswith("/3 (another replica of its partition: on 3 nodes)")


def test_a_coordinator_without_a_node_says_so(cluster: ModelCluster) -> None:
    template: Mapping[str, Any] = {"spec": {"nodeSelector": {"kubernetes.io/arch": "arm64"}}}
    cluster.edit("flights", podTemplate=template)
    cluster.add_node("a")
    cluster.settle()
    wait(cluster)
    text = "a node for the coordinator (arch arm64: no node)"
    assert all(q["waitingFor"].endswith(f"; {text}") for q in cluster.status()["queries"])
    assert text in [e.note for e in cluster.events if e.reason == "Unschedulable"]


def test_what_was_not_asked_is_no_refusal(cluster: ModelCluster) -> None:
    """The requests are on their way, or wait for something else; no node is missing."""
    cluster.quota = 0
    for name in "ab":
        cluster.add_node(name)
    cluster.settle()
    refs = list(cluster.uncreated_pods.by_ref)
    waiting = [q["waitingFor"] for q in cluster.status()["queries"]]
    assert all(w.startswith("the pods of ") and "exceeded quota" in w for w in waiting)
    cluster.uncreated_pods = UncreatedPods({})
    for ref in refs:
        tried = cluster.uncreated_pods.with_create_attempt(ref, cluster.now, None)
        cluster.uncreated_pods = tried
    (write,) = (
        a
        for a in reconcile(cluster.snapshot(), cluster.now, cluster.settings)
        if isinstance(a, WriteStatus)
    )
    cluster.write_status("flights", dict(write.status))
    waiting = [q["waitingFor"] for q in cluster.status()["queries"]]
    assert all(w.startswith("the pods of ") and "API server" not in w for w in waiting)
