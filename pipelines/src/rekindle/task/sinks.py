"""The threads of sinks, one for each query: consumers of the task's own output log, which make the
calls that the core requests.

The log is the queue: a sink that fails loses nothing and only delays checkpoints, until the log's
budget is used up; a query that is added later starts like any other. Does not know the engine.

Design: docs/design/exactly-once.md#sinks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from queue import SimpleQueue

import pyarrow as pa

from rekindle.connectors.sink import Sink
from rekindle.errors import BelowFloor, RekindleError
from rekindle.protocol import SinkAssignment
from rekindle.streams.epochs import EpochBatch, last_of_group
from rekindle.streams.log import OutputLog
from rekindle.task.core.messages import CallSink, StopSink, TaskEffect
from rekindle.task.core.sink import CheckConflicts, OpenSink, SinkCore, SinkEffect, WriteEpochs
from rekindle.task.process import TaskProcess
from rekindle.workers import CallTimer, Worker

READ_BYTES = 8 << 20
"""Bytes that one call of a sink reads from the log."""

_log = logging.getLogger(__name__)

SinkOpener = Callable[[SinkAssignment, pa.Schema], Sink]
"""Opens the sink of an assignment, for rows of a schema. Raises SinkRefused."""


class SinkWriter:
    """The calls of one query's sink."""

    def __init__(
        self,
        process: TaskProcess,
        assigned: SinkAssignment,
        log: OutputLog,
        open_sink: SinkOpener,
        first_call: SinkEffect,
    ) -> None:
        self.assigned = assigned
        self._process = process
        self._query = assigned.query
        self._calls = CallTimer(why=f"{assigned.sink.waits_for} does not respond")
        self._log = log
        self._open = open_sink
        self._sink: Sink | None = None
        self._requests = SimpleQueue[SinkEffect | None]()  # None: the thread has to end
        self._requests.put(first_call)
        self._stopping = False
        self._worker = Worker(f"sink-{self._query}", self._run)
        self._worker.start()  # last: its thread uses the attributes above

    @property
    def problem(self) -> str | None:
        """Of the thread."""
        return self._worker.problem or self._calls.problem

    def call(self, request: SinkEffect) -> None:
        self._requests.put(request)

    def stop(self) -> None:
        self._stopping = True
        self._requests.put(None)
        self._worker.stop()

    def join(self, timeout_s: float) -> None:
        self._worker.join(timeout_s)

    # -- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        """Also called again after an unexpected error (`rekindle.workers`): then the call that was
        in progress is abandoned."""
        with self._process.lock:
            if self._requests.empty():
                # This thread has ended in a call, and was started again.
                self._report(SinkCore.call_abandoned)
        while (call := self._requests.get()) is not None and not self._stopping:
            self._perform(call)
        if self._sink is not None:
            self._sink.close()

    def _report(self, happened: Callable[[SinkCore, float], list[SinkEffect]]) -> None:
        reported = partial(self._process.core.sink_reported, self.assigned, happened)

        def event(now: float) -> list[TaskEffect]:
            # Another sink may have the same assignment since this one was stopped.
            return [] if self._stopping else reported(now)

        self._process.tell(event)

    def _may_write(self, epoch: int) -> bool:
        with self._process.lock:
            return not self._stopping and self._process.core.may_write(self.assigned, epoch)

    def _perform(self, call: SinkEffect) -> None:
        """Make a call, and report its result."""
        try:
            match call:
                case OpenSink():
                    self._open_sink(call)
                case WriteEpochs(from_epoch):
                    self._write(self._opened(), from_epoch)
                case CheckConflicts():
                    self._check_conflicts(self._opened())
            self._worker.progressed()
        except Exception as error:
            expected = isinstance(error, (RekindleError, OSError))
            _log.log(logging.WARNING if expected else logging.ERROR, "sink: %s", error)
            message = self._message_of(error)
            self._report(lambda sink, now: sink.call_failed(message, now))

    def _opened(self) -> Sink:
        assert self._sink is not None
        return self._sink

    def _open_sink(self, call: OpenSink) -> None:
        with self._calls.during(f"query {self._query}: opening its sink"):
            sink = self._sink = self._sink or self._open(self.assigned, self._log.schema)
            last = sink.last_epoch(call.after)
            first = sink.first_epoch() if call.read_first_epoch else None
        group = sink.epochs_per_commit
        self._report(lambda core, now: core.opened(last, first, now, group))

    def _write(self, sink: Sink, from_epoch: int) -> None:
        next_epoch = from_epoch
        try:
            for batch in self._batches(from_epoch, sink.epochs_per_commit):
                with self._calls.during(f"query {self._query}: writing epoch {batch.epoch}"):
                    sink.write(batch)
                    if ends := batch.epoch == last_of_group(batch.epoch, sink.epochs_per_commit):
                        sink.commit(batch.epoch)
                if ends:
                    self._written(batch.epoch, sink.conflict)
                next_epoch = batch.epoch + 1
            if next_epoch % sink.epochs_per_commit:
                sink.discard()
        except BelowFloor as error:
            raise BelowFloor(
                f"query {self._query} has not written epoch {next_epoch}: {error}"
            ) from error
        self._report(SinkCore.write_ended)

    def _batches(self, from_epoch: int, epochs_per_commit: int) -> Iterator[EpochBatch]:
        """About `READ_BYTES` of what the log holds, in whole groups. A group that may not be
        written any more ends within."""
        at = from_epoch
        while last_of_group(at, epochs_per_commit) <= self._log.last:
            portion = self._log.read(at, READ_BYTES)
            for batch in portion:
                last = last_of_group(batch.epoch, epochs_per_commit)
                if last > self._log.last or not self._may_write(last):
                    return
                yield batch
            at = portion[-1].epoch + 1
            if at % epochs_per_commit == 0:
                return

    def _written(self, epoch: int, conflict: str | None) -> None:
        self._report(lambda sink, now: sink.epoch_written(epoch, conflict, now))

    def _check_conflicts(self, sink: Sink) -> None:
        with self._calls.during(f"query {self._query}: reading conflicting files"):
            sink.retry_conflicts(self._may_write)
        conflict = sink.conflict
        self._report(lambda sink, now: sink.conflicts_checked(conflict, now))

    def _message_of(self, error: Exception) -> str:
        text = str(error)
        return text if text.startswith("query") else f"query {self._query}: {text}"


class SinkWriters:
    """The running sinks of a task. `call` and `stop_writer` are called under the lock of the
    process."""

    def __init__(self, process: TaskProcess, log: OutputLog, open_sink: SinkOpener) -> None:
        self._process = process
        self._log = log
        self._open = open_sink
        self._writers: dict[str, SinkWriter] = {}

    def call(self, request: CallSink) -> None:
        assigned, call = request.assigned, request.call
        if (writer := self._writers.get(assigned.query)) is not None:
            writer.call(call)
        else:
            writer = SinkWriter(self._process, assigned, self._log, self._open, call)
            self._writers[assigned.query] = writer

    def stop_writer(self, request: StopSink) -> None:
        if (writer := self._writers.pop(request.assigned.query, None)) is not None:
            writer.stop()

    def problem(self) -> str | None:
        problems = (w.problem for w in self._writers.values())
        return next((problem for problem in problems if problem), None)

    def stop(self, timeout_s: float = 2.0) -> None:
        with self._process.lock:
            writers = list(self._writers.values())
        for writer in writers:
            writer.stop()
        for writer in writers:
            writer.join(timeout_s)
