"""Which task moves to an emptier node. Pure.

How full a node is: the largest of the fractions of its resources that pods request. A task moves
only if both nodes are then less full than the one that it leaves was before, the new one by a
margin. So with each move fewer nodes are as full as that one, and moves come to an end, whoever
else moves at the same time: a pod that is about to leave a node does not count where it would be a
reason to move others away, and counts where it would be a reason to move others there.

Design: docs/design/planned-moves.md#moves-to-emptier-nodes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

from rekindle_operator.cluster.amounts import ResourceAmounts
from rekindle_operator.recovery.misfits import NodeCapacity, PodToPlace
from rekindle_operator.recovery.pack import Capacity

MARGIN = 0.1  # of a node: a move costs the start of a task and the transfer of its state
_NOTHING = ResourceAmounts()


@dataclass(frozen=True, slots=True)
class MovableTask:
    """A task that runs on `node`, and the pod that would replace it."""

    node: str
    requests: ResourceAmounts
    to_place: PodToPlace


@dataclass(frozen=True, slots=True)
class Move:
    task: MovableTask
    target: str


class _RankedMove(NamedTuple):
    """The lowest is the best one."""

    higher_load: float  # of the two nodes
    load_of_target: float
    key: str
    target: str


class NodeLoads:
    """How full the usable nodes are. `leaving`: requests of pods that are about to leave a node, by
    node. `targets`: nodes that may get tasks."""

    def __init__(
        self,
        capacity: Capacity,
        leaving: Mapping[str, ResourceAmounts],
        targets: Collection[str],
    ) -> None:
        self._capacity = capacity
        self._leaving = leaving
        self._load_without_leaving = {
            name: _load(node, _NOTHING - leaving.get(name, _NOTHING))
            for name, node in capacity.nodes.items()
        }
        self._targets = sorted(targets & capacity.nodes.keys())
        self._lowest: dict[ResourceAmounts, float] = {}
        self._targets_of: dict[PodToPlace, list[tuple[float, str]]] = {}

    def would_gain_by_leaving(self, node: str, requests: ResourceAmounts) -> bool:
        """Whether some target, with a pod with these requests on it, would be less full than this
        node is now, by the margin. Whether one takes the pod is not checked."""
        load = self._load_without_leaving.get(node)
        if load is None:
            return False
        if requests not in self._lowest:
            nodes = (self._capacity.nodes[name] for name in self._targets)
            self._lowest[requests] = min((_load(n, requests) for n in nodes), default=inf)
        return self._lowest[requests] < load - MARGIN

    def find_move(self, tasks: Iterable[MovableTask]) -> Move | None:
        """From the fullest node that a task can leave, to the node that is least full with it."""
        by_node: dict[str, list[MovableTask]] = defaultdict(list)
        for task in tasks:
            if self.would_gain_by_leaving(task.node, task.to_place.requests):
                by_node[task.node].append(task)
        fullest_first = sorted(by_node, key=lambda name: (-self._load_without_leaving[name], name))
        for node in fullest_first:
            found = (self._best(task) for task in by_node[node])
            best = min((move for move in found if move is not None), default=None)
            if best is not None:
                task = next(t for t in by_node[node] if t.to_place.key == best.key)
                return Move(task, best.target)
        return None

    def _best(self, task: MovableTask) -> _RankedMove | None:
        """The best move of one task."""
        pod, source = task.to_place, self._capacity.nodes[task.node]
        before = self._load_without_leaving[task.node]
        gone = self._leaving.get(task.node, _NOTHING) + task.requests
        source_after = _load(source, _NOTHING - gone)
        if source_after >= before or not self._capacity.is_within_shares([pod]):
            return None
        zones = self._zones_of_others(pod)
        for after, name in self._ranked_targets(pod):
            if after >= before - MARGIN:
                return None
            target = self._capacity.nodes[name]
            if name != task.node and target.fits(pod) and not _is_worse(source, target, pod, zones):
                return _RankedMove(max(source_after, after), after, pod.key, name)
        return None

    def _ranked_targets(self, pod: PodToPlace) -> Sequence[tuple[float, str]]:
        """The nodes that take the pod, least full with it first; other replicas are not considered.
        Pods that differ only in their identity have the same ones."""
        alike = replace(pod, key="", group="", replica=0)
        if alike not in self._targets_of:
            nodes = (self._capacity.nodes[name] for name in self._targets)
            taking = (n for n in nodes if n.fits(alike))
            self._targets_of[alike] = sorted((_load(n, pod.requests), n.node.name) for n in taking)
        return self._targets_of[alike]

    def _zones_of_others(self, pod: PodToPlace) -> frozenset[str]:
        """Of the other replicas of its partition."""
        return frozenset(
            node.node.zone
            for node in self._capacity.nodes.values()
            if node.node.zone
            and any(group == pod.group and number != pod.replica for group, number in node.replicas)
        )


def _load(node: NodeCapacity, more: ResourceAmounts = _NOTHING) -> float:
    """With `more` on it."""
    allocatable = node.node.allocatable
    return (allocatable - node.free + more).highest_fraction_of(allocatable)


def _is_worse(
    source: NodeCapacity, target: NodeCapacity, pod: PodToPlace, zones: Collection[str]
) -> bool:
    """The plan would rather leave the pod where it is: in a zone without another replica of its
    partition, or off the nodes with devices that it does not need."""
    joins_zone = target.node.zone in zones
    has_devices = target.node.allocatable.has_devices_besides(pod.requests)
    return (joins_zone and source.node.zone not in zones) or (
        has_devices and not source.node.allocatable.has_devices_besides(pod.requests)
    )
