"""From the slots of all topologies to one plan, and from the plan to opened gates. Pure.

Every slot that neither runs nor has reserved capacity takes part, also those whose pods this pass
creates: a plan over only those that the API server has confirmed would start the wrong query.

Design: docs/design/recovery.md#plan, docs/design/recovery.md#gates.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rekindle.names import ANNOTATION_SHAPE, GATE, ROLE_COORDINATOR, ROLE_TASK
from rekindle.topology.model import Slot
from rekindle.topology.spec import QuerySpec
from rekindle_operator.cluster.amounts import Amounts, total
from rekindle_operator.cluster.convert import pod_requests, tolerations_of
from rekindle_operator.cluster.model import PodView, Snapshot
from rekindle_operator.limits import NamespaceLimits
from rekindle_operator.reconcile.actions import OpenGate, Rank
from rekindle_operator.reconcile.avoid import still_avoided
from rekindle_operator.reconcile.context import ReconcileContext
from rekindle_operator.reconcile.slots import Replacement, SlotState, Stand
from rekindle_operator.recovery.affinity import required_terms
from rekindle_operator.recovery.losses import LossAssessment
from rekindle_operator.recovery.pack import Capacity, NodeCapacity, PodToPlace, pack
from rekindle_operator.recovery.plan import DownQuery, Plan, SpareReplica, make_plan
from rekindle_operator.resources.common import Manifest
from rekindle_operator.resources.coordinator import COORDINATOR_REQUESTS
from rekindle_operator.resources.task import open_gate_patch
from rekindle_operator.settings import Settings, Timing

_REFUSED_FOR_GOOD = 2  # tries; a quota may refuse the first until this pass has deleted pods


@dataclass(frozen=True, slots=True)
class PodCandidate:
    """A slot that needs a node; `pod` is its gated pod, None while that is only being made."""

    state: SlotState
    to_place: PodToPlace
    pod: PodView | None


@dataclass(frozen=True, slots=True)
class PlanInput:
    """One topology's part in the plan."""

    context: ReconcileContext
    states: tuple[SlotState, ...]
    made: tuple[Replacement, ...] = ()
    surplus: tuple[PodView, ...] = ()  # that serve until others do
    candidates: Mapping[str, PodCandidate] = field(default_factory=dict)  # by slot key


def partition_key(uid: str, slot: Slot) -> str:
    return f"{uid}/{slot.segment}/{slot.partition}"


def with_candidates(
    plan_input: PlanInput, snapshot: Snapshot, assessment: LossAssessment
) -> PlanInput:
    uid = plan_input.context.view.uid
    made = {m.state.slot.key: m.create.manifest for m in plan_input.made}
    found = {}
    for state in plan_input.states:
        key, pod = state.slot.key, None
        if manifest := made.get(key):
            to_place = _from_manifest(uid, state, manifest)
            shape = manifest["metadata"]["annotations"].get(ANNOTATION_SHAPE, "")
        elif state.stand is Stand.GATED and state.loss is None and state.pod is not None:
            pod = state.pod
            to_place, shape = _from_pod(uid, state, pod), pod.shape
        else:
            continue
        to_place = replace(to_place, namespace=plan_input.context.view.namespace)
        if state.refused is not None and state.refused.tries >= _REFUSED_FOR_GOOD:
            # Capacity that is kept for a pod which the API server will not have is kept for nobody.
            to_place = replace(to_place, avoid=frozenset(assessment.usable))
        elif bad := snapshot.unsuitable.get(shape):
            to_place = replace(to_place, avoid=still_avoided(to_place, bad, assessment.usable))
        found[key] = PodCandidate(state, to_place, pod)
    return replace(plan_input, candidates=found)


def _from_pod(uid: str, state: SlotState, pod: PodView) -> PodToPlace:
    return PodToPlace(
        key=f"{uid}/{state.slot.key}",
        ask=pod.requests,
        group=partition_key(uid, state.slot),
        replica=state.slot.replica,
        selector=tuple(sorted(pod.selector.items())),
        tolerations=pod.tolerations,
        affinity=required_terms(pod.affinity),
    )


def _from_manifest(uid: str, state: SlotState, manifest: Manifest) -> PodToPlace:
    spec = manifest["spec"]
    return PodToPlace(
        key=f"{uid}/{state.slot.key}",
        ask=pod_requests(spec),
        group=partition_key(uid, state.slot),
        replica=state.slot.replica,
        selector=tuple(sorted((spec.get("nodeSelector") or {}).items())),
        tolerations=tolerations_of(spec),
        affinity=required_terms(spec.get("affinity")),
    )


def measure_capacity(
    snapshot: Snapshot,
    assessment: LossAssessment,
    gone: Iterable[str],
    coordinators: Iterable[Manifest],
    limits: NamespaceLimits,
) -> Capacity:
    """What the usable nodes have left: bound pods of any owner count until they are gone, opened
    ones until they are bound (`gone`: uids whose reservation this pass withdraws), and so do
    coordinators that the scheduler has yet to place (`coordinators`: those yet to be made)."""
    used: dict[str, list[PodView]] = defaultdict(list)
    withdrawn = set(gone)
    unplaced = [_from_coordinator(m["spec"]) for m in coordinators]
    for pod in snapshot.pods:
        place = _place(pod)
        if pod.ended or (pod.node is None and pod.uid in withdrawn):
            continue
        if place is not None:
            used[place].append(pod)
        elif pod.role == ROLE_COORDINATOR and not pod.terminating:
            terms = required_terms(pod.affinity)
            selector = tuple(sorted(pod.selector.items()))
            unplaced.append(
                PodToPlace("", COORDINATOR_REQUESTS, "", 0, selector, pod.tolerations, terms)
            )
    nodes = {}
    for name, node in assessment.usable.items():
        here = used.get(name, [])
        holds = frozenset(
            (f"{p.owner_uid}/{p.slot.segment}/{p.slot.partition}", p.slot.replica)
            for p in here
            if p.role == ROLE_TASK and p.slot is not None
        )
        free = node.allocatable - total(p.requests for p in here)
        nodes[name] = NodeCapacity(node, free, holds)
    whole = total(n.allocatable for n in assessment.usable.values())
    capacity = Capacity(nodes, whole, _left_of_shares(snapshot, used, whole, limits))
    for number, to_place in enumerate(unplaced):
        key = f"coordinator {number}"
        placement = pack([replace(to_place, key=key, group=key)], capacity)
        capacity = placement.capacity if placement is not None else capacity
    return capacity


def _place(pod: PodView) -> str | None:
    """The node whose capacity it takes. A required node alone reserves nothing: any author may
    write one into a pod that waits for its gate, or that the scheduler has refused."""
    if pod.node is not None or pod.pinned is None:
        return pod.node
    waits = GATE in pod.gates if pod.topology is not None else bool(pod.gates or pod.refusal)
    return None if waits else pod.pinned


def _from_coordinator(spec: Manifest) -> PodToPlace:
    selector = tuple(sorted((spec.get("nodeSelector") or {}).items()))
    terms = required_terms(spec.get("affinity"))
    return PodToPlace("", COORDINATOR_REQUESTS, "", 0, selector, tolerations_of(spec), terms)


def _left_of_shares(
    snapshot: Snapshot,
    used: Mapping[str, Iterable[PodView]],
    whole: Amounts,
    limits: NamespaceLimits,
) -> dict[str, Amounts]:
    """By namespace with topologies and a limited share."""
    shares = {t.namespace: limits.max_share(t.namespace) for t in snapshot.topologies}
    left = {name: whole.scaled(share) for name, share in shares.items() if share < 1.0}
    if left:
        for pod in (pod for pods in used.values() for pod in pods):
            if pod.topology is not None and pod.namespace in left:
                left[pod.namespace] = left[pod.namespace] - pod.requests
    return left


def plan_all(
    inputs: Sequence[PlanInput], capacity: Capacity, now: float, settings: Settings
) -> Plan:
    """One plan over all topologies."""
    down: list[DownQuery] = []
    pods_to_place: dict[str, PodToPlace] = {}
    spares: list[SpareReplica] = []
    for plan_input in inputs:
        if not plan_input.candidates or plan_input.context.running is None:
            continue
        if plan_input.context.running.topology.spec.recovery.mode == "Blocking":
            _add_whole_topology(plan_input, down, pods_to_place, now, settings)
        else:
            _add_queries(plan_input, down, pods_to_place, spares, now, settings)
    return make_plan(down, pods_to_place, spares, capacity)


def _add_whole_topology(
    plan_input: PlanInput,
    down: list[DownQuery],
    pods_to_place: dict[str, PodToPlace],
    now: float,
    settings: Settings,
) -> None:
    """Blocking recovery: nothing starts before there is capacity for all (the baseline of
    progressive recovery (Su and Zhou 2017), section 4)."""
    assert plan_input.context.running is not None
    queries = plan_input.context.running.topology.spec.queries
    needs = {c.to_place.key: c.to_place for c in plan_input.candidates.values()}
    pods_to_place |= needs
    down.append(
        DownQuery(
            key=(plan_input.context.view.key, ""),
            priority=sum(_priority(plan_input, q, settings) for q in queries),
            needs=frozenset(needs),
            has_waited_long=_has_waited_long(plan_input.candidates.values(), now, settings.timing),
        )
    )


def _add_queries(
    plan_input: PlanInput,
    down: list[DownQuery],
    pods_to_place: dict[str, PodToPlace],
    spares: list[SpareReplica],
    now: float,
    settings: Settings,
) -> None:
    assert plan_input.context.running is not None
    uid, topology = plan_input.context.view.uid, plan_input.context.running.topology
    held = {partition_key(uid, s.slot) for s in plan_input.states if s.holds}
    held |= {partition_key(uid, p.slot) for p in plan_input.surplus if p.slot is not None}
    first: dict[str, PodCandidate] = {}
    for candidate in sorted(
        plan_input.candidates.values(), key=lambda c: (c.pod is None, c.state.slot)
    ):
        key = candidate.to_place.group
        if key not in held:
            first.setdefault(key, candidate)
    pods_to_place |= {key: c.to_place for key, c in first.items()}
    users: dict[str, int] = defaultdict(int)
    for query in topology.spec.queries:
        wanted, priority = _partitions(plan_input, query), _priority(plan_input, query, settings)
        for key in wanted:
            users[key] = max(users[key], priority)
        if needs := wanted & set(first):
            has_waited_long = _has_waited_long((first[key] for key in needs), now, settings.timing)
            name = (plan_input.context.view.key, query.name)
            down.append(DownQuery(name, priority, frozenset(needs), has_waited_long))
    firsts = {c.to_place.key for c in first.values()}
    for candidate in plan_input.candidates.values():
        if candidate.to_place.key not in firsts:
            group = candidate.to_place.group
            spares.append(
                SpareReplica(candidate.to_place, users[group], group if group in first else "")
            )


def _partitions(plan_input: PlanInput, query: QuerySpec) -> set[str]:
    assert plan_input.context.running is not None
    uid = plan_input.context.view.uid
    wanted = {s.id for s in plan_input.context.running.topology.ancestry(query)}
    return {partition_key(uid, s.slot) for s in plan_input.states if s.slot.segment in wanted}


def _priority(plan_input: PlanInput, query: QuerySpec, settings: Settings) -> int:
    return settings.limits.priority(plan_input.context.view.namespace, query.priority)


def _has_waited_long(candidates: Iterable[PodCandidate], now: float, timing: Timing) -> bool:
    return all(
        c.pod is not None and now - c.pod.created_at >= timing.redundancy_hold_s for c in candidates
    )


def open_gates(plan_input: PlanInput, plan: Plan, now: float) -> list[OpenGate]:
    return [
        OpenGate(
            c.pod.namespace, c.pod.name, c.pod.uid, node, tuple(open_gate_patch(c.pod, node, now))
        )
        for c in plan_input.candidates.values()
        if c.pod is not None and (node := plan.nodes.get(c.to_place.key)) is not None
    ]


def ranks(plan_input: PlanInput, places: Mapping[tuple[str, str], int]) -> dict[str, Rank]:
    """By pod name, what the plan starts first. `places`: queries (or whole topologies, under "")
    in the order of the plan."""
    if plan_input.context.running is None or not plan_input.candidates:
        return {}
    key, topology = plan_input.context.view.key, plan_input.context.running.topology
    best: dict[str, int] = {}
    for query in topology.spec.queries:
        place = places.get((key, query.name), places.get((key, ""), len(places)))
        for segment in topology.ancestry(query):
            best[segment.id] = min(place, best.get(segment.id, place))
    names = {m.state.slot.key: m.create.name for m in plan_input.made}
    seen = {
        partition_key(plan_input.context.view.uid, s.slot) for s in plan_input.states if s.holds
    }
    found: dict[str, Rank] = {}
    for candidate in sorted(
        plan_input.candidates.values(), key=lambda c: (c.pod is None, c.state.slot)
    ):
        slot, group = candidate.state.slot, candidate.to_place.group
        name = candidate.pod.name if candidate.pod is not None else names[slot.key]
        found[name] = int(group in seen), best.get(slot.segment, len(places))
        seen.add(group)
    return found
