"""What a task prepares before its first epoch, in order: state, inputs, engine. Pure.

The checkpoint store or the source's files may be missing: the step is tried again after a back-off,
and what it waits for is reported. The engine starts with the process, in parallel to these steps.

Design: docs/design/task.md#start.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rekindle.backoff import BackoffPolicy
from rekindle.protocol import RestorePoint, TaskProblem
from rekindle.task.core.problems import SetProblem
from rekindle.transitions import StateMachine, Table

_BACKOFF = BackoffPolicy(first_s=0.05, longest_s=5.0)


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


# Effects that need I/O; each ends with `step_succeeded` or `step_failed`.
StartCall = RestoreState | OpenInputs | AwaitEngine
StartEffect = StartCall | CompleteStart | SetProblem


class StartStep(StrEnum):
    """What a task that starts waits for."""

    RESTORE_POINT = "a restore point"
    STATE = "its state"
    INPUTS = "its inputs"
    ENGINE = "its engine"
    NOTHING = "nothing"


NEXT: Table[StartStep, str] = {
    StartStep.RESTORE_POINT: {
        "start_requested": StartStep.STATE,
    },
    StartStep.STATE: {"step_succeeded": StartStep.INPUTS, "step_failed": StartStep.STATE},
    StartStep.INPUTS: {"step_succeeded": StartStep.ENGINE, "step_failed": StartStep.INPUTS},
    StartStep.ENGINE: {"step_succeeded": StartStep.NOTHING},
    StartStep.NOTHING: {},
}

_SUBJECTS = {StartStep.STATE: "restore", StartStep.INPUTS: "source"}
"""The subject of the problem that a step reports; other steps report none."""


class StartCore:
    """The start of one task."""

    def __init__(self) -> None:
        self._machine = StateMachine("start", NEXT, StartStep.RESTORE_POINT)
        self._point: RestorePoint | None = None
        self._failures = 0  # of this step
        self._retry_at: float | None = None

    @property
    def wake_at(self) -> float | None:
        return self._retry_at

    @property
    def waits_for(self) -> StartStep:
        """The step in progress, or that is tried again."""
        return self._machine.state

    # -- events; they raise InvalidTransition ----------------------------------------------------

    def start_requested(self, point: RestorePoint, now: float) -> list[StartEffect]:
        self._machine.step("start_requested")
        self._point = point
        return self._attempt()

    def step_succeeded(self, now: float) -> list[StartEffect]:
        """The last effect has succeeded."""
        assert self._retry_at is None, "no step is in progress"
        recovered = self._recovered()
        self._machine.step("step_succeeded")
        self._failures = 0
        return [*recovered, *self._attempt()]

    def step_failed(self, problem: TaskProblem, now: float) -> list[StartEffect]:
        """The last effect has failed, because something is missing, perhaps for a while."""
        assert self._retry_at is None, "no step is in progress"
        self._machine.step("step_failed")
        self._failures += 1
        self._retry_at = now + _BACKOFF.wait_s(self._failures)
        return [SetProblem(_SUBJECTS[self.waits_for], problem)]

    def woken(self, now: float) -> list[StartEffect]:
        """Time has passed."""
        if self._retry_at is None or now < self._retry_at:
            return []
        self._retry_at = None
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
