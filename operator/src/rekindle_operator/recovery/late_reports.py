"""Which nodes are lost while no coordinator reports on their tasks (docs/decisions/0030). Pure.

If a coordinator is lost with the nodes of its tasks, no process polls the other tasks. Then the
operator itself probes the kubelet of each node, and pods there (`recovery.probed_pods`). If both
used to respond, both are silent now, and others have responded since, these are two signals, as
with a report. No coordinator reports on the operator's own replicas: their nodes are assessed in
the same way.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from heapq import nlargest
from math import inf

from rekindle_operator.cluster.model import ProbeResults, Snapshot
from rekindle_operator.recovery.kubelets import kubelets_without_response
from rekindle_operator.recovery.probed_pods import nodes_of_late_reports, probe_candidates
from rekindle_operator.settings import Timing

_SLOW_FACTOR = 3
"""After so many times `pod_silent_s` pods are silent although not all of them were probed, or no
other node responds; and so long after its start this process may not have probed them all."""


@dataclass(frozen=True, slots=True)
class _NodeProbes:
    """What the probes of a node's pods have shown. `sent_at`: of the newest; `answered_at`: when
    the newest one with a response was sent; `silent_since`: the first one of any pod after that
    without a response. `all_silent`: whether all pods have been probed since then, and had time to
    respond."""

    sent_at: float
    answered_at: float
    silent_since: float | None
    all_silent: bool

    @classmethod
    def of(
        cls,
        results: Sequence[ProbeResults | None],
        ending: Sequence[ProbeResults],
        now: float,
        timing: Timing,
    ) -> _NodeProbes:
        """`results`: of each pod, None if it was never probed; `ending`: of those that are being
        deleted, which are not probed any more."""
        probed = [r for r in (*results, *ending) if r is not None]
        answered_at = max((r.answered_probe_at or -inf for r in probed), default=-inf)
        # None after the timers were reset, until a probe is sent.
        unanswered = (r.unanswered_probe_since for r in probed)
        since = min((at for at in unanswered if at is not None and at > answered_at), default=None)
        sent_at = max((r.sent_at for r in probed), default=-inf)
        all_silent = since is not None and all(
            r is not None
            and r.sent_at >= since
            and r.unanswered_probe_since is not None
            and now - r.unanswered_probe_since >= timing.pod_silent_s / 2
            for r in results
        )
        return cls(sent_at, answered_at, since, all_silent)

    def is_silent(self, answered_elsewhere_at: float, now: float, timing: Timing) -> bool:
        """`answered_elsewhere_at`: when the newest probe with a response from another node was
        sent."""
        since, slow_s = self.silent_since, _SLOW_FACTOR * timing.pod_silent_s
        if since is None or now - self.sent_at > timing.probe_interval_s:
            return False  # nobody probes them any more
        if answered_elsewhere_at - since >= timing.pod_silent_s:
            return self.all_silent or now - since >= slow_s
        # There may be no other node that could respond; otherwise this process may be cut off.
        nobody_else = now - answered_elsewhere_at > timing.probe_response_max_age_s
        return nobody_else and now - since >= slow_s


def _probes_by_node(
    snapshot: Snapshot, now: float, timing: Timing, without: Set[str] = frozenset()
) -> Mapping[str, _NodeProbes]:
    found: dict[str, list[ProbeResults | None]] = defaultdict(list)
    for pod in probe_candidates(snapshot, now, timing):
        if pod.node and pod.uid not in without:
            found[pod.node].append(snapshot.pod_probes.get(pod.uid))
    ending: dict[str, list[ProbeResults]] = defaultdict(list)
    for pod in snapshot.pods:
        results = snapshot.pod_probes.get(pod.uid) if pod.terminating else None
        if results is not None and pod.node in found and pod.uid not in without:
            ending[pod.node].append(results)
    return {
        node: _NodeProbes.of(results, ending[node], now, timing) for node, results in found.items()
    }


def silent_by_own_probes(
    snapshot: Snapshot, silent_kubelets: Set[str], now: float, timing: Timing
) -> frozenset[str]:
    """Nodes whose kubelet and whose pods are silent, and used to respond. Times of responses are
    those of the probes that got them."""
    operator_nodes = {p.node for p in snapshot.pods if p.node and p.helm_release}
    suspects = (nodes_of_late_reports(snapshot, now, timing) | operator_nodes) & silent_kubelets
    if not suspects:
        return frozenset()
    elsewhere = _AnswersElsewhere(snapshot, now, timing)
    return frozenset(
        node
        for node, probes in _probes_by_node(snapshot, now, timing).items()
        if node in suspects
        and now - probes.answered_at <= timing.probe_response_max_age_s
        and probes.is_silent(elsewhere.newest_at(node), now, timing)
    )


def nodes_silent_for_long(snapshot: Snapshot, now: float, timing: Timing) -> frozenset[str]:
    """Nodes whose kubelet and whose pods have not responded for 6 s, in which another kubelet and
    another node have; whether they ever responded does not matter."""
    elsewhere, slow_s = _AnswersElsewhere(snapshot, now, timing), _SLOW_FACTOR * timing.pod_silent_s

    def is_silent(node: str, probes: _NodeProbes) -> bool:
        since, answered_at = probes.silent_since, elsewhere.newest_at(node)
        is_long = since is not None and answered_at - since >= slow_s
        return is_long and probes.is_silent(answered_at, now, timing)

    without_kubelet = kubelets_without_response(snapshot, slow_s)
    by_node = _probes_by_node(snapshot, now, timing)
    return frozenset(n for n, p in by_node.items() if n in without_kubelet and is_silent(n, p))


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


def nodes_not_silent_to_probes(
    snapshot: Snapshot, now: float, timing: Timing, without: Set[str] = frozenset()
) -> frozenset[str]:
    """Nodes of which a pod has responded in the last half minute, or that this process may not have
    probed yet; and no probe since then has been unanswered for long enough to count. `without`:
    uids of pods that do not count."""
    begins = now - snapshot.observing_since < _SLOW_FACTOR * timing.pod_silent_s
    elsewhere = _AnswersElsewhere(snapshot, now, timing)
    return frozenset(
        node
        for node, probes in _probes_by_node(snapshot, now, timing, without).items()
        if (begins or now - probes.answered_at <= timing.probe_response_max_age_s)
        and not probes.is_silent(elsewhere.newest_at(node), now, timing)
    )


class _AnswersElsewhere:
    """When the newest probe with a response was sent, of other nodes than one. The operator's own
    node does not count: no network is between them. Probes of pods only count if no kubelet has
    responded for long: only those of kubelets show that this process was cut off (`ProbeState`)."""

    def __init__(self, snapshot: Snapshot, now: float, timing: Timing) -> None:
        nodes = {node.uid: node.name for node in snapshot.nodes}
        nodes |= {pod.uid: pod.node for pod in snapshot.pods if pod.node}
        self._newest_two: list[tuple[str, float]] = []
        for probes in (snapshot.kubelet_probes, snapshot.pod_probes):
            newest: dict[str, float] = {}
            for uid, results in probes.items():
                node, at = nodes.get(uid), results.answered_probe_at
                if node is not None and node != snapshot.own_node and at is not None:
                    newest[node] = max(at, newest.get(node, at))
            self._newest_two = nlargest(2, newest.items(), key=lambda item: item[1])
            if any(now - at <= timing.probe_response_max_age_s for _, at in self._newest_two):
                break

    def newest_at(self, node: str) -> float:
        return next((at for name, at in self._newest_two if name != node), -inf)
