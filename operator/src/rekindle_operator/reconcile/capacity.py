"""From the slots of all topologies to one plan, and from the plan to opened gates. Pure.

Every slot that neither runs nor has room reserved takes part, also those whose pods this very pass
creates: a plan over the half of them that the API server has confirmed would start the wrong query.

Design: docs/design/recovery.md#plan, docs/design/recovery.md#gates.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rekindle.topology.model import Slot
from rekindle.topology.spec import QuerySpec
from rekindle_operator.cluster.amounts import Amounts, total
from rekindle_operator.cluster.convert import pod_requests, tolerations_of
from rekindle_operator.cluster.model import PodView, Snapshot
from rekindle_operator.limits import NamespaceLimits
from rekindle_operator.names import ANNOTATION_SHAPE, GATE, ROLE_COORDINATOR, ROLE_TASK
from rekindle_operator.reconcile.actions import OpenGate, Rank
from rekindle_operator.reconcile.avoid import still_avoided
from rekindle_operator.reconcile.context import ReconcileContext
from rekindle_operator.reconcile.slots import Replacement, SlotState, Stand
from rekindle_operator.recovery.affinity import required_terms
from rekindle_operator.recovery.losses import LossAssessment
from rekindle_operator.recovery.pack import Bin, Item, Room, pack
from rekindle_operator.recovery.plan import Demand, Plan, Spare, make_plan
from rekindle_operator.resources.common import Manifest
from rekindle_operator.resources.coordinator import ASK
from rekindle_operator.resources.task import open_gate_patch
from rekindle_operator.settings import Settings, Timing

_REFUSED_FOR_GOOD = 2  # tries; a quota may refuse the first until this pass has deleted pods


@dataclass(frozen=True, slots=True)
class Candidate:
    """A slot that needs a node; `pod` is its gated pod, None while that is only being made."""

    state: SlotState
    item: Item
    pod: PodView | None


@dataclass(frozen=True, slots=True)
class Work:
    """One topology's part in the plan."""

    context: ReconcileContext
    states: tuple[SlotState, ...]
    made: tuple[Replacement, ...] = ()
    surplus: tuple[PodView, ...] = ()  # that serve until others do
    candidates: Mapping[str, Candidate] = field(default_factory=dict)  # by slot key


def partition_key(uid: str, slot: Slot) -> str:
    return f"{uid}/{slot.segment}/{slot.partition}"


def with_candidates(work: Work, snapshot: Snapshot, assessment: LossAssessment) -> Work:
    uid = work.context.view.uid
    made = {m.state.slot.key: m.create.manifest for m in work.made}
    found = {}
    for state in work.states:
        key, pod = state.slot.key, None
        if manifest := made.get(key):
            item = _item_of_manifest(uid, state, manifest)
            shape = manifest["metadata"]["annotations"].get(ANNOTATION_SHAPE, "")
        elif state.stand is Stand.GATED and state.loss is None and state.pod is not None:
            pod = state.pod
            item, shape = _item_of_pod(uid, state, pod), pod.shape
        else:
            continue
        item = replace(item, namespace=work.context.view.namespace)
        if state.refused is not None and state.refused.tries >= _REFUSED_FOR_GOOD:
            # Room that is kept for a pod which the API server will not have is kept for nobody.
            item = replace(item, avoid=frozenset(assessment.usable))
        elif bad := snapshot.unsuitable.get(shape):
            item = replace(item, avoid=still_avoided(item, bad, assessment.usable))
        found[key] = Candidate(state, item, pod)
    return replace(work, candidates=found)


def _item_of_pod(uid: str, state: SlotState, pod: PodView) -> Item:
    return Item(
        key=f"{uid}/{state.slot.key}",
        ask=pod.requests,
        group=partition_key(uid, state.slot),
        replica=state.slot.replica,
        selector=tuple(sorted(pod.selector.items())),
        tolerations=pod.tolerations,
        affinity=required_terms(pod.affinity),
    )


def _item_of_manifest(uid: str, state: SlotState, manifest: Manifest) -> Item:
    spec = manifest["spec"]
    return Item(
        key=f"{uid}/{state.slot.key}",
        ask=pod_requests(spec),
        group=partition_key(uid, state.slot),
        replica=state.slot.replica,
        selector=tuple(sorted((spec.get("nodeSelector") or {}).items())),
        tolerations=tolerations_of(spec),
        affinity=required_terms(spec.get("affinity")),
    )


def measure(
    snapshot: Snapshot,
    assessment: LossAssessment,
    gone: Iterable[str],
    coordinators: Iterable[Manifest],
    limits: NamespaceLimits,
) -> Room:
    """What the usable nodes have left: bound pods of any owner count until they are gone, opened
    ones until they are bound (`gone`: uids whose reservation this pass withdraws), and so do
    coordinators that the scheduler has yet to place (`coordinators`: those yet to be made)."""
    used: dict[str, list[PodView]] = defaultdict(list)
    withdrawn = set(gone)
    unplaced = [_coordinator_item(m["spec"]) for m in coordinators]
    for pod in snapshot.pods:
        place = _place(pod)
        if pod.ended or (pod.node is None and pod.uid in withdrawn):
            continue
        if place is not None:
            used[place].append(pod)
        elif pod.role == ROLE_COORDINATOR and not pod.terminating:
            terms = required_terms(pod.affinity)
            selector = tuple(sorted(pod.selector.items()))
            unplaced.append(Item("", ASK, "", 0, selector, pod.tolerations, terms))
    bins = {}
    for name, node in assessment.usable.items():
        here = used.get(name, [])
        holds = frozenset(
            (f"{p.owner_uid}/{p.slot.segment}/{p.slot.partition}", p.slot.replica)
            for p in here
            if p.role == ROLE_TASK and p.slot is not None
        )
        free = node.allocatable - total(p.requests for p in here)
        bins[name] = Bin(node, free, holds)
    whole = total(n.allocatable for n in assessment.usable.values())
    room = Room(bins, whole, _left_of_shares(snapshot, used, whole, limits))
    for number, item in enumerate(unplaced):
        key = f"coordinator {number}"
        packed = pack([replace(item, key=key, group=key)], room)
        room = packed.room if packed is not None else room
    return room


def _place(pod: PodView) -> str | None:
    """The node that it takes room of. A required node alone reserves nothing: any author may write
    one into a pod that waits, for its gate or because the scheduler has refused it."""
    if pod.node is not None or pod.pinned is None:
        return pod.node
    waits = GATE in pod.gates if pod.topology is not None else bool(pod.gates or pod.refusal)
    return None if waits else pod.pinned


def _coordinator_item(spec: Manifest) -> Item:
    selector = tuple(sorted((spec.get("nodeSelector") or {}).items()))
    terms = required_terms(spec.get("affinity"))
    return Item("", ASK, "", 0, selector, tolerations_of(spec), terms)


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


def plan_all(works: Sequence[Work], room: Room, now: float, settings: Settings) -> Plan:
    """One plan over all topologies."""
    demands: list[Demand] = []
    items: dict[str, Item] = {}
    spares: list[Spare] = []
    for work in works:
        if not work.candidates or work.context.running is None:
            continue
        if work.context.running.topology.spec.recovery.mode == "Blocking":
            _demand_in_one_block(work, demands, items, now, settings)
        else:
            _demand_by_query(work, demands, items, spares, now, settings)
    return make_plan(demands, items, spares, room)


def _demand_in_one_block(
    work: Work, demands: list[Demand], items: dict[str, Item], now: float, settings: Settings
) -> None:
    """Blocking recovery: nothing starts before there is room for all (the baseline of
    progressive recovery (Su and Zhou 2017), section 4)."""
    assert work.context.running is not None
    queries = work.context.running.topology.spec.queries
    needs = {c.item.key: c.item for c in work.candidates.values()}
    items |= needs
    demands.append(
        Demand(
            key=(work.context.view.key, ""),
            priority=sum(_priority(work, q, settings) for q in queries),
            needs=frozenset(needs),
            patient=_is_patient(work.candidates.values(), now, settings.timing),
        )
    )


def _demand_by_query(
    work: Work,
    demands: list[Demand],
    items: dict[str, Item],
    spares: list[Spare],
    now: float,
    settings: Settings,
) -> None:
    assert work.context.running is not None
    uid, topology = work.context.view.uid, work.context.running.topology
    held = {partition_key(uid, s.slot) for s in work.states if s.holds}
    held |= {partition_key(uid, p.slot) for p in work.surplus if p.slot is not None}
    first: dict[str, Candidate] = {}
    for candidate in sorted(work.candidates.values(), key=lambda c: (c.pod is None, c.state.slot)):
        key = candidate.item.group
        if key not in held:
            first.setdefault(key, candidate)
    items |= {key: c.item for key, c in first.items()}
    users: dict[str, int] = defaultdict(int)
    for query in topology.spec.queries:
        wanted, priority = _partitions(work, query), _priority(work, query, settings)
        for key in wanted:
            users[key] = max(users[key], priority)
        if needs := wanted & set(first):
            patient = _is_patient((first[key] for key in needs), now, settings.timing)
            name = (work.context.view.key, query.name)
            demands.append(Demand(name, priority, frozenset(needs), patient))
    firsts = {c.item.key for c in first.values()}
    for candidate in work.candidates.values():
        if candidate.item.key not in firsts:
            group = candidate.item.group
            spares.append(Spare(candidate.item, users[group], group if group in first else ""))


def _partitions(work: Work, query: QuerySpec) -> set[str]:
    assert work.context.running is not None
    uid = work.context.view.uid
    wanted = {s.id for s in work.context.running.topology.ancestry(query)}
    return {partition_key(uid, s.slot) for s in work.states if s.slot.segment in wanted}


def _priority(work: Work, query: QuerySpec, settings: Settings) -> int:
    return settings.limits.priority(work.context.view.namespace, query.priority)


def _is_patient(candidates: Iterable[Candidate], now: float, timing: Timing) -> bool:
    return all(
        c.pod is not None and now - c.pod.created_at >= timing.redundancy_hold_s for c in candidates
    )


def opened_gates(work: Work, plan: Plan, now: float) -> list[OpenGate]:
    return [
        OpenGate(
            c.pod.namespace, c.pod.name, c.pod.uid, node, tuple(open_gate_patch(c.pod, node, now))
        )
        for c in work.candidates.values()
        if c.pod is not None and (node := plan.nodes.get(c.item.key)) is not None
    ]


def ranks(work: Work, places: Mapping[tuple[str, str], int]) -> dict[str, Rank]:
    """By pod name, what the plan starts first. `places`: queries (or whole topologies, under "")
    in the order of the plan."""
    if work.context.running is None or not work.candidates:
        return {}
    key, topology = work.context.view.key, work.context.running.topology
    best: dict[str, int] = {}
    for query in topology.spec.queries:
        place = places.get((key, query.name), places.get((key, ""), len(places)))
        for segment in topology.ancestry(query):
            best[segment.id] = min(place, best.get(segment.id, place))
    names = {m.state.slot.key: m.create.name for m in work.made}
    seen = {partition_key(work.context.view.uid, s.slot) for s in work.states if s.holds}
    found: dict[str, Rank] = {}
    for candidate in sorted(work.candidates.values(), key=lambda c: (c.pod is None, c.state.slot)):
        slot, group = candidate.state.slot, candidate.item.group
        name = candidate.pod.name if candidate.pod is not None else names[slot.key]
        found[name] = int(group in seen), best.get(slot.segment, len(places))
        seen.add(group)
    return found
