"""The phases of a task, and the events that lead from one to the next. Pure.

The table is complete: an event that it does not contain for a phase is a bug, and raises an error
with the transitions before it. Failed is final; late events of other threads do not change it. Does
not know the task's components.

Design: docs/design/task.md#phases.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from rekindle.protocol import TaskPhase
from rekindle.transitions import StateMachine


class TaskEvent(StrEnum):
    """What changes a task's phase."""

    START_BEGUN = "start begun"
    STARTED = "started"  # state, inputs and engine are ready; the log is open to readers
    CAUGHT_UP = "caught up"
    FELL_BEHIND = "fell behind"
    STOP_REQUESTED = "stop requested"
    FAILED = "failed"


TRANSITIONS: Mapping[TaskPhase, Mapping[TaskEvent, TaskPhase]] = {
    TaskPhase.WAITING: {
        TaskEvent.START_BEGUN: TaskPhase.RESTORING,
        TaskEvent.STOP_REQUESTED: TaskPhase.STOPPING,
        TaskEvent.FAILED: TaskPhase.FAILED,
    },
    TaskPhase.RESTORING: {
        TaskEvent.STARTED: TaskPhase.CATCHING_UP,
        TaskEvent.STOP_REQUESTED: TaskPhase.STOPPING,
        TaskEvent.FAILED: TaskPhase.FAILED,
    },
    TaskPhase.CATCHING_UP: {
        TaskEvent.CAUGHT_UP: TaskPhase.LIVE,
        TaskEvent.STOP_REQUESTED: TaskPhase.STOPPING,
        TaskEvent.FAILED: TaskPhase.FAILED,
    },
    TaskPhase.LIVE: {
        TaskEvent.FELL_BEHIND: TaskPhase.CATCHING_UP,
        TaskEvent.STOP_REQUESTED: TaskPhase.STOPPING,
        TaskEvent.FAILED: TaskPhase.FAILED,
    },
    TaskPhase.STOPPING: {
        TaskEvent.FAILED: TaskPhase.FAILED,
    },
    TaskPhase.FAILED: {
        TaskEvent.CAUGHT_UP: TaskPhase.FAILED,
        TaskEvent.FELL_BEHIND: TaskPhase.FAILED,
        TaskEvent.STOP_REQUESTED: TaskPhase.FAILED,
        TaskEvent.FAILED: TaskPhase.FAILED,
    },
}


def new_phase() -> StateMachine[TaskPhase, TaskEvent]:
    """The phase of one task."""
    return StateMachine("task", TRANSITIONS, TaskPhase.WAITING)
