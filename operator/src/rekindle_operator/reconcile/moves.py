"""Planned moves: a task on a cordoned node, or one that moves to an emptier node (`rebalancing`),
gets a successor on another one, and stays until the successor has taken over. Pure.

The successor is the same replica under its other number (`Slot.alternate`), so both run at once and
are two ordinary replicas for everybody else: the successor gets its state from the one that runs.
Which of the two the topology counts on follows from the pods and the report alone.

Design: docs/design/planned-moves.md.
Paper: Flux (Shah et al. 2004), sections 3.4 and 5.3.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice

from rekindle_operator.dataplane import TaskReport
from rekindle_operator.reconcile.context import ReconcileContext
from rekindle_operator.reconcile.health import Partition, ReplicaState, replica_state
from rekindle_operator.reconcile.phases import SlotPhase
from rekindle_operator.reconcile.slots import NumberedStates, SlotState, task_pods
from rekindle_operator.recovery.losses import Loss

MOVES_AT_ONCE = 2
"""Of a topology: successors that start take the CPU of those that run."""
WITHOUT_NODE_S = 60.0
"""How long a successor may find no node before a task with a live partner is removed without it."""
_SINK_BEHIND_EPOCHS = 3
"""How far the sinks of a successor may be behind: they begin at the base of the log."""


def with_moves(
    context: ReconcileContext,
    replicas: Sequence[NumberedStates],
    leaving: frozenset[str] = frozenset(),
) -> tuple[SlotState, ...]:
    """One state for each replica, and one for each successor that runs or is to be created.
    `leaving`: names of pods that are to be replaced although their nodes are not cordoned."""
    leaving |= _pods_on_draining_nodes(context)
    elsewhere = _live_elsewhere(context, replicas, leaving)
    chosen = [_choose(context, r, leaving, elsewhere) for r in replicas]
    moving = [(state, other) for state, other in chosen if _leaves(state, leaving)]
    running = [_successor(other, leaving) for _, other in moving if other.pod is not None]
    waiting = (
        replace(other, is_successor=True, loss=None)
        for state, other in moving
        if other.pod is None and replica_state(context, state) is ReplicaState.LIVE
    )
    starting = sum(not finds_no_node(context, state) for state in running)
    started = list(islice(waiting, max(0, MOVES_AT_ONCE - starting)))
    return (*(state for state, _ in chosen), *running, *started)


def draining_nodes(context: ReconcileContext) -> frozenset[str]:
    """Nodes that take no new pods, and that are not lost."""
    losses = context.pass_inputs.losses
    nodes = context.pass_inputs.snapshot.nodes
    return frozenset(n.name for n in nodes if n.cordoned and n.name not in losses.lost_nodes)


def _pods_on_draining_nodes(context: ReconcileContext) -> frozenset[str]:
    draining = draining_nodes(context)
    return frozenset(p.name for p in task_pods(context) if p.node in draining)


def _choose(
    context: ReconcileContext,
    replicas: NumberedStates,
    leaving: frozenset[str],
    elsewhere: Mapping[Partition, frozenset[int]],
) -> tuple[SlotState, SlotState]:
    """The one that the topology counts on, and the other one."""
    first, second = replicas
    if second.pod is None:
        return first, second
    if first.pod is None:
        return second, first
    for old, new in ((first, second), (second, first)):
        if _leaves(old, leaving) and finds_no_node(context, new):
            partition = (old.slot.segment, old.slot.partition)
            partners = elsewhere.get(partition, frozenset()) - {old.slot.index}
            return (new, old) if partners else (old, new)

    newest = max((_durable(context, s) for s in replicas), default=-1)

    def preference(state: SlotState) -> tuple[bool, bool, bool, bool, int]:
        is_live = replica_state(context, state) is ReplicaState.LIVE
        has_written = _durable(context, state) >= newest - _SINK_BEHIND_EPOCHS
        was_ready = state.pod is not None and state.pod.was_ready
        return (
            state.loss is None,
            is_live and has_written,
            was_ready,
            not _leaves(state, leaving),
            -state.slot.replica,
        )

    best, other = sorted(replicas, key=preference, reverse=True)
    return best, other


def _successor(state: SlotState, leaving: frozenset[str]) -> SlotState:
    """Of one that stays for now. On a node that is drained too, it is made anew elsewhere."""
    state = replace(state, is_successor=True)
    return state.lost(Loss.DRAINED) if _leaves(state, leaving) else state


def _leaves(state: SlotState, leaving: frozenset[str]) -> bool:
    return state.phase is SlotPhase.BOUND and state.pod is not None and state.pod.name in leaving


def finds_no_node(context: ReconcileContext, state: SlotState) -> bool:
    """Its pod has been waiting for a node for too long."""
    if state.phase is not SlotPhase.GATED or state.pod is None:
        return False
    return context.pass_inputs.now - state.pod.created_at >= WITHOUT_NODE_S


def _durable(context: ReconcileContext, state: SlotState) -> int:
    """What its sinks have; -1 if it has none, or reports none."""
    report = _report(context, state)
    durable = report.durable_epoch if report is not None else None
    return -1 if durable is None else durable


def _report(context: ReconcileContext, state: SlotState) -> TaskReport | None:
    if state.pod is None:
        return None
    return context.report.task(state.slot.key, state.pod.incarnation)


def _live_elsewhere(
    context: ReconcileContext, replicas: Iterable[NumberedStates], leaving: frozenset[str]
) -> Mapping[Partition, frozenset[int]]:
    """By partition, the replicas that are live on nodes that stay."""
    found: dict[Partition, set[int]] = defaultdict(set)
    for state in _both(replicas):
        if replica_state(context, state) is ReplicaState.LIVE and not _leaves(state, leaving):
            found[state.slot.segment, state.slot.partition].add(state.slot.index)
    return {partition: frozenset(indexes) for partition, indexes in found.items()}


def _both(replicas: Iterable[NumberedStates]) -> Iterator[SlotState]:
    for first, second in replicas:
        yield first
        yield second
