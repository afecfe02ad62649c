"""Which epochs the chain computes in one call, and what is retried. Pure.

A call takes as many epochs as are complete, bounded in epochs, rows and bytes, and never goes
beyond a checkpoint epoch. Its outputs are appended to the log one after another; only then is the
state after it the task's state. A transient failure is retried after a back-off; a call that does
not fit into memory is retried as a smaller one, after a restart of the engine. Does not know the
log, Spark or sinks.

A tentative epoch is a call on a fork of the state: its result is written to a branch of the log,
and never enters the state, a checkpoint or a digest. If it fails for any reason, it is left out:
the stable branch does not wait for it.

Design: docs/design/task.md#epoch-loop, docs/design/engine.md#calls, docs/design/consistency.md.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from rekindle.backoff import BackoffPolicy
from rekindle.engine.bounds import CallBounds, take_ready
from rekindle.engine.call_sizes import CallSizes
from rekindle.engine.failure import EngineUnavailable, OutOfMemory
from rekindle.engine.model import EpochOutput, State
from rekindle.errors import RekindleError
from rekindle.protocol import TaskProblem
from rekindle.streams.digest import chain_digest, chained_digest_from
from rekindle.streams.epochs import EpochInput
from rekindle.task.core.problems import SetProblem
from rekindle.task.state import TaskState
from rekindle.transitions import InvalidTransition

_BACKOFF = BackoffPolicy(first_s=0.1, longest_s=2.0)


# -- effects -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TakeEpochs:
    bounds: CallBounds


@dataclass(frozen=True, slots=True)
class ProcessEpochs:
    """`attempt`: of the tentative branch; 0: the stable one. `for_checkpoint`: the state after
    these epochs is one, and is to have its deltas joined."""

    operators: State
    epochs: Sequence[EpochInput]
    attempt: int = 0
    for_checkpoint: bool = False


@dataclass(frozen=True, slots=True)
class AppendEpochs:
    """Append the outputs in order."""

    outputs: Sequence[EpochOutput]


@dataclass(frozen=True, slots=True)
class AppendTentative:
    """Append the output to the branch of an attempt."""

    attempt: int
    output: EpochOutput


@dataclass(frozen=True, slots=True)
class RestartEngine:
    spark_job_input_bytes: int


@dataclass(frozen=True, slots=True)
class EpochComputed:
    """An epoch is in the log: its digest, and that of all output through it."""

    epoch: int
    digest: str
    chained: str


@dataclass(frozen=True, slots=True)
class CallCompleted:
    """All outputs of a call are in the log, `took_s` after the call began."""

    epochs: Sequence[EpochInput]
    took_s: float


@dataclass(frozen=True, slots=True)
class TentativeCompleted:
    """A tentative epoch is in its branch; `failed`: it is not, and none will be for a while."""

    attempt: int
    epoch: int
    failed: bool = False


@dataclass(frozen=True, slots=True)
class CheckpointReached:
    """The newest epoch in the log is a checkpoint epoch: its state is to be saved."""

    state: TaskState


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The task cannot continue."""

    error: Exception


LoopRequest = TakeEpochs | ProcessEpochs | AppendEpochs | AppendTentative | RestartEngine
LoopEffect = (
    LoopRequest
    | SetProblem
    | EpochComputed
    | CallCompleted
    | TentativeCompleted
    | CheckpointReached
    | GiveUp
)


# -- states --------------------------------------------------------------------------------------


class LoopPhase(StrEnum):
    """What the loop is doing, or waits to try again."""

    TAKING = "taking epochs"
    PROCESSING = "processing epochs"
    APPENDING = "appending epochs"
    RESTARTING = "restarting the engine"


VALID_EVENTS: Mapping[LoopPhase, frozenset[str]] = {
    LoopPhase.TAKING: frozenset(
        {"epochs_taken", "tentative_taken", "fork_dropped", "idle_engine_died"}
    ),
    LoopPhase.PROCESSING: frozenset(
        {"epochs_processed", "tentative_failed", "engine_failed", "idle_engine_died"}
    ),
    LoopPhase.APPENDING: frozenset({"epochs_appended", "tentative_appended", "tentative_failed"}),
    LoopPhase.RESTARTING: frozenset({"engine_restarted"}),
}
"""What can happen in a phase, as methods of `LoopCore`; anything else but `request_failed` and
`woken` is a bug in the caller."""

_TENTATIVE = "tentative"
_SUBJECTS = {
    LoopPhase.TAKING: "input",
    LoopPhase.PROCESSING: "engine",
    LoopPhase.APPENDING: "log",
    LoopPhase.RESTARTING: "engine",
}


class LoopCore:
    """The loop of one task. `state`: after the newest epoch whose call is complete; `chained`: the
    digest of all output through the newest epoch in the log. All that can happen is a method that
    returns effects; InvalidTransition if the table does not have it for the phase."""

    def __init__(
        self,
        state: TaskState,
        checkpoint_interval_epochs: int,
        sizes: CallSizes,
        *,
        takes_again: bool = False,
    ) -> None:
        """`takes_again`: epochs that were taken but did not fit into the call are not kept for the
        next one, since a tentative epoch may come before them; they are taken again."""
        self._takes_again = takes_again
        self._tentative: tuple[int, int] | None = None  # attempt and epoch, if such is in the call
        self._fork: State | None = None  # of the tentative branch, while there is one
        self.state = state
        self.chained = state.chained_digest or chained_digest_from(state.epoch)
        self.phase = LoopPhase.TAKING
        self._checkpoint_interval_epochs = checkpoint_interval_epochs
        self._sizes = sizes
        self._taken: deque[EpochInput] = deque()  # taken from the inputs, not yet in a call
        self._call: Sequence[EpochInput] = ()
        self._outputs: deque[EpochOutput] = deque()  # of the call, not yet in the log
        self._operators = state.operators
        self._began = -math.inf
        self._waiting = True  # the request of the phase is to be made, at `_retry_at`
        self._failures = 0  # in a row
        self._retry_at = -math.inf
        self._problems: set[str] = set()  # subjects of the problems that are reported
        self._failed_in_call = False  # whether the engine restarts because it failed in a call

    @property
    def wake_at(self) -> float | None:
        """When `woken` is due; None if the core does not wait for a time."""
        return self._retry_at if self._waiting else None

    def _check(self, event: str) -> None:
        if event not in VALID_EVENTS[self.phase]:
            raise InvalidTransition(f"loop: {event} while {self.phase}")

    # -- taking ----------------------------------------------------------------------------------

    def _take(self) -> list[LoopEffect]:
        self._enter(LoopPhase.TAKING)
        done = self.state.epoch + 1
        until_checkpoint = (
            self._checkpoint_interval_epochs - done % self._checkpoint_interval_epochs
        )
        return [TakeEpochs(self._sizes.bounds.with_max_epochs(until_checkpoint))]

    def epochs_taken(self, epochs: Sequence[EpochInput], now: float) -> list[LoopEffect]:
        """The next complete epochs; none if no epoch was complete in time."""
        self._check("epochs_taken")
        self._taken.extend(epochs)
        return [*self._recovered("input"), *self._next_call(now)]

    def _next_call(self, now: float) -> list[LoopEffect]:
        return self._process(now) if self._taken else self._take()

    # -- tentative epochs ------------------------------------------------------------------------

    def tentative_taken(
        self, attempt: int, epoch: EpochInput, forks: bool, now: float
    ) -> list[LoopEffect]:
        """An epoch to process on a tentative branch. `forks`: it begins the branch, with the newest
        state."""
        self._check("tentative_taken")
        if forks:
            self._fork = self.state.operators
        self._tentative = attempt, epoch.epoch
        self._taken.append(epoch)
        return [*self._recovered("input"), *self._process(now)]

    def fork_dropped(self, now: float) -> list[LoopEffect]:
        """The state of the tentative branch is no longer needed."""
        self._check("fork_dropped")
        self._fork = None
        return [*self._recovered(_TENTATIVE), *self._take()]

    def tentative_appended(self, now: float) -> list[LoopEffect]:
        """The tentative epoch is in the branch of its attempt, or is no longer needed."""
        self._check("tentative_appended")
        self._fork = self._operators
        recovered = self._recovered(_TENTATIVE)
        return [*recovered, *self._end_tentative(), *self._next_call(now)]

    def tentative_failed(self, message: str, now: float) -> list[LoopEffect]:
        """The tentative epoch could not be processed, or not be appended."""
        self._check("tentative_failed")
        report = self._report(_TENTATIVE, f"tentative results are left out: {message}")
        return [report, *self._leave_out_tentative(), *self._next_call(now)]

    def _leave_out_tentative(self) -> list[LoopEffect]:
        return self._end_tentative(failed=True) if self._tentative is not None else []

    def _end_tentative(self, failed: bool = False) -> list[LoopEffect]:
        assert self._tentative is not None, "a tentative epoch is in the call"
        (attempt, epoch), self._tentative = self._tentative, None
        self._call = ()
        self._taken.clear()
        self._outputs.clear()
        return [TentativeCompleted(attempt, epoch, failed)]

    # -- processing ------------------------------------------------------------------------------

    def _process(self, now: float) -> list[LoopEffect]:
        self._enter(LoopPhase.PROCESSING)
        self._call = take_ready(deque(self._taken), self._sizes.next_call)
        self._began = now
        try:
            for epoch in self._call:
                self._sizes.check(epoch)
        except RekindleError as error:
            if self._tentative is not None:
                return self.tentative_failed(str(error), now)
            return [GiveUp(error)]
        return [self._process_call()]

    def _process_call(self) -> ProcessEpochs:
        if self._tentative is None:
            for_checkpoint = self._is_checkpoint(self._call[-1])
            return ProcessEpochs(self.state.operators, self._call, for_checkpoint=for_checkpoint)
        assert self._fork is not None, "the first epoch of a tentative branch forks the state"
        return ProcessEpochs(self._fork, self._call, self._tentative[0])

    def epochs_processed(
        self, outputs: Sequence[EpochOutput], operators: State, now: float
    ) -> list[LoopEffect]:
        """`operators`: the state of all of them after the last of these epochs."""
        self._check("epochs_processed")
        requested, returned = [e.epoch for e in self._call], [o.epoch for o in outputs]
        if requested != returned:
            problem = f"the engine returned epochs {returned} for {requested}: this is a bug"
            return [GiveUp(RekindleError(problem))]
        self._operators = operators
        self._outputs.extend(outputs)
        self._enter(LoopPhase.APPENDING)
        if self._tentative is not None:
            return [AppendTentative(self._tentative[0], outputs[0])]
        self._sizes.succeeded(requested[-1])
        return [*self._recovered("engine"), AppendEpochs(outputs)]

    def engine_failed(self, error: EngineUnavailable | OutOfMemory, now: float) -> list[LoopEffect]:
        """The engine died in the call, or the call did not fit into memory."""
        self._check("engine_failed")
        if self._tentative is not None:
            self._failed_in_call = False
            report = self._report(_TENTATIVE, f"tentative results are left out: {error}")
            return [report, *self._leave_out_tentative(), *self._restart()]
        try:
            self._sizes.failed(self._call, error)
        except RekindleError as permanent:
            return [self._report("engine", str(error)), GiveUp(permanent)]
        self._failed_in_call = True
        return [self._report("engine", str(error)), *self._restart()]

    def idle_engine_died(self, message: str, now: float) -> list[LoopEffect]:
        """The engine died while it was idle: between two calls, or before a failed call is
        repeated."""
        self._check("idle_engine_died")
        self._failed_in_call = False
        report = self._report("engine", message)
        return [report, *self._leave_out_tentative(), *self._restart()]

    def engine_restarted(self, now: float) -> list[LoopEffect]:
        self._check("engine_restarted")
        recovered = [] if self._failed_in_call else self._recovered("engine")
        return [*recovered, *self._next_call(now)]

    def _restart(self) -> list[LoopEffect]:
        self._enter(LoopPhase.RESTARTING)
        return [RestartEngine(self._sizes.spark_job_input_bytes)]

    # -- appending -------------------------------------------------------------------------------

    def epochs_appended(self, digests: Sequence[str], now: float) -> list[LoopEffect]:
        """As many of the outputs as there are digests are in the log."""
        self._check("epochs_appended")
        effects = self._recovered("log")
        for digest in digests:
            output = self._outputs.popleft()
            self.chained = chain_digest(
                self.chained, output.epoch, output.watermark, digest, output.idle
            )
            effects.append(EpochComputed(output.epoch, digest, self.chained))
        self._failures = 0
        return effects if self._outputs else [*effects, *self._call_completed(now)]

    def _call_completed(self, now: float) -> list[LoopEffect]:
        call, newest, self._call = self._call, self._call[-1], ()
        for _ in call:
            self._taken.popleft()
        if self._takes_again:
            self._taken.clear()
        self.state = TaskState(newest.epoch, newest.watermark, self._operators, self.chained)
        done: list[LoopEffect] = [CallCompleted(call, now - self._began)]
        if self._is_checkpoint(newest):
            done.append(CheckpointReached(self.state))
        return [*done, *self._next_call(now)]

    def _is_checkpoint(self, newest: EpochInput) -> bool:
        return (newest.epoch + 1) % self._checkpoint_interval_epochs == 0

    # -- failures --------------------------------------------------------------------------------

    def _enter(self, phase: LoopPhase) -> None:
        self.phase, self._waiting, self._failures = phase, False, 0

    def request_failed(self, message: str, now: float) -> list[LoopEffect]:
        """The request of this phase failed for a reason that may pass: it is made again."""
        if self._tentative is not None:
            return self.tentative_failed(message, now)
        self._waiting = True
        self._failures += 1
        self._retry_at = now + _BACKOFF.wait_s(self._failures)
        return [self._report(_SUBJECTS[self.phase], message)]

    def woken(self, now: float) -> list[LoopEffect]:
        """Time has passed."""
        if not self._waiting or now < self._retry_at:
            return []
        failures = self._failures
        effects = self._same_request(now)
        self._failures = failures
        return effects

    def _same_request(self, now: float) -> list[LoopEffect]:
        match self.phase:
            case LoopPhase.TAKING:
                return self._take()
            case LoopPhase.PROCESSING:
                self._waiting = False
                return [self._process_call()]
            case LoopPhase.APPENDING:
                self._waiting = False
                return [AppendEpochs(tuple(self._outputs))]
            case LoopPhase.RESTARTING:
                return self._restart()

    def _report(self, subject: str, message: str) -> SetProblem:
        self._problems.add(subject)
        return SetProblem(subject, TaskProblem(message=message, epoch=self.state.epoch + 1))

    def _recovered(self, subject: str) -> list[LoopEffect]:
        if subject not in self._problems:
            return []
        self._problems.discard(subject)
        return [SetProblem(subject, None)]
