"""Planned moves: a task on a cordoned node gets a successor on another one, and stays until the
successor has taken over. Pure.

The successor is the same replica under its other number (`Slot.alternate`), so both run at once and
are two ordinary replicas for everybody else: the successor gets its state from the one that runs.
Which of the two the topology counts on follows from the pods and the report alone.

Design: docs/design/planned-moves.md.
Paper: Flux (Shah et al. 2004), sections 3.4 and 5.3.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice

from rekindle_operator.reconcile.context import ReconcileContext
from rekindle_operator.reconcile.health import (
    Partition,
    ReplicaState,
    may_replace,
    replica_state,
)
from rekindle_operator.reconcile.phases import SlotPhase
from rekindle_operator.reconcile.slots import NumberedStates, SlotState
from rekindle_operator.recovery.losses import Loss

MOVES_AT_ONCE = 2
"""Of a topology: successors that start take the CPU of those that run."""
WITHOUT_NODE_S = 60.0
"""How long a successor may find no node before a task with a live partner is removed without it."""
_MAY_BE_LIVE = (ReplicaState.LIVE, ReplicaState.UNKNOWN)


def with_moves(
    context: ReconcileContext, replicas: Sequence[NumberedStates]
) -> tuple[SlotState, ...]:
    """One state for each replica, and one for each successor that runs or is to be created."""
    draining = draining_nodes(context)
    partners = _on_staying_nodes(replicas, draining)
    chosen = [_choose(context, r, draining, partners) for r in replicas]
    moving = [(state, other) for state, other in chosen if _is_on(state, draining)]
    running = [_successor(context, state, other, draining) for state, other in moving if other.pod]
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


def _choose(
    context: ReconcileContext,
    replicas: NumberedStates,
    draining: frozenset[str],
    partners: Mapping[Partition, Sequence[SlotState]],
) -> tuple[SlotState, SlotState]:
    """The one that the topology counts on, and the other one."""
    first, second = replicas
    if second.pod is None:
        return first, second
    if first.pod is None:
        return second, first
    if (first.loss is None) is not (second.loss is None):
        return (first, second) if first.loss is None else (second, first)
    old, new = (first, second) if first.pod.created_at <= second.pod.created_at else (second, first)
    assert old.pod is not None
    if _is_on(old, draining) and finds_no_node(context, new):
        others = partners.get((old.slot.segment, old.slot.partition), ())
        others = [s for s in others if s.slot.index != old.slot.index]
        goes = any(may_replace(context, s, old.pod) for s in others)
    elif _is_on(old, draining) is _is_on(new, draining):
        is_live = replica_state(context, old) is ReplicaState.LIVE
        goes = not is_live and may_replace(context, new, old.pod)
    else:
        goes = _is_on(old, draining) and may_replace(context, new, old.pod)
    return (new, old) if goes else (old, new)


def _successor(
    context: ReconcileContext, replaced: SlotState, state: SlotState, draining: frozenset[str]
) -> SlotState:
    """Of one that stays for now. On a node that is drained too, it is made anew elsewhere, unless
    it alone may be live."""
    state = replace(state, is_successor=True)
    is_needed = (
        replica_state(context, state) in _MAY_BE_LIVE
        and replica_state(context, replaced) is not ReplicaState.LIVE
    )
    return state.lost(Loss.DRAINED) if _is_on(state, draining) and not is_needed else state


def _is_on(state: SlotState, draining: frozenset[str]) -> bool:
    return state.phase is SlotPhase.BOUND and state.pod is not None and state.pod.node in draining


def finds_no_node(context: ReconcileContext, state: SlotState) -> bool:
    """Its pod has been waiting for a node for too long."""
    if state.phase is not SlotPhase.GATED or state.pod is None:
        return False
    return context.pass_inputs.now - state.pod.created_at >= WITHOUT_NODE_S


def _on_staying_nodes(
    replicas: Iterable[NumberedStates], draining: frozenset[str]
) -> Mapping[Partition, Sequence[SlotState]]:
    """By partition, the replicas that are on nodes that stay."""
    found: dict[Partition, list[SlotState]] = defaultdict(list)
    for numbered in replicas:
        for state in numbered:
            if state.phase is SlotPhase.BOUND and not _is_on(state, draining):
                found[state.slot.segment, state.slot.partition].append(state)
    return found
