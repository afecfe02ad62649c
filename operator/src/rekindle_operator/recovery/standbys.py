"""Which slots get a standby, and which standbys give their capacity back. Pure.

Two rules. A standby is given to a slot only if no query waits that would start if there were no
standbys at all. And as long as something has no node that would have one without them, those in its
way end.

Design: docs/design/recovery.md#standbys.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from rekindle_operator.cluster.amounts import ResourceAmounts, total
from rekindle_operator.recovery.misfits import PodToPlace
from rekindle_operator.recovery.pack import Capacity
from rekindle_operator.recovery.plan import Plan
from rekindle_operator.recovery.preemption import PodOnNode


@dataclass(frozen=True, slots=True)
class Standby(PodOnNode):
    """`template`: of the topology and of its pod; it serves the slots with the same one. Not
    `is_warm`: Spark still starts, and a new pod would be as fast."""

    name: str
    template: tuple[str, str]
    is_warm: bool


@dataclass(frozen=True, slots=True)
class SlotToFill:
    """A slot that lost its pod. `to_place`: the pod that it would get."""

    to_place: PodToPlace
    template: tuple[str, str]


def match(
    slots: Iterable[SlotToFill], standbys: Sequence[Standby], capacity: Capacity
) -> dict[str, Standby]:
    """By key of the pod to place, in the order of `slots`: a warm standby of the same template on a
    node that would take the pod. `capacity`: what is free beside the standbys."""
    found: dict[str, Standby] = {}
    nodes = dict(capacity.nodes)
    left = sorted((s for s in standbys if s.is_warm and s.node in nodes), key=lambda s: s.name)
    for slot in slots:
        for standby in left:
            node = nodes[standby.node]
            without = replace(node, free=node.free + standby.requests)
            if standby.template == slot.template and without.fits(slot.to_place):
                found[slot.to_place.key] = standby
                replica = slot.to_place.group, slot.to_place.replica
                nodes[standby.node] = replace(node, replicas=node.replicas | {replica})
                left.remove(standby)
                break
    return found


def in_the_way(
    plan: Plan,
    without: Plan,
    pods: Mapping[str, PodToPlace],
    standbys: Sequence[Standby],
    capacity: Capacity,
) -> list[Standby]:
    """Those that have to end for the plan `without` any of them: on its nodes, and in namespaces
    that have a limited share. None if `plan`, beside them all, places as much; all if it does not,
    and no single one is the reason. `pods`: by their keys; `capacity`: beside them all."""
    if set(plan.nodes) >= set(without.nodes) and _waiting(plan) <= _waiting(without):
        return []
    wanted: dict[str, list[PodToPlace]] = {}
    for key, name in without.nodes.items():
        wanted.setdefault(name, []).append(pods[key])
    namespaces = _by_namespace(pods[key] for key in without.nodes)
    share_left = dict(capacity.share_left)
    ended = list[Standby]()
    for standby in sorted(standbys, key=lambda s: (s.is_warm, s.name)):
        node = capacity.nodes[standby.node]
        given_back = total(s.requests for s in ended if s.node == standby.node)
        here = wanted.get(standby.node, ())
        needed_here = total(pod.requests for pod in here)
        lacks_room = bool(here) and not (node.free + given_back).covers(needed_here)
        needed = namespaces.get(standby.namespace)
        share = share_left.get(standby.namespace)
        lacks_share = needed is not None and share is not None and not share.covers(needed)
        if lacks_room or lacks_share:
            ended.append(standby)
            if share is not None:
                share_left[standby.namespace] = share + standby.requests
    return ended or list(standbys)


def _by_namespace(pods: Iterable[PodToPlace]) -> dict[str, ResourceAmounts]:
    found: dict[str, ResourceAmounts] = {}
    for pod in pods:
        found[pod.namespace] = found.get(pod.namespace, ResourceAmounts()) + pod.requests
    return found


def starts_as_much(plan: Plan, as_this: Plan) -> bool:
    """Whether each query that waits in the plan waits in the other one, too."""
    return _waiting(plan) <= _waiting(as_this)


def _waiting(plan: Plan) -> set[tuple[str, str]]:
    return {ranked.key for ranked in plan.waiting}
