"""What probes of kubelets prove about their nodes (docs/decisions/0025). Pure.

A single silent task does not prove that its node is lost: it may have crashed, or wait for a core.
Together with the node's kubelet it does, if that used to respond to the operator and is silent too.
A kubelet counts as silent only when another one has responded to a later probe: an operator that
gets no response at all is itself isolated, and one that is too slow to read one response has not
read the other either. The kubelet of the operator's own node proves nothing: no network is between
them. Times are those at which probes were sent. `unanswered_probe_since` is as `unanswered_since`,
but None until there is a probe after all timers were reset, because the operator was paused or
isolated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from math import inf

from rekindle_operator.cluster.model import NodeView, ProbeResults, Snapshot
from rekindle_operator.recovery.probed_pods import nodes_of_late_reports
from rekindle_operator.settings import Timing

_CONTROLS = 3  # other kubelets that are probed for comparison
_INTERVAL_S = 1.0  # between two probes of a node that is not suspected
_OUT_OF_REACH_S = 300.0  # far longer than Kubernetes takes to call a dead node NotReady
_MAX_AT_ONCE = 32  # probes in a tick; in a large cluster the others follow in the next


def find_silent_kubelets(
    snapshot: Snapshot, now: float, timing: Timing, max_response_age_s: float
) -> frozenset[str]:
    """Names of the nodes whose kubelets used to respond, and are silent while others respond.
    `max_response_age_s`: of their last response. It may be infinite where the node is NotReady as
    well: then it is proof enough that they ever responded."""
    return frozenset(
        name
        for name, probed in kubelets_without_response(snapshot, timing.kubelet_silent_s).items()
        if probed.answered_probe_at is not None
        and now - probed.answered_probe_at <= max_response_age_s
    )


def kubelets_without_response(snapshot: Snapshot, at_least_s: float) -> Mapping[str, ProbeResults]:
    """By the names of their nodes, kubelets that have not responded for so long while others have,
    or never."""
    known = {
        n.name: snapshot.kubelet_probes[n.uid]
        for n in snapshot.nodes
        if n.uid in snapshot.kubelet_probes
    }
    elsewhere = (r.answered_probe_at for name, r in known.items() if name != snapshot.own_node)
    newest_answered_at = max((at for at in elsewhere if at is not None), default=0.0)
    return {
        name: probed
        for name, probed in known.items()
        # The probe that got a response is later, so it was of another kubelet.
        if probed.unanswered_probe_since is not None
        and newest_answered_at - probed.unanswered_probe_since >= at_least_s
    }


def nodes_out_of_reach(snapshot: Snapshot) -> frozenset[str]:
    """Names of nodes whose kubelets never responded, for minutes in which Kubernetes called them
    Ready: something keeps the operator from them, such as a NetworkPolicy."""
    return frozenset(
        node.name
        for node in snapshot.nodes
        if (probed := snapshot.kubelet_probes.get(node.uid)) is not None
        and probed.answered_probe_at is None
        and (since := probed.unanswered_since) is not None
        and snapshot.readiness_seen_at.get(node.uid, since) - since >= _OUT_OF_REACH_S
    )


def temporarily_avoided_nodes(snapshot: Snapshot, now: float, timing: Timing) -> frozenset[str]:
    """Nodes that get no pods for now: their kubelets do not respond, and others do. A kubelet that
    never responded may be one that the operator cannot reach: its node is avoided only for a
    while."""
    return frozenset(
        name
        for name, probed in kubelets_without_response(snapshot, timing.kubelet_silent_s).items()
        if (since := probed.unanswered_probe_since) is not None
        and now - since < timing.quarantine_s
    )


def responds_now(node: NodeView, snapshot: Snapshot, now: float, timing: Timing) -> bool:
    """Whether its kubelet works, even if it does not reach the API server."""
    return now - last_response_at(node, snapshot) <= 2 * timing.kubelet_silent_s


def last_response_at(node: NodeView, snapshot: Snapshot) -> float:
    """When its kubelet was sent the last probe that it responded to; -inf if there was none."""
    results = snapshot.kubelet_probes.get(node.uid)
    return (
        results.answered_probe_at
        if results is not None and results.answered_probe_at is not None
        else -inf
    )


def kubelets_to_probe(
    snapshot: Snapshot, busy: Set[str], now: float, timing: Timing
) -> list[NodeView]:
    """At every tick nodes whose tasks are silent or that are NotReady, and those with an unanswered
    probe; at longer intervals all that run tasks, and those that are avoided. While there are
    suspects all other nodes are probed too, since tasks may have to go there, and a lost node
    counts as Ready for a while; so are nodes that were quarantined lately. With each of these some
    others are probed for comparison. `busy`: uids that were probed just now."""
    free = [n for n in snapshot.nodes if n.kubelet is not None and n.uid not in busy]
    free.sort(key=lambda n: _probed_at(n, snapshot))
    ours = [p for p in snapshot.pods if p.is_managed and not p.ended]
    occupied = {p.node for p in ours}
    silent = snapshot.suspects_silent_since
    suspects = {p.node for p in ours if p.ref in silent} if silent else set()
    suspects |= {n.name for n in snapshot.nodes if not n.ready and n.name in occupied}
    suspects |= nodes_of_late_reports(snapshot, now, timing)
    urgent = [n for n in free if n.name in suspects]
    urgent += [n for n in free if n.name in occupied and _has_unanswered(n, snapshot, now, timing)]
    routine = [
        n
        for n in free
        if n.name in occupied and now - _probed_at(n, snapshot) >= timing.probe_interval_s
    ]
    routine += [
        n
        for n in free
        if (
            suspects
            or _was_quarantined(n, snapshot, now, timing)
            or _is_avoided(n, snapshot, now, timing)
        )
        and now - _probed_at(n, snapshot) >= _INTERVAL_S
    ]
    if not urgent and not routine:
        return []
    # Many urgent ones, which may all be dead, do not keep the others from being probed.
    room = _MAX_AT_ONCE - min(len(routine), _MAX_AT_ONCE // 2)
    controls = _controls(free, suspects, snapshot)
    return _unique([*_unique([*controls, *urgent])[:room], *routine])[:_MAX_AT_ONCE]


def _unique(nodes: Iterable[NodeView]) -> list[NodeView]:
    return list({n.uid: n for n in nodes}.values())


def _controls(
    nodes: Iterable[NodeView], suspects: Set[str | None], snapshot: Snapshot
) -> list[NodeView]:
    """First those that have no unanswered probe; of these others than suspects, if there are any;
    and those that responded last."""

    def preference(node: NodeView) -> tuple[bool, bool, float, str]:
        results = snapshot.kubelet_probes.get(node.uid, ProbeResults(0.0))
        is_unanswered, is_suspect = results.unanswered_since is not None, node.name in suspects
        return is_unanswered, is_suspect, -(results.answered_probe_at or 0.0), node.name

    others = (n for n in nodes if n.name != snapshot.own_node)
    return sorted(others, key=preference)[:_CONTROLS]


def _probed_at(node: NodeView, snapshot: Snapshot) -> float:
    results = snapshot.kubelet_probes.get(node.uid)
    return results.sent_at if results is not None else 0.0


def _has_unanswered(node: NodeView, snapshot: Snapshot, now: float, timing: Timing) -> bool:
    """A single probe may be lost, so a second one is sent."""
    results = snapshot.kubelet_probes.get(node.uid)
    return (
        results is not None
        and results.unanswered_since is not None
        and _has_responded_recently(results, now, timing)
    )


def _is_avoided(node: NodeView, snapshot: Snapshot, now: float, timing: Timing) -> bool:
    """Until its kubelet responds."""
    results = snapshot.kubelet_probes.get(node.uid)
    if results is None or results.unanswered_since is None:
        return False
    return timing.kubelet_silent_s <= now - results.unanswered_since < timing.quarantine_s


def _was_quarantined(node: NodeView, snapshot: Snapshot, now: float, timing: Timing) -> bool:
    """Such a node may work again, or be lost again; only probes show it soon."""
    return now - snapshot.quarantined.get(node.uid, -inf) < timing.quarantine_s


def _has_responded_recently(results: ProbeResults, now: float, timing: Timing) -> bool:
    return (
        results.answered_probe_at is not None
        and now - results.answered_probe_at <= timing.probe_response_max_age_s
    )
