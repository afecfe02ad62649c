"""Moves to emptier nodes (`spec.recovery.rebalance`): when one begins, goes on, and is given up.
Pure.

After a loss tasks are packed tightly on the nodes that are left, and stay so when nodes come back.
So while nothing is wrong with a topology, one task at a time moves to an emptier node, as tasks on
a cordoned node do (`moves`). Which one is in `recovery.balance`. The next
leader finds a move in progress in its successor, which names the pod that it is to replace and
requires the target node.

Design: docs/design/planned-moves.md#moves-to-emptier-nodes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from rekindle.topology.model import Slot
from rekindle_operator.cluster.amounts import ResourceAmounts
from rekindle_operator.cluster.convert import parse_time, rfc3339
from rekindle_operator.cluster.model import NodeView, Snapshot
from rekindle_operator.reconcile import roll
from rekindle_operator.reconcile.context import PassInputs, ReconcileContext, draining_nodes
from rekindle_operator.reconcile.health import ReplicaState, replica_state
from rekindle_operator.reconcile.moves import problem_of
from rekindle_operator.reconcile.phases import SlotPhase
from rekindle_operator.reconcile.planning import (
    PlanInput,
    partition_key,
    with_pods_to_place,
)
from rekindle_operator.reconcile.replacements import replacements
from rekindle_operator.reconcile.slots import (
    MAX_FAILED_CREATES,
    RebalancingMove,
    SlotPair,
    SlotState,
    task_pods,
)
from rekindle_operator.recovery.balance import MovableTask, NodeLoads
from rekindle_operator.recovery.misfits import NodeCapacity, PodToPlace
from rekindle_operator.recovery.pack import Capacity
from rekindle_operator.settings import Timing
from rekindle_operator.topology_status import QueryState, RebalancingEntry

_TRUE = ("Valid", "Available", "Redundant", "Consistent")
_FALSE = ("Recovering", "Degraded")
"""Conditions of a topology with which nothing is wrong."""
_RETRY_FACTOR = 6  # after a failed move, none begins for this many times its duration


@dataclass(frozen=True, slots=True)
class GivenUp:
    """A successor that is to be deleted, since its move to an emptier node ends."""

    state: SlotState
    why: str


@dataclass(frozen=True, slots=True)
class MovesInProgress:
    """`replicas`: with `rebalancing` set in the states of successors. `leaving`: names of the pods
    that are to be replaced."""

    replicas: tuple[SlotPair, ...]
    leaving: frozenset[str] = frozenset()
    given_up: tuple[GivenUp, ...] = ()


def moves_in_progress(context: ReconcileContext, replicas: Sequence[SlotPair]) -> MovesInProgress:
    """If one is given up, its task is no longer about to leave: as with a planned move whose node
    is uncordoned, the successor is deleted. If the task is lost instead, a successor that has a
    node takes its place; one without a node could only be on the target, so another pod is
    created instead."""
    found: list[SlotPair] = []
    leaving: set[str] = set()
    given_up: list[GivenUp] = []
    for numbered in replicas:
        if not any(s.pod is not None and s.pod.replaces for s in numbered):
            found.append(numbered)
            continue
        pair = list(numbered)
        for index, state in enumerate(numbered):
            move = _move_of(state, numbered[1 - index])
            if move is not None:
                why = _why_given_up(context, state, replicas)
                if why:
                    given_up.append(GivenUp(state, why))
                else:
                    leaving.add(move.pod)
                    pair[index] = replace(state, rebalancing=move)
                    continue
            if (
                state.pod is not None
                and state.pod.replaces
                and state.phase_without_loss is SlotPhase.GATED
            ):
                pair[index] = replace(state, pod=None, loss=None)
        found.append(SlotPair(*pair))
    return MovesInProgress(tuple(found), frozenset(leaving), tuple(given_up))


def _move_of(state: SlotState, old: SlotState) -> RebalancingMove | None:
    """The move that its pod is the successor in. After the move, or if the task is lost, there is
    no pod of that name that runs."""
    if state.pod is None or old.pod is None or old.phase is not SlotPhase.BOUND:
        return None
    target, source = state.pod.node or state.pod.required_node, old.pod.node
    if state.pod.replaces != old.pod.name or target is None or source is None:
        return None
    return RebalancingMove(old.pod.name, source, target)


def _why_given_up(
    context: ReconcileContext, successor: SlotState, replicas: Iterable[SlotPair]
) -> str:
    """Why a move does not go on; empty if it does. One that has failed stays so while its successor
    cannot be deleted yet."""
    assert successor.pod is not None
    entry = context.last_status.rebalancing
    if entry is not None and entry.failed_at and _is_of(entry, successor):
        return entry.message
    timeout_s = context.pass_inputs.timing.rebalance_timeout_s
    if successor.loss is not None:
        return f"its successor is lost: {successor.loss.value}"
    if successor.phase is not SlotPhase.BOUND and (problem := problem_of(context, successor)):
        return f"its successor has no node: {problem}"
    pass_inputs = context.pass_inputs
    if pass_inputs.snapshot.pod_age_s(successor.pod, pass_inputs.now) >= timeout_s:
        return f"its successor has not taken over within {timeout_s:.0f} s"
    return _trouble(context, replicas)


def _is_of(entry: RebalancingEntry, state: SlotState) -> bool:
    """Whether its pod is the successor of that move."""
    incarnation = state.pod.incarnation if state.pod is not None else None
    return (state.slot.key, incarnation) == (entry.slot, entry.incarnation)


def _trouble(context: ReconcileContext, replicas: Iterable[SlotPair]) -> str:
    """What is wrong with the topology, which then has more urgent needs; empty: nothing."""
    assert context.running is not None
    if not context.running.topology.spec.recovery.rebalance:
        return "spec.recovery.rebalance is false"
    if context.last_status.recovery.active is not None:
        return "a recovery is in progress"
    draining = draining_nodes(context)
    for numbered in replicas:
        if not any(s.phase is SlotPhase.BOUND for s in numbered):
            return f"{numbered.first.name} is lost or has no node"
        for state in numbered:
            if state.pod is not None and state.pod.node in draining:
                return f"{state.pod.node} is drained"
    may_be_live = (QueryState.LIVE, QueryState.UNKNOWN)
    down = (q for q in context.last_status.queries.values() if q.state not in may_be_live)
    return next((f"{query.name} is {query.state}" for query in down), "")


def may_begin(context: ReconcileContext, states: Sequence[SlotState]) -> bool:
    """Nothing is wrong with the topology, nothing of it moves, and all of its tasks have run for a
    while: since the last move, too."""
    running, pass_inputs = context.running, context.pass_inputs
    if running is None or not context.needs_pods:
        return False
    if not running.topology.spec.recovery.rebalance:
        return False
    if running.generation != context.view.generation:
        return False
    if roll.is_requested(context) and any(s.outdated for s in states):
        return False
    last = context.last_status
    conditions_hold = all(last.condition(kind).status == "True" for kind in _TRUE) and all(
        last.condition(kind).status == "False" for kind in _FALSE
    )
    is_fresh = context.view.uid in pass_inputs.losses.freshly_reported
    if not conditions_hold or not is_fresh or pass_inputs.snapshot.stalled_watches:
        return False
    draining = draining_nodes(context)
    return len(task_pods(context)) == len(states) and all(
        _is_settled(context, s) and s.pod is not None and s.pod.node not in draining for s in states
    )


def _is_settled(context: ReconcileContext, state: SlotState) -> bool:
    if state.phase is not SlotPhase.BOUND or state.pod is None or state.is_successor:
        return False
    pass_inputs = context.pass_inputs
    age_s = pass_inputs.snapshot.pod_age_s(state.pod, pass_inputs.now)
    is_live = replica_state(context, state) is ReplicaState.LIVE
    return is_live and age_s >= pass_inputs.timing.rebalance_settle_s


def begin_move(
    context: ReconcileContext,
    states: Sequence[SlotState],
    replicas: Iterable[SlotPair],
    loads: NodeLoads,
) -> SlotState | None:
    """The successor that is to be created, of a topology that may begin a move; None: every task is
    where it should be. Outdated tasks stay: a move would apply the edit."""
    others = {s.slot: s for numbered in replicas for s in numbered}
    uid, allowed = context.view.uid, _allowed_slots(context, others)
    pods_to_place: dict[str, PodToPlace] = {}  # by segment
    tasks: list[MovableTask] = []
    running: dict[str, SlotState] = {}  # by the key of the pod that would replace it
    for state in states:
        pod, slot = state.pod, state.slot.alternate
        if pod is None or pod.node is None or state.outdated or slot not in allowed:
            continue
        if not loads.would_gain_by_leaving(pod.node, pod.requests):
            continue
        if slot.segment not in pods_to_place:
            pods_to_place[slot.segment] = _to_place(context, _successor(context, others[slot]))
        # Pods of a segment differ in nothing that matters here but their identity.
        to_place = replace(
            pods_to_place[slot.segment],
            key=f"{uid}/{slot.key}",
            group=partition_key(uid, slot),
            replica=slot.replica_index,
        )
        tasks.append(MovableTask(pod.node, pod.requests, to_place))
        running[to_place.key] = state
    if (move := loads.find_move(tasks)) is None:
        return None
    replaced = running[move.task.to_place.key]
    assert replaced.pod is not None
    rebalancing = RebalancingMove(replaced.pod.name, move.task.node, move.target)
    successor = _successor(context, others[replaced.slot.alternate])
    return replace(successor, rebalancing=rebalancing)


def _successor(context: ReconcileContext, other: SlotState) -> SlotState:
    """A move that begins does not use the incarnation of a pod refused in an earlier move."""
    begins = context.last_status.rebalancing is None
    uncreated_pod = None if begins else other.uncreated_pod
    return replace(other, pod=None, loss=None, is_successor=True, uncreated_pod=uncreated_pod)


def _to_place(context: ReconcileContext, successor: SlotState) -> PodToPlace:
    """As the plan will see it once it is to be created."""
    states, usable = (successor,), context.pass_inputs.losses.usable_nodes
    empty = {name: NodeCapacity(node, node.allocatable) for name, node in usable.items()}
    planned = with_pods_to_place(PlanInput(context, states, replacements(context, states)), empty)
    return planned.candidates[successor.slot.key].to_place


def _allowed_slots(context: ReconcileContext, others: Mapping[Slot, SlotState]) -> frozenset[Slot]:
    """The slots that may get a successor. After a move that failed none, until `update_rebalancing`
    forgets it; while the pod of a successor is not created yet, only that one."""
    entry = context.last_status.rebalancing
    if entry is None:
        return frozenset(others)
    if entry.failed_at:
        return frozenset()
    return frozenset(
        slot
        for slot, state in others.items()
        if slot.key == entry.slot
        and state.uncreated_pod is not None
        and state.uncreated_pod.failures < MAX_FAILED_CREATES
    )


def node_loads(pass_inputs: PassInputs, capacity: Capacity) -> NodeLoads:
    """A node that has become Ready only lately gets no tasks: it may be lost again."""
    now, settle_s = pass_inputs.now, pass_inputs.timing.rebalance_settle_s

    def is_settled(node: NodeView) -> bool:
        return pass_inputs.snapshot.readiness_age_s(node, now) >= settle_s

    targets = {name for name, node in capacity.nodes.items() if is_settled(node.node)}
    return NodeLoads(capacity, _leaving(pass_inputs.snapshot), targets)


def _leaving(snapshot: Snapshot) -> Mapping[str, ResourceAmounts]:
    """By node, what pods request that are deleted, or that a successor is to replace."""
    replaced = {
        (p.namespace, p.replaces)
        for p in snapshot.pods
        if p.replaces and p.topology is not None and not (p.terminating or p.ended)
    }
    found: dict[str, ResourceAmounts] = defaultdict(ResourceAmounts)
    for pod in snapshot.pods:
        if pod.node is None or pod.ended:
            continue
        if pod.terminating or (pod.namespace, pod.name) in replaced:
            found[pod.node] = found[pod.node] + pod.requests
    return found


def any_pod_waits(plan_input: PlanInput, capacity: Capacity) -> bool:
    """Whether a pod waits for a node, and would fit on one if fewer pods were there. Then no move
    begins: tasks that are spread out leave less free on each single node."""
    return any(capacity.fits_when_empty(c.to_place) for c in plan_input.candidates.values())


def update_rebalancing(
    context: ReconcileContext, states: Sequence[SlotState], given_up: Iterable[GivenUp]
) -> RebalancingEntry | None:
    """`status.rebalancing`: the move in progress, or one that has failed, for as long as none is to
    begin after it."""
    now, old = context.pass_inputs.now, context.last_status.rebalancing
    for state in states:
        if state.is_successor and state.rebalancing is not None:
            entry = _entry(state, state.rebalancing, now)
            is_same = old is not None and replace(old, started_at=entry.started_at) == entry
            return old if is_same else entry
    if old is None or context.running is None:
        return old
    if old.failed_at:
        return old if now < _retry_at(old, context.pass_inputs.timing) else None
    for state in states:
        if _is_of(old, state) and not state.is_successor:
            if replica_state(context, state) is ReplicaState.LIVE:
                return None
            why = "the task is lost, and its successor takes its place"
            return replace(old, failed_at=rfc3339(now), message=why)
    why = next((g.why for g in given_up if g.state.slot.key == old.slot), "its successor is gone")
    return replace(old, failed_at=rfc3339(now), message=why)


def _retry_at(failed: RebalancingEntry, timing: Timing) -> float:
    """The longer it took, the later: what fails again and again costs little."""
    failed_at = parse_time(failed.failed_at)
    took_s = min(failed_at - parse_time(failed.started_at), timing.rebalance_timeout_s)
    return failed_at + max(timing.rebalance_retry_s, _RETRY_FACTOR * took_s)


def _entry(successor: SlotState, move: RebalancingMove, now: float) -> RebalancingEntry:
    """Of a move that begins now."""
    slot, pod = successor.slot, successor.pod
    task = replace(successor, slot=slot.alternate).name
    incarnation = pod.incarnation if pod is not None else successor.next_incarnation
    return RebalancingEntry(
        slot.key, incarnation, task, move.source, move.target, started_at=rfc3339(now)
    )
