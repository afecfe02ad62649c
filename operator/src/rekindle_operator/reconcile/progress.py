"""The record of a recovery in `status.recovery`: begun, planned, who is back after how long. Pure.

All of it derives from the API's objects: the open entry of the history is the state, so another
operator goes on with it. A recovery ends when every query that it concerns is live and every
replacement that got a node is up; replicas that wait for capacity do not hold it open.

Design: docs/design/recovery.md#report.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rekindle.topology.spec import RecoverySpec
from rekindle_operator.cluster.convert import parse_time, rfc3339
from rekindle_operator.reconcile.context import ReconcileContext
from rekindle_operator.reconcile.health import Health, slot_stage
from rekindle_operator.reconcile.slots import SlotState, Stand
from rekindle_operator.recovery.losses import LossAssessment, is_burst
from rekindle_operator.recovery.plan import Plan

HISTORY = 10


@dataclass(frozen=True, slots=True)
class Recovery:
    """`active`: what is under way; `history`: newest first, the active one's entry included."""

    active: bool
    record: Mapping[str, Any]


def follow(
    context: ReconcileContext,
    states: Sequence[SlotState],
    health: Health,
    assessment: LossAssessment,
    plan: Plan,
    now: float,
) -> Recovery:
    old = context.view.status.get("recovery") or {}
    if context.running is None:
        return Recovery(False, old)  # what another version accepted: its record stays as it is
    history = [dict(entry) for entry in old.get("history") or ()]
    lost_at = _losses(states, now)
    open_entry = history[0] if history and not history[0].get("finishedAt") else None
    fresh = any(_counts(s) for s in states)
    if open_entry is None:
        if not fresh:
            return Recovery(False, {"history": history} if history else {})
        open_entry = {"startedAt": rfc3339(now), "lostNodes": [], "queries": []}
        history.insert(0, open_entry)
    begun = parse_time(open_entry["startedAt"])
    spec = context.running.topology.spec.recovery
    open_entry["mode"] = _mode(spec, open_entry.get("mode"), lost_at, now)
    open_entry["lostNodes"] = sorted(
        {*open_entry.get("lostNodes", ()), *_nodes(states, assessment)}
    )
    open_entry["queries"] = _queries(open_entry["queries"], health, now - begun)
    if context.suspended or (not fresh and _is_over(context, states, open_entry)):
        open_entry["finishedAt"] = rfc3339(now)
        return Recovery(False, {"history": history[:HISTORY]})
    record = {
        "startedAt": open_entry["startedAt"],
        "mode": open_entry["mode"],
        "lostNodes": open_entry["lostNodes"],
        "plan": _order(context, old.get("plan") or (), health, plan),
        "history": history[:HISTORY],
    }
    return Recovery(True, record)


def _counts(state: SlotState) -> bool:
    """A gated pod that someone deleted was not running anything."""
    ran = state.loss is not None and state.loss.of_what_ran
    return ran and state.stand in (Stand.BOUND, Stand.VACANT)


def _losses(states: Sequence[SlotState], now: float) -> dict[str, float]:
    """Partition -> when a replica of it was lost: in this pass, or as its replacement says."""
    lost: dict[str, float] = {}
    for state in states:
        at = now if _counts(state) else None
        if state.refused is not None:
            at = state.refused.lost_at
        if at is None and state.pod is not None:
            at = state.pod.lost_at
        if at is not None:
            key = f"{state.slot.segment}/{state.slot.partition}"
            lost[key] = max(at, lost.get(key, 0.0))
    return lost


def _mode(spec: RecoverySpec, before: str | None, lost_at: Mapping[str, float], now: float) -> str:
    """What became progressive stays so: new losses join the affected set."""
    if spec.mode == "Blocking":
        return "Blocking"
    window_s = spec.burst_window / 1e6
    if before == "Progressive" or is_burst(lost_at, now, window_s, spec.burst_threshold):
        return "Progressive"
    return "Direct"


def _nodes(states: Sequence[SlotState], assessment: LossAssessment) -> set[str]:
    return {
        s.pod.node
        for s in states
        if s.pod is not None and s.pod.node is not None and assessment.loss_of_node(s.pod)
    }


def _queries(
    known: Sequence[Mapping[str, Any]], health: Health, elapsed_s: float
) -> list[dict[str, Any]]:
    """Every query that was down at some time since the start, and when it was live again."""
    found = {str(q["name"]): dict(q) for q in known}
    for query in health.queries:
        if query.state == "Unknown":
            continue  # nobody knows whether it is down
        if query.state != "Live":
            found[query.name] = {"name": query.name}
        elif query.name in found and "liveAfter" not in found[query.name]:
            found[query.name]["liveAfter"] = f"{max(elapsed_s, 0.0):.1f}s"
    names = {q.name for q in health.queries}
    return [found[name] for name in sorted(found) if name in names]


def _is_over(
    context: ReconcileContext, states: Sequence[SlotState], entry: Mapping[str, Any]
) -> bool:
    waits = any("liveAfter" not in q for q in entry["queries"])
    starting = any(
        s.holds
        and s.pod is not None
        and s.pod.lost_at is not None
        and slot_stage(context, s) not in ("Live", "Failed")
        for s in states
    )
    return not waits and not starting


def _order(
    context: ReconcileContext, before: Sequence[str], health: Health, plan: Plan
) -> list[str]:
    """Those that have started, in the order they did; then those that start now; then the rest."""
    key = context.view.key
    down = {q.name for q in health.queries if q.state not in ("Live", "Unknown")}
    now = [r.key[1] for r in plan.order if r.key[0] == key]
    later = [r.key[1] for r in plan.waiting if r.key[0] == key]
    if "" in now or "" in later:  # in one block
        return [q.name for q in sorted(health.queries, key=lambda q: -q.priority)]
    started = [n for n in before if n not in now and n not in later]
    rest = sorted(
        (q for q in health.queries if q.name in down and q.name not in {*started, *now, *later}),
        key=lambda q: (-q.priority, q.name),
    )
    return [*started, *(q.name for q in rest), *now, *later]
