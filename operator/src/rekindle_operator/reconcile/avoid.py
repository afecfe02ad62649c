"""Nodes that did not run pods of a shape, or ran them wrongly: replacements avoid them for a while.
Pure.

Design: docs/design/recovery.md#gates.
"""

from __future__ import annotations

from collections.abc import Iterable

from rekindle_operator.cluster.unsuitable import Cause
from rekindle_operator.reconcile.actions import AvoidNode
from rekindle_operator.reconcile.slots import SlotState
from rekindle_operator.recovery.losses import Loss, LossAssessment

# What the scheduler says of a node that lacks something itself. Of capacity, taints and selectors
# the plan knows; other messages are about the pod (a missing claim).
_OWN_FAULTS = (
    "free ports",
    "volume node affinity conflict",
    "available volume zone",
    "exceed max volume count",
    "available disk",
    "available persistent volumes",
    "enough free storage",
)
# What is due to other pods, or passes: the node is avoided until a gate was opened for another one.
# A kubelet still counts pods whose objects are deleted, which the plan cannot see.
_OTHER_PODS = ("anti-affinity rules", "pod affinity rules", "topology spread constraints")
_NO_CAPACITY = ("OutOf", "shutdown", "Shutdown")


def nodes_to_avoid(states: Iterable[SlotState], losses: LossAssessment) -> list[AvoidNode]:
    """The nodes of pods that are replaced in this pass because the node did not run them, or
    because their results were wrong."""
    found = []
    for state in states:
        pod = state.pod
        if pod is None or not pod.shape:
            continue
        match state.loss:
            case Loss.UNBOUND:
                node, why = pod.required_node, pod.placement_failure
                cause = _cause_of_scheduler(why)
            case Loss.REFUSED:
                node, why = pod.node, pod.placement_failure
                cause = Cause.FULL if _has(why, _NO_CAPACITY) else Cause.REFUSED
            case Loss.CANNOT_START | Loss.CRASHING:
                node, why, cause = pod.node, state.start_problem, Cause.REFUSED
            case Loss.SILENT if losses.is_unreachable_by_coordinator(pod):
                node, why, cause = pod.node, Cause.SILENT.value, Cause.SILENT
            case Loss.DIVERGED:
                node, why, cause = pod.node, Cause.DIVERGED.value, Cause.DIVERGED
            case _:
                continue
        if node is not None and node in losses.usable_nodes and why and cause is not None:
            node_uid = losses.usable_nodes[node].uid
            found.append(AvoidNode(pod.shape, node, node_uid, pod.uid, why, cause))
    return found


def _cause_of_scheduler(message: str) -> Cause | None:
    """None: what it says is not about the node."""
    if _has(message, _OWN_FAULTS):
        return Cause.REFUSED
    return Cause.FULL if _has(message, _OTHER_PODS) else None


def _has(message: str, texts: Iterable[str]) -> bool:
    return any(text in message for text in texts)
