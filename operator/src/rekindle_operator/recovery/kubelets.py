"""Kubelets as witnesses of their nodes, beside the tasks (docs/decisions/0025). Pure.

A single silent task says little of its node: it may have crashed, or wait for a core. A kubelet
that has answered the operator before, and is as silent now, says the rest. It is called silent only
when another kubelet has answered a question that was put so much later: an operator that hears no
kubelet at all is itself cut off, and one that has not come to read the one answer has not read the
other either. The kubelet of the operator's own node proves nothing: no network is between them.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from math import inf

from rekindle_operator.cluster.model import KubeletReplies, NodeView, Snapshot
from rekindle_operator.recovery.unreported import unreported_nodes
from rekindle_operator.settings import Timing

_CONTROLS = 3
_AGAIN_S = 1.0  # between two questions to a node that nothing is said against
_MOST_AT_ONCE = 32  # questions a tick; in a large cluster the others come with the next


def silent_kubelets(snapshot: Snapshot, now: float, timing: Timing) -> frozenset[str]:
    """Names of the nodes whose kubelets used to answer, and are silent while others are heard."""
    silent = unanswering_kubelets(snapshot, timing)
    return frozenset(
        n.name
        for n in snapshot.nodes
        if n.name in silent and _can_be_asked(snapshot.kubelets[n.uid], now, timing)
    )


def unanswering_kubelets(snapshot: Snapshot, timing: Timing) -> frozenset[str]:
    """The same, however long ago they answered: enough against a node that is NotReady as well."""
    known = [
        (n.name, snapshot.kubelets[n.uid]) for n in snapshot.nodes if n.uid in snapshot.kubelets
    ]
    elsewhere = [its.answered for name, its in known if name != snapshot.own_node]
    last_heard = max((at for at in elsewhere if at is not None), default=0.0)
    return frozenset(
        name
        for name, its in known
        if its.answered is not None
        and its.unanswered is not None
        # So it is another that spoke.
        and last_heard - its.unanswered >= timing.kubelet_silent_s
    )


def doubtful_nodes(snapshot: Snapshot, now: float, timing: Timing) -> frozenset[str]:
    """Nodes that get nothing for now: their kubelets do not answer, and others do. A kubelet that
    never answered may be one that the operator cannot reach: that is no doubt for ever."""
    names = {n.uid: n.name for n in snapshot.nodes}
    elsewhere = (
        its.answered
        for uid, its in snapshot.kubelets.items()
        if names.get(uid, snapshot.own_node) != snapshot.own_node
    )
    last_heard = max((at for at in elsewhere if at is not None), default=0.0)
    return frozenset(
        names[uid]
        for uid, its in snapshot.kubelets.items()
        if uid in names
        and its.unanswered is not None
        and last_heard - its.unanswered >= timing.kubelet_silent_s
        and now - its.unanswered < timing.quarantine_s
    )


def answers_now(node: NodeView, snapshot: Snapshot, now: float, timing: Timing) -> bool:
    """Its kubelet lives, whatever the API server thinks."""
    return now - last_answer(node, snapshot) <= 2 * timing.kubelet_silent_s


def last_answer(node: NodeView, snapshot: Snapshot) -> float:
    """When the last question was put to its kubelet that it answered; long ago if none was."""
    replies = snapshot.kubelets.get(node.uid)
    return replies.answered if replies is not None and replies.answered is not None else -inf


def kubelets_to_ask(
    snapshot: Snapshot, busy: Set[str], now: float, timing: Timing
) -> list[NodeView]:
    """At every tick those whose tasks are silent or that are NotReady, with some others to compare
    them with, and those that owe an answer; now and then all that run tasks. While there are such
    suspects all others are asked, too, since tasks may have to go there: a dead node is called
    Ready for a while. `busy`: uids with an open question."""
    free = [n for n in snapshot.nodes if n.kubelet is not None and n.uid not in busy]
    free.sort(key=lambda n: _asked(n, snapshot))
    ours = [p for p in snapshot.pods if p.is_watched and not p.ended]
    occupied = {p.node for p in ours}
    silent = snapshot.silent_since
    suspects = {p.node for p in ours if p.ref in silent} if silent else set()
    suspects |= {n.name for n in snapshot.nodes if not n.ready and n.name in occupied}
    suspects |= unreported_nodes(snapshot, now, timing)
    urgent = _controls(free, suspects, snapshot) if suspects else []
    urgent += [n for n in free if n.name in suspects]
    urgent += [n for n in free if n.name in occupied and _owes(n, snapshot, now, timing)]
    urgent += [n for n in free if _is_barred(n, snapshot, now, timing)]
    routine = [
        n
        for n in free
        if n.name in occupied and now - _asked(n, snapshot) >= timing.kubelet_routine_s
    ]
    if suspects:
        routine += [n for n in free if now - _asked(n, snapshot) >= _AGAIN_S]
    return list({n.uid: n for n in [*urgent, *routine]}.values())[:_MOST_AT_ONCE]


def _controls(
    nodes: Iterable[NodeView], suspects: Set[str | None], snapshot: Snapshot
) -> list[NodeView]:
    """Those first that answered last and owe no answer."""

    def preference(node: NodeView) -> tuple[bool, float, str]:
        replies = snapshot.kubelets.get(node.uid, KubeletReplies(0.0))
        return replies.unanswered is not None, -(replies.answered or 0.0), node.name

    others = (n for n in nodes if n.name not in suspects and n.name != snapshot.own_node)
    return sorted(others, key=preference)[:_CONTROLS]


def _asked(node: NodeView, snapshot: Snapshot) -> float:
    replies = snapshot.kubelets.get(node.uid)
    return replies.asked if replies is not None else 0.0


def _owes(node: NodeView, snapshot: Snapshot, now: float, timing: Timing) -> bool:
    """A question got lost; before it is held against the node there must have been another."""
    replies = snapshot.kubelets.get(node.uid)
    return (
        replies is not None
        and replies.unanswered is not None
        and _can_be_asked(replies, now, timing)
    )


def _is_barred(node: NodeView, snapshot: Snapshot, now: float, timing: Timing) -> bool:
    """An answer ends that at once."""
    replies = snapshot.kubelets.get(node.uid)
    if replies is None or replies.unanswered is None:
        return False
    return timing.kubelet_silent_s <= now - replies.unanswered < timing.quarantine_s


def _can_be_asked(replies: KubeletReplies, now: float, timing: Timing) -> bool:
    return replies.answered is not None and now - replies.answered <= timing.kubelet_memory_s
