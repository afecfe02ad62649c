"""What a pass would delete or replace, and which objects justify that. Pure.

The cache may be old: its watch stalled, or has not caught up. Before anything is deleted or
replaced, `uncached_check` reads these objects from the API server. If one differs from the
snapshot, the decision is made again.

Design: docs/design/kubernetes.md#before-anything-is-destroyed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rekindle import names
from rekindle_operator.cluster.model import LeaseView, NodeView, PodView, Snapshot, TopologyView
from rekindle_operator.reconcile.actions import (
    Action,
    CreatePod,
    DeletePod,
    GiveSlot,
    TopologyActions,
)


@dataclass(frozen=True, slots=True)
class Preconditions:
    """What must still hold when one decision is executed.

    `topology`: all of its pods are read, since one that is missing from the cache would be
    replaced. `nodes`: None for one that the snapshot does not have."""

    topology_key: str
    topology: TopologyView | None
    deletions: tuple[DeletePod, ...]
    nodes: Mapping[str, NodeView | None]
    coordinator_lease: LeaseView | None
    pods: Mapping[str, str]  # of the topology, as the snapshot has them: uid -> name


def preconditions_of(
    decisions: Iterable[TopologyActions], snapshot: Snapshot
) -> list[Preconditions]:
    """Of the decisions that delete or replace something; not of placeholders, which run nothing,
    and of which a thousand may end at once."""
    pods = {p.uid: p for p in snapshot.pods}
    placeholders = {p.uid for p in snapshot.pods if p.role == names.ROLE_PLACEHOLDER}
    nodes = {n.name: n for n in snapshot.nodes}
    topologies = {t.key: t for t in snapshot.topologies}
    of_topology: dict[str, dict[str, str]] = defaultdict(dict)
    for p in snapshot.pods:
        if p.topology is not None:
            of_topology[f"{p.namespace}/{p.topology}"][p.uid] = p.name
    found = []
    for decision in decisions:
        deletions = tuple(
            a for a in decision.actions if isinstance(a, DeletePod) and a.uid not in placeholders
        )
        view = topologies.get(decision.topology_key)
        if not deletions and not any(_replaces(a) for a in decision.actions):
            continue
        found.append(
            Preconditions(
                topology_key=decision.topology_key,
                topology=view,
                deletions=deletions,
                nodes={name: nodes.get(name) for name in _node_names(deletions, pods, nodes)},
                coordinator_lease=_lease(view, decision, snapshot),
                pods=of_topology.get(decision.topology_key, {}),
            )
        )
    return found


def _node_names(
    deletions: Iterable[DeletePod], pods: Mapping[str, PodView], nodes: Mapping[str, NodeView]
) -> set[str]:
    """A deletion without grace rests on the loss of the node, and one on a cordoned node may rest
    on the cordon, so the node is read too."""
    found = set()
    for action in deletions:
        pod = pods.get(action.uid)
        if pod is None or pod.node is None:
            continue
        node = nodes.get(pod.node)
        if action.grace_s == 0 or (node is not None and node.cordoned):
            found.add(pod.node)
    return found


def _replaces(action: Action) -> bool:
    return isinstance(action, (CreatePod, GiveSlot)) and action.ref.incarnation > 1


def _lease(
    view: TopologyView | None, decision: TopologyActions, snapshot: Snapshot
) -> LeaseView | None:
    """The coordinator's, if the decision replaces it: one that still renews its Lease must not be
    fenced."""
    if view is None or not any(
        isinstance(a, CreatePod) and a.is_coordinator and _replaces(a) for a in decision.actions
    ):
        return None
    key = view.namespace, names.coordinator_name(view.name)
    return next((x for x in snapshot.leases if (x.namespace, x.name) == key), None)
