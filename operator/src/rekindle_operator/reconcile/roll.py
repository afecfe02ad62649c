"""Rolling replacement of running pods that an edit has outdated, where it is requested. Pure.

An edit of image, resources or template does not affect running pods (docs/operations.md). With the
annotation `rekindle.dev/roll` the operator replaces them, and without it those that have a token
that was replaced since (`rekindle_operator.tokens`): the coordinator first, which works until
the new one has started, then one task after another, each only while the new coordinator reports
every replica as live: without a coordinator nobody gives the sinks of a task to its partner. If it
reports that tasks of its image cannot read from those that run, no task is replaced: queries would
be down from the first replacement on. A replaced task continues from its partner's state, or from
the newest checkpoint and the logs of its inputs.
"""

from __future__ import annotations

from collections.abc import Sequence

from rekindle_operator.cluster.model import PodView
from rekindle_operator.reconcile.context import (
    ReconcileContext,
    coordinator_pods,
    draining_nodes,
)
from rekindle_operator.reconcile.health import ReplicaState, replica_state
from rekindle_operator.reconcile.owned import has_other_token
from rekindle_operator.reconcile.phases import SlotPhase
from rekindle_operator.reconcile.slots import SlotState
from rekindle_operator.recovery.losses import Loss


def is_requested(context: ReconcileContext) -> bool:
    """Not before the newest generation is accepted: new pods would be outdated at once."""
    running = context.running
    return (
        running is not None and context.view.roll and running.generation == context.view.generation
    )


def roll_next(context: ReconcileContext, states: Sequence[SlotState]) -> tuple[SlotState, ...]:
    """The states; one of them lost as `ROLLED`, if one may be replaced now. A task on a cordoned
    node is not chosen: its successor in a planned move is not outdated."""
    rolled = [s for s in states if not s.is_successor and _is_rolled(context, s)]
    if not rolled or not _coordinator_is_new(context):
        return tuple(states)
    if context.report.stream_conflict:
        return tuple(states)
    unreachable = [s for s in rolled if _is_unreachable(context, s)]
    if unreachable:
        return tuple(s.lost(Loss.ROLLED) if s in unreachable else s for s in states)
    if not all(_is_live(context, s) for s in states if not s.is_successor or s.holds_capacity):
        return tuple(states)
    draining = draining_nodes(context)
    chosen = next((s for s in rolled if s.pod is None or s.pod.node not in draining), None)
    return tuple(s.lost(Loss.ROLLED) if s is chosen else s for s in states)


def _is_rolled(context: ReconcileContext, state: SlotState) -> bool:
    if state.pod is None or not state.outdated:
        return False
    return is_requested(context) or has_other_token(context, state.pod)


def _is_unreachable(context: ReconcileContext, state: SlotState) -> bool:
    """The coordinator does not report it as live, although it has looked for long enough, and they
    have other tokens: it may know neither of the coordinator's, or be of a release that shows one
    only. Waiting for it would stop the roll for good."""
    coordinator = max(coordinator_pods(context), key=lambda p: p.incarnation)
    pass_inputs = context.pass_inputs
    since = pass_inputs.snapshot.pods_in_phase_since.get(coordinator.uid)
    has_looked = since is not None and pass_inputs.now - since > pass_inputs.timing.task_silent_s
    if state.pod is None or state.loss is not None or not has_looked:
        return False
    return has_other_token(context, state.pod) and not _is_live(context, state)


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
