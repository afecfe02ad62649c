"""Tasks that are taken away for a query that is down, and what says so. Pure.

Only while nothing else may change soon: the query's pods have waited for some seconds, the plan
opens no gate, and what tasks that end on usable nodes leave free would not suffice for it. A task
is offered only if its queries wait, according to this pass and to the status, and to a coordinator
that reports; or if it is a spare replica that has never served, of whatever query.

Design: docs/design/recovery.md#preemption.
"""

from __future__ import annotations

from collections.abc import Sequence

from rekindle import names
from rekindle.report import TaskReport
from rekindle.topology.spec import QuerySpec
from rekindle_operator.cluster.model import PodView
from rekindle_operator.reconcile.actions import Action, DeletePod, EmitEvent
from rekindle_operator.reconcile.context import PassInputs, ReconcileContext
from rekindle_operator.reconcile.phases import SlotPhase
from rekindle_operator.reconcile.planning import (
    PlanInput,
    missing_of,
    partition_key,
    query_priority,
)
from rekindle_operator.reconcile.slots import SlotState
from rekindle_operator.recovery.pack import Capacity
from rekindle_operator.recovery.plan import Plan
from rekindle_operator.recovery.preemption import (
    PodOnNode,
    Preemption,
    TakeablePod,
    find_preemption,
)
from rekindle_operator.topology_status import QueryState

_REASON = "Preempted"


def preempt(
    inputs: Sequence[PlanInput], plan: Plan, soon: Capacity, late: Sequence[PodOnNode]
) -> Preemption | None:
    """`soon`: the capacity once tasks have ended that end now; the plan has opened no gate. `late`:
    tasks that should have ended."""
    if not plan.waiting or plan.nodes:
        return None
    inputs = [plan_input for plan_input in inputs if _takes_part(plan_input)]
    missing = missing_of(inputs)
    waiting_keys = {ranked.key for ranked in plan.waiting} - plan.over_namespace_limit
    waited = {key for i in inputs for key in _needs_that_waited(i)}
    waiting = [q for q in missing.down if q.key in waiting_keys and q.needs <= waited]
    if not waiting:
        return None
    takeable = [pod for i in inputs for pod in _takeable(i, waiting_keys)]
    return find_preemption(waiting, missing.pods, takeable, soon, late)


def deletions(plan_input: PlanInput, preemption: Preemption | None) -> list[Action]:
    """Of the tasks of this topology that are taken away, each with an Event."""
    if preemption is None:
        return []
    taken = {pod.uid: pod for pod in preemption.taken}
    actions: list[Action] = []
    for state in plan_input.states:
        if state.pod is not None and (pod := taken.get(state.pod.uid)) is not None:
            actions += _deletion(plan_input, state, state.pod, pod, preemption)
    return actions


def _deletion(
    plan_input: PlanInput,
    state: SlotState,
    view: PodView,
    pod: TakeablePod,
    preemption: Preemption,
) -> list[Action]:
    topology, query = plan_input.context.view, preemption.query
    of_topology, name = query.key
    of = "" if of_topology == topology.key else f" of {of_topology}"
    task = f"a task of priority {pod.priority} whose queries are down"
    what = "a spare replica" if pod.is_spare else task
    why = f"{name}{of} (priority {query.priority}) is down and needs its capacity"
    note = f"{state.name} on {pod.node} is taken away, {what}: {why}"
    return [
        EmitEvent(
            topology.namespace,
            topology.name,
            topology.uid,
            warning=True,
            reason=_REASON,
            action="Plan",
            note=note,
            dedup_key=view.uid,
        ),
        DeletePod(
            view.namespace,
            view.name,
            view.uid,
            view.version,
            grace_s=None,
            why=why,
            plan_needs_its_capacity=True,
        ),
    ]


def _takes_part(plan_input: PlanInput) -> bool:
    context = plan_input.context
    if context.running is None or context.view.deleting or context.suspended:
        return False
    return context.running.topology.spec.recovery.mode != "Blocking"


def ending_tasks(pass_inputs: PassInputs, *, late: bool) -> list[PodOnNode]:
    """Tasks and standbys that end on usable nodes: whose capacity is free in a moment, or, if
    `late`, those that should have ended, and may never do so."""
    snapshot, usable = pass_inputs.snapshot, pass_inputs.losses.usable_nodes
    now, max_s = pass_inputs.now, pass_inputs.timing.ending_max_s
    return [
        PodOnNode(
            uid=pod.uid,
            node=pod.node,
            requests=pod.requests,
            group=partition_key(pod.owner_uid or "", pod.slot) if pod.slot is not None else "",
            replica=pod.slot.replica_index if pod.slot is not None else 0,
            namespace=pod.namespace if pod.topology is not None else "",
        )
        for pod in snapshot.pods
        if pod.role in (names.ROLE_TASK, names.ROLE_STANDBY)
        if pod.terminating and not pod.ended
        if pod.node is not None and pod.node in usable
        if (snapshot.ending_s(pod, now) >= max_s) == late
    ]


def _needs_that_waited(plan_input: PlanInput) -> set[str]:
    """Partitions with a gated pod that has waited for long enough."""
    pass_inputs = plan_input.context.pass_inputs
    snapshot, after_s = pass_inputs.snapshot, pass_inputs.timing.scheduling_timeout_s
    return {
        candidate.to_place.group
        for candidate in plan_input.candidates.values()
        if candidate.pod is not None
        and snapshot.pod_age_s(candidate.pod, pass_inputs.now) >= after_s
    }


def _takeable(plan_input: PlanInput, waiting: set[tuple[str, str]]) -> list[TakeablePod]:
    context = plan_input.context
    assert context.running is not None
    uid, topology = context.view.uid, context.running.topology
    users: dict[str, list[QuerySpec]] = {s.id: [] for s in topology.segments}
    for query in topology.spec.queries:
        for segment in topology.needed_segments(query):
            users[segment.id].append(query)
    by_partition: dict[str, list[SlotState]] = {}
    for state in plan_input.states:
        if _runs(state, context.pass_inputs):
            by_partition.setdefault(partition_key(uid, state.slot), []).append(state)
    # The state of other tasks would be lost without one; and they may answer tentatively soon.
    may_take_others = context.report.checkpoint is not None and not _may_go_on(plan_input)
    found = []
    for group, states in by_partition.items():
        of = users[states[0].slot.segment]
        answers = not all(_is_down(plan_input, query, waiting) for query in of)
        # The state is in the one that stays: the newest one of those that serve.
        kept = min(states, key=lambda s: (-_epoch_served(context, s), s.slot.replica_index))
        for state in states:
            if state.pod is None or (answers and _has_served(context, state)):
                continue
            is_spare = state is not kept and _can_stand_for(context, kept, state)
            if not is_spare and (answers or not may_take_others):
                continue
            found.append(
                TakeablePod(
                    uid=state.pod.uid,
                    node=state.pod.node or "",
                    requests=state.pod.requests,
                    group=group,
                    replica=state.slot.replica_index,
                    namespace=context.view.namespace,
                    users=frozenset((context.view.key, query.name) for query in of),
                    priority=max((query_priority(plan_input, q) for q in of), default=0),
                    is_spare=is_spare,
                )
            )
    return found


def _may_go_on(plan_input: PlanInput) -> bool:
    """Whether queries that lack an input may not have waited for it for `maxDelay` yet."""
    context = plan_input.context
    assert context.running is not None
    if (max_delay_us := context.running.topology.spec.max_delay) is None:
        return False
    pass_inputs = context.pass_inputs
    after_s = max_delay_us / 1e6 + 2 * pass_inputs.timing.scheduling_timeout_s
    return any(
        candidate.pod is None
        or pass_inputs.snapshot.pod_age_s(candidate.pod, pass_inputs.now) < after_s
        for candidate in plan_input.candidates.values()
    )


def _runs(state: SlotState, pass_inputs: PassInputs) -> bool:
    return (
        state.phase is SlotPhase.BOUND
        and state.holds_capacity
        and not state.is_successor
        and state.pod is not None
        and not state.pod.terminating
        and state.pod.node in pass_inputs.losses.usable_nodes
    )


def _can_stand_for(context: ReconcileContext, kept: SlotState, other: SlotState) -> bool:
    """It has the state and the log of the other one, as their coordinator reports now."""
    if context.report_stale_since is not None or other.pod is None:
        return False
    report = _report_of(context, other)
    epoch = report.stable_epoch if report is not None else None
    return _epoch_served(context, kept) >= (0 if epoch is None else max(epoch, 0))


def _has_served(context: ReconcileContext, state: SlotState) -> bool:
    """Its coordinator knows seconds before its kubelet reports that it is ready."""
    return state.pod is not None and (state.pod.was_ready or _serves(_report_of(context, state)))


def _epoch_served(context: ReconcileContext, state: SlotState) -> int:
    """The newest epoch that readers may read from it; -1: none."""
    if state.pod is None or not state.pod.was_ready:
        return -1
    report = _report_of(context, state)
    if report is None or report.suspected or report.untrusted or report.stable_epoch is None:
        return -1
    return report.stable_epoch if _serves(report) else -1


def _report_of(context: ReconcileContext, state: SlotState) -> TaskReport | None:
    assert state.pod is not None
    return context.report.task(state.slot.key, state.pod.incarnation)


def _serves(report: TaskReport | None) -> bool:
    return report is not None and report.phase is not None and report.phase.serves


def _is_down(plan_input: PlanInput, query: QuerySpec, waiting: set[tuple[str, str]]) -> bool:
    """It has no results: it lacks a partition, and does not go on without it either."""
    entry = plan_input.context.last_status.queries.get(query.name)
    is_waiting = entry is not None and entry.state is QueryState.WAITING
    return is_waiting and (plan_input.context.view.key, query.name) in waiting
