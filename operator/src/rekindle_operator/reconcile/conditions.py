"""The conditions of `status`: what holds, why not, and what nobody knows. Pure.

`Unknown` is said where the coordinator's report is too old to prove anything, and while a check is
under way; its message names what is missing. Messages change only when what they say does: a status
is written when it differs.

Design: docs/operations.md#watch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rekindle.topology.graph import nodes_with_paths
from rekindle_operator.cluster.convert import rfc3339
from rekindle_operator.cluster.model import TopologyView
from rekindle_operator.reconcile.context import ReconcileContext
from rekindle_operator.reconcile.health import Health, report_age, slot_stage
from rekindle_operator.reconcile.progress import Recovery
from rekindle_operator.reconcile.slots import SlotState

Truth = Literal["True", "False", "Unknown"]

_MESSAGE_LIMIT = 1024
_REFUSED = "RefusedByTask"
_OVERDUE = 3  # checkpoints that should have been there since
_NO_REPORT = "NoReport"


@dataclass(frozen=True, slots=True)
class Condition:
    type: str
    status: Truth
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class OperatorProblem:
    """Why the operator itself, or the cluster it runs in, does not work as it should."""

    reason: str
    message: str


def conditions_of(
    context: ReconcileContext,
    states: Sequence[SlotState],
    health: Health,
    recovery: Recovery,
    trouble: OperatorProblem | None,
) -> list[Condition]:
    valid, available = _valid(context, states, health), _available(context, health)
    return [
        valid,
        available,
        _redundant(context, states, health),
        _consistent(context),
        _recovering(recovery),
        _checkpointed(context),
        degraded(trouble),
        _ready(valid, available),
    ]


def condition_of(status: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """As it was written; empty: never."""
    found = (c for c in status.get("conditions") or () if c.get("type") == kind)
    return next(found, {})


def dated(view: TopologyView, conditions: Iterable[Condition], now: float) -> list[dict[str, Any]]:
    """As the status has them; lastTransitionTime moves only when the condition's status does."""
    before = {c["type"]: c for c in view.status.get("conditions") or ()}
    entries = []
    for condition in conditions:
        old = before.get(condition.type) or {}
        same = old.get("status") == condition.status and old.get("lastTransitionTime")
        entries.append(
            {
                "type": condition.type,
                "status": condition.status,
                "reason": condition.reason,
                "message": condition.message[:_MESSAGE_LIMIT],
                "observedGeneration": view.generation,
                "lastTransitionTime": old["lastTransitionTime"] if same else rfc3339(now),
            }
        )
    return entries


def degraded(trouble: OperatorProblem | None) -> Condition:
    if trouble is None:
        return Condition("Degraded", "False", "AsExpected", "the operator does what it should")
    return Condition("Degraded", "True", trouble.reason, trouble.message)


def _ready(valid: Condition, available: Condition) -> Condition:
    both = (valid, available)
    culprit = next((c for c in both if c.status == "False"), None)
    culprit = culprit or next((c for c in both if c.status == "Unknown"), None)
    if culprit is None:
        return Condition("Ready", "True", "Ready", available.message)
    return Condition("Ready", culprit.status, culprit.reason, culprit.message)


def _valid(context: ReconcileContext, states: Sequence[SlotState], health: Health) -> Condition:
    if context.problems:
        first = context.problems[0]
        said = "; ".join(str(p) for p in context.problems)
        if context.running is not None:
            said += f" [generation {context.running.generation} goes on]"
        return Condition("Valid", "False", first.reason or "Invalid", said)
    if not context.is_validated:
        said = f"generation {context.view.generation}: the API server is asked whether pods can be"
        return Condition("Valid", "Unknown", "Checking", said)
    refused = _found_by_tasks(context, states) or _found_before(context, health)
    if refused:
        return Condition("Valid", "False", _REFUSED, refused)
    said = "; ".join(
        (f"generation {context.view.generation} is accepted", *_remarks(context, states))
    )
    return Condition("Valid", "True", "Accepted", said)


def _remarks(context: ReconcileContext, states: Sequence[SlotState]) -> Iterator[str]:
    """What runs other than the spec has it."""
    if context.running is None:
        return
    if context.newer_image:
        image = context.running.view.spec.get("image")
        yield (
            f"it goes on with image {image}, which it was accepted with. The operator's default "
            f"is {context.newer_image} now: any edit of the spec takes it"
        )
    queries, limit = context.running.topology.spec.queries, context.max_priority
    if limit is not None and any(q.priority > limit for q in queries):
        above = ", ".join(f"{q.name} ({q.priority})" for q in queries if q.priority > limit)
        yield f"priorities above the namespace's limit count as {limit}: {above}"
    if outdated := sum(s.outdated for s in states):
        pods = sum(s.pod is not None for s in states)
        yield f"{outdated} of {pods} pods are outdated (an older spec or image)"


def _found_by_tasks(context: ReconcileContext, states: Sequence[SlotState]) -> str:
    """What only a task can see: SQL that Spark refuses, input that does not fit its schema."""
    if context.running is None:
        return ""
    paths = {node.name: path for path, node in nodes_with_paths(context.running.topology.spec)}
    reports = (
        context.data.task(s.slot.key, s.pod.incarnation) for s in states if s.pod is not None
    )
    said = (f"{paths[r.refused]}: {r.problem}" for r in reports if r and r.refused in paths)
    return "; ".join(sorted(set(said)))


def _found_before(context: ReconcileContext, health: Health) -> str:
    """A task that starts again says nothing until it has come as far as before."""
    old = condition_of(context.view.status, "Valid")
    ours = old.get("reason") == _REFUSED and old["observedGeneration"] == context.view.generation
    return str(old["message"]) if ours and health.queries_live < len(health.queries) else ""


def _available(context: ReconcileContext, health: Health) -> Condition:
    if context.suspended:
        return Condition("Available", "False", "Suspended", "spec.suspend is true")
    if context.running is None:
        return Condition("Available", "False", "NotStarted", "no generation is accepted")
    down = [f"{q.name} ({q.state})" for q in health.queries if q.state not in ("Live", "Unknown")]
    if down:
        return Condition("Available", "False", "QueriesDown", "not live: " + ", ".join(down))
    if health.is_unknown:
        return Condition("Available", "Unknown", _NO_REPORT, report_age(context))
    return Condition("Available", "True", "AllQueriesLive", "every query is live")


def _redundant(context: ReconcileContext, states: Sequence[SlotState], health: Health) -> Condition:
    stages = [(s, slot_stage(context, s)) for s in states]
    missing = [
        f"{s.segment.name}/{s.slot.partition}/{s.slot.replica}"
        for s, stage in stages
        if stage not in ("Live", "Unknown")
    ]
    if missing or not states:
        shown = ", ".join(missing[:10]) + (" ..." if len(missing) > 10 else "")
        return Condition("Redundant", "False", "ReplicasMissing", f"not live: {shown or 'all'}")
    if any(stage == "Unknown" for _, stage in stages):
        return Condition("Redundant", "Unknown", _NO_REPORT, report_age(context))
    return Condition("Redundant", "True", "AllReplicasLive", "every replica is live")


def _consistent(context: ReconcileContext) -> Condition:
    if context.stale_since is not None:
        return Condition("Consistent", "Unknown", _NO_REPORT, report_age(context))
    data = context.data
    if not data.diverged and not data.inconsistent:
        return Condition("Consistent", "True", "Agreed", "no replicas disagree")
    segments = {s.id: s.name for s in context.running.topology.segments} if context.running else {}
    shown = []
    for key in data.diverged:
        segment, _, rest = key.partition("/")
        shown.append(f"{segments.get(segment, segment)}/{rest}")
    named = ["one replica was wrong and is copied anew: " + ", ".join(shown)] if shown else []
    reason = "Diverged" if shown else "Disagreement"
    return Condition("Consistent", "False", reason, "; ".join([*named, *data.inconsistent]))


def _recovering(recovery: Recovery) -> Condition:
    if not recovery.active:
        return Condition("Recovering", "False", "Idle", "nothing is being recovered")
    plan = ", ".join(recovery.record["plan"]) or "redundancy only"
    return Condition("Recovering", "True", str(recovery.record["mode"]), f"in this order: {plan}")


def _checkpointed(context: ReconcileContext) -> Condition:
    """By epochs and not by the clock: sources that have ended, or pause, make no epochs to save."""
    newest = context.data.checkpoint.get("epoch")
    if context.running is None or context.suspended or context.data.head_epoch is None:
        return Condition("Checkpointed", "Unknown", "NotRunning", "no source has made an epoch")
    if context.stale_since is not None:
        return Condition("Checkpointed", "Unknown", _NO_REPORT, report_age(context))
    every = context.running.topology.spec.checkpoint_every
    missed = (context.data.head_epoch - (newest if isinstance(newest, int) else -1)) // every
    if missed <= _OVERDUE:
        return Condition("Checkpointed", "True", "UpToDate", "checkpoints keep up with the sources")
    since = f"the last one is of epoch {newest}" if newest is not None else "there is none yet"
    said = f"more than {_OVERDUE} checkpoints are missing: {since}"
    return Condition("Checkpointed", "False", "Overdue", said)
