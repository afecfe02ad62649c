"""Standbys of one topology: which there are, which of them end, and which are made. Pure.

A standby is made while nothing is wrong, and serves the slots whose pods have the same template. It
counts as used capacity that any plan may take back. It is no task: it has no slot, no incarnation,
and its loss is nobody's.

Design: docs/design/recovery.md#standbys.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace

from rekindle import names
from rekindle.topology.model import Segment, partition_of
from rekindle_operator.cluster.model import IncarnationRef, PodView
from rekindle_operator.reconcile.actions import Action, CreatePod, DeletePod
from rekindle_operator.reconcile.context import ReconcileContext, draining_nodes, owned_pods
from rekindle_operator.reconcile.health import ReplicaState, replica_state
from rekindle_operator.reconcile.owned import has_other_token
from rekindle_operator.reconcile.slots import SlotState
from rekindle_operator.recovery.losses import Loss
from rekindle_operator.recovery.misfits import PodToPlace
from rekindle_operator.recovery.pack import Capacity, PackingRule, pack
from rekindle_operator.recovery.standbys import (
    Standby,
)
from rekindle_operator.resources.standby import (
    on_node,
    standby_pod,
    standby_template,
)
from rekindle_operator.topology_status import TopologyPhase

_RESTARTED_S = 10.0
"""A container that has restarted so long ago has nearly started."""
_GRACE_S = 1  # it has no state

GIVEN_FOR = frozenset(
    {Loss.GONE, Loss.FAILED, Loss.TERMINATING, Loss.NODE, Loss.SILENT, Loss.RESTARTED}
)
"""What ran was lost, and not by the fault of its pod: that would end one standby after another."""


def wanted_standbys(context: ReconcileContext) -> int:
    """How many the topology is to have."""
    if context.running is None or not context.needs_pods:
        return 0
    return context.running.topology.spec.recovery.standby or 0


def standby_pods(context: ReconcileContext) -> list[PodView]:
    return [p for p in owned_pods(context) if p.role == names.ROLE_STANDBY]


def standby_status(context: ReconcileContext) -> str:
    """`warm/wanted`; empty: the topology wants none."""
    wanted = wanted_standbys(context)
    warm = sum(s.is_warm for s in usable_standbys(context))
    return f"{warm}/{wanted}" if wanted else ""


def usable_standbys(context: ReconcileContext) -> list[Standby]:
    """Those of the generation that runs, on usable nodes."""
    found, pods = [], standby_pods(context)
    template = _served_template(context) if pods else ""
    usable, snapshot = context.pass_inputs.losses.usable_nodes, context.pass_inputs.snapshot
    for pod in pods:
        node = pod.node or pod.required_node
        if node is None or node not in usable or _why_it_ends(context, pod, template):
            continue
        refused = snapshot.uncreated_pods.get(standby_ref(context, pod.name))
        may_be_given = refused is None or context.pass_inputs.now >= refused.retry_at
        found.append(
            Standby(
                uid=pod.uid,
                node=node,
                requests=pod.requests,
                group="",
                replica=0,
                namespace=pod.namespace,
                name=pod.name,
                template=(context.view.uid, pod.template_digest),
                is_warm=pod.started and pod.phase == "Running" and may_be_given,
            )
        )
    return found


def standby_ref(context: ReconcileContext, name: str) -> IncarnationRef:
    """By which refusals of its creation, and of giving it a slot, are remembered."""
    return IncarnationRef(context.view.uid, f"{names.ROLE_STANDBY}/{name}", 0)


def give_way_to_standbys(
    context: ReconcileContext, states: Sequence[SlotState]
) -> tuple[SlotState, ...]:
    """The states; those are lost whose container has just restarted, if a warm standby is faster
    and no other replica is live. Not more than there are standbys beside those for other losses."""
    if not wanted_standbys(context):
        return tuple(states)
    warm = Counter(s.template[1] for s in usable_standbys(context) if s.is_warm)
    for state in states:
        if state.loss in GIVEN_FOR:
            warm[template_of(context, state.segment)] -= 1
    live = {partition_of(s.slot) for s in states if replica_state(context, s) is ReplicaState.LIVE}
    found = []
    for state in states:
        if _has_restarted(context, state) and partition_of(state.slot) not in live:
            template = template_of(context, state.segment)
            if warm[template] > 0:
                warm[template] -= 1
                state = state.lost(Loss.RESTARTED)
        found.append(state)
    return tuple(found)


def _has_restarted(context: ReconcileContext, state: SlotState) -> bool:
    pod, now = state.pod, context.pass_inputs.now
    if pod is None or pod.node is None or state.loss is not None or state.is_successor:
        return False
    if pod.ready or not pod.was_ready or pod.restarted_at is None:
        return False
    return abs(now - pod.restarted_at) < _RESTARTED_S


def template_of(context: ReconcileContext, segment: Segment) -> str:
    assert context.running is not None
    running, defaults = context.running, context.pass_inputs.settings.pods
    return standby_template(running.view, running.topology, segment, defaults)


def keep_standbys(
    context: ReconcileContext,
    given: Collection[str],
    ending: Collection[str],
    capacity: Capacity | None,
) -> list[Action]:
    """Ends those of one topology that it does not want, or whose capacity is needed, and makes one
    if it has too few. `given`, `ending`: uids of those that get a slot, and that end for the plan.
    `capacity`: beside all pods; None while the plan opens gates, since a start takes a core."""
    losses, actions = context.pass_inputs.losses, list[Action]()
    usable = [s for s in usable_standbys(context) if s.uid not in ending]
    kept = sorted(usable, key=lambda s: (not s.is_warm, s.name))[: wanted_standbys(context)]
    pods = standby_pods(context)
    template = _served_template(context) if pods else ""
    for pod in pods:
        if pod.terminating or pod.uid in given:
            continue
        is_needed = pod.uid in ending
        why = "its capacity is needed" if is_needed else _why_it_ends(context, pod, template)
        if not why and any(s.uid == pod.uid for s in usable):
            why = "" if any(s.uid == pod.uid for s in kept) else "there are more than wanted"
        if why:
            grace_s = 0 if losses.is_on_lost_node(pod) else _GRACE_S
            actions.append(
                DeletePod(pod.namespace, pod.name, pod.uid, pod.version, grace_s, why, is_needed)
            )
    is_running = context.last_status.phase is TopologyPhase.RUNNING
    if len(kept) < wanted_standbys(context) and is_running and capacity is not None and not actions:
        actions += _creation(context, usable, capacity)
    return actions


def _why_it_ends(context: ReconcileContext, pod: PodView, template: str) -> str:
    """`template`: what standbys are made from now. Empty: it may stay, if it is not one too many.
    On a lost node it stays: it is warm when the node returns."""
    running, pass_inputs = context.running, context.pass_inputs
    if pod.terminating:
        return "it is being deleted"
    if running is None or not wanted_standbys(context):
        return "its topology wants no standby"
    if pod.generation != running.generation or has_other_token(context, pod):
        return "the topology has been edited"
    if pod.template_digest != template:
        return "pods are made from another template"
    if pod.ended:
        return "it has ended"
    if pod.node in draining_nodes(context):
        return "its node is drained"
    waits_s = pass_inputs.snapshot.pod_age_s(pod, pass_inputs.now)
    if pod.node is None and waits_s > pass_inputs.timing.scheduling_timeout_s:
        return "no node takes it"
    return ""


def _served_template(context: ReconcileContext) -> str:
    if context.running is None or not wanted_standbys(context):
        return ""
    return template_of(context, served_segment(context))


def served_segment(context: ReconcileContext) -> Segment:
    """One of those whose template standbys have: the template of the most slots without another
    replica, then of the most slots. Of its segments, one that needs Spark."""
    assert context.running is not None
    segments = context.running.topology.segments
    alone, slots = Counter[str](), Counter[str]()
    by_template: dict[str, list[Segment]] = defaultdict(list)
    for segment in segments:
        template = template_of(context, segment)
        by_template[template].append(segment)
        slots[template] += segment.partitions * segment.replicas
        alone[template] += segment.partitions if segment.replicas == 1 else 0
    best = min(by_template, key=lambda t: (-alone[t], -slots[t], t))
    return min(by_template[best], key=lambda s: (s.is_source and len(s.nodes) == 1, s.id))


def _creation(
    context: ReconcileContext, usable: Sequence[Standby], capacity: Capacity
) -> list[Action]:
    """One at a time; none if no node has room, or the API server refused it a moment ago."""
    assert context.running is not None
    running, pass_inputs = context.running, context.pass_inputs
    used = {p.name for p in owned_pods(context)}
    number = next(
        n
        for n in range(1, len(used) + 2)
        if names.standby_pod_name(context.view.name, running.generation, n) not in used
    )
    ref = standby_ref(
        context, names.standby_pod_name(context.view.name, running.generation, number)
    )
    refused = pass_inputs.snapshot.uncreated_pods.get(ref)
    if refused is not None and pass_inputs.now < refused.retry_at:
        return []
    manifest = standby_pod(
        running.view,
        running.topology,
        running.generation,
        served_segment(context),
        number,
        pass_inputs.settings.pods,
    )
    to_place = PodToPlace.of_spec(manifest["spec"], key=ref.slot, group=ref.slot)
    shape = manifest["metadata"]["annotations"][names.ANNOTATION_SHAPE]
    others = frozenset(s.node for s in usable)  # a node may be lost with all that is on it
    unsuitable = pass_inputs.snapshot.unsuitable.get(shape, frozenset())
    for avoid in (others | unsuitable, unsuitable):
        wanted = replace(to_place, namespace=context.view.namespace, avoid=avoid)
        placement = pack([wanted], capacity, PackingRule.SPREAD)
        if placement is not None:
            placed = on_node(manifest, placement.nodes[wanted.key])
            return [CreatePod(context.view.namespace, placed, ref)]
    return []
