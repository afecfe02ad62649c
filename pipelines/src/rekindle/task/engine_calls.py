"""The engine's thread: takes epochs from a source, runs epochs through the chain, and appends the
results to the output log, as the core requests. Before that it prepares the start.

Once an epoch is in the log, sinks and readers may read it. Independent of network and Spark.

Design: docs/design/task.md#epoch-loop, docs/design/engine.md#calls.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import pyarrow as pa

from rekindle.engine.bounds import CallBounds
from rekindle.engine.call_sizes import check_column_sizes
from rekindle.engine.failure import DiskFull, EngineUnavailable, OutOfMemory
from rekindle.engine.model import Chain, EpochOutput
from rekindle.errors import LogFull, SourceFailed, StateLost, StoreError
from rekindle.streams.digest import digest_table
from rekindle.streams.epochs import EpochBatch, EpochInput
from rekindle.streams.live_output import LiveOutput
from rekindle.streams.log import OutputLog
from rekindle.task.attempts import AttemptFile
from rekindle.task.call_size_file import CallSize, CallSizeFile
from rekindle.task.core.hot_keys import HotKeys
from rekindle.task.core.loop import (
    VALID_EVENTS,
    AppendEpochs,
    AppendTentative,
    LoopCore,
    LoopEffect,
    LoopRequest,
    ProcessEpochs,
    RestartEngine,
    TakeEpochs,
)
from rekindle.task.core.start import CompleteStart, StartCall
from rekindle.task.earlier_boots import EarlierBoots
from rekindle.task.process import TaskProcess

RELEASED_BYTES = 4 << 20
"""After calls larger than this, Arrow's unused memory is released; after small ones that would take
too long."""
TAKE_TIMEOUT_S = 0.25
"""How long a source may wait for an epoch, and how often an idle engine is checked."""

_log = logging.getLogger(__name__)
_TRANSIENT = (SourceFailed, LogFull, StoreError, DiskFull, OSError)
"""Errors after which the same step is retried; they are reported."""
LoopResult = Callable[[LoopCore, float], list[LoopEffect]]
"""Of a request: a call of a method of the loop, at a time."""
EngineRequest = StartCall | CompleteStart | LoopRequest


class EngineRestarter(Protocol):
    """Restarts the chain's engine. A chain without a JVM needs none."""

    def lost(self) -> EngineUnavailable | None:
        """Why the engine is gone; None while it runs."""
        ...

    def restart(self, spark_job_input_bytes: int) -> Chain:
        """The chain in a new engine. Raises EngineUnavailable."""
        ...


class EpochSource(Protocol):
    """Epochs that the task makes itself."""

    def take(self, bounds: CallBounds, timeout_s: float) -> list[EpochInput]:
        """The next complete epochs; none if none is complete before the timeout."""
        ...


@dataclass(slots=True)
class EngineParts:
    """What the calls of a started task need."""

    chain: Chain
    log: OutputLog
    source: EpochSource | None = None
    """None if the task reads streams, which are in the core."""
    engine: EngineRestarter | None = None
    call_size_file: CallSizeFile | None = None
    earlier: EarlierBoots | None = None
    output: LiveOutput | None = None
    """If output may be tentative."""
    attempts: AttemptFile | None = None
    hot_keys: HotKeys | None = None


class EngineCalls:
    """`request` is called under the lock of the process, `run` or `perform_next` by one thread."""

    def __init__(
        self,
        process: TaskProcess,
        prepare: Callable[[StartCall | CompleteStart], None],
        take_timeout_s: float = TAKE_TIMEOUT_S,
    ) -> None:
        """`prepare` performs a step of the start, with which it may call `begin`."""
        self._process = process
        self._prepare = prepare
        self._take_timeout_s = take_timeout_s
        self._parts: EngineParts | None = None
        self._changed = threading.Condition()
        self._request: EngineRequest | None = None  # at most one is in progress
        self._stopping = False
        self._call_bytes = 0  # of the newest call
        # The epoch whose append is in progress or is retried: it is compared only once.
        self._compared: EpochBatch | None = None

    def begin(self, parts: EngineParts) -> None:
        self._parts = parts
        self._process.core.status.dropped = parts.chain.dropped
        self._process.core.status.hot_keys = parts.hot_keys

    def request(self, request: EngineRequest) -> None:
        """A newer request takes the place of one that has not begun."""
        with self._changed:
            self._request = request
            self._changed.notify_all()

    def stop(self) -> None:
        """Begin no call any more; the one in progress is completed."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def run(self) -> None:
        try:
            while self.perform_next(TAKE_TIMEOUT_S):
                pass
        except BaseException as error:
            _log.exception("the engine's thread ended")
            failure = error if isinstance(error, Exception) else RuntimeError(repr(error))
            self._process.tell(partial(self._process.core.call_failed, failure))

    def perform_next(self, timeout_s: float) -> bool:
        """Perform the next request, if there is one within the timeout. False if the task has to
        stop."""
        with self._changed:
            self._changed.wait_for(lambda: self._request is not None or self._stopping, timeout_s)
            request, self._request = self._request, None
            if self._stopping and not isinstance(request, AppendEpochs | AppendTentative):
                return False
        if self._has_died(request):
            self._report(_idle_engine_died(str(self._engine_lost())))
        elif request is not None:
            self._perform(request)
        return True

    # -- requests --------------------------------------------------------------------------------

    def _perform(self, request: EngineRequest) -> None:
        """Errors for which a retry would not help fail the task."""
        core = self._process.core
        try:
            if isinstance(request, StartCall | CompleteStart):
                self._prepare(request)
            else:
                self._report(self._result(self._started(), request))
        except Exception as error:
            _log.exception("the task cannot continue")
            self._process.tell(partial(core.call_failed, error))

    def _report(self, result: LoopResult) -> None:
        self._process.tell(partial(self._process.core.loop_reported, result))

    def _started(self) -> EngineParts:
        assert self._parts is not None, "the task has started"
        return self._parts

    def _result(self, parts: EngineParts, request: LoopRequest) -> LoopResult:
        """Raises permanent errors, StateLost among them."""
        try:
            match request:
                case TakeEpochs(bounds):
                    assert parts.source is not None, "streams are in the core"
                    epochs = parts.source.take(bounds, self._take_timeout_s)
                    return lambda loop, now: loop.epochs_taken(epochs, now)
                case ProcessEpochs() if request.attempt:
                    return self._process_tentative(parts, request)
                case ProcessEpochs():
                    self._call_bytes = sum(e.nbytes for e in request.epochs)
                    return self._process_epochs(parts, request, parts.call_size_file)
                case AppendTentative():
                    return self._append_tentative(parts, request)
                case AppendEpochs(outputs):
                    return self._append(parts, outputs)
                case RestartEngine(spark_job_input_bytes):
                    assert parts.engine is not None
                    parts.chain = parts.engine.restart(spark_job_input_bytes)
                    self._process.core.status.dropped = parts.chain.dropped
                    return LoopCore.engine_restarted
        except StateLost:
            raise
        except _TRANSIENT as error:
            message = str(error)
            return lambda loop, now: loop.request_failed(message, now)

    def _process_epochs(
        self, parts: EngineParts, call: ProcessEpochs, file: CallSizeFile | None
    ) -> LoopResult:
        size = CallSize(len(call.epochs), sum(e.nbytes for e in call.epochs))
        if file is not None:
            file.begin(size)
        succeeded = None
        try:
            result = parts.chain.process(call.operators, call.epochs)
            state = result.state
            if call.for_checkpoint:
                state = parts.chain.join_deltas(state)
            succeeded = size
            if parts.hot_keys is not None and not call.attempt:
                parts.hot_keys.add(call.epochs)
            return lambda loop, now: loop.epochs_processed(result.outputs, state, now)
        except (EngineUnavailable, OutOfMemory) as error:
            if parts.engine is None:
                raise
            failure = error
            return lambda loop, now: loop.engine_failed(failure, now)
        finally:
            if file is not None:
                file.end(succeeded)

    def _process_tentative(self, parts: EngineParts, call: ProcessEpochs) -> LoopResult:
        """Any error leaves the epoch out: the stable version of the epoch may have other rows. Rows
        that are dropped here are not counted, and the call has no effect on the size of later
        ones."""
        status, chain = self._process.core.status, parts.chain
        counts = {name: replace(rows) for name, rows in chain.dropped.items()}
        status.dropped = counts  # Prometheus takes a counter that decreases for a restart
        try:
            return self._process_epochs(parts, call, None)
        except StateLost:
            raise
        except Exception as error:
            return _tentative_failed(error)
        finally:
            for name, rows in counts.items():
                dropped = chain.dropped[name]
                dropped.late, dropped.null_event_time = rows.late, rows.null_event_time
            status.dropped = chain.dropped

    def _append_tentative(self, parts: EngineParts, request: AppendTentative) -> LoopResult:
        output, attempt = request.output, request.attempt
        assert parts.output is not None, "output may be tentative"
        try:
            check_column_sizes(output.epoch, output.rows)
            if parts.attempts is not None:
                parts.attempts.reserve(attempt)
            parts.output.append(attempt, output.epoch, output.watermark, output.rows, output.idle)
        except Exception as error:
            return _tentative_failed(error)
        return LoopCore.tentative_appended

    def _append(self, parts: EngineParts, outputs: Sequence[EpochOutput]) -> LoopResult:
        """Append all outputs. Returns the result of the last one; the others are told here."""
        for output in outputs[:-1]:
            self._report(self._append_epoch(parts, output))
        result = self._append_epoch(parts, outputs[-1])
        if self._call_bytes > RELEASED_BYTES:
            pa.default_memory_pool().release_unused()  # otherwise the process keeps it
        return result

    def _append_epoch(self, parts: EngineParts, output: EpochOutput) -> LoopResult:
        batch, log = self._compared, parts.log
        if batch is None or batch.epoch != output.epoch:
            check_column_sizes(output.epoch, output.rows)
            digest = digest_table(output.rows)
            batch = EpochBatch(
                log.stream,
                log.partition,
                output.epoch,
                output.watermark,
                output.rows,
                digest,
                idle=output.idle,
            )
            self._compare(parts, batch)
            self._compared = batch
        log.append(batch)
        self._compared = None
        digests = (batch.digest,)
        return lambda loop, now: loop.epochs_appended(digests, now)

    def _compare(self, parts: EngineParts, batch: EpochBatch) -> None:
        message = parts.earlier.check(batch) if parts.earlier is not None else None
        if message is not None:
            _log.error("%s", message)
            core = self._process.core
            self._process.tell(partial(core.contradiction_found, batch.epoch, message))

    # -- the engine ------------------------------------------------------------------------------

    def _engine_lost(self) -> EngineUnavailable | None:
        engine = self._parts.engine if self._parts is not None else None
        return engine.lost() if engine is not None else None

    def _has_died(self, request: EngineRequest | None) -> bool:
        """Whether the engine died while it was idle. A call that has not begun is not made: the
        core requests it again."""
        is_idle = request is None or isinstance(request, TakeEpochs | ProcessEpochs)
        return is_idle and self._engine_lost() is not None


def _idle_engine_died(message: str) -> LoopResult:
    def happened(loop: LoopCore, now: float) -> list[LoopEffect]:
        if "idle_engine_died" not in VALID_EVENTS[loop.phase]:
            return []  # the core waits until it may append, or restarts the engine already
        return loop.idle_engine_died(message, now)

    return happened


def _tentative_failed(error: Exception) -> LoopResult:
    message = str(error)
    return lambda loop, now: loop.tentative_failed(message, now)
