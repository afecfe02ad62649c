"""Which nodes and pods are lost. Pure.

Suspicion alone creates no pod. A task is lost when its pod is gone or failed; when its node is
gone, or not Ready with tasks that do not respond; when every task of its node has been silent for
3 s, or it alone for 10 s. One silent task does not prove that its node is lost: that takes two of
them, or a silent kubelet as well. A kubelet that responds outweighs coordinators: then the node's
silent tasks are lost and the node is not. Nothing waits for evictions or for the end of a
Terminating pod (I7). A coordinator that gets no response from any of its tasks is itself suspected:
its reports of silence count only where the kubelet is silent too. A report counts while it is fresh
(`recovery.evidence`).

Design: docs/design/recovery.md#loss.
Paper: Progressive recovery (Su and Zhou 2017), section 4.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from enum import StrEnum

from rekindle.backoff import BackoffPolicy
from rekindle.names import ROLE_TASK
from rekindle_operator.cluster.model import NodeView, PodView, Snapshot
from rekindle_operator.recovery.evidence import Evidence, collect_evidence, silence_as_of_report_s
from rekindle_operator.recovery.kubelets import (
    find_silent_kubelets,
    last_response_at,
    responds_now,
    temporarily_avoided_nodes,
)
from rekindle_operator.recovery.late_reports import (
    nodes_with_responding_pods,
    silent_by_own_probes,
)
from rekindle_operator.recovery.unready import assess_unready
from rekindle_operator.settings import Timing

_MIN_SIGNALS = 2


class Loss(StrEnum):
    """Why a slot needs a new incarnation."""

    GONE = "its pod is gone"
    FAILED = "its pod has failed"
    TERMINATING = "its pod is being deleted"
    NODE = "its node is lost"
    SILENT = "the task is silent, its node is not"
    UNBOUND = "its gate is open and it was not scheduled"
    REFUSED = "the kubelet of its node refused it"
    CANNOT_START = "its containers cannot start on its node"
    CRASHING = "its containers keep failing on its node"
    RESTARTED = "its container has restarted, and a standby is faster"
    DIVERGED = "its results differ from others of its partition"
    OUTDATED = "the topology was edited before it had started"
    ROLLED = "a roll replaces it"
    DRAINED = "its node is drained before it has taken over"  # only of successors

    @property
    def counts_as_failure(self) -> bool:
        """Whether something that ran was lost; otherwise a pod is replaced before it ran, in a
        roll, or in a planned move."""
        return self not in _NO_FAILURES


_NO_FAILURES = frozenset(
    {Loss.UNBOUND, Loss.REFUSED, Loss.CANNOT_START, Loss.OUTDATED, Loss.ROLLED, Loss.DRAINED}
)


@dataclass(frozen=True, slots=True)
class LossAssessment:
    """`lost_nodes`: name -> why. `newly_silent` are to be remembered: once their pods are replaced,
    nothing else shows that they are lost until Kubernetes reports NotReady.
    `unreachable_by_coordinator`: uid of a topology and a node on which none of its tasks responds
    while the kubelet does. `why_not_lost`: why NotReady nodes do not count as lost, if
    most nodes are NotReady; otherwise empty."""

    lost_nodes: Mapping[str, str]
    newly_silent: frozenset[str]
    responding_topologies: frozenset[str]  # uids of those with a task that responds
    usable_nodes: Mapping[str, NodeView]  # by name
    unreachable_by_coordinator: frozenset[tuple[str, str]] = frozenset()
    # Not lost, but their kubelets do not respond now.
    unresponsive_nodes: frozenset[str] = frozenset()
    not_ready: frozenset[str] = frozenset()  # by Kubernetes, lost or not
    freshly_reported: frozenset[str] = frozenset()  # uids of topologies with a fresh report
    why_not_lost: str = ""
    # uid of a topology, and a lost node of which only its report says that it works: its own pods
    # there are not lost.
    alive_reports: frozenset[tuple[str, str]] = frozenset()

    @property
    def excluded_nodes(self) -> frozenset[str]:
        """Names of nodes that get no pods."""
        return self.unresponsive_nodes | self.lost_nodes.keys()

    def is_on_lost_node(self, pod: PodView) -> bool:
        if pod.node is None or pod.node not in self.lost_nodes:
            return False
        return (pod.owner_uid, pod.node) not in self.alive_reports

    def is_unreachable_by_coordinator(self, pod: PodView) -> bool:
        """None of the topology's tasks there responds to the coordinator."""
        return (pod.owner_uid, pod.node) in self.unreachable_by_coordinator

    def awaits_unresponsive_kubelet(self, pod: PodView) -> bool:
        """It never ran: the kubelet of the node that the scheduler chose has not accepted it, and
        does not respond, to the operator or to the API server. Nothing is lost with it. It may be
        the coordinator whose report would tell that the node is lost."""
        silent = self.unresponsive_nodes | self.not_ready
        return pod.node in silent and not pod.accepted_by_kubelet


def assess_nodes(snapshot: Snapshot, now: float, timing: Timing) -> LossAssessment:
    nodes = {node.name: node for node in snapshot.nodes}
    bound = [p for p in snapshot.pods if p.topology is not None and p.node is not None]
    running = [p for p in bound if p.role == ROLE_TASK and not p.terminating and not p.ended]
    evidence = collect_evidence(snapshot, bound, now, timing)
    silent_kubelets = find_silent_kubelets(snapshot, now, timing, timing.probe_response_max_age_s)
    kubelet_responds = {n.name for n in snapshot.nodes if responds_now(n, snapshot, now, timing)}
    occupied = {p.node for p in bound if p.node is not None}
    unready = assess_unready(snapshot, occupied, evidence, now, timing)
    lost = {p.node: "is gone" for p in bound if p.node is not None and p.node not in nodes}
    lost |= dict.fromkeys(unready.lost, "is not Ready")
    # A quarantine ends early if since then its readiness has changed, or its kubelet, a task
    # or a coordinator on it has responded.
    quarantined = {
        node.name
        for node in snapshot.nodes
        if (at := snapshot.quarantined.get(node.uid)) is not None
        and now - at < timing.quarantine_s
        and snapshot.readiness_seen_at.get(node.uid, at) <= at
        and last_response_at(node, snapshot) <= at
    } - evidence.alive_nodes
    with_credible_report = [
        p
        for p in running
        if p.owner_uid in evidence.freshly_reported
        and (p.owner_uid in evidence.responding_topologies or p.node in silent_kubelets)
    ]
    # A coordinator on the node that reports proves that the node works.
    silent = (
        _silent_nodes(with_credible_report, silent_kubelets, evidence, timing)
        - evidence.alive_nodes
    )
    # A coordinator belongs to a tenant: its reports decide about its own tasks, not about nodes.
    unreachable_by_coordinator = _unreachable_by_coordinator(
        with_credible_report, silent & kubelet_responds, evidence, snapshot, timing
    )
    # A pod of another topology may respond to the operator.
    silent -= kubelet_responds | nodes_with_responding_pods(
        snapshot, now, timing, without=evidence.silent_pods
    )
    silent |= (
        silent_by_own_probes(snapshot, silent_kubelets, now, timing)
        - evidence.alive_nodes
        - evidence.briefly_silent_nodes
    )
    silent -= set(lost) | quarantined
    lost |= dict.fromkeys(silent | quarantined - set(lost), "is silent")
    unresponsive_nodes = temporarily_avoided_nodes(snapshot, now, timing) - evidence.alive_nodes
    unresponsive_nodes -= lost.keys()
    usable = {
        name: node
        for name, node in nodes.items()
        if name not in lost and name not in unresponsive_nodes and node.ready and not node.cordoned
    }
    return LossAssessment(
        lost_nodes=lost,
        newly_silent=frozenset(silent),
        responding_topologies=evidence.responding_topologies,
        usable_nodes=usable,
        unreachable_by_coordinator=unreachable_by_coordinator,
        unresponsive_nodes=unresponsive_nodes,
        not_ready=frozenset(name for name, node in nodes.items() if not node.ready),
        freshly_reported=evidence.freshly_reported,
        why_not_lost=unready.why_not_lost,
        alive_reports=frozenset(v for v in evidence.alive_reports if v[1] in unready.contradicted),
    )


def _silent_nodes(
    pods: Iterable[PodView], silent_kubelets: Set[str], evidence: Evidence, timing: Timing
) -> set[str]:
    """Nodes on which no task responds, and at least two of tasks and kubelet are silent. A task
    that starts counts as responding, since a node busy with starting is slow, not dead; but not
    where the kubelet is silent: it proves nothing there."""
    quiet: dict[str, list[bool]] = defaultdict(list)
    for pod in pods:
        if pod.node is None or (pod.node in silent_kubelets and pod.uid in evidence.starting_pods):
            continue
        quiet[pod.node].append(evidence.silence_s(pod) >= timing.node_silent_s)
    return {
        node
        for node, flags in quiet.items()
        if all(flags) and len(flags) + (node in silent_kubelets) >= _MIN_SIGNALS
    }


def _unreachable_by_coordinator(
    pods: Iterable[PodView],
    silent: Set[str],
    evidence: Evidence,
    snapshot: Snapshot,
    timing: Timing,
) -> frozenset[tuple[str, str]]:
    """(uid of a topology, silent node) where at least two of its tasks are silent, and the kubelet
    has responded clearly later than any of them did: it has not failed together with them."""
    here: dict[tuple[str, str], list[PodView]] = defaultdict(list)
    for pod in pods:
        if pod.owner_uid is not None and pod.node is not None and pod.node in silent:
            here[pod.owner_uid, pod.node].append(pod)
    margin_s = timing.kubelet_silent_s
    responded_at = {
        n.name: last_response_at(n, snapshot) for n in snapshot.nodes if n.name in silent
    }
    return frozenset(
        (uid, node)
        for (uid, node), found in here.items()
        if _silent_nodes(found, frozenset(), evidence, timing)
        and all(
            responded_at[node] - snapshot.suspects_silent_since[p.ref] >= margin_s for p in found
        )
    )


def loss_of_pod(
    pod: PodView, assessment: LossAssessment, snapshot: Snapshot, now: float, timing: Timing
) -> Loss | None:
    """Why the newest pod of a slot is to be replaced; None: it stays."""
    if pod.terminating:
        return Loss.TERMINATING
    ungated_s = snapshot.ungated_s(pod, now)
    if pod.ended and (pod.was_ready or ungated_s >= timing.refusal_max_age_s):
        return Loss.FAILED
    if assessment.is_on_lost_node(pod):
        return Loss.NODE
    if assessment.awaits_unresponsive_kubelet(pod) and _has_timed_out(pod, ungated_s, timing):
        return Loss.UNBOUND  # it is bound, but replaced like a pod that no node has taken
    if pod.ended:
        return (
            Loss.REFUSED
            if pod.failed_placements == 0 or _has_timed_out(pod, ungated_s, timing)
            else None
        )
    if pod.node is None:
        return _loss_of_open(pod, assessment, ungated_s, timing)
    timeout_s = (
        timing.node_silent_s
        if assessment.is_unreachable_by_coordinator(pod)
        else timing.task_silent_s
    )
    coordinator_is_connected = pod.owner_uid in assessment.responding_topologies
    if coordinator_is_connected and silence_as_of_report_s(pod, snapshot) >= timeout_s:
        return Loss.SILENT
    return None


def _loss_of_open(
    pod: PodView, assessment: LossAssessment, ungated_s: float, timing: Timing
) -> Loss | None:
    if pod.gates or pod.required_node is None:
        return None
    if assessment.why_not_lost:  # most nodes are NotReady: no other one could take it
        return None
    if pod.required_node not in assessment.usable_nodes:
        return Loss.UNBOUND
    return Loss.UNBOUND if _has_timed_out(pod, ungated_s, timing) else None


def _has_timed_out(pod: PodView, ungated_s: float, timing: Timing) -> bool:
    """A pod that scheduler or kubelet keep refusing (a missing claim, a sysctl) is retried less and
    less often."""
    timeout_s = growing_timeout(timing.scheduling_timeout_s).wait_s(pod.failed_placements + 1)
    return ungated_s >= timeout_s


def growing_timeout(first_s: float) -> BackoffPolicy:
    """How long a pod may take until it is replaced: twice as long with each attempt."""
    return BackoffPolicy(first_s, longest_s=16 * first_s)
