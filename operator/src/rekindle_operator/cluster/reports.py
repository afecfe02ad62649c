"""How old each coordinator's report is (docs/decisions/0027). Pure but for what it remembers.

A report is known to be true at the moment when this process sees that it has changed, and whenever
it sees the coordinator's Lease renewed by the same incarnation with the number of that report. Both
are moments of this process's own clock, so another machine's clock cannot make a report look fresh
or old. A coordinator that cannot write its status does not name the report in its Lease.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rekindle_operator.cluster.model import LeaseView, TopologyView
from rekindle_operator.dataplane import report_number
from rekindle_operator.names import coordinator_name


@dataclass(frozen=True, slots=True)
class _Known:
    content: Mapping[str, Any]
    as_of: float


class ReportBook:
    """By the topology's uid. Not thread-safe: its owner holds a lock."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}

    def read(self, view: TopologyView, now: float) -> None:
        """The topology as the API server has it."""
        known = self._known.get(view.uid)
        if view.data_plane and (known is None or known.content != view.data_plane):
            self._known[view.uid] = _Known(view.data_plane, now)

    def forget(self, uid: str) -> None:
        self._known.pop(uid, None)

    def as_of(
        self, topologies: Iterable[TopologyView], leases: Iterable[LeaseView]
    ) -> Mapping[str, float]:
        """When each report was last known to be true; of what never reported, nothing."""
        by_name = {(lease.namespace, lease.name): lease for lease in leases}
        for view in topologies:
            known = self._known.get(view.uid)
            lease = by_name.get((view.namespace, coordinator_name(view.name)))
            if known is None or lease is None or lease.seen_at <= known.as_of:
                continue
            if confirms(lease, known.content):
                self._known[view.uid] = _Known(known.content, lease.seen_at)
        return {uid: known.as_of for uid, known in self._known.items()}


def confirms(lease: LeaseView, report: Mapping[str, Any]) -> bool:
    """Whether who renewed this Lease has written that report, and has nothing newer to say. A
    coordinator without numbered reports says so by renewing."""
    fence, number = report_number(report)
    return lease.holder == str(fence) and lease.report in (None, number)
