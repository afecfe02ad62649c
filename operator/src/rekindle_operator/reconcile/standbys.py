"""Standbys: which slots they take, which of them end, and which are made. Pure.

A standby is made while nothing is wrong, and serves the slots whose pods have the same template. It
counts as used capacity that any plan may take back. It is no task: it has no slot, no incarnation,
and its loss is nobody's.

Design: docs/design/recovery.md#standbys.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rekindle import names
from rekindle.topology.model import Segment, partition_of
from rekindle_operator.cluster.model import IncarnationRef, PodView
from rekindle_operator.reconcile.actions import Action, CreatePod, DeletePod, GiveSlot
from rekindle_operator.reconcile.context import ReconcileContext, draining_nodes, owned_pods
from rekindle_operator.reconcile.health import ReplicaState, replica_state
from rekindle_operator.reconcile.owned import has_other_token
from rekindle_operator.reconcile.phases import SlotEvent, SlotPhase
from rekindle_operator.reconcile.planning import PlanInput, missing_of, plan_all
from rekindle_operator.reconcile.replacements import manifest_of
from rekindle_operator.reconcile.slots import SlotState
from rekindle_operator.recovery.losses import Loss
from rekindle_operator.recovery.misfits import PodToPlace
from rekindle_operator.recovery.pack import Capacity, PackingRule, pack
from rekindle_operator.recovery.plan import Plan
from rekindle_operator.recovery.preemption import without_pods
from rekindle_operator.recovery.standbys import (
    SlotToFill,
    Standby,
    in_the_way,
    match,
    starts_as_much,
)
from rekindle_operator.resources.standby import (
    give_slot_patch,
    on_node,
    standby_pod,
    standby_template,
)
from rekindle_operator.topology_status import TopologyPhase

_RESTARTED_S = 10.0
"""A container that has restarted so long ago has nearly started."""
_GRACE_S = 1  # it has no state

_GIVEN_FOR = frozenset(
    {Loss.GONE, Loss.FAILED, Loss.TERMINATING, Loss.NODE, Loss.SILENT, Loss.RESTARTED}
)
"""What ran was lost, and not by the fault of its pod: that would end one standby after another."""


@dataclass(frozen=True, slots=True)
class StandbyPlan:
    """`inputs`: of the plan, in which slots that get a standby have it. `given`: by the topology's
    uid and the slot's key. `ending`: uids of those that give their capacity back; `soon`: the
    capacity then."""

    plan: Plan
    inputs: tuple[PlanInput, ...]
    soon: Capacity | None
    given: Mapping[tuple[str, str], Standby] = field(default_factory=dict)
    ending: frozenset[str] = frozenset()


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
        if state.loss in _GIVEN_FOR:
            warm[_template(context, state.segment)] -= 1
    live = {partition_of(s.slot) for s in states if replica_state(context, s) is ReplicaState.LIVE}
    found = []
    for state in states:
        if _has_restarted(context, state) and partition_of(state.slot) not in live:
            template = _template(context, state.segment)
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


def _template(context: ReconcileContext, segment: Segment) -> str:
    assert context.running is not None
    running, defaults = context.running, context.pass_inputs.settings.pods
    return standby_template(running.view, running.topology, segment, defaults)


def plan_with_standbys(
    inputs: Sequence[PlanInput], capacity: Capacity, soon: Capacity | None
) -> StandbyPlan:
    """One plan over all topologies, and what standbys do in it."""
    inputs = tuple(inputs)
    standbys = [s for i in inputs for s in usable_standbys(i.context)]
    placed = [s for s in standbys if s.node in capacity.nodes]
    if not placed or not any(i.candidates for i in inputs):
        return StandbyPlan(plan_all(inputs, capacity, soon), inputs, soon)
    ideal = plan_all(inputs, without_pods(placed, capacity))
    given = match(_to_fill(inputs, ideal), placed, capacity)
    chosen = _Chosen(inputs, {}, tuple(placed), ideal)
    if given:
        with_given = _Chosen.of(inputs, given, placed, capacity)
        chosen = with_given if starts_as_much(with_given.without, ideal) else chosen
    pods = {c.to_place.key: c.to_place for i in chosen.inputs for c in i.candidates.values()}
    beside = plan_all(chosen.inputs, capacity)
    ended = in_the_way(beside, chosen.without, pods, chosen.left, capacity)
    full = {i.context.view.namespace for i in inputs for s in i.states if _is_over_quota(s)}
    ended += [s for s in chosen.left if s.namespace in full and s not in ended]
    if ended:
        soon = without_pods(ended, soon or capacity)
    plan = beside if soon is None else plan_all(chosen.inputs, capacity, soon)
    known = {ranked.key for ranked in (*plan.starting_now, *plan.waiting)}
    by_standby = tuple(r for r in ideal.starting_now if r.key not in known)
    return StandbyPlan(
        replace(plan, starting_now=(*by_standby, *plan.starting_now)),
        chosen.inputs,
        soon,
        {
            (i.context.view.uid, key): chosen.given[c.to_place.key]
            for i in inputs
            for key, c in i.candidates.items()
            if c.to_place.key in chosen.given
        },
        frozenset(s.uid for s in ended),
    )


def _is_over_quota(state: SlotState) -> bool:
    """A quota that counts standbys, too, refuses its pod."""
    return state.uncreated_pod is not None and state.uncreated_pod.over_quota_since is not None


@dataclass(frozen=True, slots=True)
class _Chosen:
    """Which slots get a standby. `left`: the other standbys; `without`: the plan without them."""

    inputs: tuple[PlanInput, ...]
    given: Mapping[str, Standby]
    left: tuple[Standby, ...]
    without: Plan

    @classmethod
    def of(
        cls,
        inputs: Sequence[PlanInput],
        given: Mapping[str, Standby],
        standbys: Iterable[Standby],
        capacity: Capacity,
    ) -> _Chosen:
        with_given = tuple(_with_given(i, given) for i in inputs)
        taken = {s.uid for s in given.values()}
        left = tuple(s for s in standbys if s.uid not in taken)
        return cls(with_given, given, left, plan_all(with_given, without_pods(left, capacity)))


def _with_given(plan_input: PlanInput, given: Mapping[str, Standby]) -> PlanInput:
    """As if the slots had their pods."""
    keys = {
        k: given[c.to_place.key]
        for k, c in plan_input.candidates.items()
        if c.to_place.key in given
    }
    if not keys:
        return plan_input
    pods = {p.uid: p for p in standby_pods(plan_input.context)}
    states = tuple(
        replace(s, pod=pods[standby.uid], loss=None, uncreated_pod=None)
        if (standby := keys.get(s.slot.key)) is not None
        else s
        for s in plan_input.states
    )
    candidates = {k: c for k, c in plan_input.candidates.items() if k not in keys}
    return replace(plan_input, states=states, candidates=candidates)


def _to_fill(inputs: Sequence[PlanInput], ideal: Plan) -> list[SlotToFill]:
    """Slots that lost a pod and that the plan gives a node: what the queries need that start first,
    then further replicas."""
    missing = missing_of(inputs)
    order = {ranked.key: n for n, ranked in enumerate(ideal.starting_now)}
    position: dict[str, int] = {}
    for query in missing.down:
        for need in query.needs:
            key = missing.pods[need].key
            here = order.get(query.key, len(order))
            position[key] = min(here, position.get(key, here))
    found = []
    for plan_input in inputs:
        context = plan_input.context
        for key, candidate in plan_input.candidates.items():
            to_place = candidate.to_place
            if to_place.key not in ideal.nodes or not _may_be_given(candidate.state):
                continue
            if not wanted_standbys(context):
                continue
            template = context.view.uid, _template(context, candidate.state.segment)
            rank = position.get(to_place.key, len(order) + 1), context.view.key, key
            found.append((rank, SlotToFill(to_place, template)))
    return [slot for _, slot in sorted(found, key=lambda entry: entry[0])]


def _may_be_given(state: SlotState) -> bool:
    if state.is_successor:
        return False
    if state.phase is SlotPhase.GATED:
        return state.pod is not None and state.pod.predecessor_lost_at is not None
    return state.phase is SlotPhase.LOST and state.loss in _GIVEN_FOR


def give_slots(plan_input: PlanInput, standbys: StandbyPlan) -> list[GiveSlot]:
    """For the slots of one topology that get a standby."""
    context, found = plan_input.context, []
    pods = {p.uid: p for p in standby_pods(context)}
    for state in plan_input.states:
        standby = standbys.given.get((context.view.uid, state.slot.key))
        if standby is None:
            continue
        state.check_event(SlotEvent.STANDBY_TAKEN)
        incarnation = state.fresh_incarnation
        manifest = manifest_of(context, state, incarnation)
        patch = give_slot_patch(pods[standby.uid], manifest, state.slot, incarnation)
        found.append(
            GiveSlot(
                context.view.namespace,
                standby.name,
                standby.uid,
                IncarnationRef(context.view.uid, state.slot.key, incarnation),
                standby_ref(context, standby.name),
                tuple(patch),
            )
        )
    return found


def keep_standbys(plan_input: PlanInput, standbys: StandbyPlan, capacity: Capacity) -> list[Action]:
    """Ends those of one topology that it does not want, or whose capacity is needed, and makes one
    if it has too few. `capacity`: beside all pods."""
    context = plan_input.context
    losses, actions = context.pass_inputs.losses, list[Action]()
    usable = [s for s in usable_standbys(context) if s.uid not in standbys.ending]
    kept = sorted(usable, key=lambda s: (not s.is_warm, s.name))[: wanted_standbys(context)]
    given = {s.uid for s in standbys.given.values()}
    pods = standby_pods(context)
    template = _served_template(context) if pods else ""
    for pod in pods:
        if pod.terminating or pod.uid in given:
            continue
        is_needed = pod.uid in standbys.ending
        why = "its capacity is needed" if is_needed else _why_it_ends(context, pod, template)
        if not why and any(s.uid == pod.uid for s in usable):
            why = "" if any(s.uid == pod.uid for s in kept) else "there are more than wanted"
        if why:
            grace_s = 0 if losses.is_on_lost_node(pod) else _GRACE_S
            actions.append(
                DeletePod(pod.namespace, pod.name, pod.uid, pod.version, grace_s, why, is_needed)
            )
    if not actions and len(kept) < wanted_standbys(context) and _may_make(context, standbys):
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
    return _template(context, served_segment(context))


def served_segment(context: ReconcileContext) -> Segment:
    """One of those whose template standbys have: the template of the most slots without another
    replica, then of the most slots. Of its segments, one that needs Spark."""
    assert context.running is not None
    segments = context.running.topology.segments
    alone, slots = Counter[str](), Counter[str]()
    by_template: dict[str, list[Segment]] = defaultdict(list)
    for segment in segments:
        template = _template(context, segment)
        by_template[template].append(segment)
        slots[template] += segment.partitions * segment.replicas
        alone[template] += segment.partitions if segment.replicas == 1 else 0
    best = min(by_template, key=lambda t: (-alone[t], -slots[t], t))
    return min(by_template[best], key=lambda s: (s.is_source and len(s.nodes) == 1, s.id))


def _may_make(context: ReconcileContext, standbys: StandbyPlan) -> bool:
    """While all of the topology is live, and nothing of any starts: it takes a core for seconds."""
    is_running = context.last_status.phase is TopologyPhase.RUNNING
    return is_running and not (standbys.plan.nodes or standbys.ending)


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
