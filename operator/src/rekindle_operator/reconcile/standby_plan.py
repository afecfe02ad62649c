"""Standbys in the plan: which slots they are given, and which of them end for it. Pure.

Design: docs/design/recovery.md#standbys.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rekindle_operator.cluster.model import IncarnationRef
from rekindle_operator.reconcile.actions import GiveSlot
from rekindle_operator.reconcile.phases import SlotEvent, SlotPhase
from rekindle_operator.reconcile.planning import PlanInput, missing_of, plan_all
from rekindle_operator.reconcile.replacements import manifest_of
from rekindle_operator.reconcile.slots import SlotState
from rekindle_operator.reconcile.standbys import (
    GIVEN_FOR,
    standby_pods,
    standby_ref,
    template_of,
    usable_standbys,
    wanted_standbys,
)
from rekindle_operator.recovery.pack import Capacity
from rekindle_operator.recovery.plan import Plan
from rekindle_operator.recovery.preemption import without_pods
from rekindle_operator.recovery.standbys import (
    SlotToFill,
    Standby,
    in_the_way,
    match,
    starts_as_much,
)
from rekindle_operator.resources.standby import give_slot_patch


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
            template = context.view.uid, template_of(context, candidate.state.segment)
            rank = position.get(to_place.key, len(order) + 1), context.view.key, key
            found.append((rank, SlotToFill(to_place, template)))
    return [slot for _, slot in sorted(found, key=lambda entry: entry[0])]


def _may_be_given(state: SlotState) -> bool:
    if state.is_successor:
        return False
    if state.phase is SlotPhase.GATED:
        return state.pod is not None and state.pod.predecessor_lost_at is not None
    return state.phase is SlotPhase.LOST and state.loss in GIVEN_FOR


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
