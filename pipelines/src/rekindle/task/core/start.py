"""What a task prepares before its first epoch, in order: state, inputs, engine. Pure.

The checkpoint store or the source's files may be missing: the step is tried again after a back-off,
and what it waits for is reported. The engine starts with the process, in parallel to these steps.

Design: docs/design/task.md#start.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from rekindle.backoff import BackoffPolicy
from rekindle.errors import RekindleError
from rekindle.protocol import RestorePoint, TaskProblem
from rekindle.task.core.problems import SetProblem

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

    # -- events; they raise InvalidStart ---------------------------------------------------------

    def start_requested(self, point: RestorePoint, now: float) -> list[StartEffect]:
        self._require(self.waits_for is StartStep.RESTORE_POINT, "start requested")
        self._point = point
        return self._advance()

    def step_succeeded(self, now: float) -> list[StartEffect]:
        """The last effect has succeeded."""
        self._require(self.waits_for in NEXT and self._retry_at is None, "step succeeded")
        return [*self._recovered(), *self._advance()]

    def step_failed(self, problem: TaskProblem, now: float) -> list[StartEffect]:
        """The last effect has failed, because something is missing, perhaps for a while."""
        self._require(self.waits_for in _SUBJECTS and self._retry_at is None, "step failed")
        self._failures += 1
        self._retry_at = now + _BACKOFF.wait_s(self._failures)
        return [SetProblem(_SUBJECTS[self.waits_for], problem)]

    def woken(self, now: float) -> list[StartEffect]:
        """Time has passed."""
        if self._retry_at is None or now < self._retry_at:
            return []
        self._retry_at = None
        return self._attempt()

    def _require(self, may_happen: bool, event: str) -> None:
        if not may_happen:
            raise InvalidStart(f"start: {event} while the task waits for {self.waits_for}")

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
