"""Which running pods to take away so that a query that is down can come back. Pure.

Availability goes before redundancy: first spare replicas of what is down or that have never served,
then tasks whose queries do not answer anyway and have a lower priority, the lowest first. What
answers is never offered. No pod is taken without which the query would start too.

Design: docs/design/recovery.md#preemption.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from rekindle_operator.cluster.amounts import ResourceAmounts, total
from rekindle_operator.recovery.misfits import PodToPlace
from rekindle_operator.recovery.pack import Capacity, pack
from rekindle_operator.recovery.plan import DownQuery

_MAX_TAKEN = 64  # for one query
_MAX_PACKED = 20_000  # pods and nodes, of all attempts to pack: some tenths of a second


@dataclass(frozen=True, slots=True)
class PodOnNode:
    """`group`: its partition."""

    uid: str
    node: str
    requests: ResourceAmounts
    group: str
    replica: int
    namespace: str


@dataclass(frozen=True, slots=True)
class TakeablePod(PodOnNode):
    """A task that runs, and with which no query answers. `users`: the queries that need its
    partition. `is_spare`: another replica of the partition has its state and stays."""

    users: frozenset[tuple[str, str]]
    priority: int  # the highest of its users
    is_spare: bool


@dataclass(frozen=True, slots=True)
class Preemption:
    query: DownQuery
    taken: tuple[TakeablePod, ...]


def find_preemption(
    waiting: Sequence[DownQuery],
    pods: Mapping[str, PodToPlace],
    takeable: Sequence[TakeablePod],
    capacity: Capacity,
    late: Sequence[PodOnNode] = (),
) -> Preemption | None:
    """For the query of the highest priority that it helps. `waiting`: queries that only lack
    capacity; `pods`: what would meet each of their needs. `capacity`: with what will be free soon;
    a query that it suffices for keeps its part of it, and nothing is taken for that query. Nor is
    it for one that waits for `late`, which should have ended: the next one might not end either."""
    if not takeable:
        return None
    empty_nodes = _EmptyNodes(capacity)
    room = total(node.free.clamped() for node in capacity.nodes.values())
    packed = 0
    for query in sorted(waiting, key=lambda q: (-q.priority, q.key)):
        missing = [pods[need] for need in sorted(query.needs)]
        nodes = frozenset[str]().union(*(empty_nodes.of(pod) for pod in missing))
        offered = [t for t in takeable if t.node in nodes and _may_take(t, query)]
        offered.sort(key=lambda t: (not t.is_spare, t.priority, t.group, -t.replica))
        offered = offered[:_MAX_TAKEN]
        needed = total(pod.requests for pod in missing)
        if not (room + total(t.requests for t in offered)).covers(needed):
            continue
        packed += len(missing) + len(capacity.nodes)
        if packed > _MAX_PACKED:
            return None
        if (placed := pack(missing, capacity)) is not None:
            capacity, room = placed.capacity, room - needed
        elif late and pack(missing, without_pods(late, capacity)) is not None:
            continue
        elif taken := _least(offered, missing, capacity):
            return Preemption(query, tuple(taken))
    return None


class _EmptyNodes:
    """The nodes that would take a pod if nothing else were on them."""

    def __init__(self, capacity: Capacity) -> None:
        self._capacity = capacity
        self._found: dict[tuple[object, ...], frozenset[str]] = {}

    def of(self, pod: PodToPlace) -> frozenset[str]:
        if (shape := pod.shape) not in self._found:
            nodes = self._capacity.nodes.items()
            found = frozenset(name for name, node in nodes if node.fits_when_empty(pod))
            self._found[shape] = found
        return self._found[shape]


def _may_take(pod: TakeablePod, query: DownQuery) -> bool:
    return pod.is_spare or (pod.priority < query.priority and query.key not in pod.users)


def _least(
    offered: Sequence[TakeablePod], missing: Sequence[PodToPlace], capacity: Capacity
) -> list[TakeablePod]:
    """The first ones that suffice, without those that are not needed; none if all do not. Without
    any the capacity does not suffice."""

    def suffice(taken: Sequence[TakeablePod]) -> bool:
        return pack(missing, without_pods(taken, capacity)) is not None

    if not offered or not suffice(offered):
        return []
    low, high = 0, len(offered)  # not enough, enough
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if suffice(offered[:middle]) else (middle, high)
    taken = list(offered[:high])
    for pod in reversed(offered[:high]):
        others = [t for t in taken if t is not pod]
        if suffice(others):
            taken = others
    return taken


def without_pods(gone: Iterable[PodOnNode], capacity: Capacity) -> Capacity:
    """The capacity once these pods are gone."""
    nodes, share_left = dict(capacity.nodes), dict(capacity.share_left)
    for pod in gone:
        node = nodes[pod.node]
        nodes[pod.node] = replace(
            node,
            free=node.free + pod.requests,
            replicas=node.replicas - {(pod.group, pod.replica)},
        )
        if pod.namespace in share_left:
            share_left[pod.namespace] += pod.requests
    return Capacity(nodes, capacity.allocatable, share_left)
