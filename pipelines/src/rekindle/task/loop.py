"""The I/O around `LoopCore`: takes epochs from the inputs, runs them through the chain, and appends
the results to the output log.

Once an epoch is in the log, sinks and readers may read it. Independent of network and Spark.

Design: docs/design/task.md#epoch-loop, docs/design/engine.md#calls.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import pyarrow as pa

from rekindle.engine.bounds import CallBounds
from rekindle.engine.call_sizes import CallSizes, check_column_sizes
from rekindle.engine.failure import DiskFull, EngineUnavailable, OutOfMemory
from rekindle.engine.memory import plan_memory
from rekindle.engine.model import Chain, EpochOutput
from rekindle.errors import LogFull, SourceFailed, StateLost, StoreError
from rekindle.streams.digest import digest_table
from rekindle.streams.epochs import EpochBatch
from rekindle.streams.log import OutputLog
from rekindle.task.call_size_file import CallSize, CallSizeFile
from rekindle.task.core.branches import Taken
from rekindle.task.core.events import SetProblem, Woken
from rekindle.task.core.loop import (
    VALID_EVENTS,
    AppendEpochs,
    AppendTentative,
    CallCompleted,
    CheckpointReached,
    EngineFailed,
    EngineRestarted,
    EpochComputed,
    EpochsAppended,
    EpochsProcessed,
    EpochsTaken,
    GiveUp,
    IdleEngineDied,
    LoopCore,
    LoopEffect,
    LoopEvent,
    LoopRequest,
    LoopRequestFailed,
    ProcessEpochs,
    RestartEngine,
    TakeEpochs,
    TentativeAppended,
    TentativeCompleted,
    TentativeFailed,
)
from rekindle.task.core.status import TaskStatus
from rekindle.task.earlier_boots import EarlierBoots
from rekindle.task.inputs import Inputs
from rekindle.task.state import TaskState

RELEASED_BYTES = 4 << 20
"""After calls larger than this, Arrow's unused memory is released; after small ones that would take
too long."""

_log = logging.getLogger(__name__)
_ENDS_CALL = (EngineRestarted, TentativeAppended, TentativeFailed)
_TRANSIENT = (SourceFailed, LogFull, StoreError, DiskFull, OSError)
"""Errors after which the same step is retried; they are reported."""


class EngineRestarter(Protocol):
    """Restarts the chain's engine. A chain without a JVM needs none."""

    def lost(self) -> EngineUnavailable | None:
        """Why the engine is gone; None while it runs."""
        ...

    def restart(self, spark_job_input_bytes: int) -> Chain:
        """The chain in a new engine. Raises EngineUnavailable."""
        ...


class Branches(Protocol):
    """The inputs of a task whose output may be tentative, and the branches of its output."""

    def next_call(self, bounds: CallBounds, timeout_s: float) -> Taken:
        """What the loop processes next; no epochs at the timeout."""
        ...

    def stable_processed(self, through: int) -> None: ...
    def append(self, attempt: int, output: EpochOutput) -> None:
        """Raises OSError."""
        ...

    def tentative_completed(self, completed: TentativeCompleted) -> None: ...


class EpochLoop:
    """`wait(seconds)` sleeps, and returns True if the task has to stop."""

    def __init__(
        self,
        *,
        chain: Chain,
        state: TaskState,
        inputs: Inputs,
        log: OutputLog,
        checkpoint_interval_epochs: int,
        save: Callable[[TaskState], None],
        status: TaskStatus,
        wait: Callable[[float], bool],
        sizes: CallSizes | None = None,
        engine: EngineRestarter | None = None,
        call_size_file: CallSizeFile | None = None,
        earlier: EarlierBoots | None = None,
        branches: Branches | None = None,
    ) -> None:
        self._core = LoopCore(
            state,
            checkpoint_interval_epochs,
            sizes or CallSizes.of(plan_memory()),
            branches=branches is not None,
        )
        self._branches = branches
        self._chain = chain
        self._inputs = inputs
        self._log = log
        self._save = save
        self._status = status
        self._wait = wait
        self._engine = engine
        self._call_size_file = call_size_file
        self._earlier = earlier
        self._pending_request: LoopRequest | None = None
        self._completed = 0  # epochs of the call that was completed last
        # The epoch whose append is in progress or is retried: it is compared only once.
        self._compared: EpochBatch | None = None

    @property
    def state(self) -> TaskState:
        """After the newest epoch whose call is complete."""
        return self._core.state

    def run(self) -> None:
        """Run until the task has to stop. Raises permanent errors: OperatorFailed, EpochTooLarge,
        DifferentResults, EngineUnavailable, StateLost."""
        while not self._wait(0):
            self.run_call(timeout_s=0.25)

    def run_call(self, timeout_s: float) -> int:
        """One call of the chain, if epochs arrive within the timeout. Returns the number of epochs
        that it has completed; 0 also after an engine was restarted in place of a call."""
        self._completed = 0
        self._find_dead_engine()
        while (request := self._next_request()) is not None:
            event = self._perform(request, timeout_s)
            self._step(event)
            nothing_taken = isinstance(event, EpochsTaken) and not event.epochs
            if self._completed or nothing_taken or isinstance(event, _ENDS_CALL):
                break
        return self._completed

    def _next_request(self) -> LoopRequest | None:
        """The core's next request, after its back-off; None if the task has to stop."""
        while self._pending_request is None:
            wake_at = self._core.wake_at
            assert wake_at is not None, "the loop's core has no request, and waits for nothing"
            now = time.monotonic()
            if wake_at > now and self._wait(wake_at - now):
                return None
            self._step(Woken(), max(now, wake_at))
        request, self._pending_request = self._pending_request, None
        return request

    def _step(self, event: LoopEvent, now: float | None = None) -> None:
        for effect in self._core.step(event, time.monotonic() if now is None else now):
            self._apply(effect)

    def _apply(self, effect: LoopEffect) -> None:
        match effect:
            case (
                TakeEpochs()
                | ProcessEpochs()
                | AppendEpochs()
                | AppendTentative()
                | RestartEngine()
            ):
                self._pending_request = effect
            case SetProblem(subject, problem):
                if problem is not None:
                    _log.warning("%s: %s", subject, problem.message)
                self._status.set_problem(subject, problem)
            case EpochComputed(epoch, digest, chained):
                self._status.computed(epoch, digest, chained)
            case CallCompleted(epochs, took_s):
                self._completed = len(epochs)
                self._status.processed(epochs[-1].epoch, took_s)
                if self._branches is not None:
                    self._branches.stable_processed(epochs[-1].epoch)
                if sum(e.nbytes for e in epochs) > RELEASED_BYTES:
                    pa.default_memory_pool().release_unused()  # otherwise the process keeps it
            case TentativeCompleted():
                assert self._branches is not None, "only branches give tentative epochs"
                self._branches.tentative_completed(effect)
            case CheckpointReached(state):
                self._save(state)
            case GiveUp(error):
                raise error

    # -- requests --------------------------------------------------------------------------------

    def _perform(self, request: LoopRequest, timeout_s: float) -> LoopEvent:
        """Perform a request of the core; returns its result. Raises permanent errors, StateLost
        among them."""
        try:
            match request:
                case TakeEpochs(bounds) if self._branches is not None:
                    return self._branches.next_call(bounds, timeout_s)
                case TakeEpochs(bounds):
                    return EpochsTaken(self._inputs.take(bounds, timeout_s))
                case ProcessEpochs() if request.attempt:
                    return self._process_tentative(request)
                case ProcessEpochs():
                    return self._process(request, self._call_size_file)
                case AppendTentative():
                    return self._append_tentative(request)
                case AppendEpochs(outputs):
                    return self._append(outputs)
                case RestartEngine(spark_job_input_bytes):
                    return self._restart(spark_job_input_bytes)
        except StateLost:
            raise
        except _TRANSIENT as error:
            return LoopRequestFailed(str(error))

    def _process(self, call: ProcessEpochs, file: CallSizeFile | None) -> LoopEvent:
        size = CallSize(len(call.epochs), sum(e.nbytes for e in call.epochs))
        if file is not None:
            file.begin(size)
        succeeded = None
        try:
            result = self._chain.process(call.operators, call.epochs)
            succeeded = size
            return EpochsProcessed(result.outputs, result.state)
        except (EngineUnavailable, OutOfMemory) as error:
            if self._engine is None:
                raise
            return EngineFailed(error)
        finally:
            if file is not None:
                file.end(succeeded)

    def _process_tentative(self, call: ProcessEpochs) -> LoopEvent:
        """Any error is a TentativeFailed: the stable version of the epoch may have other rows. Rows
        that are dropped here are not counted, and the call has no effect on the size of later
        ones."""
        counts = {name: replace(rows) for name, rows in self._chain.dropped.items()}
        self._status.dropped = counts  # Prometheus takes a counter that decreases for a restart
        try:
            return self._process(call, None)
        except StateLost:
            raise
        except Exception as error:
            return TentativeFailed(str(error))
        finally:
            for name, rows in counts.items():
                dropped = self._chain.dropped[name]
                dropped.late, dropped.null_event_time = rows.late, rows.null_event_time
            self._status.dropped = self._chain.dropped

    def _append_tentative(self, request: AppendTentative) -> LoopEvent:
        assert self._branches is not None, "only branches give tentative epochs"
        try:
            check_column_sizes(request.output.epoch, request.output.rows)
            self._branches.append(request.attempt, request.output)
        except Exception as error:
            return TentativeFailed(str(error))
        return TentativeAppended()

    def _append(self, outputs: Sequence[EpochOutput]) -> EpochsAppended:
        """Append all outputs. Returns the event of the last one; the others are stepped here."""
        for output in outputs[:-1]:
            self._step(self._append_epoch(output))
        return self._append_epoch(outputs[-1])

    def _append_epoch(self, output: EpochOutput) -> EpochsAppended:
        batch = self._compared
        if batch is None or batch.epoch != output.epoch:
            check_column_sizes(output.epoch, output.rows)
            digest = digest_table(output.rows)
            batch = EpochBatch(
                self._log.stream,
                self._log.partition,
                output.epoch,
                output.watermark,
                output.rows,
                digest,
            )
            self._compare(batch)
            self._compared = batch
        self._log.append(batch)
        self._compared = None
        return EpochsAppended((batch.digest,))

    def _compare(self, batch: EpochBatch) -> None:
        message = self._earlier.check(batch) if self._earlier is not None else None
        if message is not None:
            _log.error("%s", message)
            self._status.contradicted(batch.epoch, message)

    # -- the engine ------------------------------------------------------------------------------

    def _find_dead_engine(self) -> None:
        """Find an engine that died while it was idle."""
        idle = IdleEngineDied in VALID_EVENTS[self._core.phase]
        if idle and self._engine is not None and (error := self._engine.lost()) is not None:
            self._step(IdleEngineDied(str(error)))

    def _restart(self, spark_job_input_bytes: int) -> EngineRestarted:
        assert self._engine is not None
        self._chain = self._engine.restart(spark_job_input_bytes)
        self._status.dropped = self._chain.dropped
        return EngineRestarted()
