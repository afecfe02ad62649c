"""Which nodes that Kubernetes calls NotReady are lost (docs/decisions/0027). Pure.

NotReady means that the kubelet does not reach the API server. That is one signal. Tasks that
respond to their coordinator, or a kubelet that responds to the operator, prove that the node works;
so does a pod that responds to the operator, unless a fresh report calls that one silent.
A silence of a moment proves nothing: the network may have lost a few packets.
A coordinator belongs to a tenant. What it alone claims, while neither the kubelet nor any pod of
the node has responded to the operator for long, or ever, keeps the pods of its own topology only.
When most nodes become NotReady, the connection to the API server is the more likely reason, and no
NotReady node could replace another anyway. Then no node is lost whose kubelet responds. A node is
lost whose kubelet used to respond and no longer does, or whose kubelet and pods have been silent
for long while others respond: an operator that has just begun to lead never heard from it. Not if
it was silent for minutes while Kubernetes called it Ready: the operator may be kept from it. And a
node is lost of which a fresh report says that none of its tasks responds, unless a task responds on
more than half of the NotReady nodes that fresh reports name.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from math import inf

from rekindle_operator.cluster.model import NodeView, Snapshot
from rekindle_operator.recovery.evidence import Evidence
from rekindle_operator.recovery.kubelets import (
    find_silent_kubelets,
    nodes_out_of_reach,
    responds_now,
)
from rekindle_operator.recovery.late_reports import (
    nodes_not_silent_to_probes,
    nodes_silent_for_long,
    nodes_with_responding_pods,
)
from rekindle_operator.settings import Timing

_MAX_NAMED = 3  # nodes in a message


@dataclass(frozen=True, slots=True)
class Unready:
    """`lost`: names of nodes; `contradicted`: those of them that a report says to work, and the
    operator's own probes do not. `why_not_lost`: why other NotReady nodes do not count as lost;
    empty if that needs no explanation."""

    lost: frozenset[str]
    why_not_lost: str = ""
    contradicted: frozenset[str] = frozenset()


def assess_unready(
    snapshot: Snapshot, occupied: Set[str], evidence: Evidence, now: float, timing: Timing
) -> Unready:
    """`occupied`: names of nodes with pods of topologies; `evidence`: from fresh reports,
    the nodes with a task that responds (`alive_nodes`), and all nodes with a task of which they
    say whether it responds (`reported_nodes`)."""
    unready = [n for n in snapshot.nodes if not n.ready]
    if not unready:
        return Unready(frozenset())
    silent = find_silent_kubelets(snapshot, now, timing, max_response_age_s=inf)
    # A silence of a moment proves nothing.
    reported_alive = evidence.alive_nodes | evidence.briefly_silent_nodes
    alive = [n for n in unready if n.name in reported_alive]
    reported = [n for n in unready if n.name in evidence.reported_nodes]
    most_unready = 2 * len(unready) > len(snapshot.nodes)
    most_work = most_unready and 2 * len(alive) > len(reported)
    # Where a second source, a report or the silent kubelet, says that the node is lost.
    silent_for_long = nodes_silent_for_long(snapshot, now, timing)
    never_responded = silent_for_long - nodes_out_of_reach(snapshot)
    confirmed = silent if most_work else evidence.reported_nodes | silent | never_responded

    # A report that calls a task silent outweighs that its process responds to the operator.
    silent_pods = evidence.silent_pods
    responding = nodes_with_responding_pods(snapshot, now, timing, without=silent_pods)
    not_silent = nodes_not_silent_to_probes(snapshot, now, timing, without=silent_pods)
    contradicted = frozenset[str]()
    if alive and not most_unready:
        contradicted = silent_for_long & reported_alive
    may_work = reported_alive - contradicted | responding | not_silent

    def is_lost(node: NodeView) -> bool:
        responds = responds_now(node, snapshot, now, timing)
        if node.name in may_work or (most_unready and responds):
            return False
        return node.name in confirmed or not (most_unready or responds)

    lost = frozenset(n.name for n in unready if is_lost(n))
    count = f"{len(unready)} of {len(snapshot.nodes)} nodes are NotReady"
    if most_work:
        return Unready(
            lost,
            f"{count} while tasks on {len(alive)} of them respond, or did just now "
            f"({_first_names(alive)}): their kubelets do not reach the API server; being NotReady "
            "is no reason to delete pods",
        )
    unknown = [n for n in unready if n.name in occupied and n.name not in lost and n not in alive]
    if most_unready and unknown:
        reason = f"no coordinator or kubelet reports whether {len(unknown)} of them are lost"
        return Unready(lost, f"{count}; {reason} ({_first_names(unknown)})")
    return Unready(lost, contradicted=contradicted & lost)


def _first_names(nodes: Sequence[NodeView]) -> str:
    names = sorted(n.name for n in nodes)
    return ", ".join(names[:_MAX_NAMED]) + (", …" if len(names) > _MAX_NAMED else "")
