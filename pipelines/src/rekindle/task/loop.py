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
from functools import partial
from typing import Protocol

import pyarrow as pa

from rekindle.engine.bounds import CallBounds
from rekindle.engine.call_sizes import CallSizes, check_column_sizes
from rekindle.engine.failure import DiskFull, EngineUnavailable, OutOfMemory
from rekindle.engine.memory import plan_memory
from rekindle.engine.model import Chain, EpochOutput
from rekindle.errors import LogFull, SourceFailed, StateLost, StoreError
from rekindle.streams.digest import digest_table
from rekindle.streams.epochs import EpochBatch, EpochInput
from rekindle.streams.log import OutputLog
from rekindle.task.call_size_file import CallSize, CallSizeFile
from rekindle.task.core.loop import (
    VALID_EVENTS,
    AppendEpochs,
    AppendTentative,
    CallCompleted,
    CheckpointReached,
    EpochComputed,
    GiveUp,
    LoopCore,
    LoopEffect,
    LoopRequest,
    ProcessEpochs,
    RestartEngine,
    TakeEpochs,
    TentativeCompleted,
)
from rekindle.task.core.problems import SetProblem
from rekindle.task.core.status import TaskStatus
from rekindle.task.earlier_boots import EarlierBoots
from rekindle.task.state import TaskState
from rekindle.task.stream_inputs import StreamInputs

RELEASED_BYTES = 4 << 20
"""After calls larger than this, Arrow's unused memory is released; after small ones that would take
too long."""

_log = logging.getLogger(__name__)
_TRANSIENT = (SourceFailed, LogFull, StoreError, DiskFull, OSError)
"""Errors after which the same step is retried; they are reported."""
LoopResult = Callable[[float], list[LoopEffect]]
"""Of a request: a method of the core, but for the time."""


class EngineRestarter(Protocol):
    """Restarts the chain's engine. A chain without a JVM needs none."""

    def lost(self) -> EngineUnavailable | None:
        """Why the engine is gone; None while it runs."""
        ...

    def restart(self, spark_job_input_bytes: int) -> Chain:
        """The chain in a new engine. Raises EngineUnavailable."""
        ...


class EpochSource(Protocol):
    """Inputs whose epochs are all stable, and are taken once."""

    def take(self, bounds: CallBounds, timeout_s: float) -> list[EpochInput]:
        """The next complete epochs; none if none is complete before the timeout."""
        ...


class EpochLoop:
    """`wait(seconds)` sleeps, and returns True if the task has to stop."""

    def __init__(
        self,
        *,
        chain: Chain,
        state: TaskState,
        inputs: EpochSource | StreamInputs,
        log: OutputLog,
        checkpoint_interval_epochs: int,
        save: Callable[[TaskState], None],
        status: TaskStatus,
        wait: Callable[[float], bool],
        sizes: CallSizes | None = None,
        engine: EngineRestarter | None = None,
        call_size_file: CallSizeFile | None = None,
        earlier: EarlierBoots | None = None,
    ) -> None:
        self._streams = inputs if isinstance(inputs, StreamInputs) else None
        self._core = LoopCore(
            state,
            checkpoint_interval_epochs,
            sizes or CallSizes.of(plan_memory()),
            takes_again=self._streams is not None,
        )
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
        # Whether the call ends without: nothing was taken, the engine was restarted, or the epoch
        # was a tentative one.
        self._ends_call = False
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
        self._completed, self._ends_call = 0, False
        self._find_dead_engine()
        while not self._completed and not self._ends_call:
            if (request := self._next_request()) is None:
                break
            self._step(self._perform(request, timeout_s))
        return self._completed

    def _next_request(self) -> LoopRequest | None:
        """The core's next request, after its back-off; None if the task has to stop."""
        while self._pending_request is None:
            wake_at = self._core.wake_at
            assert wake_at is not None, "the loop's core has no request, and waits for nothing"
            now = time.monotonic()
            if wake_at > now and self._wait(wake_at - now):
                return None
            self._step(self._core.woken, max(now, wake_at))
        request, self._pending_request = self._pending_request, None
        return request

    def _step(self, result: LoopResult, now: float | None = None) -> None:
        for effect in result(time.monotonic() if now is None else now):
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
                if self._streams is not None:
                    self._streams.stable_processed(epochs[-1].epoch)
                if sum(e.nbytes for e in epochs) > RELEASED_BYTES:
                    pa.default_memory_pool().release_unused()  # otherwise the process keeps it
            case TentativeCompleted():
                assert self._streams is not None, "only streams give tentative epochs"
                self._streams.tentative_completed(effect)
            case CheckpointReached(state):
                self._save(state)
            case GiveUp(error):
                raise error

    # -- requests --------------------------------------------------------------------------------

    def _perform(self, request: LoopRequest, timeout_s: float) -> LoopResult:
        """Perform a request of the core; returns its result. Raises permanent errors, StateLost
        among them."""
        try:
            match request:
                case TakeEpochs(bounds):
                    return self._take(bounds, timeout_s)
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
            return partial(self._core.request_failed, str(error))

    def _take(self, bounds: CallBounds, timeout_s: float) -> LoopResult:
        taken = self._inputs.take(bounds, timeout_s)
        self._ends_call = not taken
        if callable(taken):
            return partial(taken, self._core)
        return partial(self._core.epochs_taken, taken or ())

    def _process(self, call: ProcessEpochs, file: CallSizeFile | None) -> LoopResult:
        size = CallSize(len(call.epochs), sum(e.nbytes for e in call.epochs))
        if file is not None:
            file.begin(size)
        succeeded = None
        try:
            result = self._chain.process(call.operators, call.epochs)
            succeeded = size
            return partial(self._core.epochs_processed, result.outputs, result.state)
        except (EngineUnavailable, OutOfMemory) as error:
            if self._engine is None:
                raise
            return partial(self._core.engine_failed, error)
        finally:
            if file is not None:
                file.end(succeeded)

    def _process_tentative(self, call: ProcessEpochs) -> LoopResult:
        """Any error leaves the epoch out: the stable version of the epoch may have other rows. Rows
        that are dropped here are not counted, and the call has no effect on the size of later
        ones."""
        counts = {name: replace(rows) for name, rows in self._chain.dropped.items()}
        self._status.dropped = counts  # Prometheus takes a counter that decreases for a restart
        try:
            return self._process(call, None)
        except StateLost:
            raise
        except Exception as error:
            return self._tentative_failed(error)
        finally:
            for name, rows in counts.items():
                dropped = self._chain.dropped[name]
                dropped.late, dropped.null_event_time = rows.late, rows.null_event_time
            self._status.dropped = self._chain.dropped

    def _tentative_failed(self, error: Exception) -> LoopResult:
        self._ends_call = True
        return partial(self._core.tentative_failed, str(error))

    def _append_tentative(self, request: AppendTentative) -> LoopResult:
        assert self._streams is not None, "only streams give tentative epochs"
        try:
            check_column_sizes(request.output.epoch, request.output.rows)
            self._streams.append(request.attempt, request.output)
        except Exception as error:
            return self._tentative_failed(error)
        self._ends_call = True
        return self._core.tentative_appended

    def _append(self, outputs: Sequence[EpochOutput]) -> LoopResult:
        """Append all outputs. Returns the result of the last one; the others are stepped here."""
        for output in outputs[:-1]:
            self._step(self._append_epoch(output))
        return self._append_epoch(outputs[-1])

    def _append_epoch(self, output: EpochOutput) -> LoopResult:
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
        return partial(self._core.epochs_appended, (batch.digest,))

    def _compare(self, batch: EpochBatch) -> None:
        message = self._earlier.check(batch) if self._earlier is not None else None
        if message is not None:
            _log.error("%s", message)
            self._status.contradicted(batch.epoch, message)

    # -- the engine ------------------------------------------------------------------------------

    def _find_dead_engine(self) -> None:
        """Find an engine that died while it was idle."""
        idle = "idle_engine_died" in VALID_EVENTS[self._core.phase]
        if idle and self._engine is not None and (error := self._engine.lost()) is not None:
            self._step(partial(self._core.idle_engine_died, str(error)))

    def _restart(self, spark_job_input_bytes: int) -> LoopResult:
        assert self._engine is not None
        self._chain = self._engine.restart(spark_job_input_bytes)
        self._status.dropped = self._chain.dropped
        self._ends_call = True
        return self._core.engine_restarted
