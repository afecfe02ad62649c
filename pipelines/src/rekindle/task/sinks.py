"""Sinks as consumers of the task's own output log: one thread for each query.

The log is the queue: a sink that fails loses nothing and only delays checkpoints, until the log's
budget is used up; a query that is added later starts like any other. Before its first write, a sink
looks for the last epoch in its output. Does not know the engine.

Design: docs/design/exactly-once.md#sinks.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable

import pyarrow as pa

from rekindle.backoff import Backoff, BackoffPolicy
from rekindle.connectors.sink import Sink
from rekindle.errors import BelowFloor, RekindleError
from rekindle.protocol import SinkAssignment, SinkProgress
from rekindle.streams.log import OutputLog
from rekindle.workers import CallTimer, Worker

READ_BYTES = 8 << 20
WAIT_S = 0.25
PAUSED_S = 0.05
_BACKOFF = BackoffPolicy(first_s=0.1, longest_s=5.0)
RETRY_CONFLICTS_S = 5.0
"""Seconds between checks of the conflicting files: they may have been deleted."""
_RETRY_PAUSE = 4
"""The pause between checks is at least this many times as long as the last check: on a slow store
checks of many files leave most of the thread's time to writing."""

_log = logging.getLogger(__name__)

OpenSink = Callable[[SinkAssignment, pa.Schema], Sink]
"""Opens the sink of an assignment, for rows of a schema. Raises SinkRefused."""


class SinkWriter:
    """Writes one query's epochs from `from_epoch` on. Epochs up to `restored_from` are durable,
    because an entry is committed only after its partition's sinks have written. Epochs of
    an earlier boot are skipped, but compared from `compare_from` on, because that boot's log may
    have been wrong."""

    def __init__(
        self,
        assigned: SinkAssignment,
        restored_from: int,
        log: OutputLog,
        open_sink: OpenSink,
        compare_from: int | None = None,
    ) -> None:
        self.assigned = assigned
        self._problem: str | None = None
        self._calls = CallTimer()
        self.conflict: str | None = None
        self.through: int | None = None
        """No epoch above this is written; None: all."""
        self._next = max(assigned.from_epoch, restored_from + 1)
        self._log = log
        self._open = open_sink
        self._compare_from = compare_from
        self._retry_at = 0.0
        self._stopping = threading.Event()
        self._worker = Worker(f"sink-{assigned.query}", self._run).start()

    @property
    def durable(self) -> int:
        """Newest epoch that is durable in the sink."""
        return self._next - 1

    @property
    def problem(self) -> str | None:
        return self._problem or self._worker.problem or self._calls.problem

    def stop(self) -> None:
        self._stopping.set()
        self._worker.stop()

    def join(self, timeout_s: float) -> None:
        self._worker.join(timeout_s)

    def _run(self) -> None:
        backoff = Backoff(_BACKOFF)
        sink: Sink | None = None
        while not self._stopping.is_set():
            try:
                if sink is None:
                    with self._calls.during(f"query {self.assigned.query}: opening its sink"):
                        sink = self._open(self.assigned, self._log.schema)
                        self._next = max(self._next, self._first_to_write(sink))
                self._write_some(sink)
                self._retry_conflicts(sink)
                self._worker.progressed()
                self._problem = None
                backoff.succeeded()
            except Exception as error:
                expected = isinstance(error, (RekindleError, OSError))
                _log.log(logging.WARNING if expected else logging.ERROR, "sink: %s", error)
                self._problem = self._message_of(error)
                self._stopping.wait(backoff.failed())

    def _first_to_write(self, sink: Sink) -> int:
        after = sink.last_epoch(self._next - 1) + 1
        if self._compare_from is None:
            return after
        return min(after, max(self._compare_from, sink.first_epoch()))

    def _write_some(self, sink: Sink) -> None:
        if self._paused(self._next):
            self._stopping.wait(PAUSED_S)
            return
        if not self._log.wait_for(self._next, WAIT_S):
            return
        for batch in self._log.read(self._next, READ_BYTES):
            if self._stopping.is_set() or self._paused(batch.epoch):
                return
            with self._calls.during(f"query {self.assigned.query}: writing epoch {batch.epoch}"):
                sink.write(batch)
            self.conflict = sink.conflict
            self._next = batch.epoch + 1

    def _retry_conflicts(self, sink: Sink) -> None:
        began = time.monotonic()
        if self.conflict is None or began < self._retry_at:
            return
        try:
            with self._calls.during(f"query {self.assigned.query}: reading conflicting files"):
                sink.retry_conflicts(lambda epoch: not self._paused(epoch))
        finally:
            ended = time.monotonic()
            self._retry_at = ended + max(RETRY_CONFLICTS_S, _RETRY_PAUSE * (ended - began))
        self.conflict = sink.conflict

    def _paused(self, epoch: int) -> bool:
        return self.through is not None and epoch > self.through

    def _message_of(self, error: Exception) -> str:
        query = self.assigned.query
        if isinstance(error, BelowFloor):
            return f"query {query} has not written epoch {self._next}: {error}"
        text = str(error)
        return text if text.startswith("query") else f"query {query}: {text}"


class SinkWriters:
    """The sinks that the coordinator has assigned to this task."""

    def __init__(
        self,
        log: OutputLog,
        restored_from: int,
        open_sink: OpenSink,
        compare_from: int | None = None,
    ) -> None:
        self._log = log
        self._compare_from = compare_from
        self._restored_from = restored_from
        self._open = open_sink
        self._through: int | None = None
        self._writers: dict[str, SinkWriter] = {}

    def assign(self, sinks: Iterable[SinkAssignment]) -> None:
        wanted = {s.query: s for s in sinks}
        writers = dict(self._writers)
        for query, writer in self._writers.items():
            if writer.assigned != wanted.get(query):
                writers.pop(query).stop()
        for query in set(wanted) - set(writers):
            writers[query] = SinkWriter(
                wanted[query], self._restored_from, self._log, self._open, self._compare_from
            )
            writers[query].through = self._through
        self._writers = writers

    def pause_after(self, through: int | None) -> None:
        """Write no epoch above this; None: all. For epochs about which replicas disagree."""
        self._through = through
        for writer in self._writers.values():
            writer.through = through

    def progress(self) -> tuple[SinkProgress, ...]:
        writers = self._writers.values()
        return tuple(
            SinkProgress(assigned=w.assigned, durable=w.durable, conflict=w.conflict)
            for w in writers
        )

    def problem(self) -> str | None:
        problems = (w.problem for w in self._writers.values())
        return next((problem for problem in problems if problem), None)

    def flush(self, through: int, timeout_s: float) -> bool:
        """Wait until all are durable through an epoch; False at the timeout."""
        done = threading.Event()
        if self._through is not None:
            through = min(through, self._through)
        for _ in range(max(1, int(timeout_s / 0.02))):
            if all(w.durable >= through for w in self._writers.values()):
                return True
            done.wait(0.02)
        return False

    def stop(self, timeout_s: float = 2.0) -> None:
        for writer in self._writers.values():
            writer.stop()
        for writer in self._writers.values():
            writer.join(timeout_s)
