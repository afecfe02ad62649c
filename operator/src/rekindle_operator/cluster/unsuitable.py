"""Which nodes did not bind, admit or start pods of one shape, and how long they are avoided. Pure.

A shape is a digest of a pod's spec (`resources.shape`). Each further refusal doubles the time. The
refusals are forgotten an hour after that time has passed. A node whose kubelet only had no capacity
is avoided for a few seconds: long enough for a gate to be opened for another one. A Node object
that was created again under the same name is another node.

Design: docs/design/recovery.md#gates.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from rekindle.backoff import BackoffPolicy

_BACKOFF = BackoffPolicy(first_s=300.0, longest_s=3600.0)
_TEMPORARY_S = 5.0
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
        *,
        is_temporary: bool = False,
    ) -> UnsuitableNodes:
        known = self.refusals.get((shape, node))
        if known is not None and known.pod_uid == pod_uid:
            return self
        if known is not None and known.node_uid != node_uid:
            known = None
        if known is not None and now >= known.until + _BACKOFF.longest_s:
            known = None
        count = known.count if known is not None else 0
        if is_temporary:
            until = max(now + _TEMPORARY_S, known.until if known is not None else 0.0)
        else:
            count += 1
            until = now + _BACKOFF.wait_s(count)
        kept = {k: r for k, r in self.refusals.items() if now < r.until + _BACKOFF.longest_s}
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
