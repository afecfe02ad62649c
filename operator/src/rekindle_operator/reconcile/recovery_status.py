"""`status.recovery`: when a recovery began, its plan, and when each query was live again. Pure.

The open entry of the history is all the state there is, so another operator continues it. A
recovery ends when every query that it concerns is live and every replacement that got a node runs;
replicas that wait for capacity do not keep it open.

Design: docs/design/recovery.md#report.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rekindle_operator.cluster.convert import parse_time, rfc3339
from rekindle_operator.reconcile.context import ReconcileContext
from rekindle_operator.reconcile.health import Health, ReplicaState, replica_state
from rekindle_operator.reconcile.phases import SlotPhase
from rekindle_operator.reconcile.slots import SlotState
from rekindle_operator.recovery.losses import LossAssessment
from rekindle_operator.recovery.plan import Plan
from rekindle_operator.topology_status import (
    QueryState,
    RecoveredQuery,
    RecoveryEntry,
    RecoveryStatus,
)

HISTORY = 10
MAX_LOST_NODES = 500
"""Of one recovery, for the API server refuses a status with more than 1,000. A recovery stays open
while a query cannot run, and each machine that is lost meanwhile has another name."""


def update_recovery(
    context: ReconcileContext, states: Sequence[SlotState], health: Health, plan: Plan
) -> RecoveryStatus:
    """Of a topology that runs."""
    assert context.running is not None
    now, old = context.pass_inputs.now, context.last_status.recovery
    # What ends while the topology is being deleted is not replaced.
    has_losses = any(_is_loss(s) for s in states) and not context.view.deleting
    entry = old.newest if old.newest is not None and not old.newest.finished_at else None
    if entry is None and not has_losses:
        return RecoveryStatus(history=old.history)
    earlier = old.history if entry is None else old.history[1:]
    entry = _updated(context, entry or RecoveryEntry(started_at=rfc3339(now)), states, health)
    if not context.needs_pods or (not has_losses and _is_over(context, states, entry)):
        finished = replace(entry, finished_at=rfc3339(now))
        return RecoveryStatus(history=(finished, *earlier)[:HISTORY])
    order = _order(context, old.plan, health, plan)
    return RecoveryStatus(is_active=True, plan=order, history=(entry, *earlier)[:HISTORY])


def _updated(
    context: ReconcileContext, entry: RecoveryEntry, states: Sequence[SlotState], health: Health
) -> RecoveryEntry:
    assert context.running is not None
    elapsed_s = context.pass_inputs.now - parse_time(entry.started_at)
    return replace(
        entry,
        mode=context.running.topology.spec.recovery.mode,
        lost_nodes=_with_lost_nodes(entry, _lost_nodes(states, context.pass_inputs.losses)),
        queries=_queries(entry.queries, health, elapsed_s),
    )


def _is_loss(state: SlotState) -> bool:
    """Something that ran was lost. A gated pod that someone deleted did not run."""
    ran = state.loss is not None and state.loss.counts_as_failure
    return ran and state.phase_without_loss in (SlotPhase.BOUND, SlotPhase.NO_POD)


def _with_lost_nodes(entry: RecoveryEntry, lost: set[str]) -> tuple[str, ...]:
    """Those of the entry first, up to the limit."""
    fresh = sorted(lost.difference(entry.lost_nodes))
    return tuple(sorted([*entry.lost_nodes, *fresh][:MAX_LOST_NODES]))


def _lost_nodes(states: Sequence[SlotState], losses: LossAssessment) -> set[str]:
    return {
        s.pod.node
        for s in states
        if s.pod is not None and s.pod.node is not None and losses.is_on_lost_node(s.pod)
    }


def _queries(
    known: Sequence[RecoveredQuery], health: Health, elapsed_s: float
) -> tuple[RecoveredQuery, ...]:
    """Every query that was down at some time since the start, and when it was live again."""
    found = {q.name: q for q in known}
    for query in health.queries:
        if query.state is QueryState.UNKNOWN:
            continue
        if query.state is not QueryState.LIVE:
            found[query.name] = RecoveredQuery(query.name)
        elif query.name in found and not found[query.name].live_after:
            live_after = f"{max(elapsed_s, 0.0):.1f}s"
            found[query.name] = RecoveredQuery(query.name, live_after)
    names = {q.name for q in health.queries}
    return tuple(found[name] for name in sorted(found) if name in names)


def _is_over(context: ReconcileContext, states: Sequence[SlotState], entry: RecoveryEntry) -> bool:
    settled = (ReplicaState.LIVE, ReplicaState.FAILED)
    is_starting = any(
        s.holds_capacity
        and s.pod is not None
        and s.pod.predecessor_lost_at is not None
        and replica_state(context, s) not in settled
        for s in states
    )
    return all(q.live_after for q in entry.queries) and not is_starting


def _order(
    context: ReconcileContext, before: Sequence[str], health: Health, plan: Plan
) -> tuple[str, ...]:
    """Queries that have started, in the order in which they did; others that are down and
    need no more capacity; then those that start now; then those that wait."""
    key = context.view.key
    now = [r.key[1] for r in plan.starting_now if r.key[0] == key]
    later = [r.key[1] for r in plan.waiting if r.key[0] == key]
    if "" in now or "" in later:  # all queries together (mode Blocking)
        return tuple(q.name for q in sorted(health.queries, key=lambda q: -q.priority))
    not_down = (QueryState.LIVE, QueryState.UNKNOWN)
    names = {q.name for q in health.queries}
    started = [n for n in before if n in names and n not in {*now, *later}]
    in_progress = sorted(
        (
            q
            for q in health.queries
            if q.state not in not_down and q.name not in {*started, *now, *later}
        ),
        key=lambda q: (-q.priority, q.name),
    )
    return (*started, *(q.name for q in in_progress), *now, *later)
