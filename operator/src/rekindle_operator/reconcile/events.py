"""What a person would want to know of, as Events with stable reasons. Pure.

Events are the difference between the status that was and the one that is about to be written, so
another operator, or this one after a restart, says nothing twice. `occasion` makes an Event's name:
the API server refuses the same one again.

Design: docs/operations.md#events.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from rekindle_operator.reconcile.actions import EmitEvent
from rekindle_operator.reconcile.conditions import condition_of
from rekindle_operator.reconcile.context import ReconcileContext
from rekindle_operator.reconcile.slots import SlotState
from rekindle_operator.recovery.losses import Loss, LossAssessment
from rekindle_operator.recovery.plan import Plan

_NOTE_LIMIT = 1000


@dataclass(frozen=True, slots=True)
class Change:
    """One pass over one topology: what there was, what there is, and what was decided."""

    context: ReconcileContext
    states: Sequence[SlotState]
    assessment: LossAssessment
    plan: Plan
    new: Mapping[str, Any]
    replacement: str  # why the coordinator was replaced; empty: it was not
    incarnation: int | None

    @property
    def old(self) -> Mapping[str, Any]:
        return self.context.view.status


def tell(change: Change) -> list[EmitEvent]:
    said = [
        *_validity(change),
        *_image(change),
        *_losses(change),
        *_recovery(change),
        *_queries(change),
        *_troubles(change),
        *_coordinator(change),
        *_conditions(change),
        *_trouble(change),
        *_phases(change),
    ]
    return [_event(change.context, *words) for words in said]


# (warning, reason, action, note, occasion)
Words = tuple[bool, str, str, str, str]


def _event(
    context: ReconcileContext, warning: bool, reason: str, action: str, note: str, occasion: str
) -> EmitEvent:
    view = context.view
    short = note if len(note) <= _NOTE_LIMIT else note[: _NOTE_LIMIT - 4] + " ..."
    return EmitEvent(view.namespace, view.name, view.uid, warning, reason, action, short, occasion)


def _validity(change: Change) -> Iterator[Words]:
    old, new = condition_of(change.old, "Valid"), condition_of(change.new, "Valid")
    generation = change.context.view.generation
    told = old.get("observedGeneration") == generation and old.get("reason") == new["reason"]
    if told or new["reason"] == "Checking":
        return
    if new["status"] == "True":
        yield False, "Accepted", "Validate", new["message"], f"{generation}"
    else:
        yield True, "Invalid", "Validate", new["message"], f"{generation} {new['message']}"


def _image(change: Change) -> Iterator[Words]:
    image, new = change.context.newer_image, condition_of(change.new, "Valid")
    if image and image not in condition_of(change.old, "Valid").get("message", ""):
        yield False, "ImageOutdated", "Upgrade", new["message"], image


def _losses(change: Change) -> Iterator[Words]:
    entry = _entry(change.new)
    before = _entry(change.old)
    known = set(before.get("lostNodes") or ()) if _same(before, entry) else set()
    for node in entry.get("lostNodes") or ():
        if node not in known:
            lost = [s for s in change.states if s.pod is not None and s.pod.node == node]
            why = change.assessment.lost_nodes.get(node, "is lost")
            note = f"node {node} {why}; it ran {_name(lost)}"
            yield True, "NodeLost", "Assess", note, f"{entry.get('startedAt')} {node}"
    held = {(s.slot.segment, s.slot.partition) for s in change.states if s.holds}
    for state in change.states:
        if state.loss is None or not state.loss.of_what_ran or state.pod is None:
            continue
        occasion = f"{state.slot.key} {state.pod.incarnation}"
        if state.loss is Loss.DIVERGED:
            note = f"{_name([state])} disagrees with its partner and is copied anew"
            yield True, "Diverged", "Replace", note, occasion
        elif (state.slot.segment, state.slot.partition) in held and state.pod.node is not None:
            note = f"{_name([state])}: {state.loss.value}; its partner goes on alone"
            yield True, "TakeOver", "Replace", note, occasion


def _recovery(change: Change) -> Iterator[Words]:
    old, new = change.old.get("recovery") or {}, change.new.get("recovery") or {}
    started = new.get("startedAt")
    if started is None:
        return
    if new["mode"] == "Progressive" and (
        old.get("mode") != "Progressive" or old.get("startedAt") != started
    ):
        nodes = ", ".join(new.get("lostNodes") or ()) or "no node of them known"
        note = f"a correlated failure (lost: {nodes}): queries come back by profit density"
        yield True, "BurstDetected", "Assess", note, f"{started} burst"
    if new["plan"] and (old.get("startedAt") != started or old.get("plan") != new["plan"]):
        occasion = f"{started} {' '.join(new['plan'])}"
        yield False, "RecoveryPlanned", "Plan", _explain(change, new["plan"]), occasion


def _explain(change: Change, order: Sequence[str]) -> str:
    """The order, and why: profit density = priority ÷ cost of what is missing, shared."""
    key = change.context.view.key
    now = {r.key[1]: r.density for r in change.plan.order if r.key[0] == key}
    later = {r.key[1]: r.density for r in change.plan.waiting if r.key[0] == key}
    if "" in later:
        return f"all wait until there is room for all of it (blocking): {', '.join(order)}"
    words = []
    for name in order:
        if name in now:
            words.append(f"{name} now (profit density {readable(now[name])})")
        elif name in later:
            words.append(f"{name} waits for capacity (profit density {readable(later[name])})")
        else:
            words.append(f"{name} under way")
    return "; ".join(words)


def readable(density: float) -> str:
    """Three digits, and no exponent."""
    if density == inf:
        return "unlimited: nothing is missing"
    if 0 < density < 0.001:
        return "< 0.001"
    return f"{density:,.0f}" if density >= 100 else f"{density:.3g}"


def _queries(change: Change) -> Iterator[Words]:
    before = {q["name"]: q for q in change.old.get("queries") or ()}
    entry, said = _entry(change.new), _entry(change.old)
    known_down = {q["name"] for q in said.get("queries") or () if "liveAfter" not in q}
    after = {q["name"]: q.get("liveAfter") for q in entry.get("queries") or ()}
    stamp = entry.get("startedAt") or f"generation {change.context.view.generation}"
    for query in change.new.get("queries") or ():
        name, state = query["name"], query["state"]
        was = before.get(name, {}).get("state", "")
        if state == was:
            continue
        occasion = f"{stamp} {name} {_round(change, name)}"
        was_up = was == "Live" or (was == "Unknown" and name not in known_down)
        if was_up and state in ("Waiting", "Restoring", "Failed"):
            note = f"{name} (priority {query['priority']}) is down: {query.get('waitingFor', '')}"
            yield True, "QueryLost", "Assess", note, occasion
        if state in ("Restoring", "CatchingUp") and was not in ("Restoring", "CatchingUp"):
            note = f"{name} is coming up; it waits for {query.get('waitingFor', '')}"
            yield False, "QueryRestoring", "Recover", note, occasion
        if state == "Live":
            took = f", {after[name]} after the loss" if after.get(name) else ""
            yield False, "QueryLive", "Recover", f"{name} is live{took}", occasion


def _troubles(change: Change) -> Iterator[Words]:
    """Containers that cannot run, once for each pod and reason that a query waits for."""
    before = {q["name"]: str(q.get("waitingFor", "")) for q in change.old.get("queries") or ()}
    troubled = [(s.pod, s.trouble) for s in change.states if s.pod is not None and s.trouble]
    for query in change.new.get("queries") or ():
        name, waits = query["name"], str(query.get("waitingFor", ""))
        for pod, trouble in troubled:
            container, _, said = trouble.partition(": ")
            reason = said.partition(":")[0].partition(",")[0]
            head = f"{pod.name} on {pod.node}: {container}: {reason}"
            if head in waits and head not in before.get(name, ""):
                note = f"{name} waits for {pod.name} on {pod.node}: {trouble}"
                yield True, "TaskCannotStart", "Start", note, f"{name} {pod.name} {reason}"


def _round(change: Change, query: str) -> int:
    """Tells one loss of a query from the next: the incarnations that it stands on."""
    if change.context.running is None:
        return 0
    spec = next(q for q in change.context.running.topology.spec.queries if q.name == query)
    wanted = {s.id for s in change.context.running.topology.ancestry(spec)}
    taken = {s["slot"]: s["incarnation"] for s in change.new.get("slots") or ()}
    return sum(taken.get(s.slot.key, 0) for s in change.states if s.slot.segment in wanted)


def _coordinator(change: Change) -> Iterator[Words]:
    if change.incarnation is not None and change.incarnation > 1 and change.replacement:
        note = f"coordinator {change.incarnation} follows: {change.replacement}"
        yield True, "CoordinatorReplaced", "Replace", note, f"{change.incarnation}"


def _conditions(change: Change) -> Iterator[Words]:
    old, new = condition_of(change.old, "Redundant"), condition_of(change.new, "Redundant")
    if change.old.get("phase") in ("Recovering", "Degraded") and (
        new["status"] == "True" and old.get("status") == "False"
    ):
        note = f"{change.new['redundancy']} replicas are live"
        yield False, "RedundancyRestored", "Recover", note, new["lastTransitionTime"]


def _trouble(change: Change) -> Iterator[Words]:
    old, new = condition_of(change.old, "Degraded"), condition_of(change.new, "Degraded")
    if new["status"] == "True" and (old.get("status"), old.get("reason")) != (
        "True",
        new["reason"],
    ):
        occasion = f"{new['reason']} {new['lastTransitionTime']}"
        yield True, new["reason"], "Reconcile", new["message"], occasion


def _phases(change: Change) -> Iterator[Words]:
    old, new = change.old.get("phase"), change.new["phase"]
    occasion = f"generation {change.context.view.generation}"
    if new == "Suspended" and old != "Suspended":
        note = "tasks are stopped; checkpoints and incarnations are kept"
        yield False, "Suspended", "Suspend", note, occasion
    if old == "Suspended" and new != "Suspended":
        yield False, "Resumed", "Resume", "tasks are restored from the checkpoints", occasion


def _entry(status: Mapping[str, Any]) -> Mapping[str, Any]:
    history = (status.get("recovery") or {}).get("history") or ()
    return history[0] if history else {}


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.get("startedAt") == other.get("startedAt")


def _name(states: Sequence[SlotState]) -> str:
    named = [f"{s.segment.name}/{s.slot.partition}/{s.slot.replica}" for s in states]
    return ", ".join(named[:8]) + (" ..." if len(named) > 8 else "") if named else "no task"
