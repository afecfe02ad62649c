"""The leader replaces replicas of the operator that died with their nodes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from rekindle_operator.cluster.amounts import ResourceAmounts
from rekindle_operator.cluster.model import NodeView, PodView, ProbeResults, Snapshot
from rekindle_operator.cluster.phase_times import phase_times
from rekindle_operator.reconcile.actions import DeletePod
from rekindle_operator.reconcile.core import reconcile
from rekindle_operator.settings import Election, OperatorSettings

NOW = 1_800_000_000.0
SETTINGS = OperatorSettings(
    helm_release="rekindle", election=Election(namespace="system", identity="leader")
)


def node(name: str, ready: bool) -> NodeView:
    return NodeView(
        name=name,
        uid=name,
        version=1,
        ready=ready,
        readiness_changed_at=NOW - 60,
        cordoned=False,
        taints=(),
        labels={},
        allocatable=ResourceAmounts.parse({"cpu": "4"}),
    )


def peer(name: str, on: str, **changes: object) -> PodView:
    made = PodView(
        namespace="system",
        name=name,
        uid=f"uid of {name}",
        version=1,
        created_at=NOW - 600,
        phase="Running",
        node=on,
        requests=ResourceAmounts.parse({"cpu": "100m"}),
        helm_release="rekindle",
        accepted_by_kubelet=True,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def world(
    pods: Iterable[PodView], nodes: Iterable[NodeView], in_phase_s: float = 600, **changes: Any
) -> Snapshot:
    """`in_phase_s`: since this process has seen them in their phase, on their nodes."""
    pods, nodes = tuple(pods), tuple(nodes)
    since = {p.uid: NOW - in_phase_s for p in pods}
    changed = {n.uid: NOW - 60 for n in nodes}
    return Snapshot(
        pods=pods, nodes=nodes, pods_in_phase_since=since, readiness_seen_at=changed, **changes
    )


def deleted(
    *pods: PodView, settings: OperatorSettings = SETTINGS, in_phase_s: float = 600
) -> list[DeletePod]:
    nodes = (node("up", ready=True), node("down", ready=False))
    actions = reconcile(world(pods, nodes, in_phase_s), NOW, settings)
    return [a for a in actions if isinstance(a, DeletePod)]


def test_a_replica_on_a_lost_node_is_deleted_by_force() -> None:
    (action,) = deleted(peer("leader", "up"), peer("b", "up"), peer("c", "down"))
    assert (action.name, action.uid, action.grace_s) == ("c", "uid of c", 0)


def test_a_replica_is_replaced_when_most_nodes_die() -> None:
    """Kubernetes evicts nothing, and no task or coordinator proves that the nodes are lost."""
    nodes = [
        node("up", ready=True),
        *(node(name, ready=False) for name in ("down", "dead", "gone")),
    ]

    def deleted_at(now: float, **changes: Any) -> list[str]:
        pods = (peer("leader", "up"), peer("b", "down"), peer("c", "gone"))
        actions = reconcile(world(pods, nodes, **changes), now, SETTINGS)
        return [a.name for a in actions if isinstance(a, DeletePod)]

    assert deleted_at(NOW) == ["b", "c"]
    assert deleted_at(NOW - 55) == [], "they have been NotReady for 5 s"
    responded = {"down": ProbeResults(NOW - 0.5, answered_probe_at=NOW - 0.5)}
    assert deleted_at(NOW, kubelet_probes=responded) == ["c"], "only the API server is out of reach"
    nodes[0] = node("up", ready=False)
    assert deleted_at(NOW) == [], "no node could take another replica"


def test_a_terminating_replica_on_a_lost_node_is_deleted() -> None:
    assert [a.name for a in deleted(peer("c", "down", terminating=True))] == ["c"]


def test_the_leader_never_deletes_itself() -> None:
    assert deleted(peer("leader", "down")) == []


def test_replicas_of_another_release_are_not_deleted() -> None:
    assert deleted(peer("c", "down", helm_release="other")) == []
    assert deleted(peer("c", "down", namespace="elsewhere")) == []
    assert deleted(peer("c", "down"), settings=replace(SETTINGS, helm_release="")) == []


def test_a_new_replica_is_not_deleted_at_once_again() -> None:
    """The scheduler may choose the dead node while Kubernetes calls it Ready."""
    assert deleted(peer("c", "down"), in_phase_s=1) == []


def test_a_replica_that_no_kubelet_accepts_is_deleted() -> None:
    """Its node is dead, Kubernetes calls it Ready, and nothing else is known of it."""
    assert deleted(peer("b", "up", accepted_by_kubelet=False), in_phase_s=6) == []
    (action,) = deleted(peer("b", "up", accepted_by_kubelet=False), in_phase_s=12)
    assert action.name == "b"


def test_the_age_of_a_replica_counts_from_when_this_process_saw_it() -> None:
    """The leader's clock is a minute ahead of the API server's."""
    new = peer("b", "up", accepted_by_kubelet=False, created_at=NOW - 60)
    assert deleted(new, in_phase_s=1) == []
    assert [a.name for a in deleted(new, in_phase_s=12)] == ["b"]


def test_the_phase_of_a_replica_is_timed_only_once_it_has_a_node() -> None:
    (bound, free) = peer("b", "up"), replace(peer("c", "up"), node=None)
    assert set(phase_times({}, [bound, free], NOW)) == {bound.uid}
