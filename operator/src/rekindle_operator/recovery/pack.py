"""Packing tasks onto nodes. Pure.

What fits on a node is in `misfits`. Pods that differ only in their identity are compared with each
node once; after that, only with nodes that have changed.

Design: docs/design/recovery.md#plan, docs/design/recovery.md#gates.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from heapq import heapify, heappop, heappush

from rekindle_operator.cluster.amounts import ResourceAmounts, total
from rekindle_operator.recovery.misfits import NodeCapacity, PodToPlace

_SEARCH_STEPS = 20_000  # nodes examined by the exact search that follows when the rule fails
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
        return _are_within(self.share_left, pods)

    def fits_when_empty(self, pod: PodToPlace) -> bool:
        """Whether some usable node would take the pod if nothing else were on it."""
        return any(n.fits_when_empty(pod) for n in self.nodes.values())

    def fitting(self, pods: Mapping[str, PodToPlace]) -> dict[str, bool]:
        """Of each, whether some node takes it."""
        with_replicas = {group for n in self.nodes.values() for group, _ in n.replicas}
        of_shape: dict[object, bool] = {}
        found = {}
        for key, pod in pods.items():
            shape = pod.shape if pod.group not in with_replicas else (pod.shape, key)
            if shape not in of_shape:
                of_shape[shape] = any(n.fits(pod) for n in self.nodes.values())
            found[key] = of_shape[shape]
        return found

    def fitting_when_empty(self, pods: Mapping[str, PodToPlace]) -> dict[str, bool]:
        """Of each, whether some usable node would take it if nothing else were on it."""
        of_shape: dict[object, bool] = {}
        for pod in pods.values():
            if pod.shape not in of_shape:
                of_shape[pod.shape] = self.fits_when_empty(pod)
        return {key: of_shape[pod.shape] for key, pod in pods.items()}


def _are_within(shares: Mapping[str, ResourceAmounts], pods: Iterable[PodToPlace]) -> bool:
    if not shares:
        return True
    requested: dict[str, ResourceAmounts] = defaultdict(ResourceAmounts)
    for pod in pods:
        if pod.namespace in shares:
            requested[pod.namespace] += pod.requests
    return all(shares[namespace].covers(requests) for namespace, requests in requested.items())


@dataclass(frozen=True, slots=True)
class Placement:
    capacity: Capacity
    nodes: Mapping[str, str]  # pod key -> node


_Key = tuple[bool, float, str, int]  # of a candidate: preference, name, version of the node


class Packer:
    """Places pods, each set of them as a whole or not at all. `steps`: nodes that exact searches
    may examine, of all sets together."""

    def __init__(self, capacity: Capacity, steps: int = _SEARCH_STEPS) -> None:
        self._allocatable = capacity.allocatable
        self.nodes = dict(capacity.nodes)
        self.share_left = dict(capacity.share_left)
        self._versions = dict.fromkeys(self.nodes, 0)
        self._changed: list[str] = []  # nodes, in the order of their changes
        self._candidates: dict[object, _Candidates] = {}
        self._replicas: dict[str, list[tuple[int, str, str]]] = defaultdict(list)
        for name, node in self.nodes.items():  # by group: replica, node, zone
            for group, replica in node.replicas:
                self._replicas[group].append((replica, name, node.node.zone))
        self._steps = steps
        self._sizes: dict[ResourceAmounts, float] = {}
        self._left = total(map(_room, self.nodes.values()))
        self.placed: dict[str, str] = {}

    def placement(self) -> Placement:
        return Placement(
            Capacity(self.nodes, self._allocatable, dict(self.share_left)), dict(self.placed)
        )

    def place_all(
        self,
        pods: Iterable[PodToPlace],
        rule: PackingRule = PackingRule.TIGHT,
        excluded: Collection[str] = (),
    ) -> bool:
        """All of the pods, or none. Largest first; if the rule fails, by a bounded search."""
        ordered = sorted(pods, key=lambda p: (-self._size(p.requests), p.key))
        if not self._may_fit(ordered):
            return False
        rules = [rule] if rule is PackingRule.TIGHT else [rule, PackingRule.TIGHT]
        if any(self._by_rule(ordered, each, excluded) for each in rules):
            return True
        # Without a node for one of them the search would try the others in vain.
        may = not excluded and len(ordered) <= _SEARCH_PODS
        if may and all(self._best_node(pod, PackingRule.TIGHT, ()) for pod in ordered):
            return self._by_search(ordered)
        return False

    def _size(self, requests: ResourceAmounts) -> float:
        if requests not in self._sizes:
            self._sizes[requests] = requests.fraction_of(self._allocatable)
        return self._sizes[requests]

    def _may_fit(self, pods: Sequence[PodToPlace]) -> bool:
        """False if more is needed than namespaces or all nodes have left."""
        if not _are_within(self.share_left, pods):
            return False
        return self._left.covers(total(p.requests for p in pods))

    def _by_rule(
        self, pods: Sequence[PodToPlace], rule: PackingRule, excluded: Collection[str]
    ) -> bool:
        undo: list[tuple[PodToPlace, NodeCapacity]] = []
        for pod in pods:
            name = self._best_node(pod, rule, excluded)
            if name is None:
                for earlier, node in reversed(undo):
                    self._take_back(earlier, node)
                return False
            undo.append((pod, self.nodes[name]))
            self._put(pod, name)
        return True

    def _best_node(
        self, pod: PodToPlace, rule: PackingRule, excluded: Collection[str]
    ) -> str | None:
        """In another zone than the partition's other replicas, if one fits there; then without
        devices that the pod does not need; then the emptiest or fullest."""
        others = [o for o in self._replicas.get(pod.group, ()) if o[0] != pod.replica]
        skipped = {node for _, node, _ in others}
        skipped.update(excluded)
        taken = {zone for _, _, zone in others if zone}
        key = rule, pod.shape
        candidates = self._candidates.get(key)
        if candidates is None:
            candidates = self._candidates[key] = _Candidates(pod, rule)
            candidates.add(self.nodes, self.nodes, self._versions)
            candidates.seen = len(self._changed)
        elif candidates.seen < len(self._changed):
            changed = dict.fromkeys(self._changed[candidates.seen :])
            candidates.add(changed, self.nodes, self._versions)
            candidates.seen = len(self._changed)
        return candidates.best(skipped, taken, self._versions)

    def _put(self, pod: PodToPlace, name: str) -> None:
        node = self.nodes[name]
        self._set(name, node.with_pod(pod))
        self.placed[pod.key] = name
        self._replicas[pod.group].append((pod.replica, name, node.node.zone))
        if pod.namespace in self.share_left:
            self.share_left[pod.namespace] -= pod.requests

    def _take_back(self, pod: PodToPlace, before: NodeCapacity) -> None:
        self._set(before.node.name, before)
        del self.placed[pod.key]
        self._replicas[pod.group].pop()
        if pod.namespace in self.share_left:
            self.share_left[pod.namespace] += pod.requests

    def _set(self, name: str, node: NodeCapacity) -> None:
        self._left = self._left - _room(self.nodes[name]) + _room(node)
        self.nodes[name] = node
        self._versions[name] += 1
        self._changed.append(name)

    def _by_search(self, pods: Sequence[PodToPlace]) -> bool:
        """Depth-first over nodes; nodes that look the same are tried once."""
        names = sorted(n for n, node in self.nodes.items() if any(node.fits(p) for p in pods))
        looks = {
            n: (self.nodes[n].node.taints, tuple(sorted(self.nodes[n].node.labels.items())))
            for n in names
        }

        def descend(index: int) -> bool:
            if index == len(pods):
                return True
            pod, tried = pods[index], set[tuple[object, ...]]()
            for name in names:
                self._steps -= 1
                if self._steps < 0:
                    return False
                before = self.nodes[name]
                signature = (before.free, before.replicas, looks[name])
                if signature in tried or not before.fits(pod):
                    continue
                tried.add(signature)
                self._put(pod, name)
                if descend(index + 1):
                    return True
                self._take_back(pod, before)
            return False

        return descend(0)


def _room(node: NodeCapacity) -> ResourceAmounts:
    """What pods may use of it: nothing if it takes no pod any more."""
    return node.free.clamped() if node.free.pods > 0 else ResourceAmounts()


class _Candidates:
    """The nodes that take pods like one, by zone, the preferred one first."""

    def __init__(self, pod: PodToPlace, rule: PackingRule) -> None:
        self._pod = replace(pod, key="", group="", replica=0)
        self._sign = -1.0 if rule is PackingRule.SPREAD else 1.0
        self._heaps: dict[str, list[_Key]] = {}
        self.seen = 0  # changes of nodes so far

    def add(
        self, names: Iterable[str], nodes: Mapping[str, NodeCapacity], versions: Mapping[str, int]
    ) -> None:
        """As they are now; earlier entries of a node are void."""
        pod, sign, is_first = self._pod, self._sign, not self._heaps
        for name in names:
            node = nodes[name]
            if node.fits(pod):
                left = sign * node.free.cpu_memory_pods_fraction_of(node.node.allocatable)
                wasteful = node.free.has_devices_besides(pod.requests)
                heap = self._heaps.setdefault(node.node.zone, [])
                entry = (wasteful, left, name, versions[name])
                if is_first:
                    heap.append(entry)
                else:
                    heappush(heap, entry)
        if is_first:
            for heap in self._heaps.values():
                heapify(heap)

    def best(
        self, skipped: Collection[str], taken: Collection[str], versions: Mapping[str, int]
    ) -> str | None:
        """`taken`: zones that come last."""
        found: tuple[bool, _Key] | None = None
        for zone, heap in self._heaps.items():
            set_aside = []
            while heap and (heap[0][3] != versions[heap[0][2]] or heap[0][2] in skipped):
                entry = heappop(heap)
                if entry[3] == versions[entry[2]]:
                    set_aside.append(entry)
            if heap and (found is None or (zone in taken, heap[0]) < found):
                found = zone in taken, heap[0]
            for entry in set_aside:
                heappush(heap, entry)
        return found[1][2] if found is not None else None


def pack(
    pods: Iterable[PodToPlace], capacity: Capacity, rule: PackingRule = PackingRule.TIGHT
) -> Placement | None:
    """All of the pods, or None."""
    packer = Packer(capacity)
    return packer.placement() if packer.place_all(pods, rule) else None
