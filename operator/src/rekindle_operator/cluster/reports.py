"""How old each coordinator's report is (docs/decisions/0027). No I/O, no clock.

A report is known to be true at the moment when this process sees it change, and whenever it sees
the coordinator's Lease renewed by the same incarnation with the number of that report. Both times
are of this process's clock, so another machine's clock cannot make a report look fresh or old. A
coordinator that cannot write its status does not name the report in its Lease.

A report or a Lease that exists when this process starts may be of any age. It proves nothing until
one of them changes. Neither does a report that was removed, until there is another one. Once the
pod of a coordinator is gone and its next incarnation has one, what it goes on to report proves
nothing: it may be cut off from some nodes, which may be why it was replaced.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass

from rekindle.names import ROLE_COORDINATOR, coordinator_name
from rekindle.report import Report
from rekindle_operator.cluster.model import LeaseView, PodView, TopologyView

PREEXISTING_AGE_S = 60.0
"""Assumed age of a report that existed when this process started, or that was removed."""


@dataclass(frozen=True, slots=True)
class _KnownReport:
    report: Report | None  # None: it was removed
    as_of: float
    preexisting: bool = False  # when this process started; neither changed nor confirmed since


class ReportAges:
    """Keyed by the topology's uid. Not thread-safe: the caller holds a lock."""

    def __init__(self) -> None:
        self._unreported: set[str] = set()  # seen before their first report
        self._known: dict[str, _KnownReport] = {}
        self._preexisting_leases: dict[str, int] = {}  # versions, by the topology's uid
        # The time that was found last while there was no next incarnation, by the topology's uid.
        self._before_next: dict[str, float] = {}
        self._newest_pods: dict[str, int] = {}  # incarnations, by the topology's uid

    def observe(self, view: TopologyView, now: float) -> None:
        """Record the report in the newest version of the topology."""
        known, long_ago = self._known.get(view.uid), now - PREEXISTING_AGE_S
        report = view.report if view.data_plane else None
        if known is None and report is None:
            self._unreported.add(view.uid)
        elif known is None and view.uid not in self._unreported:
            self._known[view.uid] = _KnownReport(report, long_ago, preexisting=True)
        elif known is None or known.report != report:
            self._known[view.uid] = _KnownReport(report, now if report is not None else long_ago)

    def forget(self, uid: str) -> None:
        self._unreported.discard(uid)
        self._known.pop(uid, None)
        self._preexisting_leases.pop(uid, None)
        self._before_next.pop(uid, None)
        self._newest_pods.pop(uid, None)

    def as_of(
        self,
        topologies: Iterable[TopologyView],
        leases: Iterable[LeaseView],
        coordinators: Mapping[str, Set[int]] | None = None,
    ) -> Mapping[str, float]:
        """When each report was last known to be true, without topologies that never had one.
        `coordinators`: their incarnations that have a pod, by the topology's uid."""
        by_name = {(lease.namespace, lease.name): lease for lease in leases}
        for view in topologies:
            known = self._known.get(view.uid)
            lease = by_name.get((view.namespace, coordinator_name(view.name)))
            if known is None or known.report is None:
                continue
            if lease is None or lease.seen_at <= known.as_of:
                continue
            if known.preexisting and lease.version == self._preexisting_leases.setdefault(
                view.uid, lease.version
            ):
                continue
            if _confirms(lease, known.report):
                self._known[view.uid] = _KnownReport(known.report, lease.seen_at)
        pods = coordinators or {}
        return {
            uid: self._as_of_before_next(uid, known, pods.get(uid, frozenset()))
            for uid, known in self._known.items()
        }

    def _as_of_before_next(self, uid: str, known: _KnownReport, pods: Set[int]) -> float:
        """While its own pod exists it goes on, until the next incarnation takes over. It does not
        go on again if that one's pod is gone too, before there is another one."""
        newest = self._newest_pods[uid] = max([self._newest_pods.get(uid, 0), *pods])
        fence = known.report.fence if known.report is not None else newest
        if fence in pods or fence >= newest:
            self._before_next[uid] = known.as_of
        return self._before_next.setdefault(uid, known.as_of)


def _confirms(lease: LeaseView, report: Report) -> bool:
    """Whether the holder of this Lease wrote that report and has no newer one. For a coordinator
    that does not number its reports, each renewal confirms."""
    return lease.holder == str(report.fence) and lease.report_number in (None, report.number)


def coordinators_with_pods(pods: Iterable[PodView]) -> Mapping[str, Set[int]]:
    """Incarnations, by the topology's uid."""
    found: dict[str, set[int]] = {}
    for pod in pods:
        if pod.role == ROLE_COORDINATOR and pod.owner_uid is not None and not pod.ended:
            found.setdefault(pod.owner_uid, set()).add(pod.incarnation)
    return found
