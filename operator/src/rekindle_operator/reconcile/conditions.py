"""The conditions of `status`: what holds, and why not. Pure.

A condition is `Unknown` where the coordinator's report is too old to prove anything, and while a
check is pending; its message names what is missing. A message changes only when its meaning does:
a status is written when it differs.

Design: docs/operations.md#watch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rekindle.identity import STREAM_PROTOCOL, STREAM_VERSIONS, Versions, incompatible
from rekindle.report import CheckpointProblemKind
from rekindle.topology.graph import nodes_with_paths
from rekindle_operator.cluster.convert import rfc3339
from rekindle_operator.cluster.model import TopologyView
from rekindle_operator.reconcile import roll
from rekindle_operator.reconcile.context import ReconcileContext
from rekindle_operator.reconcile.coordinator import why_roll_waits
from rekindle_operator.reconcile.drains import cut, waiting_drains
from rekindle_operator.reconcile.health import (
    Health,
    ReplicaState,
    replica_state,
    stale_report_message,
    without_successors,
)
from rekindle_operator.reconcile.sidecars import failing_sidecars
from rekindle_operator.reconcile.slots import SlotState
from rekindle_operator.topology_status import ConditionEntry, QueryState, RecoveryStatus

_MAX_MESSAGE_CHARS = 1024
_LEAST_PROBLEM_CHARS = 300
_SHOWN_NAMES = 10  # in a message
_SHOWN_REASONS = 2
_REFUSED = "RefusedByTask"
_MAX_MISSED_CHECKPOINTS = 3
_NO_REPORT = "NoReport"
_DELETING = "Deleting"
_FOREGROUND = "foregroundDeletion"  # the garbage collector's own finalizer
_OTHER_PROBLEM = "CheckpointProblem"


@dataclass(frozen=True, slots=True)
class Condition:
    type: str
    status: str  # True | False | Unknown
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
    recovery: RecoveryStatus,
    problem: OperatorProblem | None,
) -> list[Condition]:
    valid, available = _valid(context, states, health), _available(context, health)
    return [
        valid,
        available,
        _redundant(context, states),
        _consistent(context),
        _recovering(recovery),
        _checkpointed(context, states),
        degraded(problem),
        _ready(valid, available),
    ]


def conditions_of_undecided(view: TopologyView, problem: OperatorProblem) -> list[Condition]:
    """Of a topology for which nothing can be decided."""
    unknown = [
        Condition(kind, "Unknown", problem.reason, problem.message)
        for kind in ("Redundant", "Consistent")
    ]
    valid, available = (
        Condition(kind, "Unknown", problem.reason, problem.message)
        for kind in ("Valid", "Available")
    )
    if view.deleting:
        available = _being_deleted(view)
    kept = [_kept(view, kind) for kind in ("Recovering", "Checkpointed")]
    known = [c for c in kept if c.status]
    return [valid, available, *unknown, *known, degraded(problem), _ready(valid, available)]


def condition_entries(
    view: TopologyView, conditions: Iterable[Condition], now: float
) -> list[ConditionEntry]:
    """Entries of `status.conditions`; lastTransitionTime changes only with the condition's
    status."""
    entries = []
    for condition in conditions:
        old = view.operator_status.condition(condition.type)
        is_same = old.status == condition.status and bool(old.last_transition_time)
        entries.append(
            ConditionEntry(
                type=condition.type,
                status=condition.status,
                reason=condition.reason,
                message=condition.message[:_MAX_MESSAGE_CHARS],
                observed_generation=view.generation,
                last_transition_time=old.last_transition_time if is_same else rfc3339(now),
            )
        )
    return entries


def degraded(problem: OperatorProblem | None) -> Condition:
    if problem is None:
        return Condition("Degraded", "False", "AsExpected", "the operator works as expected")
    return Condition("Degraded", "True", problem.reason, problem.message)


def _kept(view: TopologyView, kind: str) -> Condition:
    old = view.operator_status.condition(kind)
    return Condition(kind, old.status, old.reason, old.message)


def _being_deleted(view: TopologyView) -> Condition:
    """Available, with what the deletion waits for."""
    holders = [
        "its pods and other objects to end (foreground deletion)"
        if name == _FOREGROUND
        else f"finalizer {name}"
        for name in view.finalizers
    ]
    waits = f", which waits for {', '.join(holders)}" if holders else ""
    message = f"the topology is being deleted{waits}; nothing that ends is replaced"
    return Condition("Available", "False", _DELETING, message)


def _ready(valid: Condition, available: Condition) -> Condition:
    both = (valid, available)
    failing = next((c for c in both if c.status == "False"), None)
    failing = failing or next((c for c in both if c.status == "Unknown"), None)
    if failing is None:
        return Condition("Ready", "True", "Ready", available.message)
    return Condition("Ready", failing.status, failing.reason, failing.message)


def _valid(context: ReconcileContext, states: Sequence[SlotState], health: Health) -> Condition:
    generation = context.view.generation
    if context.view.deleting and (old := _kept(context.view, "Valid")).status:
        return old  # its deletion decides about no generation
    if context.problems:
        rest = "".join(f"; {n}" for n in (*_older_crd(context), *waiting_drains(context, states)))
        rest += _keeps_running(context)
        problems = "; ".join(map(str, context.problems))
        message = cut(problems, max(_MAX_MESSAGE_CHARS - len(rest), _LEAST_PROBLEM_CHARS)) + rest
        return Condition("Valid", "False", context.problems[0].reason or "Invalid", message)
    if (waits := context.acceptance_waits) is not None:
        message = f"generation {generation}: waiting for {waits.what}{_keeps_running(context)}"
        return Condition("Valid", "Unknown", waits.reason, cut(message, _MAX_MESSAGE_CHARS))
    refused = _refused_by_tasks(context, states) or _refused_before(context, health)
    if refused:
        return Condition("Valid", "False", _REFUSED, refused)
    notes = (*_notes(context, states), *_older_crd(context))
    message = "; ".join((f"generation {generation} is accepted", *notes))
    return Condition("Valid", "True", "Accepted", message)


def _keeps_running(context: ReconcileContext) -> str:
    """What is said of the generation before one that is not accepted."""
    running = context.running
    return f" [generation {running.generation} keeps running]" if running is not None else ""


def _notes(context: ReconcileContext, states: Sequence[SlotState]) -> Iterator[str]:
    """How the running pods differ from the spec, and what limits them."""
    if context.running is None:
        return
    yield from waiting_drains(context, states)
    yield from failing_sidecars(context, states)
    if context.newer_image:
        image = context.running.view.spec.get("image")
        yield (
            f"it keeps image {image}, with which it was accepted; the operator's default is now "
            f"{context.newer_image}: any edit of the spec adopts it"
        )
        if _default_image_conflicts(context):
            yield (
                f"with that edit set spec.suspend to true, and back once all tasks have ended: "
                f"its tasks, of stream protocol {STREAM_PROTOCOL}, cannot read from running ones, "
                f"of {context.report.stream_protocol}"
            )
    queries, limit = context.running.topology.spec.queries, context.max_priority
    if limit is not None and any(q.priority > limit for q in queries):
        above = ", ".join(f"{q.name} ({q.priority})" for q in queries if q.priority > limit)
        yield f"priorities above the namespace's limit count as {limit}: {above}"
    if outdated := sum(s.outdated for s in states):
        pods = sum(s.pod is not None for s in states)
        text = f"{outdated} of {pods} pods are outdated (an older spec, image or token)"
        waits = roll.why_tasks_wait(context, states)
        yield f"{text}; the roll waits for {waits}" if waits else text
    if why := why_roll_waits(context):
        yield f"the roll waits for a new coordinator ({why})"
    conflict = context.report.stream_conflict
    is_default_image = not context.newer_image and context.view.spec.get("image") is None
    if (
        is_default_image
        and roll.keeps_older_coordinator(context)
        and _default_image_conflicts(context)
    ):
        # The older coordinator does not know what tasks of the new image speak.
        conflict = (context.report.stream_protocol, STREAM_PROTOCOL)
    if conflict:
        refused = "the roll is refused: " if roll.is_requested(context) else ""
        yield (
            f"{refused}stream protocols {' and '.join(map(str, conflict))} of running tasks and of "
            f"those of the image cannot work together, so lost tasks cannot be replaced: set "
            f"spec.suspend to true, and back once all tasks have ended"
        )


def _default_image_conflicts(context: ReconcileContext) -> bool:
    """Whether tasks of the operator's own release cannot read from those that run."""
    if not context.report.fence:  # no coordinator has reported yet
        return False
    running = context.report.stream_protocol
    return incompatible(Versions(protocol=running, oldest=running), STREAM_VERSIONS) is not None


def _older_crd(context: ReconcileContext) -> Iterator[str]:
    """A note if the CRD lacks fields: the API server drops them from the spec, and the operator
    from the status."""
    if missing := context.pass_inputs.snapshot.crd_missing_fields:
        shown = ", ".join(missing[:_SHOWN_NAMES]) + (", ..." if len(missing) > _SHOWN_NAMES else "")
        yield f"the CRD in the cluster is older than the operator and lacks {shown}: upgrade it"


def _refused_by_tasks(context: ReconcileContext, states: Sequence[SlotState]) -> str:
    """What only a task can find: SQL that Spark refuses, input that does not fit its schema."""
    if context.running is None:
        return ""
    paths = {node.name: path for path, node in nodes_with_paths(context.running.topology.spec)}
    pods = ((s.slot.key, s.pod.incarnation) for s in states if s.pod is not None)
    tasks = (context.report.task(slot, incarnation) for slot, incarnation in pods)
    found = (
        f"{paths[t.wrong_definition]}: {t.problem}"
        for t in tasks
        if t and t.wrong_definition in paths
    )
    return "; ".join(sorted(set(found)))


def _refused_before(context: ReconcileContext, health: Health) -> str:
    """The refusal that the status has, until the queries are live: a task that starts again
    reports a refusal only once it has come as far again."""
    old = context.last_status.condition("Valid")
    is_of_generation = old.reason == _REFUSED and old.observed_generation == context.view.generation
    return old.message if is_of_generation and health.queries_live < len(health.queries) else ""


def _available(context: ReconcileContext, health: Health) -> Condition:
    if context.view.deleting:
        return _being_deleted(context.view)
    if context.suspended:
        return Condition("Available", "False", "Suspended", "spec.suspend is true")
    if context.running is None:
        return Condition("Available", "False", "NotStarted", "no generation is accepted")
    not_down = (QueryState.LIVE, QueryState.UNKNOWN)
    down = [q for q in health.queries if q.state not in not_down]
    if down:
        message = "not live: " + ", ".join(f"{q.name} ({q.state})" for q in down)
        first = next((q for q in down if q.waiting_for), None)
        message += f"; {first.name} waits for {first.waiting_for}" if first is not None else ""
        return Condition("Available", "False", "QueriesDown", message)
    if health.is_unknown:
        return Condition("Available", "Unknown", _NO_REPORT, stale_report_message(context))
    return Condition("Available", "True", "AllQueriesLive", "every query is live")


def _redundant(context: ReconcileContext, states: Sequence[SlotState]) -> Condition:
    replicas = [(s, replica_state(context, s)) for s in without_successors(states)]
    not_missing = (ReplicaState.LIVE, ReplicaState.UNKNOWN)
    missing = [s for s, state in replicas if state not in not_missing]
    if missing or not states:
        names = ", ".join(s.name for s in missing[:_SHOWN_NAMES])
        shown = names + (" ..." if len(missing) > _SHOWN_NAMES else "")
        reasons = Counter(why for s in missing if (why := s.refusal or s.no_node))
        most = [why[:_LEAST_PROBLEM_CHARS] for why, _ in reasons.most_common(_SHOWN_REASONS)]
        detail = f" ({'; '.join(most)})" if most else ""
        message = f"not live: {shown or 'all'}{detail}"
        return Condition("Redundant", "False", "ReplicasMissing", message)
    if any(state is ReplicaState.UNKNOWN for _, state in replicas):
        return Condition("Redundant", "Unknown", _NO_REPORT, stale_report_message(context))
    return Condition("Redundant", "True", "AllReplicasLive", "every replica is live")


def _consistent(context: ReconcileContext) -> Condition:
    if context.report_stale_since is not None:
        return Condition("Consistent", "Unknown", _NO_REPORT, stale_report_message(context))
    report = context.report
    if not report.diverged and not report.inconsistent:
        return Condition("Consistent", "True", "Agreed", "no replicas disagree")
    segments = {s.id: s.name for s in context.running.topology.segments} if context.running else {}
    shown = []
    for key in report.diverged:
        segment, _, rest = key.partition("/")
        shown.append(f"{segments.get(segment, segment)}/{rest}")
    diverged = []
    if shown:
        diverged.append(f"to be replaced, since their partners agree: {', '.join(shown)}")
    reason = "Diverged" if shown else "Disagreement"
    return Condition("Consistent", "False", reason, "; ".join([*diverged, *report.inconsistent]))


def _recovering(recovery: RecoveryStatus) -> Condition:
    if (active := recovery.active) is None:
        return Condition("Recovering", "False", "Idle", "no recovery is in progress")
    plan = f"in this order: {', '.join(recovery.plan)}"
    message = plan if recovery.plan else "no query waits; lost replicas are replaced"
    return Condition("Recovering", "True", active.mode, message)


_STORE_PROBLEMS = (
    CheckpointProblemKind.STORE_UNAVAILABLE,
    CheckpointProblemKind.ENTRIES_REFUSED,
    CheckpointProblemKind.UNRESTORABLE,
)
"""Why nothing is committed. Of the other kinds GARBAGE_COLLECTION_FAILED is no reason, and STALLED
only the effect."""


def _checkpointed(context: ReconcileContext, states: Sequence[SlotState]) -> Condition:
    """By epochs, not by the clock: sources that have ended, or pause, make no epochs to save."""
    checkpoint, head = context.report.checkpoint, context.report.head_epoch
    newest = checkpoint.epoch if checkpoint is not None else None
    store = _checkpoint_problem(context, *_STORE_PROBLEMS)
    other = _checkpoint_problem(context, None)
    nothing_fails = not store and not other
    if context.running is None or context.suspended or (head is None and nothing_fails):
        message = "no source has released an epoch"
        return Condition("Checkpointed", "Unknown", "NotRunning", message)
    if head is None:  # tasks get no restore point before the store can be read
        reason = "StoreFailed" if store else _OTHER_PROBLEM
        return Condition("Checkpointed", "False", reason, store or other)
    if context.report_stale_since is not None:
        return Condition("Checkpointed", "Unknown", _NO_REPORT, stale_report_message(context))
    if lost := _checkpoint_problem(context, CheckpointProblemKind.UNRESTORABLE):
        return Condition("Checkpointed", "False", "Unrestorable", lost)
    if other:
        return Condition("Checkpointed", "False", _OTHER_PROBLEM, other)
    interval_epochs = context.running.topology.spec.checkpoint_interval_epochs
    due = checkpoint.next_epoch if checkpoint is not None else None
    # Checkpoint epochs that `replayTarget` leaves out are not missed.
    expected = max(newest if newest is not None else -1, (due or 0) - interval_epochs)
    missed = (head - expected) // interval_epochs
    if missed <= _MAX_MISSED_CHECKPOINTS:
        return Condition("Checkpointed", "True", "UpToDate", "checkpoints keep up with the sources")
    last = f"the last one is of epoch {newest}" if newest is not None else "there is none yet"
    message = f"more than {_MAX_MISSED_CHECKPOINTS} checkpoints are missing: {last}"
    reason = store or _saving_problem(context, states)
    message += f"; {reason}" if reason else ""
    return Condition("Checkpointed", "False", "Overdue", message)


def _checkpoint_problem(context: ReconcileContext, *kinds: CheckpointProblemKind | None) -> str:
    """The message of the first problem of these kinds; None: of a kind that a newer coordinator
    knows."""
    found = (p.message for p in context.report.checkpoint_problems if p.kind in kinds)
    return next(found, "")


def _saving_problem(context: ReconcileContext, states: Sequence[SlotState]) -> str:
    """Why tasks do not save their checkpoints: the first one that says so."""
    for state in states:
        task = state.pod and context.report.task(state.slot.key, state.pod.incarnation)
        if task and task.saving_fails:
            return f"{state.name}: {task.problem}"
    return ""
