"""I8: no query waits for long whose missing tasks would fit into the capacity that is left.

What fits is searched for in full, without the product's packing: a simulated cluster is small.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from rekindle_operator.cluster.amounts import ResourceAmounts, total
from rekindle_operator.cluster.model import NodeView, PodView
from rekindle_testing.simulation.kube.control_plane import Views
from rekindle_testing.simulation.scheduler import Scheduler

_LOOK_S = 1.0
_FITS_S = 20.0
"""For so long a query may wait although it fits: the operator has to learn of nodes and pods."""

PartitionKey = tuple[str, int]


class WaitingChecks:
    """`needs`: the partitions that each query needs. `is_usable`: whether an operator can know that
    a node takes pods. `is_calm`: whether it can know and do anything. `failed` ends the
    simulation. `waited`: how often a query was seen waiting."""

    def __init__(
        self,
        scheduler: Scheduler,
        views: Views,
        needs: Callable[[], Mapping[str, frozenset[PartitionKey]]],
        is_usable: Callable[[NodeView], bool],
        is_calm: Callable[[], bool],
        failed: Callable[[str], None],
    ) -> None:
        self.waited = 0
        self._scheduler = scheduler
        self._views = views
        self._needs = needs
        self._is_usable = is_usable
        self._is_calm = is_calm
        self._failed = failed
        self._fits_since: dict[str, float] = {}  # by query
        scheduler.after(_LOOK_S, self._look)

    def _look(self) -> None:
        self._scheduler.after(_LOOK_S, self._look)
        fitting = set(self._fitting()) if self._is_calm() else set()
        now = self._scheduler.now
        self._fits_since = {q: self._fits_since.get(q, now) for q in fitting}
        for query, since in self._fits_since.items():
            if now - since > _FITS_S:
                self._failed(f"I8: query {query} waits, although it fits for {_FITS_S:g} s")

    def _fitting(self) -> Iterable[str]:
        """The queries that wait although they fit."""
        pods = [p for p in self._views.pods() if not p.ended]
        placed, gated = set(), defaultdict(list)
        for pod in pods:
            if pod.slot is None or pod.terminating:
                continue
            partition = (pod.slot.segment, pod.slot.partition)
            if pod.gates:
                gated[partition].append(pod)
            else:
                placed.add(partition)
        free = {
            node.name: node.allocatable
            - total(p.requests for p in pods if node.name in (p.node, p.required_node))
            for node in self._views.nodes()
            if self._is_usable(node)
        }
        for query, needs in self._needs().items():
            missing = sorted(needs - placed)
            if missing:
                self.waited += 1
                if all(gated[p] for p in missing) and fits([gated[p][0] for p in missing], free):
                    yield query


def fits(pods: Sequence[PodView], free: Mapping[str, ResourceAmounts]) -> bool:
    """Whether nodes have space for all pods; they are of different partitions, of which no other
    replica runs."""
    if not pods:
        return True
    first, *others = pods
    return any(
        left.covers(first.requests) and fits(others, {**free, name: left - first.requests})
        for name, left in free.items()
    )
