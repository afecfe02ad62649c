"""Kubelets as witnesses of their nodes, beside the tasks (docs/decisions/0025). Pure.

A single silent task says little of its node: it may have crashed, or wait for a core. A kubelet
that has answered the operator before, and is as silent now, says the rest. It is called silent only
when another kubelet has answered a question that was put so much later: an operator that hears no
kubelet at all is itself cut off, and one that has not come to read the one answer has not read the
other either.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

from rekindle_operator.cluster.model import KubeletWord, NodeView, Snapshot
from rekindle_operator.settings import Timing

_CONTROLS = 3
_MOST_AT_ONCE = 32  # questions; of a large cluster the others come next


def silent_kubelets(
    nodes: Iterable[NodeView], words: Mapping[str, KubeletWord], now: float, timing: Timing
) -> frozenset[str]:
    """Names of the nodes whose kubelets used to answer, and are silent while others are heard."""
    last_heard = max((w.answered for w in words.values() if w.answered is not None), default=0.0)
    return frozenset(
        node.name
        for node in nodes
        if (word := words.get(node.uid)) is not None
        and word.answered is not None
        and word.unanswered is not None
        and now - word.answered <= timing.kubelet_memory_s
        and last_heard - word.unanswered >= timing.kubelet_silent_s  # so it is another that spoke
    )


def kubelets_to_ask(snapshot: Snapshot, now: float, timing: Timing) -> list[NodeView]:
    """Often those whose tasks are silent, with some others to compare them with; now and then all
    that run tasks."""
    askable = [n for n in snapshot.nodes if n.ready and n.kubelet is not None]
    occupied = {p.node for p in snapshot.pods if p.topology is not None and not p.ended}
    suspects = {p.node for p in snapshot.pods if p.ref in snapshot.silent_since}
    urgent = _controls(askable, suspects, snapshot.kubelets) if suspects else []
    urgent += [n for n in askable if n.name in suspects]
    routine = [n for n in askable if n.name in occupied]
    due = {n.uid: n for n in urgent if _due(n, snapshot, now, timing.kubelet_urgent_s)}
    due |= {n.uid: n for n in routine if _due(n, snapshot, now, timing.kubelet_routine_s)}
    return list(due.values())[:_MOST_AT_ONCE]


def _controls(
    nodes: Iterable[NodeView], suspects: Set[str | None], words: Mapping[str, KubeletWord]
) -> list[NodeView]:
    """Those first that answered last and owe no answer."""

    def preference(node: NodeView) -> tuple[bool, float, str]:
        word = words.get(node.uid, KubeletWord(0.0))
        return word.unanswered is not None, -(word.answered or 0.0), node.name

    return sorted((n for n in nodes if n.name not in suspects), key=preference)[:_CONTROLS]


def _due(node: NodeView, snapshot: Snapshot, now: float, every_s: float) -> bool:
    word = snapshot.kubelets.get(node.uid)
    return word is None or now - word.asked >= every_s
