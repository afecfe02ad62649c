"""Which nodes are lost while no coordinator reports on their tasks (docs/decisions/0030). Pure.

If a coordinator is lost with the nodes of its tasks, no process polls the other tasks. Then the
operator itself probes the kubelet of each node, and one pod there, by its HTTP port. If both used
to respond, both are silent now, and others have responded since, these are two signals, as with a
report. One pod of each node is always probed at intervals, since only one that has responded before
can become silent. No coordinator reports on the operator's own replicas: their nodes are assessed
in the same way.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from functools import partial

from rekindle_operator.cluster.model import PodView, ProbeResults, Snapshot
from rekindle_operator.settings import Timing

_MAX_AT_ONCE = 32  # probes that one round of the probing loop sends
_UNCOMPARED_FACTOR = 3  # so many times `pod_silent_s` prove a silence if nobody else responds


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
    urgent = nodes_of_late_reports(snapshot, now, timing)
    urgent |= {node.name for node in snapshot.nodes if not node.ready}
    preference = partial(_preference, snapshot=snapshot, now=now, timing=timing)
    candidates = _that_may_be_probed(snapshot)
    chosen: dict[str, PodView] = {}
    for pod in candidates:
        if pod.node:
            known = chosen.get(pod.node)
            if known is None or preference(pod) < preference(known):
                chosen[pod.node] = pod
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
    neighbours = _neighbours(snapshot, candidates, chosen, busy, now, timing)
    first = [*neighbours[: _MAX_AT_ONCE // 2], *(p for p in due if p.node in urgent)]
    # Many urgent ones, which may all be dead, do not keep the others from being probed.
    room = _MAX_AT_ONCE - min(len(routine), _MAX_AT_ONCE // 4)
    return [*first[:room], *routine][:_MAX_AT_ONCE]


def _neighbours(
    snapshot: Snapshot,
    candidates: Sequence[PodView],
    chosen: Mapping[str, PodView],
    busy: Set[str],
    now: float,
    timing: Timing,
) -> list[PodView]:
    """Of each node whose chosen pod is silent, the pod that has responded last, so that it is
    known to go on; and those that were probed longest ago: of the pods that were ready or have
    responded, and of the others."""

    def is_silent(pod: PodView) -> bool:
        results = snapshot.pod_probes.get(pod.uid)
        since = results.unanswered_since if results is not None else None
        is_long = since is not None and now - since >= timing.pod_silent_s / 2
        return is_long and _has_unanswered(pod, snapshot, now, timing)

    others: dict[str, list[PodView]] = {n: [] for n, pod in chosen.items() if is_silent(pod)}
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
            _responded_last(pods, snapshot),
            _probed_longest_ago(proven, snapshot),
            _probed_longest_ago(rest, snapshot),
        )
        found |= {p.uid: p for p in choices if p is not None}
    return [pod for uid, pod in found.items() if uid not in busy]


def _responded_last(pods: Iterable[PodView], snapshot: Snapshot) -> PodView | None:
    """None if none has responded, or the last probe of each is unanswered."""
    responding = [
        (results.answered_probe_at, pod.uid, pod)
        for pod in pods
        if (results := snapshot.pod_probes.get(pod.uid)) is not None
        and results.answered_probe_at is not None
        and results.unanswered_since is None
    ]
    return max(responding)[2] if responding else None


def _probed_longest_ago(pods: Iterable[PodView], snapshot: Snapshot) -> PodView | None:
    return min(pods, key=lambda p: _probed_at(p, snapshot), default=None)


def _is_proven(pod: PodView, snapshot: Snapshot) -> bool:
    """Whether it was ready, or has responded."""
    results = snapshot.pod_probes.get(pod.uid)
    return _was_ready(pod) or (results is not None and results.answered_probe_at is not None)


def _that_may_be_probed(snapshot: Snapshot) -> list[PodView]:
    """Those that were ready, and on NotReady nodes all: Kubernetes marks the pods there as not
    ready, and a kubelet that hangs does not report that one has become ready."""
    unready = {node.name for node in snapshot.nodes if not node.ready}
    return [
        pod
        for pod in snapshot.pods
        if pod.is_managed
        and pod.node
        and pod.ip
        and not (pod.ended or pod.terminating)
        and (_was_ready(pod) or pod.node in unready)
    ]


def _was_ready(pod: PodView) -> bool:
    return pod.ready or pod.was_ready


def silent_by_own_probes(
    snapshot: Snapshot, silent_kubelets: Set[str], now: float, timing: Timing
) -> frozenset[str]:
    """Nodes whose kubelet and whose pod are silent. Times of responses are those of the probes that
    got them."""
    operator_nodes = {p.node for p in snapshot.pods if p.node and p.helm_release}
    suspects = (nodes_of_late_reports(snapshot, now, timing) | operator_nodes) & silent_kubelets
    if not suspects:
        return frozenset()
    last_response_at = _last_response_at(snapshot)
    silent = set()
    for pod in snapshot.pods:
        results = snapshot.pod_probes.get(pod.uid)
        if pod.node not in suspects or results is None:
            continue
        if (
            results.answered_probe_at is None
            or now - results.answered_probe_at > timing.probe_response_max_age_s
            or now - results.sent_at > timing.probe_interval_s  # nobody probes it any more
        ):
            continue
        first = results.unanswered_probe_since
        if first is not None and last_response_at - first >= timing.pod_silent_s:
            silent.add(pod.node)
    return frozenset(silent) - nodes_with_responding_pods(snapshot, now, timing)


def nodes_with_responding_pods(
    snapshot: Snapshot, now: float, timing: Timing, without: Set[str] = frozenset()
) -> frozenset[str]:
    """Nodes with a pod that has responded to a probe lately. `without`: uids of pods that do not
    count."""
    found = set()
    for pod in snapshot.pods:
        if pod.uid in without:
            continue
        results = snapshot.pod_probes.get(pod.uid)
        responded_at = results.answered_probe_at if results is not None else None
        if pod.node and responded_at is not None and now - responded_at <= timing.pod_silent_s:
            found.add(pod.node)
    return frozenset(found)


def nodes_not_silent_to_probes(snapshot: Snapshot, now: float, timing: Timing) -> frozenset[str]:
    """Nodes of which a pod has responded in the last half minute, and no probe of a pod since then
    has been unanswered for long enough to count."""
    probed: dict[str, list[ProbeResults]] = defaultdict(list)
    for pod in _that_may_be_probed(snapshot):
        if pod.node and (results := snapshot.pod_probes.get(pod.uid)) is not None:
            probed[pod.node].append(results)
    last_response_at = _last_response_at(snapshot)
    found = set()
    for node, all_results in probed.items():
        answered_at = max((r.answered_probe_at or 0.0 for r in all_results), default=0.0)
        first = min(
            (
                at
                for r in all_results
                if (at := r.unanswered_probe_since) is not None and at > answered_at
            ),
            default=None,
        )
        is_recent = now - answered_at <= timing.probe_response_max_age_s
        is_silent = first is not None and (
            last_response_at - first >= timing.pod_silent_s
            # There may be no other node that could respond.
            or now - first >= _UNCOMPARED_FACTOR * timing.pod_silent_s
        )
        if is_recent and not is_silent:
            found.add(node)
    return frozenset(found)


def _last_response_at(snapshot: Snapshot) -> float:
    """When the last probe was sent that a kubelet or a pod of another node responded to."""
    nodes = {node.uid: node.name for node in snapshot.nodes}
    pods = {pod.uid: pod.node for pod in snapshot.pods if pod.uid in snapshot.pod_probes}
    probed = [(nodes.get(uid), results) for uid, results in snapshot.kubelet_probes.items()]
    probed += [(pods.get(uid), results) for uid, results in snapshot.pod_probes.items()]
    times = (
        results.answered_probe_at
        for node, results in probed
        if node is not None and node != snapshot.own_node and results.answered_probe_at is not None
    )
    return max(times, default=0.0)


def _has_unanswered(pod: PodView, snapshot: Snapshot, now: float, timing: Timing) -> bool:
    results = snapshot.pod_probes.get(pod.uid)
    if results is None or results.unanswered_since is None or results.answered_probe_at is None:
        return False
    return now - results.answered_probe_at <= timing.probe_response_max_age_s


def _preference(
    pod: PodView, snapshot: Snapshot, now: float, timing: Timing
) -> tuple[bool, bool, bool, str]:
    """A pod that never responded comes last: any user may set its labels. Before it those that have
    been silent for long: their containers may have ended; and before these pods that were never
    ready."""
    results = snapshot.pod_probes.get(pod.uid)
    if results is None or results.unanswered_since is None:
        return False, False, not _was_ready(pod), pod.uid
    is_old = not _has_unanswered(pod, snapshot, now, timing)
    return results.answered_probe_at is None, is_old, not _was_ready(pod), pod.uid


def _probed_at(pod: PodView, snapshot: Snapshot) -> float:
    return snapshot.pod_probes.get(pod.uid, ProbeResults(0.0)).sent_at
