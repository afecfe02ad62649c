"""How a task starts, follows polls, fails and ends. Pure.

A poll is level-triggered: the newest one that is not `ask_only` is the task's complete desired
state. Its changes are applied once; how far the log is truncated also depends on what the sinks
have written. A task that failed waits until it has reported that in a poll response, and ends. If
its results differ each time it stays, because its next boot would only fail again. A task that has
to compute again discards its log and ends.

Design: docs/design/task.md#passive, docs/design/task.md#failures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from rekindle.protocol import PollRequest, RestorePoint, SinkAssignment, Upstream
from rekindle.transitions import InvalidTransition

REPORT_FAILURE_S = 5.0
"""How long a failed task waits for the poll to which it reports the failure."""
CALL_TIMEOUT_S = 20.0
FLUSH_TIMEOUT_S = 15.0
SAVER_TIMEOUT_S = 5.0
"""Timeouts of an end (`EndProcess`): of the loop's call, the sinks and the saver."""
_ABORT_TIMEOUT_S = 0.5
"""How long a failed task waits for its threads."""


# -- effects -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartTask:
    restore: RestorePoint


@dataclass(frozen=True, slots=True)
class RouteInputs:
    upstreams: Sequence[Upstream]


@dataclass(frozen=True, slots=True)
class SetSinks:
    """First limit the running writers to epochs through `through` (None: no limit), then start and
    stop writers."""

    through: int | None
    sinks: Sequence[SinkAssignment]


@dataclass(frozen=True, slots=True)
class ReportDigests:
    """Respond with the digests of these epochs."""

    epochs: Sequence[int]


@dataclass(frozen=True, slots=True)
class SetCommittedEntry:
    """The partition's entry in the newest manifest; None if it has none. `refused`: entries of the
    partition that cannot be restored. `may_be_live`: see `PollRequest`."""

    point: RestorePoint | None
    refused: frozenset[str] = frozenset()
    may_be_live: bool = True


@dataclass(frozen=True, slots=True)
class TruncateLog:
    """Epochs through `floor` are no longer needed."""

    floor: int


@dataclass(frozen=True, slots=True)
class RunLoop:
    """Begin to compute epochs."""


@dataclass(frozen=True, slots=True)
class DiscardLog:
    """The log may be wrong: it is deleted before it is opened the next time."""


@dataclass(frozen=True, slots=True)
class CompareSinkFiles:
    """Files of earlier incarnations may be wrong: sinks compare them."""


@dataclass(frozen=True, slots=True)
class StopSinks:
    pass


@dataclass(frozen=True, slots=True)
class EndProcess:
    """Stop taking epochs, finish the running call within `loop_s`, let the sinks write the log
    within `flush_s` (0: not at all), and the saver finish within `saver_s`."""

    exit_status: int
    loop_s: float
    flush_s: float
    saver_s: float


SupervisorEffect = (
    StartTask
    | RouteInputs
    | SetSinks
    | ReportDigests
    | SetCommittedEntry
    | TruncateLog
    | RunLoop
    | DiscardLog
    | CompareSinkFiles
    | StopSinks
    | EndProcess
)


# -- states --------------------------------------------------------------------------------------


class ProcessPhase(StrEnum):
    """The phase of a task's process."""

    WAITING = "waiting for a restore point"
    STARTING = "starting"
    RUNNING = "running"
    FAILED_UNREPORTED = "failed, until that is reported"
    FAILED_PERMANENTLY = "failed, until it has to stop or to compute again"
    ENDED = "ended"


NEXT: Mapping[ProcessPhase, frozenset[ProcessPhase]] = {
    ProcessPhase.WAITING: frozenset(
        {
            ProcessPhase.STARTING,
            ProcessPhase.FAILED_UNREPORTED,
            ProcessPhase.FAILED_PERMANENTLY,
            ProcessPhase.ENDED,
        }
    ),
    ProcessPhase.STARTING: frozenset(
        {
            ProcessPhase.RUNNING,
            ProcessPhase.FAILED_UNREPORTED,
            ProcessPhase.FAILED_PERMANENTLY,
            ProcessPhase.ENDED,
        }
    ),
    ProcessPhase.RUNNING: frozenset(
        {ProcessPhase.FAILED_UNREPORTED, ProcessPhase.FAILED_PERMANENTLY, ProcessPhase.ENDED}
    ),
    ProcessPhase.FAILED_UNREPORTED: frozenset({ProcessPhase.ENDED}),
    ProcessPhase.FAILED_PERMANENTLY: frozenset({ProcessPhase.ENDED}),
    ProcessPhase.ENDED: frozenset(),
}


class SupervisorCore:
    """The process of one task."""

    def __init__(self, boot_id: str) -> None:
        self.phase = ProcessPhase.WAITING
        self._boot_id = boot_id
        self._desired: PollRequest | None = None
        self._failed = False
        self._report_until: float | None = None

    @property
    def ended(self) -> bool:
        return self.phase is ProcessPhase.ENDED

    @property
    def wake_at(self) -> float | None:
        return self._report_until if self.phase is ProcessPhase.FAILED_UNREPORTED else None

    @property
    def is_saver(self) -> bool:
        """Whether this replica saves the checkpoints of its partition."""
        return self._desired is not None and self._desired.saver

    def must_recompute(self, poll: PollRequest | None) -> bool:
        """Whether a poll requires this boot to end, because its results may be wrong."""
        return poll is not None and poll.recompute == self._boot_id

    # -- events; they raise InvalidTransition ----------------------------------------------------

    def poll_accepted(self, poll: PollRequest, now: float) -> list[SupervisorEffect]:
        """The newest poll that is not `ask_only`: the desired state."""
        if self.ended:
            return []
        self._desired = poll
        if self.must_recompute(poll) and self.phase is not ProcessPhase.FAILED_UNREPORTED:
            # Sinks stop before the running call ends: its output in the log may be wrong too.
            return [DiscardLog(), StopSinks(), *self._end(flush_s=0.0)]
        match self.phase:
            case ProcessPhase.WAITING:
                before = self._before_start(poll)
                if poll.restore is None:
                    return before
                self._enter(ProcessPhase.STARTING)
                return [*before, StartTask(poll.restore), RouteInputs(poll.upstreams)]
            case ProcessPhase.STARTING:
                return [RouteInputs(poll.upstreams)]  # inputs are read ahead
            case ProcessPhase.RUNNING:
                return self._apply_desired()
        return []

    def started(self, now: float) -> list[SupervisorEffect]:
        """State, inputs, engine and log are ready."""
        if self.ended:
            return []
        self._enter(ProcessPhase.RUNNING)
        return [*self._apply_desired(), RunLoop()]

    def sinks_progressed(self, durable: Sequence[int], now: float) -> list[SupervisorEffect]:
        """`durable`: the newest durable epoch of each sink. The log is truncated to the floor, but
        keeps epochs that a sink has not written. The same floor is applied again and again, because
        epochs below it may be appended after it came."""
        desired = self._desired
        if self.phase is not ProcessPhase.RUNNING or desired is None or desired.floor is None:
            return []
        return [TruncateLog(min([desired.floor, *durable]))]

    def task_failed(self, permanent: bool, now: float) -> list[SupervisorEffect]:
        """`permanent`: the next boot would fail again."""
        if self._failed or self.ended:
            return []
        self._failed = True
        self._enter(
            ProcessPhase.FAILED_PERMANENTLY if permanent else ProcessPhase.FAILED_UNREPORTED
        )
        if not permanent:
            self._report_until = now + REPORT_FAILURE_S
        return [StopSinks()]

    def failure_reported(self, now: float) -> list[SupervisorEffect]:
        """A response has reported to a coordinator that the task failed."""
        return self._end() if self.phase is ProcessPhase.FAILED_UNREPORTED else []

    def stop_requested(self, now: float) -> list[SupervisorEffect]:
        return self._end() if not self.ended else []

    def woken(self, now: float) -> list[SupervisorEffect]:
        """Time has passed."""
        return self._end() if self.wake_at is not None and now >= self.wake_at else []

    def _before_start(self, poll: PollRequest) -> list[SupervisorEffect]:
        """What may be wrong of earlier boots."""
        discard: list[SupervisorEffect] = [DiscardLog()] if poll.discard_log else []
        return [*discard, CompareSinkFiles()] if poll.compare_files else discard

    def _apply_desired(self) -> list[SupervisorEffect]:
        """Apply the newest desired state to a running task."""
        desired = self._desired
        if desired is None:
            return []
        return [
            RouteInputs(desired.upstreams),
            SetSinks(desired.sinks_through, desired.sinks),
            ReportDigests(desired.digests_of),
            SetCommittedEntry(desired.committed, frozenset(desired.refused), desired.may_be_live),
        ]

    def _end(self, flush_s: float = FLUSH_TIMEOUT_S) -> list[SupervisorEffect]:
        # Before that, the thread of the loop may wait for an engine that starts slowly.
        loop_s = CALL_TIMEOUT_S if self.phase is ProcessPhase.RUNNING else 0.0
        self._enter(ProcessPhase.ENDED)
        if self._failed:
            abort = _ABORT_TIMEOUT_S
            return [EndProcess(exit_status=1, loop_s=abort, flush_s=0.0, saver_s=abort)]
        return [EndProcess(exit_status=0, loop_s=loop_s, flush_s=flush_s, saver_s=SAVER_TIMEOUT_S)]

    def _enter(self, phase: ProcessPhase) -> None:
        if phase not in NEXT[self.phase]:
            raise InvalidTransition(f"task: '{phase}' cannot follow '{self.phase}'")
        self.phase = phase
