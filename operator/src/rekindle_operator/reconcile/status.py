"""The operator's part of `status`, whole, as server-side apply wants it. Pure.

Built anew in each pass and written only when it differs. `figures` are the fields that change with
every epoch; a difference in nothing else can wait two seconds.

Design: docs/design/kubernetes.md#status.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rekindle_operator.cluster.model import TopologyView
from rekindle_operator.reconcile.conditions import (
    Condition,
    OperatorProblem,
    condition_of,
    conditions_of,
    dated,
    degraded,
)
from rekindle_operator.reconcile.context import BEFORE_RUNNING, ReconcileContext
from rekindle_operator.reconcile.health import Health, slot_stage
from rekindle_operator.reconcile.progress import Recovery
from rekindle_operator.reconcile.slots import SlotState

OWNED = (
    "observedGeneration",
    "phase",
    "conditions",
    "queries",
    "queriesLive",
    "redundancy",
    "lag",
    "operators",
    "checkpoint",
    "recovery",
    "slots",
)
_FIGURES = ("lag", "checkpoint")


def build_status(
    context: ReconcileContext,
    states: Sequence[SlotState],
    health: Health,
    recovery: Recovery,
    slots: list[dict[str, object]],
    trouble: OperatorProblem | None,
    now: float,
) -> dict[str, Any]:
    lags = [q.lag_s for q in health.queries if q.lag_s is not None]
    status: dict[str, Any] = {
        "observedGeneration": context.view.generation,
        "phase": _phase(context, health, recovery),
        "conditions": dated(
            context.view, conditions_of(context, states, health, recovery, trouble), now
        ),
        "queries": [_query(q) for q in health.queries],
        "queriesLive": f"{health.queries_live}/{len(health.queries)}",
        "redundancy": f"{health.live}/{health.slots}",
        "operators": _operators(context, states),
        "recovery": dict(recovery.record),
        "slots": slots,
    }
    if lags:
        status["lag"] = f"{max(lags):.1f}s"
    if checkpoint := _checkpoint(context.data.checkpoint):
        status["checkpoint"] = checkpoint
    return status


def failed_status(view: TopologyView, trouble: OperatorProblem, now: float) -> dict[str, Any]:
    """Of a topology that the operator cannot decide on: what it last wrote, and that nobody knows
    whether it still holds."""
    status = owned(view.status)
    unknown = [
        Condition(kind, "Unknown", trouble.reason, trouble.message)
        for kind in ("Valid", "Available", "Redundant", "Consistent", "Ready")
    ]
    kept = [
        Condition(kind, old["status"], old["reason"], old["message"])
        for kind in ("Recovering", "Checkpointed")
        if (old := condition_of(status, kind))
    ]
    conditions = dated(view, [*unknown, *kept, degraded(trouble)], now)
    live = f"0/{len(status.get('queries') or ())}"
    queries = [{**q, "state": "Unknown"} for q in status.get("queries") or ()]
    said = {"phase": "Unknown", "conditions": conditions}
    return {**status, **said, **({"queries": queries} if queries else {}), "queriesLive": live}


def owned(status: Mapping[str, Any]) -> dict[str, Any]:
    """What the operator wrote of a status; absent and empty are the same."""
    return {key: status[key] for key in OWNED if status.get(key) not in (None, {}, [])}


def without_figures(status: Mapping[str, Any]) -> dict[str, Any]:
    slow = {k: v for k, v in owned(status).items() if k not in _FIGURES}
    for key in ("queries", "operators"):
        if key in slow:
            slow[key] = [
                {k: v for k, v in item.items() if k not in ("lag", "stableEpoch")}
                for item in slow[key]
            ]
    return slow


def _phase(context: ReconcileContext, health: Health, recovery: Recovery) -> str:
    if context.view.deleting:
        return "Deleting"
    if context.running is None:
        return "Invalid" if context.problems else "Pending"
    if context.suspended:
        return "Suspended"
    if recovery.active:
        return "Recovering"
    if health.is_unknown:
        return "Unknown"
    if health.queries_live == len(health.queries):
        return "Running" if health.live == health.slots else "Degraded"
    return "Starting" if context.view.status.get("phase") in BEFORE_RUNNING else "Degraded"


def _query(query: Any) -> dict[str, Any]:
    said: dict[str, Any] = {
        "name": query.name,
        "priority": query.priority,
        "state": query.state,
    }
    if query.stable_epoch is not None:
        said["stableEpoch"] = query.stable_epoch
    if query.lag_s is not None:
        said["lag"] = f"{query.lag_s:.1f}s"
    if query.waiting_for:
        said["waitingFor"] = query.waiting_for
    return said


def _operators(context: ReconcileContext, states: Sequence[SlotState]) -> list[dict[str, Any]]:
    if context.running is None:
        return []
    said = []
    for segment in context.running.topology.segments:
        slots = [s for s in states if s.slot.segment == segment.id]
        ready = sum(slot_stage(context, s) == "Live" for s in slots)
        epochs = [
            report.stable_epoch
            for s in slots
            if s.pod is not None
            and (report := context.data.task(s.slot.key, s.pod.incarnation)) is not None
            and report.stable_epoch is not None
        ]
        for name in segment.nodes:
            entry = {
                "name": name,
                "partitions": segment.partitions,
                "replicasReady": ready,
            }
            said.append(entry | ({"stableEpoch": max(epochs)} if epochs else {}))
    return said


def _checkpoint(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {k: raw[k] for k in ("epoch", "time", "bytes") if raw.get(k) is not None}
