"""Connects `coordinator.movement` to the coordinator: its input from poll responses, its decisions
for polls, floors and restore points. Pure.

A task gets a restore point once the movement core decides so, or at once if no partner could be its
donor: most tasks that start have no partner, or start together with their partners.

Design: docs/design/state-movement.md#the-coordinators-side.
"""

from __future__ import annotations

from dataclasses import replace

from rekindle.coordinator.checkpoints.retention import Progress
from rekindle.coordinator.model import Effect
from rekindle.coordinator.movement.core import MovementCore, ReplicasObserved
from rekindle.coordinator.movement.views import ReplicaView, ReplicaViews
from rekindle.coordinator.tasks.graph import Graph
from rekindle.coordinator.tasks.membership import Membership, Task, TaskPredicate
from rekindle.coordinator.tasks.routes import serves
from rekindle.exchange.state_mover.messages import Directive, Replica
from rekindle.protocol import PollResponse, TaskPhase

OBSERVE_INTERVAL_S = 1.0
"""How often the core observes all tasks while no response has anything new: with thousands of tasks
that takes as long as a tick."""


class StateMovements:
    """Of one coordinator. `fence`: its incarnation. `last_session_number`: as in `MovementCore`."""

    def __init__(self, fence: int, last_session_number: int = 0) -> None:
        self.core = MovementCore(fence, last_session_number=last_session_number)
        self._was_needed = False
        self._has_changed = True
        self._observed_at = 0.0

    def answered(self, before: PollResponse | None, response: PollResponse) -> None:
        """A task has responded; `before`: its response before that."""
        self._has_changed |= before is None or _relevant(before) != _relevant(response)

    def observe(
        self,
        tasks: Membership,
        graph: Graph,
        is_suspected: TaskPredicate,
        is_untrusted: TaskPredicate,
        now: float,
    ) -> list[Effect]:
        """Let the core decide, if a response has changed or the interval has passed. To be called
        at each tick once all tasks that were ready have responded."""
        if not self._has_changed and now - self._observed_at < OBSERVE_INTERVAL_S:
            return []
        self._has_changed, self._observed_at = False, now
        needed = self.core.active or any(_is_involved(task) for task in tasks)
        if not needed and not self._was_needed:
            return []
        self._was_needed = needed
        views = ReplicaViews(
            (_view(t, is_suspected, is_untrusted) for t in tasks if t.pod.may_be_running),
            graph.inputs,
        )
        return [*self.core.step(ReplicasObserved(views), now)]

    def may_restore(self, task: Task, partners: list[Task]) -> bool:
        """Whether a task that has no state may get a restore point. `partners`: replicas of its
        partition that serve and are trusted."""
        if task.response is None or task.response.movement is None:
            return True  # of a release that does not move state
        decided = self.core.may_restore(_replica(task), task.response.boot_id)
        if decided is not None:
            return decided
        newcomer = task.response.movement.newcomer
        if newcomer is not None and newcomer.progress is not None:
            return False  # a session of an earlier coordinator
        return not any(t is not task and t.phase is TaskPhase.LIVE for t in partners)

    def directive_for(self, task: Task, tasks: Membership) -> Directive | None:
        directive = self.core.directive_for(_replica(task))
        if directive == Directive():
            return None
        if directive.order is None:
            return directive
        donor = directive.order.donor
        found = tasks.find(donor.slot, donor.incarnation)
        return replace(directive, donor_address=found.endpoint) if found is not None else directive

    def with_holds(self, progress: Progress) -> Progress:
        """For floors, and for what manifests keep."""
        return self.core.with_holds(progress)


def _relevant(response: PollResponse) -> object:
    """The parts of a response whose changes the core observes at once. A transfer's progress is not
    one: it only shows that a session goes on."""
    report = response.movement
    newcomer = report.newcomer if report is not None else None
    progress = newcomer.progress if newcomer is not None else None
    session = (progress.session, progress.phase) if progress is not None else None
    return (
        response.boot_id,
        response.phase,
        response.restored_from,
        session,
        newcomer.abandoned if newcomer is not None else None,
        (report.holds, report.donates) if report is not None else None,
    )


def _is_involved(task: Task) -> bool:
    """Whether a task is, or may become, part of a state movement."""
    response = task.response
    if response is None or response.movement is None:
        return False
    report = response.movement
    return _waits_for_state(task) or bool(report.holds or report.donates)


def _waits_for_state(task: Task) -> bool:
    return task.phase is TaskPhase.WAITING and task.assigned is None


def _replica(task: Task) -> Replica:
    return Replica(task.slot, task.pod.incarnation)


def _view(task: Task, is_suspected: TaskPredicate, is_untrusted: TaskPredicate) -> ReplicaView:
    response, slot = task.response, task.slot
    before_response = ReplicaView(
        slot,
        task.pod.incarnation,
        serves=serves(task),
        suspected=is_suspected(task),
        trusted=not is_untrusted(task),
    )
    if response is None:
        return before_response
    report = response.movement
    phase = response.phase
    if phase is TaskPhase.WAITING and (report is None or task.assigned is not None):
        phase = TaskPhase.RESTORING  # it has a restore point, or will get one
    found = replace(
        before_response,
        boot=response.boot_id,
        phase=phase,
        epoch=response.stable_epoch,
        restored_from=response.restored_from,
        log_base=response.log_base if response.phase.serves else None,
        engine=response.engine,
    )
    if report is None:
        return replace(found, trusted=False)  # it cannot be a donor
    return replace(found, newcomer=report.newcomer, holds=report.holds, donates=report.donates)
