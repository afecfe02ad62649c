"""The phases of a task, and the events that lead from one to the next. Pure.

The table is complete: an event that it does not contain for a phase is a bug, and raises an error
with the transitions before it. Failed is final; late events of other threads do not change it. Does
not know the task's components.

Design: docs/design/task.md#phases.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from enum import StrEnum

from rekindle.errors import RekindleError
from rekindle.protocol import TaskPhase

HISTORY_LENGTH = 16
"""Number of transitions in an error message."""


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


class InvalidTransition(RekindleError):
    """An event that cannot happen in a phase: a bug in the task. Contains the transitions before
    it."""


class PhaseMachine:
    """The phase of one task."""

    def __init__(self) -> None:
        self._phase = TaskPhase.WAITING
        self._history: deque[str] = deque(maxlen=HISTORY_LENGTH)

    @property
    def phase(self) -> TaskPhase:
        return self._phase

    def step(self, event: TaskEvent) -> bool:
        """Whether the event changed the phase. Raises InvalidTransition."""
        before = self._phase
        after = TRANSITIONS[before].get(event)
        if after is None:
            history = "; ".join(self._history) or "nothing"
            raise InvalidTransition(
                f"task: event '{event}' is invalid in phase {before}; transitions before: {history}"
            )
        self._history.append(f"{before}: {event}")
        self._phase = after
        return after is not before
