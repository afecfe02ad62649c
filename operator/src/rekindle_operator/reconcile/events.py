"""Events of a pass, for users, with stable reasons. Pure.

Events are the difference between the last status and the one that is about to be written, so
another operator, or this one after a restart, emits nothing twice. An Event's name contains its
`dedup_key`: the API server refuses the same one again.
Design: docs/operations.md#events.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import assert_never

from rekindle import names
from rekindle.report import MissingResults
from rekindle.topology.changes import compare
from rekindle.topology.model import partition_of
from rekindle_operator.cluster.convert import parse_time
from rekindle_operator.reconcile.actions import EmitEvent
from rekindle_operator.reconcile.context import ReconcileContext
from rekindle_operator.reconcile.coordinator import CoordinatorReplacement
from rekindle_operator.reconcile.drains import waiting_drains
from rekindle_operator.reconcile.health import (
    REASON_LIMIT,
    bad_records,
    coordinator_without_node,
    hot_keys,
)
from rekindle_operator.reconcile.phases import QueryChange, query_changes, was_live
from rekindle_operator.reconcile.sidecars import failing_sidecars
from rekindle_operator.reconcile.slots import SlotState, mislabelled_pods
from rekindle_operator.recovery.losses import Loss
from rekindle_operator.recovery.plan import Plan
from rekindle_operator.topology_status import (
    QueryEntry,
    RecoveryEntry,
    TopologyPhase,
    TopologyStatus,
)

_MAX_NOTE_BYTES = 1024  # of UTF-8; the API server refuses longer notes
_NO_RECOVERY = RecoveryEntry(started_at="")
_NORMAL, _WARNING = False, True  # `EventText.warning`


@dataclass(frozen=True, slots=True)
class PassResult:
    """Of one pass over one topology: the status before and after, and the decisions. `states`: of
    its slots; `superseded`: those of lost tasks that their successors in planned moves replace."""

    context: ReconcileContext
    states: Sequence[SlotState]
    plan: Plan
    new: TopologyStatus
    coordinator: CoordinatorReplacement
    superseded: Sequence[SlotState] = ()

    @property
    def old(self) -> TopologyStatus:
        return self.context.last_status

    @property
    def newest_recovery(self) -> RecoveryEntry:
        """In progress or not; an empty one if there was none."""
        return self.new.recovery.newest or _NO_RECOVERY

    @property
    def previous_recovery(self) -> RecoveryEntry:
        return self.old.recovery.newest or _NO_RECOVERY


@dataclass(frozen=True, slots=True)
class EventText:
    """`action`, `reason`, `note`: fields of the Event. `dedup_key`: equal for equal Events."""

    warning: bool
    reason: str
    action: str
    note: str
    dedup_key: str


def build_events(result: PassResult) -> list[EmitEvent]:
    texts = [
        *_validity(result),
        *_image(result),
        *_lost_nodes(result),
        *_replaced_tasks(result),
        *_mislabelled_pods(result),
        *_moves(result),
        *_waiting_drains(result),
        *_rebalancing(result),
        *_recovery(result),
        *_queries(result),
        *_missing_results(result),
        *_bad_records(result),
        *_hot_keys(result),
        *_start_problems(result),
        *_failing_sidecars(result),
        *_without_node(result),
        *_blocked_queries(result),
        *_coordinator(result),
        *_redundancy(result),
        *_refused_token(result.context),
        *_operator_problem(result),
        *_suspension(result),
    ]
    return [_event(result.context, text) for text in texts]


def _event(context: ReconcileContext, text: EventText) -> EmitEvent:
    return EmitEvent(
        namespace=context.view.namespace,
        topology=context.view.name,
        uid=context.view.uid,
        warning=text.warning,
        reason=text.reason,
        action=text.action,
        note=shortened(text.note),
        dedup_key=text.dedup_key,
    )


def shortened(note: str) -> str:
    """At most as long as the note of an Event may be."""
    encoded = note.encode()
    if len(encoded) <= _MAX_NOTE_BYTES:
        return note
    return encoded[: _MAX_NOTE_BYTES - 4].decode(errors="ignore") + " ..."


def _validity(result: PassResult) -> Iterator[EventText]:
    old, new = result.old.condition("Valid"), result.new.condition("Valid")
    generation = result.context.view.generation
    is_same = old.observed_generation == new.observed_generation and old.reason == new.reason
    if is_same or new.reason == "Checking":
        return
    if new.status == "True":
        yield _accepted(result.context, new.message)
    elif new.status == "Unknown":
        yield EventText(_WARNING, new.reason, "Validate", new.message, f"{generation}")
    else:
        dedup_key = f"{generation} {new.message}"
        yield EventText(_WARNING, "Invalid", "Validate", new.message, dedup_key)


def _accepted(context: ReconcileContext, message: str) -> EventText:
    """With what an edit does to the operators, before their tasks are replaced."""
    dedup_key = f"{context.view.generation}"
    if context.running is None or context.previous is None:
        return EventText(_NORMAL, "Accepted", "Validate", message, dedup_key)
    changes = compare(context.previous.topology, context.running.topology)
    note = f"{message}; {changes.summary()}"
    return EventText(changes.loses_results, "Accepted", "Validate", note, dedup_key)


def _image(result: PassResult) -> Iterator[EventText]:
    image, message = result.context.newer_image, result.new.condition("Valid").message
    if image and image not in result.old.condition("Valid").message:
        yield EventText(_NORMAL, "ImageOutdated", "Upgrade", message, image)


def _lost_nodes(result: PassResult) -> Iterator[EventText]:
    """Those that this recovery has not had yet, or on which more is lost: they came back."""
    entry, before = result.newest_recovery, result.previous_recovery
    known = before.lost_nodes if before.started_at == entry.started_at else ()
    lost_nodes = result.context.pass_inputs.losses.lost_nodes
    taken, reserved = result.new.incarnations, result.old.incarnations
    on_node: dict[str, list[SlotState]] = defaultdict(list)
    for state in (*result.states, *result.superseded):
        if state.pod is not None and state.pod.node is not None:
            on_node[state.pod.node].append(state)
    for node in entry.lost_nodes:
        keys = [s.slot.key for s in on_node[node] if node in lost_nodes]
        if node in known and not any(taken.get(k, 0) > reserved.get(k, 0) for k in keys):
            continue
        note = (
            f"node {node} {lost_nodes.get(node, 'is lost')}; tasks on it: {_names(on_node[node])}"
        )
        pods = sorted(s.pod.uid for s in on_node[node] if s.pod is not None)
        dedup_key = " ".join((entry.started_at, node, *pods))
        yield EventText(_WARNING, "NodeLost", "Assess", note, dedup_key)


def _replaced_tasks(result: PassResult) -> Iterator[EventText]:
    with_capacity = {partition_of(s.slot) for s in result.states if s.holds_capacity}
    for state in (*result.states, *result.superseded):
        if state.loss is None or not state.loss.counts_as_failure or state.pod is None:
            continue
        has_partner = partition_of(state.slot) in with_capacity
        dedup_key = f"{state.slot.key} {state.pod.incarnation}"
        if state.loss is Loss.DIVERGED:
            note = f"{state.name}: {state.loss.value}; it is replaced"
            yield EventText(_WARNING, "Diverged", "Replace", note, dedup_key)
        elif has_partner and state.pod.node is not None:
            is_moving = state in result.superseded
            who = "its successor goes on in its place" if is_moving else "its partner takes over"
            note = f"{state.name}: {state.loss.value}; {who}"
            yield EventText(_WARNING, "TakeOver", "Replace", note, dedup_key)


def _mislabelled_pods(result: PassResult) -> Iterator[EventText]:
    for pod in mislabelled_pods(result.context):
        if not pod.terminating:
            note = (
                f"pod {pod.name} on {pod.node or 'no node'} belongs to the topology, and its "
                f"labels {names.OWN_PREFIX}* do not say what it is in it: it is ended and replaced"
            )
            yield EventText(_WARNING, "PodMislabelled", "Replace", note, pod.uid)


def _moves(result: PassResult) -> Iterator[EventText]:
    """A successor gets an incarnation: a planned move begins."""
    current = {s.slot: s for s in result.states}
    for state in result.states:
        replaced, key = current.get(state.slot.alternate), state.slot.key
        incarnation = result.new.incarnations.get(key, 0)
        if not state.is_successor or replaced is None or replaced.pod is None:
            continue
        if state.rebalancing is not None:
            continue
        if incarnation > result.old.incarnations.get(key, 0):
            note = f"{replaced.pod.node} is drained: {state.name} is to replace {replaced.name}"
            yield EventText(_NORMAL, "Moving", "Move", note, f"{key} {incarnation}")


def _rebalancing(result: PassResult) -> Iterator[EventText]:
    """A move to an emptier node begins, has ended, or has failed."""
    old, new = result.old.rebalancing, result.new.rebalancing
    if new is not None and not new.failed_at and new != old:
        note = f"{new.task} moves from {new.source} to {new.target}, which is emptier"
        dedup_key = f"{new.slot} {new.incarnation}"
        yield EventText(_NORMAL, "Rebalancing", "Move", note, dedup_key)
    if old is None or old.failed_at:
        return
    dedup_key = f"{old.slot} {old.incarnation}"
    if new is None:
        note = f"{old.task} has moved from {old.source} to {old.target}"
        yield EventText(_NORMAL, "Rebalanced", "Move", note, dedup_key)
    elif new.failed_at:
        note = f"{old.task} stays on {old.source}, and does not move to {old.target}: {new.message}"
        yield EventText(_NORMAL, "RebalancingFailed", "Move", note, dedup_key)


def _waiting_drains(result: PassResult) -> Iterator[EventText]:
    """Those that the message of the condition Valid names for the first time."""
    old, new = result.old.condition("Valid").message, result.new.condition("Valid").message
    for text in waiting_drains(result.context, result.states):
        if text in new and text not in old:
            yield EventText(_WARNING, "DrainWaits", "Move", text, text)


def _recovery(result: PassResult) -> Iterator[EventText]:
    old, new = result.old.recovery, result.new.recovery
    if (active := new.active) is None:
        return
    is_new = old.active is None or old.active.started_at != active.started_at
    if new.plan and (is_new or old.plan != new.plan):
        dedup_key = f"{active.started_at} {' '.join(new.plan)}"
        yield EventText(_NORMAL, "RecoveryPlanned", "Plan", _explain(result, new.plan), dedup_key)


def _explain(result: PassResult, order: Sequence[str]) -> str:
    """The order, and the reason: profit density, priority / (shared) cost of what is missing."""
    key = result.context.view.key
    now = {r.key[1]: r.density for r in result.plan.starting_now if r.key[0] == key}
    later = {r.key[1]: r.density for r in result.plan.waiting if r.key[0] == key}
    if "" in later:
        names = ", ".join(order)
        return f"all wait for capacity for the whole topology (mode Blocking): {names}"
    parts = []
    for name in order:
        if name in now:
            parts.append(f"{name} starts now (profit density {readable(now[name])})")
        elif name in later:
            parts.append(f"{name} waits for capacity (profit density {readable(later[name])})")
        else:
            parts.append(f"{name} is in progress")
    return "; ".join(parts)


def readable(density: float) -> str:
    """Three digits, and no exponent."""
    if density == inf:
        return "unlimited: nothing is missing"
    if 0 < density < 0.001:
        return "< 0.001"
    return f"{density:,.0f}" if density >= 100 else f"{density:.3g}"


def _queries(result: PassResult) -> Iterator[EventText]:
    generation = f"generation {result.context.view.generation}"
    for query in result.new.queries.values():
        before = result.old.queries.get(query.name)
        if query.state is None or (before is not None and query.state is before.state):
            continue
        since = query.since or (before.since if before is not None else "")
        details = f"{query.name} since {since}: {query.waiting_for or 'waits for nothing'}"
        # Each loss has its own Events: it has another time.
        dedup_key = f"{since or generation} {query.name} {_incarnations(result, query.name)}"
        old_state = before.state if before is not None else None
        is_known_live = before is not None and was_live(result.old, before)
        for announced in query_changes(old_state, query.state, is_known_live, details):
            yield _query_event(result, query, announced, since, dedup_key)


def _query_event(
    result: PassResult, query: QueryEntry, announced: QueryChange, since: str, dedup_key: str
) -> EventText:
    """`since`: when it was lost, or stopped being live; empty: it never was live."""
    match announced:
        case QueryChange.LOST:
            note = f"{query.name} (priority {query.priority}) is down: it waits for "
            return EventText(_WARNING, announced, "Assess", note + query.waiting_for, dedup_key)
        case QueryChange.RESTORING:
            what = "is being restored" if query.since else "is starting"
            note = f"{query.name} {what}; it waits for {query.waiting_for}"
            return EventText(_NORMAL, announced, "Recover", note, dedup_key)
        case QueryChange.TENTATIVE:
            note = f"{query.name} goes on without an input; it waits for {query.waiting_for}"
            return EventText(_WARNING, announced, "Assess", note, dedup_key)
        case QueryChange.LIVE:
            took_s = result.context.pass_inputs.now - parse_time(since)
            took = f", {max(took_s, 0.0):.1f}s after the loss" if since else ""
            return EventText(
                _NORMAL, announced, "Recover", f"{query.name} is live{took}", dedup_key
            )
        case _:
            assert_never(announced)


def _missing_results(result: PassResult) -> Iterator[EventText]:
    for query in result.new.queries.values():
        known = result.old.queries[query.name].missing if query.name in result.old.queries else ()
        for missing in query.missing:
            if missing not in known:
                since, what = missing.since_generation, _missing(missing)
                note = f"query {query.name}: {what}, because generation {since} began anew"
                dedup_key = f"{query.name} {since} {missing.from_epoch}"
                yield EventText(_WARNING, "ResultsMissing", "Assess", note, dedup_key)


def _bad_records(result: PassResult) -> Iterator[EventText]:
    for source, example in bad_records(result.context).items():
        if source not in result.old.bad_records:
            note = f"source {source}: records that are no rows are left out, such as {example}"
            dedup_key = f"{source} {result.context.view.generation}"
            yield EventText(_WARNING, "BadRecords", "Assess", note, dedup_key)


def _hot_keys(result: PassResult) -> Iterator[EventText]:
    found = hot_keys(result.context)
    for partition in result.new.hot_keys:
        if partition not in result.old.hot_keys:
            dedup_key = f"{partition} {result.context.view.generation}"
            yield EventText(_WARNING, "HotKey", "Assess", found[partition], dedup_key)


def _missing(missing: MissingResults) -> str:
    epochs = f"epochs {missing.from_epoch} to {missing.to_epoch}"
    if not missing.to_time:
        return f"its results of {epochs} are missing"
    begin = f"from {missing.from_time} to" if missing.from_time else "before"
    return f"its results {begin} {missing.to_time} are missing ({epochs})"


def _start_problems(result: PassResult) -> Iterator[EventText]:
    """Containers that cannot run, once for each pod and reason that a query waits for."""
    pods = [(s.pod, s.start_problem) for s in result.states if s.pod is not None]
    for query in result.new.queries.values():
        before = result.old.queries.get(query.name)
        waited_for = before.waiting_for if before is not None else ""
        for pod, problem in pods:
            container, _, text = problem.partition(": ")
            reason = text.partition(":")[0].partition(",")[0]
            head = f"{pod.name} on {pod.node}: {container}: {reason}"
            if problem and head in query.waiting_for and head not in waited_for:
                note = f"{query.name} waits for {pod.name} on {pod.node}: {problem}"
                dedup_key = f"{query.name} {pod.name} {reason}"
                yield EventText(_WARNING, "TaskCannotStart", "Start", note, dedup_key)


def _without_node(result: PassResult) -> Iterator[EventText]:
    """Pods that no node takes: when the status names a requirement for the first time."""
    generation = result.context.view.generation
    old, new = (s.condition("Redundant").message for s in (result.old, result.new))
    for why in sorted({s.no_node for s in result.states} - {""}):
        requirements = [f"{part.partition(': ')[0]}: " for part in why.split("; ")]
        if any(r in new and r not in old for r in requirements):
            note = f"{_names([s for s in result.states if s.no_node == why])}: {why}"
            dedup_key = f"{generation} {' '.join(requirements)}"
            yield EventText(_WARNING, "Unschedulable", "Plan", note, dedup_key)
    waits = coordinator_without_node(result.context)
    before = " ".join(q.waiting_for for q in result.old.queries.values())
    after = " ".join(q.waiting_for for q in result.new.queries.values())
    if waits and waits in after and waits not in before:
        yield EventText(_WARNING, "Unschedulable", "Plan", waits, f"{generation} {waits}")


def _failing_sidecars(result: PassResult) -> Iterator[EventText]:
    """Those that the message of the condition Valid names for the first time."""
    old, new = result.old.condition("Valid").message, result.new.condition("Valid").message
    for text in failing_sidecars(result.context, result.states):
        container = text.partition(" of ")[0]
        if f"{container} of " in new and f"{container} of " not in old:
            dedup_key = f"{container} {result.new.condition('Valid').observed_generation}"
            yield EventText(_WARNING, "SidecarFailing", "Start", text, dedup_key)


def _blocked_queries(result: PassResult) -> Iterator[EventText]:
    """What a query that is not live waits for fails, once for each cause: numbers in it may change.
    Not what has Events of its own: containers that cannot run, and wrong definitions."""
    for query in result.new.queries.values():
        before = result.old.queries.get(query.name)
        waited_for = _without_numbers(before.waiting_for if before is not None else "")
        for state in result.states:
            cause = _cause(result.context, state)[:REASON_LIMIT]
            is_new = _without_numbers(cause) not in waited_for
            if cause and is_new and cause in query.waiting_for:
                note = f"{query.name} is {query.state}: it waits for {query.waiting_for}"
                generation = f"generation {result.context.view.generation}"
                dedup_key = f"{query.since or generation} {query.name} {_without_numbers(cause)}"
                yield EventText(_WARNING, "QueryBlocked", "Assess", note, dedup_key)
                break


def _cause(context: ReconcileContext, state: SlotState) -> str:
    """The problem that its task reports, or why the API server does not create its pod."""
    if state.uncreated_pod is not None:
        return state.refusal
    task = context.report.task(state.slot.key, state.pod.incarnation) if state.pod else None
    has_own_event = state.refusal or (task is not None and task.wrong_definition)
    return task.problem if task is not None and not has_own_event else ""


def _without_numbers(text: str) -> str:
    return re.sub(r"[0-9]+", "0", text)


def _incarnations(result: PassResult, query: str) -> int:
    """The sum of its slots' incarnations, which distinguishes what is lost while it is down, or
    while its results are tentative."""
    if result.context.running is None:
        return 0
    topology = result.context.running.topology
    spec = next(q for q in topology.spec.queries if q.name == query)
    segments = {s.id for s in topology.needed_segments(spec)}
    taken = result.new.incarnations
    return sum(taken.get(s.slot.key, 0) for s in result.states if s.slot.segment in segments)


def _coordinator(result: PassResult) -> Iterator[EventText]:
    incarnation, why = result.coordinator.incarnation, result.coordinator.why
    if incarnation is not None and incarnation > 1 and why:
        note = f"replaced by incarnation {incarnation} of the coordinator: {why}"
        yield EventText(_WARNING, "CoordinatorReplaced", "Replace", note, f"{incarnation}")


def _redundancy(result: PassResult) -> Iterator[EventText]:
    old, new = result.old.condition("Redundant"), result.new.condition("Redundant")
    was_reduced = result.old.phase in (TopologyPhase.RECOVERING, TopologyPhase.DEGRADED)
    if was_reduced and new.status == "True" and old.status == "False":
        note = f"{result.new.redundancy} replicas are live"
        dedup_key = new.last_transition_time
        yield EventText(_NORMAL, "RedundancyRestored", "Recover", note, dedup_key)


def _refused_token(context: ReconcileContext) -> Iterator[EventText]:
    view = context.view
    name = names.token_secret_name(view.name, view.uid)
    if context.token is not None and context.token.is_refused:
        note = (
            f"the value of `{names.TOKEN_KEY}` in the Secret {name} is refused, and the token that "
            "pods have stays: a token is 1 to 1024 printable ASCII characters without spaces or "
            "line ends (`printf %s` writes none, `echo` does); write another one"
        )
        secret = context.pass_inputs.snapshot.owned["Secret", view.namespace, name]
        yield EventText(_WARNING, "TokenRefused", "Validate", note, f"{secret.version}")


def _operator_problem(result: PassResult) -> Iterator[EventText]:
    """The condition Degraded: the operator or the control plane fails. (In the phase Degraded, a
    query or a replica is missing.)"""
    old, new = result.old.condition("Degraded"), result.new.condition("Degraded")
    if new.status == "True" and (old.status, old.reason) != ("True", new.reason):
        dedup_key = f"{new.reason} {new.last_transition_time}"
        yield EventText(_WARNING, new.reason, "Reconcile", new.message, dedup_key)


def _suspension(result: PassResult) -> Iterator[EventText]:
    is_suspended = result.new.phase is TopologyPhase.SUSPENDED
    was_suspended = result.old.phase is TopologyPhase.SUSPENDED
    dedup_key = f"generation {result.context.view.generation}"
    if is_suspended and not was_suspended:
        note = "tasks are stopped; checkpoints and incarnations are kept"
        yield EventText(_NORMAL, "Suspended", "Suspend", note, dedup_key)
    if was_suspended and not is_suspended:
        note = "tasks are restored from checkpoints"
        yield EventText(_NORMAL, "Resumed", "Resume", note, dedup_key)


def _names(states: Sequence[SlotState]) -> str:
    names = [s.name for s in states]
    more = " ..." if len(names) > 8 else ""
    return ", ".join(names[:8]) + more if names else "none"
