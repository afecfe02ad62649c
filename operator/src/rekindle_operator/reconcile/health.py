"""State of replicas, partitions and queries, from pods and the coordinator's report. Pure.

Design: docs/operations.md#watch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum, auto

from rekindle.protocol import ConsistencyState, TaskPhase
from rekindle.report import TaskReport
from rekindle.topology.model import Partition, Slot, partition_of
from rekindle.topology.spec import QuerySpec
from rekindle_operator.cluster.convert import parse_time, rfc3339
from rekindle_operator.cluster.model import PodView
from rekindle_operator.reconcile.context import ReconcileContext, coordinator_pods
from rekindle_operator.reconcile.slots import SlotState
from rekindle_operator.recovery.misfits import Misfits, NodeCapacity, PodToPlace
from rekindle_operator.recovery.plan import OVER_NAMESPACE_LIMIT
from rekindle_operator.recovery.start_failures import is_same_everywhere
from rekindle_operator.topology_status import QueryEntry, QueryState

REASON_LIMIT = 400
_LIVE_WITHIN_EPOCHS = 10
"""How far the sink of a live query may be behind its sources, and at least `_LIVE_WITHIN_S`: while
its upstream starts, a task receives nothing newer, and reports Live."""
_LIVE_WITHIN_S = 5.0
_SINK_BEHIND_EPOCHS = 3
"""How far the sinks of a task may be behind those of one that it replaces: those of a new task
first compare what is written already, from the first epoch that its output log holds."""
_SHOWN_PARTITIONS = 5


class ReplicaState(IntEnum):
    """Best first: a partition has the state of its best replica, and `UNKNOWN` if one may be live;
    a query has the state of its worst partition."""

    LIVE = auto()
    CATCHING_UP = auto()
    RESTORING = auto()
    STARTING = auto()  # it has a node, its task has not responded to the coordinator yet
    FAILED = auto()
    UNKNOWN = auto()  # it ran when the coordinator reported last, which is too long ago
    WAITING = auto()  # for a node


_STATE_BY_TASK_PHASE: Mapping[TaskPhase, ReplicaState] = {
    TaskPhase.WAITING: ReplicaState.STARTING,
    TaskPhase.RESTORING: ReplicaState.RESTORING,
    TaskPhase.CATCHING_UP: ReplicaState.CATCHING_UP,
    TaskPhase.LIVE: ReplicaState.LIVE,
    TaskPhase.STOPPING: ReplicaState.STARTING,
    TaskPhase.FAILED: ReplicaState.FAILED,
}

_QUERY_STATE: Mapping[ReplicaState, QueryState] = {
    ReplicaState.LIVE: QueryState.LIVE,
    ReplicaState.CATCHING_UP: QueryState.CATCHING_UP,
    ReplicaState.RESTORING: QueryState.RESTORING,
    ReplicaState.STARTING: QueryState.RESTORING,
    ReplicaState.FAILED: QueryState.FAILED,
    ReplicaState.UNKNOWN: QueryState.UNKNOWN,
    ReplicaState.WAITING: QueryState.WAITING,
}

_WAITING_FOR: Mapping[ReplicaState, str] = {
    ReplicaState.CATCHING_UP: "catch-up of",
    ReplicaState.RESTORING: "state restore of",
    ReplicaState.STARTING: "start of tasks of",
    ReplicaState.FAILED: "recovery of failed tasks of",
    ReplicaState.WAITING: "a node for",
}

_NOT_CREATED = "the pods of"  # what there is none of yet needs no node yet


@dataclass(frozen=True, slots=True)
class QueryHealth:
    """`waiting_for` names what is missing; empty: nothing. `durable_epoch`: the newest one that is
    in the sink for good; `complete_until`: the time up to which its results are complete; `lag_s`:
    their age; `finished_generation`: in which its input has ended, and they are complete."""

    name: str
    priority: int
    state: QueryState
    waiting_for: str = ""
    durable_epoch: int | None = None
    lag_s: float | None = None
    complete_until: float | None = None
    finished_generation: int | None = None


@dataclass(frozen=True, slots=True)
class Health:
    queries: tuple[QueryHealth, ...]
    live: int  # slots whose task is live
    slots: int

    @property
    def queries_live(self) -> int:
        return sum(q.state is QueryState.LIVE for q in self.queries)

    @property
    def is_unknown(self) -> bool:
        return any(q.state is QueryState.UNKNOWN for q in self.queries)


def health_of(
    context: ReconcileContext,
    states: Sequence[SlotState],
    surplus: Iterable[PodView],
    over_namespace_limit: Container[str] = (),
) -> Health:
    """`surplus`: replicas that have moved, or that an edit removes, and that serve until others do.
    `over_namespace_limit`: queries that wait because their namespace has used its share of the
    cluster; "" for all."""
    replicas: dict[Partition, list[ReplicaState]] = defaultdict(list)
    for state in states:
        replicas[partition_of(state.slot)].append(replica_state(context, state))
    for pod in surplus:
        if pod.slot is not None:
            found = _state_of_pod(context, pod.slot, pod)
            replicas[partition_of(pod.slot)].append(found)
    partitions = {
        key: ReplicaState.UNKNOWN if ReplicaState.UNKNOWN in found else min(found)
        for key, found in replicas.items()
    }
    queries = context.running.topology.spec.queries if context.running else ()
    all_over_limit = "" in over_namespace_limit
    counted = without_successors(states)
    return Health(
        queries=tuple(
            _query(context, q, states, partitions, all_over_limit or q.name in over_namespace_limit)
            for q in queries
        ),
        live=sum(replica_state(context, s) is ReplicaState.LIVE for s in counted),
        slots=len(counted),
    )


def without_successors(states: Iterable[SlotState]) -> list[SlotState]:
    """The replicas that the spec requires: successors in planned moves come in addition."""
    return [s for s in states if not s.is_successor]


def replica_state(context: ReconcileContext, state: SlotState) -> ReplicaState:
    if not state.holds_capacity or state.pod is None:
        return ReplicaState.WAITING
    return _state_of_pod(context, state.slot, state.pod)


def _state_of_pod(context: ReconcileContext, slot: Slot, pod: PodView) -> ReplicaState:
    """What its task reports, as long as the report is fresh."""
    if context.report_stale_since is not None:
        return ReplicaState.UNKNOWN if pod.was_ready else ReplicaState.STARTING
    task = context.report.task(slot.key, pod.incarnation)
    if task is None or task.suspected or task.phase is None:
        return ReplicaState.STARTING
    return _STATE_BY_TASK_PHASE[task.phase]


def may_replace(context: ReconcileContext, state: SlotState, other: PodView) -> bool:
    """Whether a task can do without delay what another one of its partition does: it is live, may
    be read, and its sinks are up to date.

    They are compared with those of the other one. If its report proves nothing, because it is
    suspected, starts again, or has no sinks yet, they have to have what the task itself has
    computed."""
    if replica_state(context, state) is not ReplicaState.LIVE or state.pod is None:
        return False
    own = context.report.task(state.slot.key, state.pod.incarnation)
    if own is None or own.untrusted:
        return False
    if not state.segment.queries:
        return True
    if own.durable_epoch is None or other.slot is None:
        return False
    report = context.report.task(other.slot.key, other.incarnation)
    wanted = report.durable_epoch if report is not None else None
    if wanted is None or _state_of_pod(context, other.slot, other) is not ReplicaState.LIVE:
        if own.stable_epoch is None:
            return False
        wanted = own.stable_epoch if wanted is None else max(wanted, own.stable_epoch)
    return own.durable_epoch >= wanted - _SINK_BEHIND_EPOCHS


def still_needed(
    context: ReconcileContext, states: Iterable[SlotState], surplus: Iterable[PodView]
) -> list[PodView]:
    """The surplus replicas that no replica which stays may replace."""
    staying: dict[Partition, list[SlotState]] = defaultdict(list)
    for state in without_successors(states):
        staying[partition_of(state.slot)].append(state)
    return [
        pod
        for pod in surplus
        if pod.slot is not None
        and not any(may_replace(context, state, pod) for state in staying[partition_of(pod.slot)])
    ]


def _query(
    context: ReconcileContext,
    query: QuerySpec,
    states: Sequence[SlotState],
    partitions: Mapping[Partition, ReplicaState],
    over_namespace_limit: bool,
) -> QueryHealth:
    assert context.running is not None
    if context.suspended:
        return QueryHealth(query.name, query.priority, QueryState.WAITING, "spec.suspend is true")
    names = {s.id: s.name for s in context.running.topology.needed_segments(query)}
    needed = {p: state for p, state in partitions.items() if p.segment in names}
    worst = max(needed.values(), default=ReplicaState.WAITING)
    what = _WAITING_FOR.get(worst, "")
    if worst is ReplicaState.RESTORING and context.report.checkpoint is None:
        what = _WAITING_FOR[ReplicaState.STARTING]  # there is no state yet
    of_worst = [p for p, state in needed.items() if state is worst]
    worst_names = [f"{names[p.segment]}/{p.index}" for p in of_worst]
    reasons = sorted({_reason(context, s) for s in states if _is_needed(s, needed)} - {""})
    if worst is ReplicaState.WAITING:
        waiting = [s for s in states if _is_needed(s, of_worst)]
        reasons += sorted({s.no_node for s in waiting} - {""})
        if all(s.pod is None for s in waiting):
            what = _NOT_CREATED
    if over_namespace_limit:
        reasons.insert(0, OVER_NAMESPACE_LIMIT)
    found = _with_progress(context, query)
    lag_s = _reported_lag_s(context, query.name)
    queried = context.running.topology.queried_segment(query).id
    has_output = all(s is ReplicaState.LIVE for p, s in needed.items() if p.segment == queried)
    missing = _missing_inputs(context, [s for s in states if _is_needed(s, needed)], names)
    if has_output and missing:
        waiting_for = "; ".join(
            filter(None, (missing, _waiting_for(context, worst, what, worst_names, reasons)))
        )
        return _with_lag(
            context, replace(found, state=QueryState.TENTATIVE, waiting_for=waiting_for)
        )
    is_behind = lag_s is not None and lag_s > _live_within_s(context, query.name)
    if worst is ReplicaState.LIVE and is_behind:
        worst, worst_names = ReplicaState.CATCHING_UP, [f"the sink of {query.name}"]
        what = _WAITING_FOR[worst]
    waiting_for = _waiting_for(context, worst, what, worst_names, reasons)
    return _with_lag(context, replace(found, state=_QUERY_STATE[worst], waiting_for=waiting_for))


def _with_progress(context: ReconcileContext, query: QuerySpec) -> QueryHealth:
    """How far its results are. A new coordinator knows less than the status until tasks respond."""
    assert context.running is not None
    report = context.report.queries.get(query.name)
    before = context.last_status.queries.get(query.name) or QueryEntry(query.name)
    reported = report.durable_epoch if report is not None else None
    epochs = [e for e in (reported, before.durable_epoch) if e is not None]
    generation = context.running.generation
    is_finished = report is not None and report.finished and context.report.generation == generation
    is_finished |= before.finished_generation == generation
    durable_epoch = max(epochs, default=None)
    return QueryHealth(
        query.name,
        query.priority,
        QueryState.WAITING,
        durable_epoch=durable_epoch,
        complete_until=_complete_until(context, durable_epoch),
        finished_generation=generation if is_finished else None,
    )


def _complete_until(context: ReconcileContext, durable_epoch: int | None) -> float | None:
    """The end of an epoch, as sources release it. Of a query without any result: when it could
    begin to have some."""
    assert context.running is not None
    if durable_epoch is None:
        return None
    origin = parse_time(context.view.creation_timestamp)
    if durable_epoch < 0:
        accepted_at = context.last_status.condition("Valid").last_transition_time
        return max(origin, parse_time(accepted_at))
    return origin + (durable_epoch + 1) * context.running.topology.spec.epoch_interval / 1e6


def _reported_lag_s(context: ReconcileContext, query: str) -> float | None:
    report = context.report.queries.get(query)
    return report.lag_s if report and context.report_stale_since is None else None


def _with_lag(context: ReconcileContext, query: QueryHealth) -> QueryHealth:
    """The coordinator measures the lag of a live query by the clocks of its sources. It does not
    know that of a query without sources that run."""
    reported = _reported_lag_s(context, query.name)
    if query.finished_generation is not None:
        return replace(query, lag_s=0.0)
    if query.state is QueryState.LIVE and reported is not None:
        return replace(query, lag_s=reported + context.report_age_s)
    ages = [reported] if reported is not None else []
    if query.complete_until is not None:
        ages.append(max(0.0, context.pass_inputs.now - query.complete_until))
    return replace(query, lag_s=max(ages, default=None))


def _missing_inputs(
    context: ReconcileContext, states: Iterable[SlotState], names: Mapping[str, str]
) -> str:
    """What the partitions lack whose output is tentative: no live replica has stable output. Empty
    if there are none."""
    live: dict[Partition, list[TaskReport]] = defaultdict(list)
    for state in states:
        if replica_state(context, state) is ReplicaState.LIVE and state.pod is not None:
            task = context.report.task(state.slot.key, state.pod.incarnation)
            if task is not None:
                live[partition_of(state.slot)].append(task)
    found = []
    for partition, tasks in sorted(live.items()):
        if all(task.output_state != ConsistencyState.STABLE for task in tasks):
            inputs = sorted({name for task in tasks for name in task.missing_inputs})
            what = f"input {', '.join(inputs)}" if inputs else "the correction"
            found.append(f"{what} of {names[partition.segment]}/{partition.index}")
    more = " ..." if len(found) > _SHOWN_PARTITIONS else ""
    return ", ".join(found[:_SHOWN_PARTITIONS]) + more


def bad_records(context: ReconcileContext) -> dict[str, str]:
    """Sources of which tasks have left out records, and an example of each."""
    if context.running is None:
        return {}
    sources = {s.id: s.nodes[0] for s in context.running.topology.segments if s.is_source}
    return {
        source: report.bad_record
        for report in context.report.tasks.values()
        if report.bad_records and (source := sources.get(report.slot.partition("/")[0]))
    }


def hot_keys(context: ReconcileContext) -> dict[str, str]:
    """By "operator/partition": which key most rows have, as a replica says it."""
    if context.running is None:
        return {}
    operators = {s.id: s.nodes[0] for s in context.running.topology.segments}
    found = dict[str, str]()
    for slot, report in sorted(context.report.tasks.items()):
        segment, _, rest = slot.partition("/")
        if report.hot_key and segment in operators:
            found.setdefault(f"{operators[segment]}/{rest.partition('/')[0]}", report.hot_key)
    return found


def _live_within_s(context: ReconcileContext, query: str) -> float:
    """The maximum lag of a live query. Half of it for a query that was not live, so that its state
    does not alternate when the lag is near the limit; an `Unknown` query may have been live."""
    assert context.running is not None
    epochs_s = _LIVE_WITHIN_EPOCHS * context.running.topology.spec.epoch_interval / 1e6
    limit_s = max(_LIVE_WITHIN_S, epochs_s)
    before = context.last_status.queries.get(query)
    may_be_live = (QueryState.LIVE, QueryState.UNKNOWN)
    return limit_s if before is None or before.state in may_be_live else limit_s / 2


def stale_report_message(context: ReconcileContext) -> str:
    """A text that does not change while the report stays outdated."""
    if context.report_stale_since is None:
        return "the coordinator's report is fresh"
    coordinator = _coordinator_waits_for(context)
    stale = f"no report from the coordinator since {rfc3339(context.report_stale_since)}"
    return stale + (f"; {coordinator}" if coordinator else "")


def _coordinator_waits_for(context: ReconcileContext) -> str:
    """A node, or a Secret or ConfigMap that does not exist. Empty: neither."""
    newest = max(coordinator_pods(context), key=lambda p: p.incarnation, default=None)
    if newest is not None and is_same_everywhere(newest.container_error):
        return f"the start of the coordinator ({newest.container_error[:REASON_LIMIT]})"
    return coordinator_without_node(context)


def coordinator_without_node(context: ReconcileContext) -> str:
    """What its newest pod waits for, and why; empty: it has a node, or may get one in a moment."""
    pods, pass_inputs = coordinator_pods(context), context.pass_inputs
    pod = max(pods, key=lambda p: p.incarnation, default=None)
    if pod is None or pod.node is not None or pod.ended or pod.terminating:
        return ""
    age_s = pass_inputs.snapshot.pod_age_s(pod, pass_inputs.now)
    if age_s < pass_inputs.timing.scheduling_timeout_s:
        return ""
    usable = pass_inputs.losses.usable_nodes
    empty = {name: NodeCapacity(node, node.allocatable) for name, node in usable.items()}
    why = Misfits(empty).why(PodToPlace.of_pod(pod))
    why = why or (f"scheduler: {pod.placement_failure}" if pod.placement_failure else "")
    return "a node for the coordinator" + (f" ({why[:REASON_LIMIT]})" if why else "")


def _is_needed(state: SlotState, needed: Container[Partition]) -> bool:
    return partition_of(state.slot) in needed


def _reason(context: ReconcileContext, state: SlotState) -> str:
    """Why its pod is not created, placed or started, or the problem that its task reports."""
    task = context.report.task(state.slot.key, state.pod.incarnation) if state.pod else None
    return state.refusal or (task.problem if task is not None else "")


def _waiting_for(
    context: ReconcileContext,
    worst: ReplicaState,
    what: str,
    names: Sequence[str],
    reasons: Sequence[str],
) -> str:
    if worst is ReplicaState.LIVE:
        return ""
    if context.view.deleting:
        return "nothing: the topology is being deleted"
    more = " ..." if len(names) > _SHOWN_PARTITIONS else ""
    shown = ", ".join(names[:_SHOWN_PARTITIONS]) + more
    if worst is ReplicaState.UNKNOWN:
        return f"{stale_report_message(context)}; the state of {shown} is unknown"
    detail = f" ({reasons[0][:REASON_LIMIT]})" if reasons else ""
    coordinator = _coordinator_waits_for(context)
    return f"{what} {shown}{detail}" + (f"; {coordinator}" if coordinator else "")
