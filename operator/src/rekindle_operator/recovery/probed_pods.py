"""Which pods the operator probes. Pure.

One pod of each node is always probed at intervals, since only one that has responded before can
become silent. While no coordinator reports on the pods of a node, Kubernetes calls it NotReady, or
its kubelet does not respond, one is probed at each tick; and if that is silent, the others, since
its container may be what has ended. What the results prove is in `recovery.late_reports`.

Design: docs/design/recovery.md#loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from heapq import nsmallest

from rekindle_operator.cluster.model import PodView, ProbeResults, Snapshot
from rekindle_operator.settings import Timing

_MAX_AT_ONCE = 64  # probes that one round of the probing loop sends
_PROVEN_AT_ONCE = 2  # pods of a node besides the chosen one, of those that were ready
_Preference = tuple[bool, bool, bool, bool, str]
_KUBELET_SILENT_S = 0.5  # two ticks; then it may not report that pods have become ready


def nodes_of_late_reports(snapshot: Snapshot, now: float, timing: Timing) -> frozenset[str]:
    """Nodes with pods of a topology whose report is late."""
    late = {uid for uid, at in snapshot.report_times.items() if now - at >= timing.report_late_s}
    if not late:
        return frozenset()
    return frozenset(p.node for p in snapshot.pods if p.node and p.topology and p.owner_uid in late)


def pods_to_probe(snapshot: Snapshot, busy: Set[str], now: float, timing: Timing) -> list[PodView]:
    """One of each node at intervals; at every tick those that no coordinator reports on, and those
    with an unanswered probe. If that is unanswered for a while, also the others of its node, one
    after another: its container may be what has ended. `busy`: uids that were probed just now."""
    urgent = nodes_of_late_reports(snapshot, now, timing) | _doubtful_nodes(snapshot, now, timing)
    candidates = probe_candidates(snapshot, now, timing)
    chosen = _chosen(candidates, snapshot, now, timing)
    due = [
        pod
        for node, pod in chosen.items()
        if pod.uid not in busy
        and (
            node in urgent
            or _has_unanswered(pod, snapshot, now, timing)
            or now - _probed_at(pod, snapshot) >= timing.probe_interval_s
        )
    ]
    due.sort(key=lambda p: _probed_at(p, snapshot))
    routine = [p for p in due if p.node not in urgent]
    silent = {n for n, pod in chosen.items() if _is_silent(pod, snapshot, now, timing)}
    silent |= _without_response(candidates, snapshot, now, timing) & urgent
    neighbours = _neighbours(snapshot, candidates, chosen, silent, busy)
    first = [*neighbours[: _MAX_AT_ONCE // 2], *(p for p in due if p.node in urgent)]
    # Many urgent ones, which may all be dead, do not keep the others from being probed.
    room = _MAX_AT_ONCE - min(len(routine), _MAX_AT_ONCE // 4)
    return [*first[:room], *routine][:_MAX_AT_ONCE]


def _doubtful_nodes(snapshot: Snapshot, now: float, timing: Timing) -> frozenset[str]:
    """Those that are NotReady, or whose kubelet does not respond; after a minute such a node would
    be NotReady, if it were not the operator that cannot reach any kubelet."""
    return frozenset(
        node.name
        for node in snapshot.nodes
        if not node.ready
        or (
            (results := snapshot.kubelet_probes.get(node.uid)) is not None
            and results.unanswered_since is not None
            and _KUBELET_SILENT_S <= now - results.unanswered_since < timing.quarantine_s
        )
    )


def _chosen(
    candidates: Iterable[PodView], snapshot: Snapshot, now: float, timing: Timing
) -> dict[str, PodView]:
    """By node, the pod to probe."""
    best: dict[str, tuple[_Preference, PodView]] = {}
    for pod in candidates:
        if pod.node:
            preference = _preference(pod, snapshot, now, timing)
            known = best.get(pod.node)
            if known is None or preference < known[0]:
                best[pod.node] = preference, pod
    return {node: pod for node, (_, pod) in best.items()}


def _without_response(
    candidates: Iterable[PodView], snapshot: Snapshot, now: float, timing: Timing
) -> frozenset[str]:
    """Nodes of which a pod was probed, and none has responded in the last half minute."""
    probed, responding = set(), set()
    for pod in candidates:
        results = snapshot.pod_probes.get(pod.uid)
        if results is None or not pod.node:
            continue
        probed.add(pod.node)
        at = results.answered_probe_at
        if at is not None and now - at <= timing.probe_response_max_age_s:
            responding.add(pod.node)
    return frozenset(probed - responding)


def _neighbours(
    snapshot: Snapshot,
    candidates: Sequence[PodView],
    chosen: Mapping[str, PodView],
    nodes: Set[str],
    busy: Set[str],
) -> list[PodView]:
    """Of each of these nodes, besides its chosen pod: the pod that has responded last, so that it
    is known to go on; and those that were probed longest ago: of the pods that were ready or have
    responded, and of the others."""
    others: dict[str, list[PodView]] = {node: [] for node in nodes}
    for pod in candidates:
        if pod.node in others and pod.uid != chosen[pod.node].uid:
            others[pod.node].append(pod)
    found: dict[str, PodView] = {}
    # Nodes of which none was probed for longest first, so that no node keeps others waiting.
    for pods in sorted(
        others.values(), key=lambda pods: max((_probed_at(p, snapshot) for p in pods), default=0.0)
    ):
        proven = [p for p in pods if _is_proven(p, snapshot)]
        rest = [p for p in pods if not _is_proven(p, snapshot)]
        choices = (
            *_responded_last(pods, snapshot),
            *_probed_longest_ago(proven, snapshot, _PROVEN_AT_ONCE),
            *_probed_longest_ago(rest, snapshot, 1),
        )
        found |= {p.uid: p for p in choices}
    return [pod for uid, pod in found.items() if uid not in busy]


def _is_silent(pod: PodView, snapshot: Snapshot, now: float, timing: Timing) -> bool:
    results = snapshot.pod_probes.get(pod.uid)
    since = results.unanswered_since if results is not None else None
    is_long = since is not None and now - since >= timing.pod_silent_s / 4
    return is_long and _has_unanswered(pod, snapshot, now, timing)


def _responded_last(pods: Iterable[PodView], snapshot: Snapshot) -> list[PodView]:
    """Empty if none has responded, or the last probe of each is unanswered."""
    responding = [
        (results.answered_probe_at, pod.uid, pod)
        for pod in pods
        if (results := snapshot.pod_probes.get(pod.uid)) is not None
        and results.answered_probe_at is not None
        and results.unanswered_since is None
    ]
    return [max(responding)[2]] if responding else []


def _probed_longest_ago(pods: Sequence[PodView], snapshot: Snapshot, number: int) -> list[PodView]:
    """Of the namespace of which none was probed for longest first: no tenant hides another one's,
    with however many topologies. Pods without one, which anybody may create, share a turn."""
    topologies = {topology.uid for topology in snapshot.topologies}
    tenants = {p.uid: p.namespace if p.owner_uid in topologies else None for p in pods}
    newest: dict[str | None, float] = {}
    for pod in pods:
        tenant = tenants[pod.uid]
        newest[tenant] = max(newest.get(tenant, 0.0), _probed_at(pod, snapshot))
    return nsmallest(number, pods, key=lambda p: (newest[tenants[p.uid]], _probed_at(p, snapshot)))


def _is_proven(pod: PodView, snapshot: Snapshot) -> bool:
    """Whether it was ready, or has responded."""
    results = snapshot.pod_probes.get(pod.uid)
    return _was_ready(pod) or (results is not None and results.answered_probe_at is not None)


def probe_candidates(snapshot: Snapshot, now: float, timing: Timing) -> list[PodView]:
    """Those that were ready; and all on nodes that are NotReady, or whose kubelet does not respond:
    Kubernetes marks the pods of the former as not ready, and a kubelet that hangs does not report
    that one has become ready."""
    doubtful = _doubtful_nodes(snapshot, now, timing)
    return [
        pod
        for pod in snapshot.pods
        if pod.is_managed
        and pod.node
        and pod.ip
        and not (pod.ended or pod.terminating)
        and (_was_ready(pod) or pod.node in doubtful)
    ]


def _was_ready(pod: PodView) -> bool:
    return pod.ready or pod.was_ready


def _has_unanswered(pod: PodView, snapshot: Snapshot, now: float, timing: Timing) -> bool:
    results = snapshot.pod_probes.get(pod.uid)
    if results is None or results.unanswered_since is None or results.answered_probe_at is None:
        return False
    return now - results.answered_probe_at <= timing.probe_response_max_age_s


def _preference(pod: PodView, snapshot: Snapshot, now: float, timing: Timing) -> _Preference:
    """A pod that never responded comes last: any user may set its labels. Before it those that have
    been silent for long: their containers may have ended; before these those that a report calls
    silent; and before these pods that were never ready."""
    results = snapshot.pod_probes.get(pod.uid)
    suspects = snapshot.suspects_silent_since
    is_suspected = bool(suspects) and pod.ref in suspects
    if results is None or results.unanswered_since is None:
        return False, False, is_suspected, not _was_ready(pod), pod.uid
    is_old = not _has_unanswered(pod, snapshot, now, timing)
    never_responded = results.answered_probe_at is None
    return never_responded, is_old, is_suspected, not _was_ready(pod), pod.uid


def _probed_at(pod: PodView, snapshot: Snapshot) -> float:
    return snapshot.pod_probes.get(pod.uid, ProbeResults(0.0)).sent_at
