"""One plan over the slots of all topologies, and the gates that it opens. Pure.

Every slot that neither runs nor has reserved capacity takes part, also those whose pods this pass
creates: a plan over only those that the API server has confirmed would start the wrong query.

Design: docs/design/recovery.md#plan, docs/design/recovery.md#gates.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace

from rekindle.names import ANNOTATION_SHAPE
from rekindle.topology.model import Slot
from rekindle.topology.spec import QuerySpec
from rekindle_operator.cluster.model import PodView
from rekindle_operator.reconcile.actions import OpenGate, PlanRank
from rekindle_operator.reconcile.context import ReconcileContext
from rekindle_operator.reconcile.moves import places_left
from rekindle_operator.reconcile.phases import SlotEvent, SlotPhase
from rekindle_operator.reconcile.replacements import TaskReplacement
from rekindle_operator.reconcile.slots import MAX_FAILED_CREATES, SlotState
from rekindle_operator.recovery.misfits import NodeCapacity, PodToPlace
from rekindle_operator.recovery.pack import Capacity
from rekindle_operator.recovery.plan import DownQuery, Plan, SpareReplica, make_plan
from rekindle_operator.resources.task import open_gate_patch

_TOGETHER = "capacity: what is free is too little for all that waits, or is kept for other queries"


@dataclass(frozen=True, slots=True)
class PodCandidate:
    """A slot that needs a node; `pod` is its gated pod, None before its creation. The `group` of
    `to_place` is its partition: replicas of one never share a node."""

    state: SlotState
    to_place: PodToPlace
    pod: PodView | None


@dataclass(frozen=True, slots=True)
class PlanInput:
    """One topology's part in the plan."""

    context: ReconcileContext
    states: tuple[SlotState, ...]
    replacements: tuple[TaskReplacement, ...] = ()
    surplus: tuple[PodView, ...] = ()  # see `health_of`
    candidates: Mapping[str, PodCandidate] = field(default_factory=dict)  # by slot key


def partition_key(uid: str, slot: Slot) -> str:
    return f"{uid}/{slot.segment}/{slot.partition}"


def with_pods_to_place(
    plan_input: PlanInput, without_topologies: Mapping[str, NodeCapacity]
) -> PlanInput:
    """With the slots that are about to have a pod, or have a gated one. A pod avoids nodes that
    are unsuitable for pods of its shape. `without_topologies`: the usable nodes, less what pods of
    other owners use of them, which the operator cannot move."""
    uid, pass_inputs = plan_input.context.view.uid, plan_input.context.pass_inputs
    usable, unsuitable = pass_inputs.losses.usable_nodes, pass_inputs.snapshot.unsuitable
    manifests = {m.state.slot.key: m.create.manifest for m in plan_input.replacements}
    replicas = _replicas_by_partition(uid, plan_input.states)
    found = {}
    for state in plan_input.states:
        key, pod = state.slot.key, None
        identity = f"{uid}/{key}", partition_key(uid, state.slot), state.slot.replica_index
        if manifest := manifests.get(key):
            to_place = PodToPlace.of_spec(manifest["spec"], *identity)
            shape = manifest["metadata"]["annotations"].get(ANNOTATION_SHAPE, "")
        elif state.phase is SlotPhase.GATED and state.pod is not None:
            pod = state.pod
            to_place, shape = PodToPlace.of_pod(pod, *identity), pod.shape
        else:
            continue
        to_place = replace(to_place, namespace=plan_input.context.view.namespace)
        if state.uncreated_pod is not None and state.uncreated_pod.failures >= MAX_FAILED_CREATES:
            # No capacity is kept for a pod that the API server refuses.
            to_place = replace(to_place, avoid=frozenset(usable))
        elif refused_by := unsuitable.get(shape):
            partners = replicas[to_place.group]
            nodes = (
                replace(node, replicas=frozenset(partners[name])) if name in partners else node
                for name, node in without_topologies.items()
                if name not in refused_by
            )
            avoid = refused_by if any(node.fits(to_place) for node in nodes) else frozenset()
            to_place = replace(to_place, avoid=avoid)  # none if no other node could run the pod
        found[key] = PodCandidate(state, to_place, pod)
    return replace(plan_input, candidates=found)


def _replicas_by_partition(
    uid: str, states: Iterable[SlotState]
) -> Mapping[str, Mapping[str | None, set[tuple[str, int]]]]:
    """By partition and node."""
    found: dict[str, dict[str | None, set[tuple[str, int]]]] = defaultdict(lambda: defaultdict(set))
    for state in states:
        if state.holds_capacity and state.pod is not None:
            group, node = partition_key(uid, state.slot), state.pod.node or state.pod.required_node
            found[group][node].add((group, state.slot.replica_index))
    return found


@dataclass(frozen=True, slots=True)
class Missing:
    """What the plan is made of. `pods`: what would meet each need of the queries."""

    down: list[DownQuery]
    pods: dict[str, PodToPlace]
    spares: list[SpareReplica]


def plan_all(inputs: Sequence[PlanInput], capacity: Capacity, soon: Capacity | None = None) -> Plan:
    """One plan over all topologies. `soon`: the capacity once tasks have ended that end now. They
    end one after the other: what the first ones leave free is kept for queries that start with it
    all, also of those for which capacity is not reserved any more. Otherwise a spare replica would
    get it, and would be taken away again for the same query."""
    missing = missing_of(inputs)
    plan = make_plan(missing.down, missing.pods, missing.spares, capacity)
    if soon is None or not plan.waiting or not plan.nodes:
        return plan
    later = {r.key for r in make_plan(missing.down, missing.pods, (), soon).starting_now}
    kept = later & {r.key for r in plan.waiting}
    if not kept:
        return plan
    held = {q.key for q in missing.down} - later
    down = [
        replace(q, capacity_reservation_is_over=False) if q.key in kept else q for q in missing.down
    ]
    return make_plan(down, missing.pods, missing.spares, capacity, held)


def missing_of(inputs: Sequence[PlanInput]) -> Missing:
    down: list[DownQuery] = []
    pods_to_place: dict[str, PodToPlace] = {}
    spares: list[SpareReplica] = []
    for plan_input in inputs:
        if not plan_input.candidates or plan_input.context.running is None:
            continue
        if plan_input.context.running.topology.spec.recovery.mode == "Blocking":
            _add_whole_topology(plan_input, down, pods_to_place, spares)
        else:
            _add_queries(plan_input, down, pods_to_place, spares)
    return Missing(down, pods_to_place, spares)


def _add_whole_topology(
    plan_input: PlanInput,
    down: list[DownQuery],
    pods_to_place: dict[str, PodToPlace],
    spares: list[SpareReplica],
) -> None:
    """Blocking recovery: nothing starts before there is capacity for all (the baseline of
    progressive recovery (Su and Zhou 2017), section 4). Successors in planned moves are spare: what
    they replace still runs."""
    assert plan_input.context.running is not None
    queries = plan_input.context.running.topology.spec.queries
    candidates = [c for c in plan_input.candidates.values() if not c.state.is_successor]
    if candidates:
        needs = {c.to_place.key: c.to_place for c in candidates}
        pods_to_place |= needs
        down.append(
            DownQuery(
                key=(plan_input.context.view.key, ""),
                priority=sum(query_priority(plan_input, q) for q in queries),
                needs=frozenset(needs),
                capacity_reservation_is_over=_spares_may_go_first(plan_input, candidates),
            )
        )
    successors = (c for c in plan_input.candidates.values() if c.state.is_successor)
    spares += _spares(plan_input, successors, {})


def _add_queries(
    plan_input: PlanInput,
    down: list[DownQuery],
    pods_to_place: dict[str, PodToPlace],
    spares: list[SpareReplica],
) -> None:
    assert plan_input.context.running is not None
    uid, topology = plan_input.context.view.uid, plan_input.context.running.topology
    placed = {partition_key(uid, s.slot) for s in plan_input.states if s.holds_capacity}
    placed |= {partition_key(uid, p.slot) for p in plan_input.surplus if p.slot is not None}
    first_replicas: dict[str, PodCandidate] = {}  # of partitions that have none, by partition
    for candidate in sorted(
        plan_input.candidates.values(), key=lambda c: (c.pod is None, c.state.slot)
    ):
        key = candidate.to_place.group
        if key not in placed:
            first_replicas.setdefault(key, candidate)
    pods_to_place |= {key: c.to_place for key, c in first_replicas.items()}
    for query in topology.spec.queries:
        if needs := _partitions(plan_input, query) & set(first_replicas):
            priority = query_priority(plan_input, query)
            capacity_reservation_is_over = _spares_may_go_first(
                plan_input, (first_replicas[key] for key in needs)
            )
            name = (plan_input.context.view.key, query.name)
            paths = _paths(plan_input, query, needs)
            down.append(
                DownQuery(name, priority, frozenset(needs), capacity_reservation_is_over, paths)
            )
    first_replica_keys = {c.to_place.key for c in first_replicas.values()}
    further = (
        c for c in plan_input.candidates.values() if c.to_place.key not in first_replica_keys
    )
    spares += _spares(plan_input, further, first_replicas)


def _spares(
    plan_input: PlanInput,
    candidates: Iterable[PodCandidate],
    without_replica: Container[str],
) -> list[SpareReplica]:
    """`without_replica`: partitions of which the plan places the first one."""
    assert plan_input.context.running is not None
    highest_priority: dict[str, int] = defaultdict(int)
    for query in plan_input.context.running.topology.spec.queries:
        priority = query_priority(plan_input, query)
        for key in _partitions(plan_input, query):
            highest_priority[key] = max(highest_priority[key], priority)
    return [
        SpareReplica(
            c.to_place,
            highest_priority[c.to_place.group],
            missing_first_replica=c.to_place.group if c.to_place.group in without_replica else "",
        )
        for c in candidates
    ]


def _partitions(plan_input: PlanInput, query: QuerySpec) -> set[str]:
    assert plan_input.context.running is not None
    wanted = {s.id for s in plan_input.context.running.topology.needed_segments(query)}
    return _partitions_of(plan_input, wanted)


def _partitions_of(plan_input: PlanInput, segments: AbstractSet[str]) -> set[str]:
    uid = plan_input.context.view.uid
    return {partition_key(uid, s.slot) for s in plan_input.states if s.slot.segment in segments}


def _paths(
    plan_input: PlanInput, query: QuerySpec, needs: AbstractSet[str]
) -> tuple[frozenset[str], ...]:
    """The parts of `needs` on the path from each source. Empty if the query has no tentative
    results: `maxDelay` is infinite, or there is no checkpoint (its tasks wait for all inputs)."""
    running, checkpoint = plan_input.context.running, plan_input.context.report.checkpoint
    assert running is not None
    if running.topology.spec.max_delay is None or checkpoint is None:
        return ()
    on_paths = running.topology.paths(query)
    found = {frozenset(_partitions_of(plan_input, path) & needs) for path in on_paths}
    return tuple(sorted(found - {frozenset()}, key=sorted))


def query_priority(plan_input: PlanInput, query: QuerySpec) -> int:
    limits = plan_input.context.pass_inputs.settings.limits
    return limits.priority(plan_input.context.view.namespace, query.priority)


def _spares_may_go_first(plan_input: PlanInput, candidates: Iterable[PodCandidate]) -> bool:
    """Whether these have waited so long that spare replicas may use the capacity that was reserved
    for them."""
    pass_inputs = plan_input.context.pass_inputs
    snapshot, reserved_s = pass_inputs.snapshot, pass_inputs.timing.capacity_reservation_s
    return all(
        c.pod is not None and snapshot.pod_age_s(c.pod, pass_inputs.now) >= reserved_s
        for c in candidates
    )


def with_reasons(plan_input: PlanInput, plan: Plan) -> PlanInput:
    """The states of gated pods that the plan gives no node, with the reason. Not at once: what pods
    that are being deleted use is free in a moment."""
    pass_inputs = plan_input.context.pass_inputs
    snapshot, after_s = pass_inputs.snapshot, pass_inputs.timing.scheduling_timeout_s
    waiting = {
        key: plan.unplaced[candidate.to_place.key] or _TOGETHER
        for key, candidate in plan_input.candidates.items()
        if candidate.pod is not None
        and candidate.to_place.key in plan.unplaced
        and snapshot.pod_age_s(candidate.pod, pass_inputs.now) >= after_s
    }
    states = (replace(s, no_node=waiting.get(s.slot.key, "")) for s in plan_input.states)
    return replace(plan_input, states=tuple(states)) if waiting else plan_input


def open_gates(plan_input: PlanInput, plan: Plan) -> list[OpenGate]:
    """For the gated pods that the plan gives a node; of successors only for so many as may start at
    once, also when capacity for many returns."""
    found, now = [], plan_input.context.pass_inputs.now
    successors = [s for s in plan_input.states if s.is_successor]
    places = places_left(plan_input.context, successors)
    for candidate in plan_input.candidates.values():
        pod, node = candidate.pod, plan.nodes.get(candidate.to_place.key)
        if pod is None or node is None:
            continue
        if candidate.state.is_successor:
            if places == 0:
                continue
            places -= 1
        candidate.state.check_event(SlotEvent.GATE_OPENED)
        patch = tuple(open_gate_patch(pod, node, now))
        found.append(OpenGate(pod.namespace, pod.name, pod.uid, node, patch))
    return found


def ranks(plan_input: PlanInput, plan_order: Mapping[tuple[str, str], int]) -> dict[str, PlanRank]:
    """By pod name, what the plan starts first. `plan_order`: queries (or whole topologies, under
    "") in the order of the plan."""
    if plan_input.context.running is None or not plan_input.candidates:
        return {}
    key, topology = plan_input.context.view.key, plan_input.context.running.topology
    best: dict[str, int] = {}
    for query in topology.spec.queries:
        position = plan_order.get((key, query.name), plan_order.get((key, ""), len(plan_order)))
        for segment in topology.needed_segments(query):
            best[segment.id] = min(position, best.get(segment.id, position))
    names = {m.state.slot.key: m.create.name for m in plan_input.replacements}
    placed = {
        partition_key(plan_input.context.view.uid, s.slot)
        for s in plan_input.states
        if s.holds_capacity
    }
    found: dict[str, PlanRank] = {}
    for candidate in sorted(
        plan_input.candidates.values(), key=lambda c: (c.pod is None, c.state.slot)
    ):
        slot, group = candidate.state.slot, candidate.to_place.group
        name = candidate.pod.name if candidate.pod is not None else names[slot.key]
        found[name] = PlanRank(
            replica_order=int(group in placed),
            plan_position=best.get(slot.segment, len(plan_order)),
        )
        placed.add(group)
    return found
