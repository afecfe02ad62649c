"""The I/O around `SinkCore`: sinks as consumers of the task's own output log, one thread for each
query.

The log is the queue: a sink that fails loses nothing and only delays checkpoints, until the log's
budget is used up; a query that is added later starts like any other. Does not know the engine.

Design: docs/design/exactly-once.md#sinks.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial

import pyarrow as pa

from rekindle.connectors.sink import Sink
from rekindle.errors import BelowFloor, RekindleError
from rekindle.protocol import SinkAssignment, SinkProgress
from rekindle.streams.log import OutputLog
from rekindle.task.core.sink import (
    CheckConflicts,
    OpenSink,
    SinkCore,
    SinkEffect,
    StartWriter,
    StopWriter,
    WriteEpochs,
    assignment_changes,
)
from rekindle.workers import CallTimer, Worker

READ_BYTES = 8 << 20
"""Bytes that one call of a sink reads from the log."""
MAX_WAIT_S = 0.25
"""Longest wait for an epoch or a retry before the core is stepped again."""
PAUSED_WAIT_S = 0.05
"""The same if the core does not wait for an epoch, such as while writing is paused."""

_log = logging.getLogger(__name__)

SinkOpener = Callable[[SinkAssignment, pa.Schema], Sink]
"""Opens the sink of an assignment, for rows of a schema. Raises SinkRefused."""


class SinkWriter:
    """Writes one query's epochs: performs the calls of a `SinkCore`."""

    def __init__(self, core: SinkCore, log: OutputLog, open_sink: SinkOpener) -> None:
        self.core = core
        self._query = core.assigned.query
        self._calls = CallTimer()
        self._log = log
        self._open = open_sink
        self._sink: Sink | None = None
        self._lock = threading.RLock()
        self._pending_call: SinkEffect | None = None
        self._stopping = threading.Event()
        self._worker = Worker(f"sink-{self._query}", self._run)
        self._worker.start()  # last: its thread uses the attributes above

    @property
    def problem(self) -> str | None:
        return self.core.problem or self._worker.problem or self._calls.problem

    def step(self, happened: Callable[[float], list[SinkEffect]]) -> None:
        """`happened`: a method of the core, but for the time."""
        with self._lock:
            for effect in happened(time.monotonic()):
                self._pending_call = effect

    def stop(self) -> None:
        self._stopping.set()
        self._worker.stop()

    def join(self, timeout_s: float) -> None:
        self._worker.join(timeout_s)

    # -- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        """Also called again after an unexpected error (`rekindle.workers`): then the call that was
        in progress is abandoned."""
        with self._lock:
            if self._pending_call is None:
                # This thread has ended in a call, and was started again.
                self.step(self.core.call_abandoned)
        while not self._stopping.is_set():
            if (call := self._next()) is None:
                self._wait()
            else:
                self._perform(call)
            if self.core.problem is None:
                self._worker.progressed()

    def _next(self) -> SinkEffect | None:
        with self._lock:
            call, self._pending_call = self._pending_call, None
        return call

    def _wait(self) -> None:
        """Wait until the core can go on, or for a short time."""
        wake_at, awaited_epoch = self.core.wake_at, self.core.awaited_epoch
        wait_s = MAX_WAIT_S
        if wake_at is not None:
            wait_s = min(wait_s, max(0.0, wake_at - time.monotonic()))
        if awaited_epoch is None:
            self._stopping.wait(min(wait_s, PAUSED_WAIT_S))
        elif self._log.wait_for(awaited_epoch, wait_s):
            self.step(partial(self.core.log_grew, self._log.last))
            return
        self.step(self.core.woken)

    def _perform(self, call: SinkEffect) -> None:
        """Make a call, and step the core with its result."""
        try:
            match call:
                case OpenSink():
                    self._open_sink(call)
                case WriteEpochs(from_epoch):
                    self._write(self._opened(), from_epoch)
                case CheckConflicts():
                    self._check_conflicts(self._opened())
        except Exception as error:
            expected = isinstance(error, (RekindleError, OSError))
            _log.log(logging.WARNING if expected else logging.ERROR, "sink: %s", error)
            self.step(partial(self.core.call_failed, self._message_of(error)))

    def _opened(self) -> Sink:
        assert self._sink is not None
        return self._sink

    def _open_sink(self, call: OpenSink) -> None:
        with self._calls.during(f"query {self._query}: opening its sink"):
            sink = self._sink = self._sink or self._open(self.core.assigned, self._log.schema)
            last = sink.last_epoch(call.after)
            first = sink.first_epoch() if call.read_first_epoch else None
        self.step(partial(self.core.opened, last, first))

    def _write(self, sink: Sink, from_epoch: int) -> None:
        for batch in self._log.read(from_epoch, READ_BYTES):
            if self._stopping.is_set() or not self.core.may_write(batch.epoch):
                break
            with self._calls.during(f"query {self._query}: writing epoch {batch.epoch}"):
                sink.write(batch)
            self.step(partial(self.core.epoch_written, batch.epoch, sink.conflict))
        self.step(partial(self.core.log_grew, self._log.last))
        self.step(self.core.write_ended)

    def _check_conflicts(self, sink: Sink) -> None:
        with self._calls.during(f"query {self._query}: reading conflicting files"):
            sink.retry_conflicts(self.core.may_write)
        self.step(partial(self.core.conflicts_checked, sink.conflict))

    def _message_of(self, error: Exception) -> str:
        if isinstance(error, BelowFloor):
            return f"query {self._query} has not written epoch {self.core.next_epoch}: {error}"
        text = str(error)
        return text if text.startswith("query") else f"query {self._query}: {text}"


class SinkWriters:
    """The sinks that the coordinator has assigned to this task. Epochs up to `written_through` are
    certainly durable. From `compare_files_from` on, files of earlier boots are compared; None: they
    are not."""

    def __init__(
        self,
        log: OutputLog,
        written_through: int,
        open_sink: SinkOpener,
        compare_files_from: int | None = None,
    ) -> None:
        self._log = log
        self._compare_files_from = compare_files_from
        self._written_through = written_through
        self._open = open_sink
        self._write_limit: int | None = None  # see `pause_after`
        self._writers: dict[str, SinkWriter] = {}

    def assign(self, sinks: Iterable[SinkAssignment]) -> None:
        writers = dict(self._writers)
        current = {query: writer.core.assigned for query, writer in writers.items()}
        for change in assignment_changes(current, sinks):
            match change:
                case StopWriter(query):
                    writers.pop(query).stop()
                case StartWriter(assigned):
                    writers[assigned.query] = self._writer(assigned)
        self._writers = writers

    def _writer(self, assigned: SinkAssignment) -> SinkWriter:
        core = SinkCore(
            assigned, self._written_through, self._compare_files_from, self._write_limit
        )
        return SinkWriter(core, self._log, self._open)

    def pause_after(self, through: int | None) -> None:
        """Write no epoch above this; None: all. For epochs about which replicas disagree."""
        self._write_limit = through
        for writer in self._writers.values():
            writer.step(partial(writer.core.write_limit_changed, through))

    def progress(self) -> tuple[SinkProgress, ...]:
        return tuple(w.core.progress() for w in self._writers.values())

    def all_compared(self) -> bool:
        """Whether all files that earlier boots may have written are compared, and equal."""
        writers = self._writers.values()
        return bool(writers) and not any(w.core.compares for w in writers)

    def problem(self) -> str | None:
        problems = (w.problem for w in self._writers.values())
        return next((problem for problem in problems if problem), None)

    def wait_until_durable(self, through: int, timeout_s: float) -> bool:
        """Wait until all are durable through an epoch; False at the timeout."""
        if self._write_limit is not None:
            through = min(through, self._write_limit)
        for _ in range(max(1, int(timeout_s / 0.02))):
            if all(s.durable >= through for s in self.progress()):
                return True
            time.sleep(0.02)
        return False

    def stop(self, timeout_s: float = 2.0) -> None:
        for writer in self._writers.values():
            writer.stop()
        for writer in self._writers.values():
            writer.join(timeout_s)
