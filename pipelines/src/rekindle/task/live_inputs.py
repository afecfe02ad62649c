"""The epochs of a live source that this task reads itself: planned, recorded and read by a thread.

The thread does what `PlannedCuts` requests, one after another: the record of an epoch is created
while the engine processes the epoch before it. It stops while too many rows wait for the engine;
then the next record is for all epochs whose time has passed meanwhile. Does not know engine, log or
sinks.

Design: docs/decisions/0058-planned-cuts.md.
"""

from __future__ import annotations

import logging
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, assert_never

import pyarrow as pa

from rekindle.backoff import Backoff, BackoffPolicy
from rekindle.connectors.cut_records import (
    CutRecord,
    Position,
    decode_cut_record,
    encode_cut_record,
)
from rekindle.connectors.dead_letters import DeadLetters
from rekindle.connectors.live_source import LiveSource, Reach, SourceRows
from rekindle.connectors.planned_cuts import (
    CreateRecord,
    CutsOvertaken,
    FindEnds,
    ListRecords,
    PlannedCuts,
    ReadRecord,
    ReadRows,
    Request,
)
from rekindle.connectors.source import EventTimes
from rekindle.engine.bounds import CallBounds, CallBuilder
from rekindle.errors import SourceFailed, StoreError
from rekindle.protocol import Upstream
from rekindle.streams.epochs import NO_WATERMARK, EpochInput, merge_watermarks
from rekindle.task.core.source import LiveSourceStatus, released_epoch, released_in_s
from rekindle.task.inputs import Clock
from rekindle.workers import CallTimer, Worker

RETRY = BackoffPolicy(first_s=0.1, longest_s=5.0, jitter=0.5)
PARALLEL_READS = 8
"""Records of a replay that are read at the same time: a request may take 50 ms."""

_log = logging.getLogger(__name__)


class CutStore(Protocol):
    """The cut records of one partition of a source, in the checkpoint store. Raises StoreError."""

    def list(self) -> Collection[int]:
        """The first epoch of each."""
        ...

    def read(self, first: int) -> bytes | None:
        """None if it does not exist."""
        ...

    def create(self, first: int, data: bytes) -> bool:
        """False if it exists."""
        ...


@dataclass(frozen=True, slots=True)
class _Planned:
    record: CutRecord
    rows: pa.Table


class LiveInputs:
    """Implements `task.inputs.Inputs`. `stores`: of all partitions of the source, the task's own
    first. `watermark`: after `next_epoch - 1`. Owns the source."""

    def __init__(
        self,
        source: LiveSource,
        stores: Sequence[CutStore],
        cuts: PlannedCuts,
        next_epoch: int,
        watermark: int,
        *,
        name: str,
        origin_us: int,
        epoch_interval_us: int,
        clock: Clock = time.time,
        read_ahead_bytes: int = 32 << 20,
        dead_letters: DeadLetters | None = None,
    ) -> None:
        self._name = name
        self._source = source
        self._stores, self._store = stores, stores[0]
        self._cuts = cuts
        self._began_at = self._next = next_epoch
        self._watermark = watermark
        self._origin_us = origin_us
        self._epoch_interval_us = epoch_interval_us
        self._clock = clock
        self._read_ahead_bytes = read_ahead_bytes
        self._dead_letters = dead_letters
        self._changed = threading.Condition()
        self._ready: deque[_Planned] = deque()
        self._ready_bytes = 0
        self._error: Exception | None = None
        self._failure: str | None = None
        self._closed = threading.Event()
        self._calls = CallTimer(why=f"waiting for {source.waiting_for()}, or for the store")
        self._event_times: dict[int, EventTimes] = {}
        self._asked: set[int] = set()  # epochs whose event times are asked for
        self._listed: list[int] = []  # first epochs of records that may have to be read
        self._reads: dict[int, Future[CutRecord | None]] = {}
        self._readers = ThreadPoolExecutor(PARALLEL_READS, "cut-records")
        # Of the planning thread:
        self._backoff = Backoff(RETRY)
        self._proposed: tuple[Position, Position, SourceRows] | None = None
        self._to_read: CutRecord | None = None  # adopted, and its rows are not read yet
        self._reach: Reach | None = None  # the newest
        self.status = LiveSourceStatus(name)
        self._worker = Worker("cuts", self._plan)
        self._worker.start()

    # --- called by the engine's thread, or by any -------------------------------------------------

    def take(self, bounds: CallBounds, timeout_s: float) -> list[EpochInput]:
        """As of `Inputs`. Raises CutsOvertaken."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._ready or self._error or self._closed.is_set(), timeout_s
            )
            if self._error is not None and not self._ready:
                raise self._error
            call = CallBuilder(bounds)
            while self._ready and call.add(epoch := self._epoch(self._ready[0])):
                self._watermark = epoch.watermark
                self._next += 1
                if epoch.epoch == self._ready[0].record.last:
                    self._ready_bytes -= self._ready.popleft().rows.nbytes
                    self._changed.notify_all()
            return call.epochs

    def _epoch(self, planned: _Planned) -> EpochInput:
        record, rows = planned.record, planned.rows
        rows = rows if self._next == record.first else rows.slice(0, 0)
        after = max(self._watermark, record.watermark)
        return EpochInput(self._next, self._watermark, after, (rows,), idle=record.all_idle)

    def head(self) -> int:
        return released_epoch(self._clock(), self._origin_us, self._epoch_interval_us)

    def route(self, upstreams: Sequence[Upstream]) -> None:
        """A source has no upstreams."""

    def unreadable(self) -> tuple[str, ...]:
        return ()

    def problem(self) -> str | None:
        return self._failure or self._calls.problem or self._worker.problem

    def event_times(self, epoch: int) -> EventTimes | None:
        """Through an epoch, of all partitions: the newest event time of any, and the watermark.
        None: not all of them have recorded it, or it will be read by the time of a later call."""
        found = self._event_times.get(epoch)
        if found is None:
            self._asked.add(epoch)
        return found

    def read_event_times(self, epoch: int) -> EventTimes | None:
        """The same, without delay. Raises StoreError."""
        newest, watermarks = list[int](), list[tuple[int, bool]]()
        for store in self._stores:
            before = [first for first in store.list() if first <= epoch]
            record = self._record(store, max(before)) if before else None
            if record is None or record.last < epoch:
                return None
            newest += record.newest_us.values()
            watermarks.append((record.watermark, record.all_idle))
        watermark, _ = merge_watermarks(watermarks)
        return EventTimes(max(newest, default=NO_WATERMARK), watermark)

    def close(self) -> None:
        self._closed.set()
        self._worker.stop()
        with self._changed:
            self._changed.notify_all()
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._worker.join(timeout_s=2.0)
        if not self._worker.alive:  # a call that has not returned uses it
            self._source.close()
            if self._dead_letters is not None:
                self._dead_letters.close()

    # --- the planning thread ----------------------------------------------------------------------

    def _plan(self) -> None:
        while not self._closed.is_set():
            try:
                if not self._step():
                    return
            except (SourceFailed, StoreError) as error:
                self._report(error)
                self._cuts.failed(of_source=isinstance(error, SourceFailed))
                self._closed.wait(self._backoff.failed())

    def _report(self, error: Exception) -> None:
        if str(error) != self._failure:
            _log.warning("%s", error)
        self._failure = str(error)

    def _step(self) -> bool:
        """One request, or a wait. False once the reader was overtaken. Raises SourceFailed,
        StoreError."""
        if self._to_read is not None:
            self._read(self._to_read)
            self._to_read = None
        while self._asked:
            if (found := self.read_event_times(epoch := self._asked.pop())) is not None:
                self._event_times[epoch] = found
        request = self._cuts.next_request(self.head())
        if request is None:
            wait_s = released_in_s(
                self._cuts.next_epoch, self._clock(), self._origin_us, self._epoch_interval_us
            )
            self._closed.wait(wait_s)
            return True
        try:
            self._perform(request)
        except CutsOvertaken as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()
            return False
        self._to_read = self._cuts.take()
        return True

    def _perform(self, request: Request) -> None:
        sent_at = time.monotonic()
        with self._calls.during(f"planning epoch {self._cuts.next_epoch} of the source"):
            match request:
                case ListRecords():
                    listed = self._store.list()
                    self._cuts.listed(listed, sent_at)
                    self._listed, self._reads = sorted(listed), {}
                case ReadRecord(first):
                    self._cuts.record_read(self._record_of_chain(first), time.monotonic())
                case FindEnds(after):
                    self._reach = self._source.ends(after)
                    self._cuts.ends_found(self._reach, self.head())
                case ReadRows(start, end):
                    found = self._source.read_some(start, end)
                    self._proposed = (start, found.end, found)
                    self._cuts.rows_read(found.end, found.newest_us)
                case CreateRecord(record):
                    created = self._store.create(record.first, encode_cut_record(record))
                    self._cuts.created(created, sent_at, time.monotonic())
                case _:
                    assert_never(request)

    def _record_of_chain(self, first: int) -> CutRecord | None:
        """Those that are listed after it are read at the same time."""
        at = bisect_left(self._listed, first)
        del self._listed[:at]
        for listed in self._listed[:PARALLEL_READS]:
            if listed not in self._reads:
                self._reads[listed] = self._readers.submit(self._record, self._store, listed)
        read = self._reads.pop(first, None)
        return self._record(self._store, first) if read is None else read.result()

    def _record(self, store: CutStore, first: int) -> CutRecord | None:
        data = store.read(first)
        try:
            return None if data is None else decode_cut_record(data)
        except ValueError as error:
            raise StoreError(f"the record of epoch {first} of the source: {error}") from error

    def _read(self, record: CutRecord) -> None:
        """Reads a record's rows, and waits until the engine has space for them."""
        if record.identity != self._source.identity:
            raise SourceFailed(
                f"{self._source.waiting_for()} was deleted and created again: what was read from "
                "the former one cannot be read again; give the source another name to read the "
                "new one"
            )
        if record.first < self._began_at:  # its rows are in the restored state
            found = SourceRows(record.end, self._source.schema.empty_table(), {})
        else:
            found = self._rows(record)
        if found.dead_letters and self._dead_letters is not None:
            self._dead_letters.put(record.first, found.dead_letters)
        # Not before: while the source is away, others' records are looked for, which succeeds.
        self._failure = None
        self._backoff.succeeded()
        self._worker.progressed()
        if found.dropped:
            self.status.bad_records += found.dropped
            self.status.example = found.example or self.status.example
            _log.warning("%d records dropped, such as %s", found.dropped, found.example)
        if self._reach is not None:
            self.status.behind = self._reach.behind(record.end)
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    not self._ready
                    or self._ready_bytes + found.table.nbytes <= self._read_ahead_bytes
                    or self._closed.is_set()
                )
            )
            self._ready.append(_Planned(record, found.table))
            self._ready_bytes += found.table.nbytes
            self._changed.notify_all()

    def _rows(self, record: CutRecord) -> SourceRows:
        """They are at hand if the reader has proposed the same ones."""
        proposed, self._proposed = self._proposed, None
        if proposed is not None and proposed[:2] == (record.start, record.end):
            return proposed[2]
        with self._calls.during(f"reading epoch {record.first} of the source"):
            return self._source.read(record.start, record.end)
