"""Packing tasks onto nodes. Pure.

What fits on a node is in `misfits`.

Design: docs/design/recovery.md#plan, docs/design/recovery.md#gates.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from rekindle_operator.cluster.amounts import ResourceAmounts, total
from rekindle_operator.recovery.misfits import NodeCapacity, PodToPlace

_SEARCH_STEPS = 2000  # of the exact search that follows when the simple rule fails
_SEARCH_PODS = 16  # with more pods there is no search


class PackingRule(Enum):
    """SPREAD when there is capacity for all pods; TIGHT when there is not."""

    SPREAD = auto()
    TIGHT = auto()


class Capacity:
    """The usable nodes, by name, and what namespaces with a limited share of them may still use.
    Immutable: packing returns a new one."""

    __slots__ = ("allocatable", "nodes", "share_left")

    def __init__(
        self,
        nodes: Mapping[str, NodeCapacity],
        allocatable: ResourceAmounts,
        share_left: Mapping[str, ResourceAmounts] | None = None,
    ) -> None:
        self.nodes = dict(nodes)
        self.allocatable = allocatable  # of all usable nodes; costs are fractions of it
        self.share_left = share_left or {}

    def place(self, pod: PodToPlace, node: str) -> Capacity:
        left = self.share_left
        if pod.namespace in left:
            left = {**left, pod.namespace: left[pod.namespace] - pod.requests}
        return Capacity(self.nodes | {node: self.nodes[node].with_pod(pod)}, self.allocatable, left)

    def is_within_shares(self, pods: Iterable[PodToPlace]) -> bool:
        """Whether they are within the shares of their namespaces."""
        if not self.share_left:
            return True
        requested: dict[str, ResourceAmounts] = {}
        for pod in pods:
            if pod.namespace in self.share_left:
                before = requested.get(pod.namespace, ResourceAmounts())
                requested[pod.namespace] = before + pod.requests
        return all(
            self.share_left[namespace].covers(requests) for namespace, requests in requested.items()
        )

    def fits(self, pod: PodToPlace) -> bool:
        return any(n.fits(pod) for n in self.nodes.values())

    def fits_when_empty(self, pod: PodToPlace) -> bool:
        """Whether some usable node would take the pod if nothing else were on it."""
        return any(n.fits_when_empty(pod) for n in self.nodes.values())


@dataclass(frozen=True, slots=True)
class Placement:
    capacity: Capacity
    nodes: Mapping[str, str]  # pod key -> node


def pack(
    pods: Iterable[PodToPlace], capacity: Capacity, rule: PackingRule = PackingRule.TIGHT
) -> Placement | None:
    """All of the pods, or None. Largest first; if the rule fails, by a bounded search."""
    ordered = sorted(pods, key=lambda p: (-p.requests.fraction_of(capacity.allocatable), p.key))
    if not capacity.is_within_shares(ordered) or not _may_fit(ordered, capacity):
        return None
    placement = _by_rule(ordered, capacity, rule)
    if placement is None and rule is PackingRule.SPREAD:
        placement = _by_rule(ordered, capacity, PackingRule.TIGHT)
    if placement is None and len(ordered) <= _SEARCH_PODS:
        placement = _by_search(ordered, capacity)
    return placement


def _may_fit(pods: Sequence[PodToPlace], capacity: Capacity) -> bool:
    """False if more is needed than all nodes have left, or no node takes one of the pods."""
    free = (n.free.clamped() for n in capacity.nodes.values())
    left = total(f for f in free if f.covers(ResourceAmounts(pods=1)))
    return left.covers(total(p.requests for p in pods)) and all(capacity.fits(pod) for pod in pods)


def _by_rule(pods: Sequence[PodToPlace], capacity: Capacity, rule: PackingRule) -> Placement | None:
    nodes: dict[str, str] = {}
    zones = _zones_of_replicas({pod.group for pod in pods}, capacity)
    for pod in pods:
        candidates = [n for n in capacity.nodes.values() if n.fits(pod)]
        if not candidates:
            return None
        taken = {zone for replica, zone in zones[pod.group] if replica != pod.replica}
        best = min(candidates, key=lambda n: _preference(n, pod, taken, rule))
        nodes[pod.key] = best.node.name
        zones[pod.group].append((pod.replica, best.node.zone))
        capacity = capacity.place(pod, best.node.name)
    return Placement(capacity, nodes)


def _zones_of_replicas(
    groups: Collection[str], capacity: Capacity
) -> dict[str, list[tuple[int, str]]]:
    """The replicas of each group that are on nodes, and their zones."""
    found: dict[str, list[tuple[int, str]]] = {group: [] for group in groups}
    for on_node in capacity.nodes.values():
        for group, replica in on_node.replicas:
            if group in found:
                found[group].append((replica, on_node.node.zone))
    return found


def _preference(
    candidate: NodeCapacity, pod: PodToPlace, taken: Collection[str], rule: PackingRule
) -> tuple[int, int, float, str]:
    """Another zone than those of the partition's other replicas, `taken`, first; then a node
    without devices that the pod does not need; then the emptiest or fullest node."""
    zone = candidate.node.zone
    same_zone = bool(zone) and zone in taken
    wasteful = candidate.free.has_devices_besides(pod.requests)
    left = candidate.free.cpu_memory_pods_fraction_of(candidate.node.allocatable)
    return (
        int(same_zone),
        int(wasteful),
        -left if rule is PackingRule.SPREAD else left,
        candidate.node.name,
    )


def _by_search(pods: Sequence[PodToPlace], capacity: Capacity) -> Placement | None:
    """Depth-first over nodes; nodes that look the same are tried once. Bounded in steps."""
    steps = 0
    nodes: dict[str, str] = {}

    def descend(index: int, current: Capacity) -> Capacity | None:
        nonlocal steps
        if index == len(pods):
            return current
        pod, tried = pods[index], set[tuple[object, ...]]()
        for name in sorted(current.nodes):
            candidate = current.nodes[name]
            signature = (
                candidate.free,
                candidate.replicas,
                candidate.node.taints,
                tuple(sorted(candidate.node.labels.items())),
            )
            if signature in tried or not candidate.fits(pod):
                continue
            tried.add(signature)
            steps += 1
            if steps > _SEARCH_STEPS:
                return None
            nodes[pod.key] = name
            if (found := descend(index + 1, current.place(pod, name))) is not None:
                return found
        return None

    found = descend(0, capacity)
    return Placement(found, nodes) if found is not None else None
