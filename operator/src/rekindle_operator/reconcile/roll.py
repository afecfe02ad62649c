"""Rolling replacement of running pods that an edit has outdated, where it is requested. Pure.

An edit of image, resources or template does not affect running pods (docs/operations.md). With the
annotation `rekindle.dev/roll` the operator replaces them, and without it those that have a token
that was replaced since (`rekindle_operator.tokens`): the coordinator first, which works until
the new one has started, then one task after another, each only while the new coordinator reports
every replica as live: without a coordinator nobody gives the sinks of a task to its partner. A
token has to be replaced some time: a task that has another one waits for its own partition alone,
where no partner has a node for none, and for what the roll has replaced before. If the coordinator
reports that tasks of its image cannot read from those that run, no task is replaced: queries would
be down from the first replacement on. A replaced task continues from its partner's state, or from
the newest checkpoint and the logs of its inputs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from rekindle.topology.model import Partition, partition_of
from rekindle_operator.cluster.model import PodView
from rekindle_operator.reconcile.context import (
    ReconcileContext,
    coordinator_pods,
    draining_nodes,
)
from rekindle_operator.reconcile.health import ReplicaState, replica_state
from rekindle_operator.reconcile.owned import has_other_token
from rekindle_operator.reconcile.partners import waits
from rekindle_operator.reconcile.phases import SlotPhase
from rekindle_operator.reconcile.slots import SlotState
from rekindle_operator.recovery.losses import Loss

_SHOWN_NAMES = 3


def is_requested(context: ReconcileContext) -> bool:
    """Not before the newest generation is accepted: new pods would be outdated at once."""
    running = context.running
    return (
        running is not None and context.view.roll and running.generation == context.view.generation
    )


def roll_next(context: ReconcileContext, states: Sequence[SlotState]) -> tuple[SlotState, ...]:
    """The states; one of them lost as `ROLLED`, if one may be replaced now, or all that the
    coordinator cannot reach."""
    rolled = _rolled(context, states)
    chosen = _unreachable(context, rolled) if rolled else []
    if not chosen:
        chosen = [s for s in (_choice(context, states, rolled)[0],) if s is not None]
    return tuple(s.lost(Loss.ROLLED) if s in chosen else s for s in states)


def why_tasks_wait(context: ReconcileContext, states: Sequence[SlotState]) -> str:
    """What has to be live before the next task is replaced; empty: nothing, or none is to be."""
    names = _choice(context, states, _rolled(context, states))[1]
    more = " ..." if len(names) > _SHOWN_NAMES else ""
    return f"{', '.join(names[:_SHOWN_NAMES])}{more} to be live" if names else ""


def _rolled(context: ReconcileContext, states: Sequence[SlotState]) -> list[SlotState]:
    """Those that are to be replaced, now or later."""
    rolled = [s for s in states if not s.is_successor and _is_rolled(context, s)]
    may_begin = rolled and _coordinator_is_new(context) and not context.report.stream_conflict
    return rolled if may_begin else []


def _choice(
    context: ReconcileContext, states: Sequence[SlotState], rolled: Sequence[SlotState]
) -> tuple[SlotState | None, Sequence[str]]:
    """The task that may be replaced now; or names of those that it waits for. A task on a cordoned
    node is not chosen: its successor in a planned move is not outdated."""
    draining = draining_nodes(context)
    rolled = [s for s in rolled if s.pod is None or s.pod.node not in draining]
    if not rolled or context.report_stale_since is not None:
        return None, ()
    partitions: dict[Partition, list[SlotState]] = defaultdict(list)
    for state in states:
        partitions[partition_of(state.slot)].append(state)
    missing = [
        s for s in states if not _is_live(context, s) if not s.is_successor or s.holds_capacity
    ]
    replaced = [
        s
        for s in missing
        if _was_replaced_by_choice(s)
        if not _has_given_its_place(context, s, partitions[partition_of(s.slot)])
    ]
    waits_for: dict[str, None] = {}
    for state in rolled:
        partition = partitions[partition_of(state.slot)]
        if state.pod is not None and has_other_token(context, state.pod):
            waited = replaced or _missing_partners(context, state, partition)
        else:
            waited = missing
        if not waited:
            return state, ()
        if len(waits_for) <= _SHOWN_NAMES:
            waits_for |= dict.fromkeys(s.name for s in waited)
    return None, tuple(waits_for)


def _missing_partners(
    context: ReconcileContext, state: SlotState, partition: Sequence[SlotState]
) -> list[SlotState]:
    """What a task waits for that is to be replaced: to be live itself, and a live partner, if one
    has a node."""
    if not _is_live(context, state):
        return [state]
    partners = [s for s in partition if s is not state and not waits(context, s)]
    return [] if any(_is_live(context, s) for s in partners) else partners


def _was_replaced_by_choice(state: SlotState) -> bool:
    """By this roll, or in a planned move, and not for a loss; or this is not known yet."""
    if state.uncreated_pod is not None:
        return state.uncreated_pod.predecessor_lost_at is None
    if state.pod is None or state.pod.terminating:
        return True
    return not state.outdated and state.pod.predecessor_lost_at is None


def _has_given_its_place(
    context: ReconcileContext, state: SlotState, partition: Sequence[SlotState]
) -> bool:
    """To a partner, which is new and live: it had no node before."""
    return waits(context, state) and any(_is_live(context, s) and not s.outdated for s in partition)


def _is_rolled(context: ReconcileContext, state: SlotState) -> bool:
    if state.pod is None or not state.outdated:
        return False
    return is_requested(context) or has_other_token(context, state.pod)


def _unreachable(context: ReconcileContext, rolled: Sequence[SlotState]) -> list[SlotState]:
    """Tasks with other tokens that have never responded to the coordinator, although it has looked
    for long enough: they may know neither of its tokens, or be of a release that shows one only.
    Waiting for them would stop the roll for good."""
    coordinator = max(coordinator_pods(context), key=lambda p: p.incarnation)
    pass_inputs = context.pass_inputs
    since = pass_inputs.snapshot.pods_in_phase_since.get(coordinator.uid)
    has_looked = since is not None and pass_inputs.now - since > pass_inputs.timing.task_silent_s
    if not has_looked or context.report_stale_since is not None:
        return []
    return [s for s in rolled if s.loss is None and _never_responded(context, s)]


def _never_responded(context: ReconcileContext, state: SlotState) -> bool:
    """Of one that the coordinator could reach: it has a node, and another token."""
    if state.pod is None or state.pod.node is None or not has_other_token(context, state.pod):
        return False
    report = context.report.task(state.slot.key, state.pod.incarnation)
    return report is None or report.stable_epoch is None


def is_replaced_by_roll(context: ReconcileContext, coordinator: PodView) -> bool:
    """It has another token, or runs another image than the generation; what else is edited does not
    concern it."""
    has_other_image = is_requested(context) and _has_other_image(context, coordinator)
    return has_other_image or has_other_token(context, coordinator)


def keeps_older_coordinator(context: ReconcileContext) -> bool:
    """An edit has changed the image; the coordinator that works has the one before."""
    newest = max(coordinator_pods(context), key=lambda p: p.incarnation, default=None)
    return newest is not None and _has_other_image(context, newest)


def _has_other_image(context: ReconcileContext, coordinator: PodView) -> bool:
    if context.running is None or not coordinator.image:
        return False
    recorded = context.running.view.spec.get("image")
    return recorded is not None and coordinator.image != recorded


def _coordinator_is_new(context: ReconcileContext) -> bool:
    """It has the generation's image, and has reported."""
    newest = max(coordinator_pods(context), key=lambda p: p.incarnation, default=None)
    if newest is None or newest.terminating or newest.ended:
        return False
    if context.pass_inputs.losses.is_on_lost_node(newest) or is_replaced_by_roll(context, newest):
        return False
    return context.report.fence == newest.incarnation


def _is_live(context: ReconcileContext, state: SlotState) -> bool:
    is_bound = state.phase is SlotPhase.BOUND
    return is_bound and replica_state(context, state) is ReplicaState.LIVE
