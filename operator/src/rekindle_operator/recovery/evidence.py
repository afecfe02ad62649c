"""What the coordinators' reports prove now (docs/decisions/0027). Pure.

A report that is older than a few seconds proves neither that a task works nor that it is silent. A
silence has lasted until the report was last known to be true, not until now: if a coordinator
reports a short stall and dies, no task is lost for that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rekindle.names import ROLE_COORDINATOR, coordinator_pod_name
from rekindle.report import TaskReport
from rekindle_operator.cluster.model import IncarnationRef, PodView, Snapshot
from rekindle_operator.settings import Timing


@dataclass(frozen=True, slots=True)
class Evidence:
    """`freshly_reported`: uids of topologies whose report is fresh; `responding_topologies`: of
    those with a task that responds to its coordinator. `alive_nodes`: nodes with such a task, or
    with a coordinator that reports. `reported_nodes`: with a pod of a topology whose report is
    fresh, and says whether it responds. `starting_pods`: uids of tasks that have not responded yet
    according to a fresh report; `silent_pods`: of those that are silent, unless none of their
    topology responds: its coordinator may be what is cut off. `briefly_silent_nodes`: with a silent
    pod that has not been silent for long enough to be lost with its node.
    `alive_reports`: a topology that says so of one of `alive_nodes` or `briefly_silent_nodes`, and
    that node."""

    freshly_reported: frozenset[str]
    responding_topologies: frozenset[str]
    alive_nodes: frozenset[str]
    reported_nodes: frozenset[str]
    starting_pods: frozenset[str]
    silent_pods: frozenset[str]
    briefly_silent_nodes: frozenset[str]
    alive_reports: frozenset[tuple[str, str]]  # uid of a topology, and a node
    silences: Mapping[IncarnationRef, float]  # in seconds, as of the report

    def silence_s(self, pod: PodView) -> float:
        """0 for a task that responds or starts."""
        return self.silences.get(pod.ref, 0.0)


def collect_evidence(
    snapshot: Snapshot, bound: Iterable[PodView], now: float, timing: Timing
) -> Evidence:
    """`bound`: pods of topologies that have a node."""
    fresh = frozenset(
        uid for uid, as_of in snapshot.report_times.items() if now - as_of <= timing.report_fresh_s
    )
    reports = {t.uid: t.report for t in snapshot.topologies if t.uid in fresh}
    tasks = {
        IncarnationRef(uid, task.slot, task.incarnation): task
        for uid, report in reports.items()
        for task in report.tasks.values()
    }
    inconclusive = {ref for ref, task in tasks.items() if _is_inconclusive(task)}
    reporting_coordinators = {(uid, report.fence) for uid, report in reports.items()}
    reported = [
        p
        for p in bound
        if p.owner_uid in fresh and p.ref not in inconclusive and _is_of(p, tasks.get(p.ref))
    ]
    running = [p for p in reported if not p.terminating and not p.ended]
    silent = [p for p in running if p.ref in snapshot.suspects_silent_since]
    responding = [
        p
        for p in running
        if p.ref not in snapshot.suspects_silent_since
        and (task := tasks.get(p.ref)) is not None
        and _responds(task)
    ]
    reporters = [
        p
        for p in running
        if p.role == ROLE_COORDINATOR
        and (p.owner_uid, p.incarnation) in reporting_coordinators
        and p.name == coordinator_pod_name(p.topology or "", p.incarnation)
    ]
    briefly_silent = [
        p for p in silent if _silence_before_resets_s(p, snapshot) < timing.node_silent_s
    ]
    reported_alive = (*responding, *reporters, *briefly_silent)
    silences = {p.ref: silence_as_of_report_s(p, snapshot) for p in reported}
    responding_topologies = frozenset(p.owner_uid for p in responding if p.owner_uid)
    return Evidence(
        freshly_reported=fresh,
        responding_topologies=responding_topologies,
        alive_nodes=frozenset(p.node for p in [*responding, *reporters] if p.node),
        reported_nodes=frozenset(p.node for p in reported if p.node),
        starting_pods=frozenset(p.uid for p in running) - {p.uid for p in (*silent, *responding)},
        silent_pods=frozenset(p.uid for p in silent if p.owner_uid in responding_topologies),
        briefly_silent_nodes=frozenset(p.node for p in briefly_silent if p.node),
        alive_reports=frozenset(
            (p.owner_uid, p.node) for p in reported_alive if p.owner_uid and p.node
        ),
        silences=silences,
    )


def _responds(task: TaskReport) -> bool:
    """Whether it responds to this coordinator, which then knows an epoch of it."""
    return task.stable_epoch is not None and not task.silent_s


def _is_inconclusive(task: TaskReport) -> bool:
    """Silent to a coordinator that suspects nobody, since its own network seems to be faulty: this
    proves neither that the task works nor that it does not."""
    return bool(task.silent_s) and not task.suspected


def _is_of(pod: PodView, task: TaskReport | None) -> bool:
    """False if the report is of another pod: any user may give one the labels of a task."""
    return task is None or task.pod in ("", pod.name)


def _silence_before_resets_s(pod: PodView, snapshot: Snapshot) -> float:
    """As `silence_as_of_report_s`; that this process was paused does not shorten it."""
    since = snapshot.silence_began_at.get(pod.ref, snapshot.suspects_silent_since[pod.ref])
    return snapshot.report_times.get(pod.owner_uid or "", since) - since


def silence_as_of_report_s(pod: PodView, snapshot: Snapshot) -> float:
    """How long the task had been silent when its coordinator's report was last known to be true."""
    since = snapshot.suspects_silent_since.get(pod.ref)
    as_of = snapshot.report_times.get(pod.owner_uid or "")
    return max(0.0, as_of - since) if since is not None and as_of is not None else 0.0
