"""What a task prepares before its first epoch, in order: state, inputs, engine. Pure.

The checkpoint store or the source's files may be missing: the step is tried again after a back-off,
and what it waits for is reported. The engine starts with the process, in parallel to these steps.

Design: docs/design/task.md#start.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never

from rekindle.backoff import BackoffPolicy
from rekindle.errors import RekindleError
from rekindle.protocol import RestorePoint, TaskProblem
from rekindle.task.core.events import SetProblem, Woken

_BACKOFF = BackoffPolicy(first_s=0.05, longest_s=5.0)


@dataclass(frozen=True, slots=True)
class StartRequested:
    point: RestorePoint


@dataclass(frozen=True, slots=True)
class StateArrived:
    """State and log are installed already: they came from a partner."""


@dataclass(frozen=True, slots=True)
class StartStepSucceeded:
    """The last effect has succeeded."""


@dataclass(frozen=True, slots=True)
class StartStepFailed:
    """The last effect has failed, because something is missing, perhaps for a while."""

    problem: TaskProblem


@dataclass(frozen=True, slots=True)
class RestoreState:
    point: RestorePoint


@dataclass(frozen=True, slots=True)
class OpenInputs:
    pass


@dataclass(frozen=True, slots=True)
class AwaitEngine:
    pass


@dataclass(frozen=True, slots=True)
class CompleteStart:
    """Open the log, and begin."""


StartEvent = StartRequested | StateArrived | StartStepSucceeded | StartStepFailed | Woken
# Effects that need I/O; each ends with StartStepSucceeded or StartStepFailed.
StartCall = RestoreState | OpenInputs | AwaitEngine
StartEffect = StartCall | CompleteStart | SetProblem


class StartStep(StrEnum):
    """What a task that starts waits for."""

    RESTORE_POINT = "a restore point"
    STATE = "its state"
    INPUTS = "its inputs"
    ENGINE = "its engine"
    NOTHING = "nothing"


NEXT: Mapping[StartStep, StartStep] = {
    StartStep.RESTORE_POINT: StartStep.STATE,
    StartStep.STATE: StartStep.INPUTS,
    StartStep.INPUTS: StartStep.ENGINE,
    StartStep.ENGINE: StartStep.NOTHING,
}

_SUBJECTS = {StartStep.STATE: "restore", StartStep.INPUTS: "source"}
"""The subject of the problem that a step reports; other steps report none."""


class InvalidStart(RekindleError):
    """An event that cannot happen while a task waits for something: a bug in the task."""


class StartCore:
    """The start of one task. `waits_for`: the step in progress, or that is tried again."""

    def __init__(self) -> None:
        self.waits_for = StartStep.RESTORE_POINT
        self._point: RestorePoint | None = None
        self._failures = 0  # of this step
        self._retry_at: float | None = None

    @property
    def wake_at(self) -> float | None:
        return self._retry_at

    def step(self, event: StartEvent, now: float) -> list[StartEffect]:
        """Raises InvalidStart."""
        match event:
            case StartRequested(point) if self.waits_for is StartStep.RESTORE_POINT:
                self._point = point
                return self._advance()
            case StateArrived() if self.waits_for is StartStep.RESTORE_POINT:
                self.waits_for = StartStep.STATE
                return self._advance()
            case StartStepSucceeded() if self.waits_for in NEXT and self._retry_at is None:
                return [*self._recovered(), *self._advance()]
            case StartStepFailed(problem) if self.waits_for in _SUBJECTS and self._retry_at is None:
                self._failures += 1
                self._retry_at = now + _BACKOFF.wait_s(self._failures)
                return [SetProblem(_SUBJECTS[self.waits_for], problem)]
            case Woken():
                if self._retry_at is None or now < self._retry_at:
                    return []
                self._retry_at = None
                return self._attempt()
            case StartRequested() | StateArrived() | StartStepSucceeded() | StartStepFailed():
                raise InvalidStart(f"start: {event} while the task waits for {self.waits_for}")
        assert_never(event)

    def _advance(self) -> list[StartEffect]:
        self.waits_for = NEXT[self.waits_for]
        self._failures = 0
        return self._attempt()

    def _recovered(self) -> list[StartEffect]:
        if not self._failures:
            return []
        return [SetProblem(_SUBJECTS[self.waits_for], None)]

    def _attempt(self) -> list[StartEffect]:
        match self.waits_for:
            case StartStep.STATE:
                assert self._point is not None
                return [RestoreState(self._point)]
            case StartStep.INPUTS:
                return [OpenInputs()]
            case StartStep.ENGINE:
                return [AwaitEngine()]
            case StartStep.NOTHING:
                return [CompleteStart()]
            case StartStep.RESTORE_POINT:
                return []
