"""The operator's complete part of `status`, as server-side apply needs it. Pure.

Built in each pass and written only when it differs. Fields that change with every epoch are
written less often.

Design: docs/design/kubernetes.md#status.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rekindle.report import CheckpointReport
from rekindle_operator.cluster.convert import parse_time, rfc3339
from rekindle_operator.cluster.model import TopologyView
from rekindle_operator.crd_fields import without_missing
from rekindle_operator.reconcile.conditions import (
    OperatorProblem,
    condition_entries,
    conditions_of,
    conditions_of_undecided,
)
from rekindle_operator.reconcile.context import ReconcileContext
from rekindle_operator.reconcile.health import (
    Health,
    QueryHealth,
    ReplicaState,
    bad_records,
    hot_keys,
    replica_state,
    without_successors,
)
from rekindle_operator.reconcile.phases import (
    BEFORE_RUNNING,
    next_topology_phase,
    phase_when_unknown,
    was_live,
)
from rekindle_operator.reconcile.records import generation_entries, with_generation
from rekindle_operator.reconcile.slots import SlotState
from rekindle_operator.topology_status import (
    QueryEntry,
    QueryState,
    RebalancingEntry,
    RecoveryStatus,
    TopologyOperatorEntry,
    TopologyPhase,
    TopologyStatus,
    read_topology_status,
)

_RESERVATIONS = ("slots", "generations")
_COORDINATOR_FIELD = "dataPlane"
_MAX_WAITING_FOR_CHARS = 1024
"""As in the CRD: the API server would refuse the whole status, and with it each replacement whose
incarnation it reserves."""
_PER_EPOCH = ("lag", "checkpoint")
# `stableEpoch` of a query: durable in its sink; of an operator: stable in its log.
_PER_EPOCH_IN = {"queries": ("lag", "stableEpoch", "completeUntil"), "operators": ("stableEpoch",)}
"""Fields that change with every epoch: of the status, and of the entries of its lists."""

_MAX_HOT_KEYS = 64


@dataclass(frozen=True, slots=True)
class BuiltStatus:
    """`written`: the JSON. `status`: what Events are decided from; as it will be read back, without
    what the CRD cannot hold, which would be a change in each pass."""

    status: TopologyStatus
    written: Mapping[str, Any]


def build_status(
    context: ReconcileContext,
    states: Sequence[SlotState],
    health: Health,
    recovery: RecoveryStatus | None,
    rebalancing: RebalancingEntry | None,
    incarnations: Mapping[str, int],
    problem: OperatorProblem | None,
    standby: str = "",
) -> BuiltStatus:
    """`recovery`: None keeps what is written. `standby`: warm ones and wanted ones."""
    kept = context.last_status.recovery if recovery is None else recovery
    conditions = conditions_of(context, states, health, kept, problem)
    entries = condition_entries(context.view, conditions, context.pass_inputs.now)
    status = TopologyStatus(
        phase=_phase(context, health, kept),
        conditions={entry.type: entry for entry in entries},
        queries={q.name: _query(context, q) for q in health.queries},
        redundancy=f"{health.live}/{health.slots}",
        recovery=kept,
        rebalancing=rebalancing,
        bad_records=tuple(bad_records(context)),
        hot_keys=tuple(hot_keys(context))[:_MAX_HOT_KEYS],
        incarnations=incarnations,
        generations=context.generations,
    )
    written: dict[str, Any] = {
        "observedGeneration": context.view.generation,
        "phase": status.phase,
        "conditions": [entry.to_json() for entry in entries],
        "queries": [query.to_json() for query in status.queries.values()],
        "queriesLive": f"{health.queries_live}/{len(health.queries)}",
        "redundancy": status.redundancy,
        "standby": standby or None,
        "operators": [operator.to_json() for operator in _operators(context, states)],
        "recovery": context.view.status.get("recovery") if recovery is None else kept.to_json(),
        "rebalancing": rebalancing.to_json() if rebalancing is not None else None,
        "badRecords": list(status.bad_records),
        "hotKeys": list(status.hot_keys),
        "slots": [{"slot": slot, "incarnation": n} for slot, n in incarnations.items()],
        "generations": generation_entries(context.generations),
        "checkpoint": _checkpoint(context.report.checkpoint),
    }
    if lags := [q.lag_s for q in health.queries if q.lag_s is not None]:
        written["lag"] = _lag(max(lags))
    if not (missing := context.pass_inputs.snapshot.crd_missing_fields):
        return BuiltStatus(status, operator_fields(written))
    declared = operator_fields(without_missing(written, missing))
    return BuiltStatus(read_topology_status(declared), declared)


def failed_status(
    view: TopologyView,
    problem: OperatorProblem,
    now: float,
    generations: Mapping[int, str] | None,
    missing: Collection[str],
) -> dict[str, Any]:
    """Of a topology for which nothing can be decided: the last status, with its queries and
    conditions unknown. `generations`: digests of accepted records; None if they are not known.
    `missing`: fields that the CRD lacks."""
    status = operator_fields(view.status)
    entries = condition_entries(view, conditions_of_undecided(view, problem), now)
    lags = {q.name: _lag_if_undecided(q, now) for q in view.operator_status.queries.values()}
    queries = [
        {
            **q,
            "state": QueryState.UNKNOWN,
            **({"lag": _lag(lag_s)} if (lag_s := lags.get(q.get("name"))) is not None else {}),
        }
        for q in status.get("queries") or ()
    ]
    changed: dict[str, Any] = {
        "phase": TopologyPhase.DELETING
        if view.deleting
        else phase_when_unknown(view.operator_status.phase),
        "conditions": [entry.to_json() for entry in entries],
        "queriesLive": f"0/{len(queries)}",
    }
    if known := [lag_s for lag_s in lags.values() if lag_s is not None]:
        changed["lag"] = _lag(max(known))
    if generations is not None:
        listed = with_generation(generations, view.generation)
        changed["generations"] = generation_entries(listed)
    written = {**status, **changed, **({"queries": queries} if queries else {})}
    return operator_fields(without_missing(written, missing))


def _lag_if_undecided(query: QueryEntry, now: float) -> float | None:
    """It grows while nothing is decided; None: it is not known, as in the last status."""
    if query.finished_generation is not None:
        return 0.0
    return max(0.0, now - parse_time(query.complete_until)) if query.complete_until else None


def operator_fields(status: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a status that the operator owns; absent and empty are the same."""
    return {
        key: value
        for key, value in status.items()
        if key != _COORDINATOR_FIELD and value not in (None, {}, [])
    }


def only_reservations(last: Mapping[str, Any], decided: Mapping[str, Any]) -> dict[str, Any]:
    """The last status, with what pods and generation records wait for of the one that was decided:
    for a status that the API server refuses."""
    return operator_fields({**last, **{k: v for k, v in decided.items() if k in _RESERVATIONS}})


def without_per_epoch_fields(status: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in operator_fields(status).items() if key not in _PER_EPOCH}
    for key, per_epoch in _PER_EPOCH_IN.items():
        if key in kept:
            kept[key] = [
                {k: v for k, v in item.items() if k not in per_epoch} for item in kept[key]
            ]
    return kept


def _phase(context: ReconcileContext, health: Health, recovery: RecoveryStatus) -> TopologyPhase:
    before = context.last_status.phase
    details = (
        f"generation {context.view.generation}, {health.queries_live} of {len(health.queries)} "
        f"queries and {health.live} of {health.slots} replicas are live"
    )
    return next_topology_phase(before, _observed_phase(context, health, recovery), details)


def _observed_phase(
    context: ReconcileContext, health: Health, recovery: RecoveryStatus
) -> TopologyPhase:
    if context.view.deleting:
        return TopologyPhase.DELETING
    if context.running is None:
        return TopologyPhase.INVALID if context.problems else TopologyPhase.PENDING
    if context.suspended:
        return TopologyPhase.SUSPENDED
    if recovery.is_active:
        return TopologyPhase.RECOVERING
    is_starting = context.last_status.phase in BEFORE_RUNNING
    if health.is_unknown and not is_starting:
        return TopologyPhase.UNKNOWN
    if health.queries_live == len(health.queries):
        is_redundant = health.live == health.slots
        return TopologyPhase.RUNNING if is_redundant else TopologyPhase.DEGRADED
    return TopologyPhase.STARTING if is_starting else TopologyPhase.DEGRADED


def _query(context: ReconcileContext, query: QueryHealth) -> QueryEntry:
    waiting_for = query.waiting_for
    if len(waiting_for) > _MAX_WAITING_FOR_CHARS:
        waiting_for = f"{waiting_for[: _MAX_WAITING_FOR_CHARS - 4]} ..."
    return QueryEntry(
        name=query.name,
        priority=query.priority,
        state=query.state,
        waiting_for=waiting_for,
        durable_epoch=query.durable_epoch,
        lag="" if query.lag_s is None else _lag(query.lag_s),
        since=_not_live_since(context, query),
        complete_until="" if query.complete_until is None else rfc3339(query.complete_until),
        finished_generation=query.finished_generation,
        missing=report.missing if (report := context.report.queries.get(query.name)) else (),
    )


def _lag(seconds: float) -> str:
    return f"{seconds:.1f}s"


def _not_live_since(context: ReconcileContext, query: QueryHealth) -> str:
    before = context.last_status.queries.get(query.name)
    if before is None or context.suspended or query.state is QueryState.LIVE:
        return ""  # a suspension is no loss
    if query.state is QueryState.UNKNOWN or not was_live(context.last_status, before):
        return before.since
    return rfc3339(context.pass_inputs.now)


def _operators(
    context: ReconcileContext, states: Sequence[SlotState]
) -> list[TopologyOperatorEntry]:
    if context.running is None:
        return []
    found = []
    for segment in context.running.topology.segments:
        slots = [s for s in without_successors(states) if s.slot.segment == segment.id]
        ready = sum(replica_state(context, s) is ReplicaState.LIVE for s in slots)
        epochs = [
            task.stable_epoch
            for s in slots
            if s.pod is not None
            and (task := context.report.task(s.slot.key, s.pod.incarnation)) is not None
            and task.stable_epoch is not None
        ]
        newest = max(epochs, default=None)
        found += [
            TopologyOperatorEntry(n, segment.partitions, ready, newest) for n in segment.nodes
        ]
    return found


def _checkpoint(newest: CheckpointReport | None) -> dict[str, Any]:
    if newest is None:
        return {}
    return {"epoch": newest.epoch, "time": newest.time, "bytes": newest.bytes}
