"""Which nodes would not bind, admit or start pods of one shape, and for how long they are avoided.

Pure. A shape is a digest of a pod's spec (`resources.shape`). Each further
refusal doubles the time; a node that ran well for an hour after that is as good as any other.

Design: docs/design/recovery.md#gates.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

_FIRST_S = 300.0
_LONGEST_S = 3600.0
_MOST_RECORDS = 10_000  # the soonest to expire go first


@dataclass(frozen=True, slots=True)
class Unsuitable:
    """`pod_uid`: the pod that was refused last; one pod counts once."""

    pod_uid: str
    times: int
    until: float


@dataclass(frozen=True, slots=True)
class UnsuitableNodes:
    """By shape and node."""

    records: Mapping[tuple[str, str], Unsuitable]

    def with_one(self, shape: str, node: str, pod_uid: str, now: float) -> UnsuitableNodes:
        known = self.records.get((shape, node))
        if known is not None and known.pod_uid == pod_uid:
            return self
        times = known.times + 1 if known is not None and now < known.until + _LONGEST_S else 1
        length_s = min(_FIRST_S * 2 ** min(times - 1, 10), _LONGEST_S)
        kept = {k: r for k, r in self.records.items() if now < r.until + _LONGEST_S}
        if len(kept) >= _MOST_RECORDS:
            del kept[min(kept, key=lambda k: kept[k].until)]
        return UnsuitableNodes({**kept, (shape, node): Unsuitable(pod_uid, times, now + length_s)})

    def by_shape(self, now: float) -> dict[str, frozenset[str]]:
        found: dict[str, set[str]] = defaultdict(set)
        for (shape, node), record in self.records.items():
            if now < record.until:
                found[shape].add(node)
        return {shape: frozenset(nodes) for shape, nodes in found.items()}
