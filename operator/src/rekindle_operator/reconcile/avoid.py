"""Nodes that did not run pods of a shape, or ran them wrongly: replacements avoid them for a while.
Pure.

Design: docs/design/recovery.md#gates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rekindle_operator.cluster.model import NodeView
from rekindle_operator.cluster.unsuitable import Cause
from rekindle_operator.reconcile.actions import AvoidNode
from rekindle_operator.reconcile.slots import SlotState
from rekindle_operator.recovery.losses import Loss, LossAssessment
from rekindle_operator.recovery.pack import NodeCapacity, PodToPlace

# Reasons that the plan considers too, or that are temporary: another pod took the capacity first.
# If a kubelet gives such a reason, its node is avoided for some seconds all the same: it still
# counts pods whose objects are deleted, which the plan cannot see.
_EXPECTED_REFUSALS = (
    "Insufficient",
    "Too many pods",
    "untolerated taint",
    "OutOf",
    "shutdown",
    "Shutdown",
)


def nodes_to_avoid(states: Iterable[SlotState], losses: LossAssessment) -> list[AvoidNode]:
    """The nodes of pods that are replaced in this pass because the node did not run them, or
    because their results were wrong."""
    found = []
    for state in states:
        pod = state.pod
        if pod is None or not pod.shape:
            continue
        cause = Cause.REFUSED
        match state.loss:
            case Loss.UNBOUND:
                node, why = pod.required_node, pod.placement_failure
            case Loss.REFUSED:
                node, why = pod.node, pod.placement_failure
            case Loss.CANNOT_START | Loss.CRASHING:
                node, why = pod.node, state.start_problem
            case Loss.SILENT if losses.is_unreachable_by_coordinator(pod):
                node, why, cause = pod.node, Cause.SILENT.value, Cause.SILENT
            case Loss.DIVERGED:
                node, why, cause = pod.node, Cause.DIVERGED.value, Cause.DIVERGED
            case _:
                continue
        if any(text in why for text in _EXPECTED_REFUSALS):
            cause = Cause.FULL
        counts = bool(why) and (cause is not Cause.FULL or state.loss is Loss.REFUSED)
        if node is not None and node in losses.usable_nodes and counts:
            node_uid = losses.usable_nodes[node].uid
            found.append(AvoidNode(pod.shape, node, node_uid, pod.uid, why, cause))
    return found


def avoided_if_another_fits(
    pod: PodToPlace, nodes: frozenset[str], usable: Mapping[str, NodeView]
) -> frozenset[str]:
    """`nodes`, unless no other node could run the pod: then none of them is avoided."""
    others = (node for name, node in usable.items() if name not in nodes)
    has_other_node = any(
        node.allocatable.covers(pod.requests) and NodeCapacity(node, node.allocatable).admits(pod)
        for node in others
    )
    return nodes if has_other_node else frozenset()
