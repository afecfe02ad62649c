"""The output log: the newest epochs of one stream partition, on local disk.

It is a bounded cache, not a source of truth: whatever it loses is computed again, to the bit, so it
is never fsynced. Each read checks the record's checksum. Damage found at reopening, torn tail or
flipped bit, cuts it there; damage found later stands in `damage`, and its owner reopens the log. It
knows no network and no engine. Who may truncate is decided elsewhere; here an epoch at or above the
floor never leaves (invariant I5): over budget, whole segment files go to the spill, or appends
fail.

Design: docs/design/streams.md#output-log.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from rekindle.errors import BelowFloor, Diverged, LogCorrupt, LogFull
from rekindle.streams import records
from rekindle.streams.epochs import NO_EPOCH, EpochBatch, Kind
from rekindle.streams.records import Record
from rekindle.streams.segments import Segment, new_segment, take_over

SEGMENT_BYTES = 16 << 20
SEGMENT_EPOCHS = 1024
READ_EPOCHS = 256
"""Epochs of one read at most: empty ones have no bytes to bound it by."""

_log = logging.getLogger(__name__)


class Spill(Protocol):
    """Where segment files go that the local budget has no room for (the checkpoint store)."""

    def put(self, name: str, data: bytes) -> object: ...
    def get(self, name: str) -> bytes: ...
    def delete(self, name: str) -> object: ...


@dataclass(frozen=True, slots=True)
class Result:
    """What identifies the content of an epoch."""

    digest: str
    watermark: int


class OutputLog:
    """Consecutive epochs `base..last`. Thread-safe: one appender, many readers."""

    def __init__(
        self,
        directory: Path,
        stream: str,
        partition: int,
        schema: pa.Schema,
        *,
        budget: int | None = None,
        spill: Spill | None = None,
        spill_prefix: str = "",
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        self.stream = stream
        self.partition = partition
        self.schema = schema
        self._directory = directory
        self._budget = budget
        self._spill = spill
        self._spill_prefix = spill_prefix
        self._segment_bytes = min(segment_bytes, max(1, budget // 8)) if budget else segment_bytes
        # Taken in this order. The store, which may be slow, is spoken to under the first at most.
        self._appending = threading.Lock()  # held by the one appender
        self._writing = threading.Lock()  # held by whoever changes files
        self._changed = threading.Condition()  # held to look at or change the index
        self._closed = False
        self._floor = NO_EPOCH
        self.damage: str | None = None
        """What a read found; the log has to be opened again, which cuts it there."""
        self._fetched: tuple[str, pa.Buffer] | None = None  # the spilled file read last
        directory.mkdir(parents=True, exist_ok=True)
        self._segments, damage = take_over(directory, with_spilled=spill is not None)
        if damage:
            _log.warning("output log cut: %s; the epochs from there are computed again", damage)
        self._next = self._segments[-1].last + 1 if self._segments else 0

    # -- what is there ---------------------------------------------------------------------------

    @property
    def base(self) -> int:
        """Lowest epoch that can be read; `last + 1` if there is none."""
        with self._changed:
            return self._segments[0].first if self._segments else self._next

    @property
    def last(self) -> int:
        """Newest epoch, NO_EPOCH if there never was one."""
        return self._next - 1

    @property
    def local_bytes(self) -> int:
        """Bytes on local disk."""
        with self._changed:
            return sum(s.size for s in self._segments if s.spilled is None)

    def results(self, from_epoch: int) -> dict[int, Result]:
        """What it holds, from an epoch on."""
        with self._changed:
            epochs = range(max(self.base, from_epoch), self._next)
            found = {e: self._find(e) for e in epochs}
        return {e: Result(record.digest, record.watermark) for e, record in found.items()}

    def wait_for(self, epoch: int, timeout_s: float) -> bool:
        """Wait until `epoch` is in the log (or no longer); False at the time-out or at closing."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while self._next <= epoch and not self._closed:
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(left)
            return not self._closed

    def read(self, from_epoch: int, max_bytes: int) -> list[EpochBatch]:
        """Consecutive epochs from `from_epoch`, at least one if it is there, zero-copy from the
        mapped file. Raises BelowFloor for an epoch below the base."""
        with self._changed:
            if from_epoch < self.base:
                raise BelowFloor(
                    f"epoch {from_epoch} of stream {self.stream}/{self.partition} has left the "
                    f"log, which begins at {self.base}; read from another replica, or restore "
                    f"from a later epoch"
                )
            found: list[tuple[Segment, Record]] = []
            size = 0
            for epoch in range(from_epoch, min(self._next, from_epoch + READ_EPOCHS)):
                segment = self._segment_of(epoch)
                record = segment.find(epoch)
                size += record.size
                if found and size > max_bytes:
                    break
                found.append((segment, record))
            local = {id(s): s.map(r) for s, r in found if s.spilled is None}  # the last is longest
        fetched = {id(s): self._fetch(s) for s, _ in found if id(s) not in local}
        return [self._checked(s, r, (local | fetched)[id(s)]) for s, r in found]

    # -- what changes it -------------------------------------------------------------------------

    def start_at(self, epoch: int, *, keep: bool = True) -> None:
        """Make `epoch` appendable: a log that ends before `epoch - 1` would have a gap and is
        emptied. A log that already holds more stays, and is compared with what is appended, or with
        `keep=False` is emptied as well."""
        with self._appending, self._writing, self._changed:
            if keep and self._next >= epoch:
                return
            gone, self._segments = self._segments, []
            self._remove_files(gone)
            self._next = epoch
        self._remove_spilled(gone)

    def append(self, batch: EpochBatch) -> bool:
        """Add an epoch; True if it is new. An epoch that is there already must agree with it, one
        that was truncated is ignored. Raises Diverged, LogFull, LogCorrupt once damage was found;
        OSError leaves the log as it was.
        """
        if batch.kind is not Kind.STABLE:
            raise ValueError(f"only stable epochs enter the output log, not {batch.kind}")
        with self._appending:
            if batch.epoch < self._next:
                self._compare(batch)
                return False
            if batch.epoch > self._next:
                raise ValueError(f"epoch {batch.epoch} cannot follow {self.last} in the log")
            self._make_room()
            with self._writing:
                if self.damage is not None:  # a file that was removed must not begin anew
                    raise LogCorrupt(self.damage)
                segment = self._writable(batch.epoch)
                record, pieces = records.encode(batch, segment.size)
                segment.write(record, pieces)
                with self._changed:
                    segment.index.append(record)
                    if len(segment.index) == 1:
                        self._segments.append(segment)
                    self._next = batch.epoch + 1
                    self._changed.notify_all()
        return True

    def truncate(self, floor: int) -> None:
        """Epochs at or below `floor` may leave; whole segment files do."""
        gone: list[Segment] = []
        with self._writing, self._changed:
            self._floor = max(self._floor, floor)
            while self._segments and self._segments[0].last <= floor:
                gone.append(self._segments.pop(0))
            self._remove_files(gone)
            self._changed.notify_all()
        self._remove_spilled(gone)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            for segment in self._segments:
                segment.forget()
            self._changed.notify_all()

    # -- inside ----------------------------------------------------------------------------------

    def _segment_of(self, epoch: int) -> Segment:
        starts = [s.first for s in self._segments]
        return self._segments[bisect_right(starts, epoch) - 1]

    def _find(self, epoch: int) -> Record:
        return self._segment_of(epoch).find(epoch)

    def _fetch(self, segment: Segment) -> pa.Buffer:
        """The bytes of a spilled segment; without the lock, for it takes the network's time."""
        assert self._spill is not None
        assert segment.spilled is not None
        fetched = self._fetched
        if fetched is None or fetched[0] != segment.spilled:
            fetched = self._fetched = (
                segment.spilled,
                pa.py_buffer(self._spill.get(segment.spilled)),
            )
        return fetched[1]

    def _checked(self, segment: Segment, record: Record, data: pa.Buffer) -> EpochBatch:
        """The epoch, if its bytes are those that were written. What came over the network wrong is
        fetched once more."""
        sound = records.is_sound(memoryview(data), record)
        if not sound and segment.spilled is not None:
            self._fetched = None
            data = self._fetch(segment)
            sound = records.is_sound(memoryview(data), record)
        if not sound:
            raise LogCorrupt(self._damaged(segment, record))
        rows = records.decode(data.slice(record.payload, record.length), self.schema)
        return EpochBatch(
            self.stream, self.partition, record.epoch, record.watermark, rows, record.digest
        )

    def _damaged(self, segment: Segment, record: Record) -> str:
        """Make sure that the log ends before the record when it is opened the next time."""
        where = segment.spilled or segment.path
        said = (
            f"epoch {record.epoch} of stream {self.stream}/{self.partition} is damaged in {where} "
            f"at offset {record.start}; the task starts again, cuts its output log there and "
            f"computes it again"
        )
        with self._writing, self._changed:
            if segment.spilled is not None and segment in self._segments:
                # Spilled bytes are not looked at when a log is opened, so the file goes now, and
                # those after it: a log without its first files would begin at a later epoch.
                for later in self._segments[self._segments.index(segment) :]:
                    later.path.unlink(missing_ok=True)
            self.damage = self.damage or said
        return said

    def _compare(self, batch: EpochBatch) -> None:
        with self._changed:
            if batch.epoch < self.base:
                return
            mine = self._find(batch.epoch)
        if (mine.digest, mine.watermark) != (batch.digest, batch.watermark):
            raise Diverged(
                f"epoch {batch.epoch} of stream {self.stream}/{self.partition} was computed again "
                f"with another result: digest {mine.digest} and watermark {mine.watermark} in the "
                f"log, now {batch.digest} and {batch.watermark}; look for a function in the "
                f"operator that is not deterministic"
            )

    def _writable(self, epoch: int) -> Segment:
        if self._segments:
            newest = self._segments[-1]
            full = newest.size >= self._segment_bytes or len(newest.index) >= SEGMENT_EPOCHS
            if newest.spilled is None and not full:
                return newest
            newest.forget()
        return new_segment(self._directory, epoch)

    def _make_room(self) -> None:
        """Keep local bytes below the budget: spill the oldest file, or refuse."""
        if self._budget is None:
            return
        while self.local_bytes >= self._budget:
            with self._changed:
                local = [s for s in self._segments if s.spilled is None]
            if self._spill is None or not local:
                raise LogFull(
                    f"the output log of stream {self.stream}/{self.partition} has reached its "
                    f"budget of {self._budget} bytes and epochs from {self._floor + 1} are still "
                    f"needed; raise logBudget or bring back the consumers that hold them"
                )
            self._spill_segment(local[0], self._spill)

    def _spill_segment(self, segment: Segment, spill: Spill) -> None:
        # Unique: an object of an earlier life may be there and is never replaced.
        name = f"{self._spill_prefix}{segment.path.stem}-{uuid.uuid4().hex[:12]}"
        with self._writing:
            if segment not in self._segments:
                return
            data = segment.path.read_bytes()
        spill.put(name, data)
        with self._writing:
            kept = segment in self._segments
            if kept:
                note = segment.note_spilled(name)
                with self._changed:
                    segment.leave(note, name)
        if not kept:  # truncated meanwhile
            self._discard(name)

    def _remove_files(self, segments: list[Segment]) -> None:
        for segment in segments:
            segment.path.unlink(missing_ok=True)

    def _remove_spilled(self, segments: list[Segment]) -> None:
        """To be called without locks: it takes the network's time."""
        for segment in segments:
            if segment.spilled is not None:
                self._discard(segment.spilled)

    def _discard(self, name: str) -> None:
        if self._fetched is not None and self._fetched[0] == name:
            self._fetched = None
        if self._spill is None:
            return
        try:
            self._spill.delete(name)
        except Exception as error:
            _log.warning("spilled log %s was not deleted: %s", name, error)

    def __iter__(self) -> Iterator[EpochBatch]:
        """All epochs, oldest first (for tests and tools)."""
        for epoch in range(self.base, self._next):
            yield from self.read(epoch, 0)
