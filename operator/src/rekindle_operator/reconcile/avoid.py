"""Which nodes would not run which shapes of pods, as the pods that are replaced tell. Pure.

Design: docs/design/recovery.md#gates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rekindle_operator.cluster.model import NodeView
from rekindle_operator.reconcile.actions import AvoidNode
from rekindle_operator.reconcile.slots import SlotState
from rekindle_operator.recovery.losses import Loss, LossAssessment
from rekindle_operator.recovery.pack import NodeCapacity, PodToPlace

# Reasons that the plan knows too, or that pass: another pod took the capacity first.
_OF_THE_MOMENT = (
    "Insufficient",
    "Too many pods",
    "untolerated taint",
    "OutOf",
    "shutdown",
    "Shutdown",
)


def nodes_to_avoid(states: Iterable[SlotState], assessment: LossAssessment) -> list[AvoidNode]:
    """What the pods that are replaced in this pass tell of their nodes."""
    found = []
    for state in states:
        pod = state.pod
        if pod is None or not pod.shape:
            continue
        match state.loss:
            case Loss.UNBOUND:
                node, why = pod.pinned, pod.refusal
            case Loss.REFUSED:
                node, why = pod.node, pod.refusal
            case Loss.CANNOT_START | Loss.CRASHING:
                node, why = pod.node, state.trouble
            case Loss.SILENT if assessment.is_cut_off(pod):
                node, why = pod.node, "its tasks are silent while its kubelet answers"
            case _:
                continue
        lasts = bool(why) and not any(words in why for words in _OF_THE_MOMENT)
        if node is not None and node in assessment.usable and lasts:
            found.append(AvoidNode(pod.shape, node, pod.uid, why))
    return found


def still_avoided(
    pod: PodToPlace, nodes: frozenset[str], usable: Mapping[str, NodeView]
) -> frozenset[str]:
    """`nodes`, unless they are all that could take the pod: then each is tried again in time."""
    others = (node for name, node in usable.items() if name not in nodes)
    takes = any(
        node.allocatable.covers(pod.ask) and NodeCapacity(node, node.allocatable).admits(pod)
        for node in others
    )
    return nodes if takes else frozenset()
