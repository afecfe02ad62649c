"""Which nodes did not bind, admit or start pods of one shape, and how long they are avoided. Pure.

A shape is a digest of a pod's spec (`resources.shape`). Each further refusal doubles the time. The
refusals are forgotten an hour after that time has passed. A Node object that was created again
under the same name is another node.

Design: docs/design/recovery.md#gates.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from rekindle.backoff import BackoffPolicy


class Cause(StrEnum):
    """Why a node is avoided."""

    REFUSED = "scheduler or kubelet refused the pod, or its containers did not start"
    SILENT = "tasks on it are silent while its kubelet responds"
    DIVERGED = "the results of a replica on it differ from others of its partition"
    FULL = "its kubelet had no capacity, or shuts down, or other pods there kept it off"


_BACKOFF = {
    Cause.REFUSED: BackoffPolicy(first_s=300.0, longest_s=3600.0),
    Cause.SILENT: BackoffPolicy(first_s=30.0, longest_s=3600.0),  # a network may heal soon
    # Its memory or its cores may be damaged. A pod that no other node can take waits for so long.
    Cause.DIVERGED: BackoffPolicy(first_s=30.0, longest_s=120.0),
}
_FULL_S = 5.0
"""Long enough for a gate to be opened for another node."""
_FORGOTTEN_AFTER_S = 3600.0
_MAX_ENTRIES = 10_000  # those that expire first are dropped


@dataclass(frozen=True, slots=True)
class Refusals:
    """`pod_uid`: the pod that was refused last. One pod counts once. `node_uid`: of the Node.
    `count`: without those for a lack of capacity."""

    node_uid: str
    pod_uid: str
    count: int
    until: float


@dataclass(frozen=True, slots=True)
class UnsuitableNodes:
    """Keyed by shape and the node's name."""

    refusals: Mapping[tuple[str, str], Refusals]

    def with_refusal(
        self,
        shape: str,
        node: str,
        node_uid: str,
        pod_uid: str,
        now: float,
        cause: Cause = Cause.REFUSED,
    ) -> UnsuitableNodes:
        known = self.refusals.get((shape, node))
        if known is not None and known.pod_uid == pod_uid:
            return self
        if known is not None and known.node_uid != node_uid:
            known = None
        if known is not None and now >= known.until + _FORGOTTEN_AFTER_S:
            known = None
        count, until = (known.count, known.until) if known is not None else (0, 0.0)
        if cause is Cause.FULL:
            until = max(until, now + _FULL_S)
        else:
            count += 1
            until = max(until, now + _BACKOFF[cause].wait_s(count))
        kept = {k: r for k, r in self.refusals.items() if now < r.until + _FORGOTTEN_AFTER_S}
        if len(kept) >= _MAX_ENTRIES:
            del kept[min(kept, key=lambda k: kept[k].until)]
        refusals = Refusals(node_uid, pod_uid, count, until)
        return UnsuitableNodes({**kept, (shape, node): refusals})

    def by_shape(self, uids: Mapping[str, str], now: float) -> dict[str, frozenset[str]]:
        """Names of the nodes to avoid now. `uids`: of the Node objects that there are, by name."""
        found: dict[str, set[str]] = defaultdict(set)
        for (shape, node), refusals in self.refusals.items():
            if now < refusals.until and uids.get(node) == refusals.node_uid:
                found[shape].add(node)
        return {shape: frozenset(nodes) for shape, nodes in found.items()}
