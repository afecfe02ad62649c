"""The operator's part of `status` (design §2), whole, as server-side apply wants it. Pure.

Built anew in each pass and written only when it differs. `figures` are the fields that change with
every epoch; a difference in nothing else can wait two seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rekindle.topology.graph import nodes_with_paths
from rekindle_operator.reconcile.case import BEFORE_RUNNING, Case
from rekindle_operator.reconcile.health import Health, slot_stage
from rekindle_operator.reconcile.progress import Recovery, rfc3339
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
_MESSAGE_LIMIT = 1024
_REFUSED = "RefusedByTask"


@dataclass(frozen=True, slots=True)
class Condition:
    type: str
    status: bool
    reason: str
    message: str


def build_status(
    case: Case,
    states: Sequence[SlotState],
    health: Health,
    recovery: Recovery,
    slots: list[dict[str, object]],
    now: float,
) -> dict[str, Any]:
    lags = [q.lag_s for q in health.queries if q.lag_s is not None]
    status: dict[str, Any] = {
        "observedGeneration": case.view.generation,
        "phase": _phase(case, health, recovery),
        "conditions": _dated(case, _conditions(case, states, health, recovery), now),
        "queries": [_query(q) for q in health.queries],
        "queriesLive": f"{health.queries_live}/{len(health.queries)}",
        "redundancy": f"{health.live}/{health.slots}",
        "operators": _operators(case, states),
        "recovery": dict(recovery.record),
        "slots": slots,
    }
    if lags:
        status["lag"] = f"{max(lags):.1f}s"
    if checkpoint := _checkpoint(case.data.checkpoint):
        status["checkpoint"] = checkpoint
    return status


def condition_of(status: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """As it was written; empty: never."""
    found = (c for c in status.get("conditions") or () if c.get("type") == kind)
    return next(found, {})


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


def _phase(case: Case, health: Health, recovery: Recovery) -> str:
    if case.view.deleting:
        return "Deleting"
    if case.running is None:
        return "Invalid" if case.problems else "Pending"
    if case.suspended:
        return "Suspended"
    if recovery.active:
        return "Recovering"
    if health.queries_live == len(health.queries):
        return "Running" if health.live == health.slots else "Degraded"
    return "Starting" if case.view.status.get("phase") in BEFORE_RUNNING else "Degraded"


def _conditions(
    case: Case, states: Sequence[SlotState], health: Health, recovery: Recovery
) -> list[Condition]:
    valid = _valid(case, states, health)
    available = _available(case, health)
    ready = valid.status and available.status
    culprit = available if valid.status else valid
    return [
        valid,
        available,
        _redundant(case, states, health),
        _consistent(case),
        _recovering(recovery),
        Condition("Ready", ready, "Ready" if ready else culprit.reason, culprit.message),
    ]


def _valid(case: Case, states: Sequence[SlotState], health: Health) -> Condition:
    if case.problems:
        first = case.problems[0]
        said = "; ".join(str(p) for p in case.problems)
        if case.running is not None:
            said += f" [generation {case.running.generation} goes on]"
        return Condition("Valid", False, first.reason or "Invalid", said)
    if not case.judged:
        return Condition("Valid", False, "Checking", "the API server is asked whether pods can be")
    refused = _found_by_tasks(case, states) or _found_before(case, health)
    if refused:
        return Condition("Valid", False, _REFUSED, refused)
    said = f"generation {case.view.generation} is accepted"
    if case.newer_image and case.running is not None:
        image = case.running.view.spec.get("image")
        said += (
            f"; it goes on with image {image}, which it was accepted with. The operator's default "
            f"is {case.newer_image} now: any edit of the spec takes it"
        )
    return Condition("Valid", True, "Accepted", said)


def _found_by_tasks(case: Case, states: Sequence[SlotState]) -> str:
    """What only a task can see: SQL that Spark refuses, input that does not fit its schema."""
    if case.running is None:
        return ""
    paths = {node.name: path for path, node in nodes_with_paths(case.running.topology.spec)}
    reports = (case.data.task(s.slot.key, s.pod.incarnation) for s in states if s.pod is not None)
    said = (f"{paths[r.refused]}: {r.problem}" for r in reports if r and r.refused in paths)
    return "; ".join(sorted(set(said)))


def _found_before(case: Case, health: Health) -> str:
    """A task that starts again says nothing until it has come as far as before."""
    old = condition_of(case.view.status, "Valid")
    ours = old.get("reason") == _REFUSED and old["observedGeneration"] == case.view.generation
    return str(old["message"]) if ours and health.queries_live < len(health.queries) else ""


def _available(case: Case, health: Health) -> Condition:
    if case.suspended:
        return Condition("Available", False, "Suspended", "spec.suspend is true")
    if case.running is None:
        return Condition("Available", False, "NotStarted", "no generation is accepted")
    down = [f"{q.name} ({q.state})" for q in health.queries if q.state != "Live"]
    if down:
        return Condition("Available", False, "QueriesDown", "not live: " + ", ".join(down))
    return Condition("Available", True, "AllQueriesLive", "every query is live")


def _redundant(case: Case, states: Sequence[SlotState], health: Health) -> Condition:
    missing = [
        f"{s.segment.name}/{s.slot.partition}/{s.slot.replica}"
        for s in states
        if slot_stage(case, s) != "Live"
    ]
    if missing or not states:
        shown = ", ".join(missing[:10]) + (" ..." if len(missing) > 10 else "")
        return Condition("Redundant", False, "ReplicasMissing", f"not live: {shown or 'all'}")
    return Condition("Redundant", True, "AllReplicasLive", "every replica is live")


def _consistent(case: Case) -> Condition:
    if not case.data.diverged:
        return Condition("Consistent", True, "Agreed", "no replicas disagree")
    segments = {s.id: s.name for s in case.running.topology.segments} if case.running else {}
    shown = []
    for key in case.data.diverged:
        segment, _, rest = key.partition("/")
        shown.append(f"{segments.get(segment, segment)}/{rest}")
    said = "replicas disagree, one is copied anew: " + ", ".join(shown)
    return Condition("Consistent", False, "Diverged", said)


def _recovering(recovery: Recovery) -> Condition:
    if not recovery.active:
        return Condition("Recovering", False, "Idle", "nothing is being recovered")
    plan = ", ".join(recovery.record["plan"]) or "redundancy only"
    return Condition("Recovering", True, str(recovery.record["mode"]), f"in this order: {plan}")


def _dated(case: Case, conditions: Sequence[Condition], now: float) -> list[dict[str, Any]]:
    """lastTransitionTime moves only when the condition's status does."""
    before = {c["type"]: c for c in case.view.status.get("conditions") or ()}
    dated = []
    for condition in conditions:
        status = "True" if condition.status else "False"
        old = before.get(condition.type)
        same = old is not None and old.get("status") == status and old.get("lastTransitionTime")
        since = old["lastTransitionTime"] if old is not None and same else rfc3339(now)
        dated.append(
            {
                "type": condition.type,
                "status": status,
                "reason": condition.reason,
                "message": condition.message[:_MESSAGE_LIMIT],
                "observedGeneration": case.view.generation,
                "lastTransitionTime": since,
            }
        )
    return dated


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


def _operators(case: Case, states: Sequence[SlotState]) -> list[dict[str, Any]]:
    if case.running is None:
        return []
    said = []
    for segment in case.running.topology.segments:
        slots = [s for s in states if s.slot.segment == segment.id]
        ready = sum(slot_stage(case, s) == "Live" for s in slots)
        epochs = [
            report.stable_epoch
            for s in slots
            if s.pod is not None
            and (report := case.data.task(s.slot.key, s.pod.incarnation)) is not None
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
