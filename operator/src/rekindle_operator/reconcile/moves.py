"""Planned moves: a task on a cordoned node, or one that moves to an emptier node (`rebalancing`),
gets a successor on another one, and stays until the successor has taken over. Pure.

The successor is the same replica under its other number (`Slot.alternate`), so both run at once and
are two ordinary replicas for everybody else: the successor gets its state from the one that runs.
Which of the two counts as the replica follows from the pods and the report alone.

Design: docs/design/planned-moves.md.
Paper: Flux (Shah et al. 2004), sections 3.4 and 5.3.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from rekindle.topology.model import Partition, partition_of
from rekindle_operator.reconcile.context import ReconcileContext, draining_nodes
from rekindle_operator.reconcile.health import (
    ReplicaState,
    may_replace,
    replica_state,
)
from rekindle_operator.reconcile.phases import SlotPhase
from rekindle_operator.reconcile.slots import SlotPair, SlotState, task_pods
from rekindle_operator.recovery.losses import Loss

MOVES_AT_ONCE = 2
"""Of a topology: successors that start take the CPU of those that run."""
SUCCESSOR_WITHOUT_NODE_S = 60.0
"""How long a successor may find no node, or no room in a quota, before a task with a live partner
is removed without it."""
LATE_S = 300.0
"""A successor that runs for longer without taking over does not count in `MOVES_AT_ONCE`."""
_UNBOUND_FOR_LONG = 4  # incarnations that were not bound: their growing timeouts add up to 75 s
_REFUSED = 2  # attempts; the first one may have failed by chance
_MAY_BE_LIVE = (ReplicaState.LIVE, ReplicaState.UNKNOWN)


@dataclass(frozen=True, slots=True)
class MovedStates:
    """`states`: one for each replica, and one for each successor that runs or is to be created.
    `superseded`: those of lost tasks that their successors replace."""

    states: tuple[SlotState, ...]
    superseded: tuple[SlotState, ...] = ()


def with_moves(
    context: ReconcileContext,
    replicas: Sequence[SlotPair],
    leaving: frozenset[str] = frozenset(),
) -> MovedStates:
    """`leaving`: names of pods that are to be replaced although their nodes are not cordoned."""
    leaving |= _pods_on_draining_nodes(context)
    pairs = [_by_age(numbered) for numbered in replicas]
    partners = _on_staying_nodes(replicas, leaving)
    successors = [new for old, new in pairs if new.pod is not None and _leaves(old, leaving)]
    gates_may_open = places_left(context, successors) > 0
    chosen = [_choose(context, pair, leaving, partners, gates_may_open) for pair in pairs]
    moving = [(state, other) for state, other in chosen if _leaves(state, leaving)]
    running = [_successor(context, state, other, leaving) for state, other in moving if other.pod]
    uncreated = [
        replace(other, is_successor=True, loss=None)
        for state, other in moving
        if other.pod is None and replica_state(context, state) is ReplicaState.LIVE
    ]
    begun = [state for state in uncreated if state.uncreated_pod is not None]
    in_progress = sum(not problem_of(context, state) for state in (*running, *begun))
    not_begun = (state for state in uncreated if state.uncreated_pod is None)
    # A new successor has the newest image. In a conflict of stream protocols it could not read from
    # the tasks that run, and would never be live.
    may_begin = 0 if context.report.stream_conflict else MOVES_AT_ONCE - in_progress
    started = islice(not_begun, max(0, may_begin))
    return MovedStates(
        states=(*(state for state, _ in chosen), *running, *begun, *started),
        superseded=tuple(
            old
            for (old, new), (counts, _) in zip(pairs, chosen, strict=True)
            if counts is new and _was_lost(context, old, new)
        ),
    )


def places_left(context: ReconcileContext, states: Iterable[SlotState]) -> int:
    """How many more successors may start now. One that has a problem keeps no other from it."""
    starting = sum(s.holds_capacity and not problem_of(context, s) for s in states)
    return max(0, MOVES_AT_ONCE - starting)


def problem_of(context: ReconcileContext, successor: SlotState) -> str:
    """Why a successor makes no progress, as far as is known; empty: it may be making some."""
    pod, uncreated = successor.pod, successor.uncreated_pod
    if pod is None or uncreated is not None:
        now = context.pass_inputs.now
        if uncreated is None or uncreated.failures < _REFUSED or uncreated.is_abandoned(now):
            return ""
        return successor.refusal
    if successor.phase is not SlotPhase.BOUND:
        is_new = not pod.failed_placements and not _has_no_node(context, successor)
        return "" if is_new else successor.refusal or successor.no_node or "no node takes it"
    if successor.refusal:
        return successor.refusal
    pass_inputs = context.pass_inputs
    if pass_inputs.snapshot.ungated_s(pod, pass_inputs.now) < LATE_S:
        return ""
    report = context.report.task(successor.slot.key, pod.incarnation)
    if report is not None and report.untrusted:
        return "replicas disagree, as the condition Consistent says"
    if replica_state(context, successor) is ReplicaState.LIVE:
        return "its sinks are behind"
    detail = f": {report.problem}" if report is not None and report.problem else ""
    return f"it runs and does not become live{detail}"


def is_on(state: SlotState, nodes: frozenset[str]) -> bool:
    return state.phase is SlotPhase.BOUND and state.pod is not None and state.pod.node in nodes


def _leaves(state: SlotState, leaving: frozenset[str]) -> bool:
    return state.phase is SlotPhase.BOUND and state.pod is not None and state.pod.name in leaving


def _pods_on_draining_nodes(context: ReconcileContext) -> frozenset[str]:
    draining = draining_nodes(context)
    return frozenset(p.name for p in task_pods(context) if p.node in draining)


def _by_age(replicas: SlotPair) -> tuple[SlotState, SlotState]:
    """The task, and its successor if there is one."""
    first, second = replicas
    if first.pod is None or second.pod is None:
        is_second = second.pod is not None
        # Without any pod: the API server refused the successor for long, and the task was deleted
        # before it. The successor counts as the task now.
        is_second |= first.pod is None and bool(second.uncreated_pod and not first.uncreated_pod)
        return (second, first) if is_second else (first, second)
    return (first, second) if first.pod.created_at <= second.pod.created_at else (second, first)


def _choose(
    context: ReconcileContext,
    pair: tuple[SlotState, SlotState],
    leaving: frozenset[str],
    partners: Mapping[Partition, Sequence[SlotState]],
    gates_may_open: bool,
) -> tuple[SlotState, SlotState]:
    """The one that counts as the replica, and the other one. `gates_may_open`: whether a successor
    without a node may get one; otherwise others start first, and it proves nothing."""
    old, new = pair
    if old.pod is None or (new.pod is None and new.uncreated_pod is None):
        return old, new
    if new.pod is None and (old.loss is not None or not _leaves(old, leaving)):
        is_removed = old.pod.terminating and old.pod.name in leaving
        return (new, old) if is_removed else (old, new)
    if (old.loss is None) is not (new.loss is None):
        return (old, new) if old.loss is None else (new, old)
    if _leaves(old, leaving) and _has_no_node(context, new):
        others = partners.get(partition_of(old.slot), ())
        others = [s for s in others if s.slot.replica_index != old.slot.replica_index]
        old_goes = gates_may_open and any(may_replace(context, s, old.pod) for s in others)
    elif _leaves(old, leaving) is _leaves(new, leaving):
        is_live = replica_state(context, old) is ReplicaState.LIVE
        old_goes = not is_live and may_replace(context, new, old.pod)
    else:
        old_goes = _leaves(old, leaving) and may_replace(context, new, old.pod)
    return (new, old) if old_goes else (old, new)


def _was_lost(context: ReconcileContext, old: SlotState, new: SlotState) -> bool:
    """Whether a task was lost before its successor could replace it. One that is being deleted on a
    drained node was not."""
    if old.pod is None or old.loss in (None, Loss.TERMINATING):
        return False
    return old.loss.counts_as_failure and not may_replace(context, new, old.pod)


def _successor(
    context: ReconcileContext, replaced: SlotState, state: SlotState, leaving: frozenset[str]
) -> SlotState:
    """The state of the successor of a task that stays for now. If its own node is drained too, it
    is replaced by a pod elsewhere, unless only the successor may be live."""
    state = replace(state, is_successor=True)
    is_needed = (
        replica_state(context, state) in _MAY_BE_LIVE
        and replica_state(context, replaced) is not ReplicaState.LIVE
    )
    return state.lost(Loss.DRAINED) if _leaves(state, leaving) and not is_needed else state


def _has_no_node(context: ReconcileContext, successor: SlotState) -> bool:
    """Whether for a long time no node takes its pod, or a quota is full."""
    pod, uncreated, pass_inputs = successor.pod, successor.uncreated_pod, context.pass_inputs
    if pod is None:
        long_s, now = SUCCESSOR_WITHOUT_NODE_S, pass_inputs.now
        return uncreated is not None and uncreated.is_over_quota_for(long_s, now)
    if successor.phase not in (SlotPhase.GATED, SlotPhase.OPEN):
        return False
    is_old = pass_inputs.snapshot.pod_age_s(pod, pass_inputs.now) >= SUCCESSOR_WITHOUT_NODE_S
    is_gated = successor.phase is SlotPhase.GATED
    return (is_gated and is_old) or pod.failed_placements >= _UNBOUND_FOR_LONG


def _on_staying_nodes(
    replicas: Iterable[SlotPair], leaving: frozenset[str]
) -> Mapping[Partition, Sequence[SlotState]]:
    """By partition, the replicas that are on nodes that stay."""
    found: dict[Partition, list[SlotState]] = defaultdict(list)
    for numbered in replicas:
        for state in numbered:
            if state.phase is SlotPhase.BOUND and not _leaves(state, leaving):
                found[partition_of(state.slot)].append(state)
    return found
