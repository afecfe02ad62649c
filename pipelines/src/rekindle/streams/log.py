"""The output log: the newest epochs of one stream partition, on local disk.

It is a bounded cache, not a source of truth: lost epochs are computed again with the same bits, so
it is never fsynced. Each read checks the record's checksum. Damage that is found when the log is
opened, a torn tail or a flipped bit, truncates the log there; for damage that is found later,
`damage` is set and the owner reopens the log. It does not know network or engine. The caller
decides what is truncated; an epoch above the floor is never removed (invariant I5): over
budget, whole files are spilled to the checkpoint store, or appends fail.

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
from rekindle.streams.log_files import LogFile, load_log_files, new_log_file
from rekindle.streams.records import Record

LOG_FILE_BYTES = 16 << 20
LOG_FILE_EPOCHS = 1024
READ_EPOCHS = 256
"""Maximum epochs of one read: empty ones would not count for its limit in bytes."""

_log = logging.getLogger(__name__)


class Spill(Protocol):
    """Holds the files that exceed the local budget (the checkpoint store)."""

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
        file_bytes: int = LOG_FILE_BYTES,
    ) -> None:
        self.stream = stream
        self.partition = partition
        self.schema = schema
        self._directory = directory
        self._budget = budget
        self._spill = spill
        self._spill_prefix = spill_prefix
        self._file_bytes = min(file_bytes, max(1, budget // 8)) if budget else file_bytes
        # Locks, acquired in this order. Calls of the store, which may be slow, hold only the first.
        self._appending = threading.Lock()  # held by the one appender
        self._writing = threading.Lock()  # held while files are changed
        self._changed = threading.Condition()  # held to read or change the index
        self._closed = False
        self._floor = NO_EPOCH
        self.damage: str | None = None
        """Damage that a read found; the log has to be reopened, which truncates it there."""
        self._fetched: tuple[str, pa.Buffer] | None = None  # the spilled file read last
        directory.mkdir(parents=True, exist_ok=True)
        self._files, damage = load_log_files(directory, with_spilled=spill is not None)
        if damage:
            _log.warning(
                "output log truncated: %s; the epochs from there are computed again", damage
            )
        self._next = self._files[-1].last + 1 if self._files else 0

    # -- reading ---------------------------------------------------------------------------------

    @property
    def base(self) -> int:
        """Lowest epoch that can be read; `last + 1` if there is none."""
        with self._changed:
            return self._files[0].first if self._files else self._next

    @property
    def last(self) -> int:
        """Newest epoch, NO_EPOCH if there never was one."""
        return self._next - 1

    @property
    def local_bytes(self) -> int:
        """Bytes on local disk."""
        with self._changed:
            return sum(s.size for s in self._files if s.spilled is None)

    def results(self, from_epoch: int) -> dict[int, Result]:
        """Digest and watermark of each epoch that it holds, from an epoch on."""
        with self._changed:
            epochs = range(max(self.base, from_epoch), self._next)
            found = {e: self._find(e) for e in epochs}
        return {e: Result(record.digest, record.watermark) for e, record in found.items()}

    def wait_for(self, epoch: int, timeout_s: float) -> bool:
        """Wait until `epoch` is in the log (or was truncated); False at the timeout or on close."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while self._next <= epoch and not self._closed:
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(left)
            return not self._closed

    def read(self, from_epoch: int, max_bytes: int) -> list[EpochBatch]:
        """Consecutive epochs from `from_epoch`, at least one if it exists, zero-copy from the
        mapped file. Raises BelowFloor for an epoch below the base."""
        with self._changed:
            if from_epoch < self.base:
                raise BelowFloor(
                    f"epoch {from_epoch} of stream {self.stream}/{self.partition} is no longer in "
                    f"the log, which begins at {self.base}; read from another replica, or "
                    f"restore from a later epoch"
                )
            found: list[tuple[LogFile, Record]] = []
            size = 0
            for epoch in range(from_epoch, min(self._next, from_epoch + READ_EPOCHS)):
                file = self._file_of(epoch)
                record = file.find(epoch)
                size += record.size
                if found and size > max_bytes:
                    break
                found.append((file, record))
            local = {id(s): s.map(r) for s, r in found if s.spilled is None}  # the last is longest
        fetched = {id(s): self._fetch(s) for s, _ in found if id(s) not in local}
        return [self._checked(s, r, (local | fetched)[id(s)]) for s, r in found]

    # -- writing ---------------------------------------------------------------------------------

    def start_at(self, epoch: int, *, keep: bool = True) -> None:
        """Make `epoch` appendable: a log that ends before `epoch - 1` would have a gap and is
        emptied. A log that already holds more stays, and is compared with what is appended, or with
        `keep=False` is emptied as well."""
        with self._appending, self._writing, self._changed:
            if keep and self._next >= epoch:
                return
            gone, self._files = self._files, []
            self._remove_files(gone)
            self._next = epoch
        self._remove_spilled(gone)

    def append(self, batch: EpochBatch) -> bool:
        """Add an epoch; True if it is new. An epoch that exists already must be equal; one that
        was truncated is ignored. Raises Diverged, LogFull, LogCorrupt once damage was found;
        after OSError the log is unchanged.
        """
        if batch.kind is not Kind.STABLE:
            raise ValueError(f"only stable epochs enter the output log, not {batch.kind}")
        with self._appending:
            if batch.epoch < self._next:
                self._compare(batch)
                return False
            if batch.epoch > self._next:
                raise ValueError(f"epoch {batch.epoch} cannot follow {self.last} in the log")
            self._free_budget()
            with self._writing:
                if self.damage is not None:  # a file that was removed must not be created again
                    raise LogCorrupt(self.damage)
                file = self._writable(batch.epoch)
                record, pieces = records.encode(batch, file.size)
                file.write(record, pieces)
                with self._changed:
                    file.index.append(record)
                    if len(file.index) == 1:
                        self._files.append(file)
                    self._next = batch.epoch + 1
                    self._changed.notify_all()
        return True

    def truncate(self, floor: int) -> None:
        """Epochs at or below `floor` are no longer needed: remove the files that have no others."""
        gone: list[LogFile] = []
        with self._writing, self._changed:
            self._floor = max(self._floor, floor)
            while self._files and self._files[0].last <= floor:
                gone.append(self._files.pop(0))
            self._remove_files(gone)
            self._changed.notify_all()
        self._remove_spilled(gone)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            for file in self._files:
                file.unmap()
            self._changed.notify_all()

    # -- private ---------------------------------------------------------------------------------

    def _file_of(self, epoch: int) -> LogFile:
        return self._files[bisect_right(self._files, epoch, key=lambda f: f.first) - 1]

    def _find(self, epoch: int) -> Record:
        return self._file_of(epoch).find(epoch)

    def _fetch(self, file: LogFile) -> pa.Buffer:
        """The bytes of a spilled file; without the lock, because of the network."""
        assert self._spill is not None
        assert file.spilled is not None
        fetched = self._fetched
        if fetched is None or fetched[0] != file.spilled:
            fetched = self._fetched = (
                file.spilled,
                pa.py_buffer(self._spill.get(file.spilled)),
            )
        return fetched[1]

    def _checked(self, file: LogFile, record: Record, data: pa.Buffer) -> EpochBatch:
        """The epoch, if its checksum matches. A spilled file that does not match is fetched once
        more."""
        sound = records.is_sound(memoryview(data), record)
        if not sound and file.spilled is not None:
            self._fetched = None
            data = self._fetch(file)
            sound = records.is_sound(memoryview(data), record)
        if not sound:
            raise LogCorrupt(self._damaged(file, record))
        rows = records.decode(data.slice(record.payload, record.length), self.schema)
        return EpochBatch(
            self.stream, self.partition, record.epoch, record.watermark, rows, record.digest
        )

    def _damaged(self, file: LogFile, record: Record) -> str:
        """Ensure that the log ends before the record when it is opened the next time."""
        where = file.spilled or file.path
        message = (
            f"epoch {record.epoch} of stream {self.stream}/{self.partition} is damaged in {where} "
            f"at offset {record.start}; the task restarts, truncates its output log there and "
            f"computes the epoch again"
        )
        with self._writing, self._changed:
            if file.spilled is not None and file in self._files:
                # Spilled bytes are not checked when a log is opened, so the file is removed now,
                # and those after it: a log without its first files would begin at a later epoch.
                for later in self._files[self._files.index(file) :]:
                    later.path.unlink(missing_ok=True)
            self.damage = self.damage or message
        return message

    def _compare(self, batch: EpochBatch) -> None:
        with self._changed:
            if batch.epoch < self.base:
                return
            mine = self._find(batch.epoch)
        if (mine.digest, mine.watermark) != (batch.digest, batch.watermark):
            raise Diverged(
                f"epoch {batch.epoch} of stream {self.stream}/{self.partition} was computed again "
                f"with another result: digest {mine.digest} and watermark {mine.watermark} in the "
                f"log, now {batch.digest} and {batch.watermark}; does the operator use a function "
                f"that is not deterministic?"
            )

    def _writable(self, epoch: int) -> LogFile:
        if self._files:
            newest = self._files[-1]
            full = newest.size >= self._file_bytes or len(newest.index) >= LOG_FILE_EPOCHS
            if newest.spilled is None and not full:
                return newest
            newest.unmap()
        return new_log_file(self._directory, epoch)

    def _free_budget(self) -> None:
        """Keep local bytes below the budget: spill the oldest files, or raise LogFull."""
        if self._budget is None:
            return
        while self.local_bytes >= self._budget:
            with self._changed:
                local = [s for s in self._files if s.spilled is None]
            if self._spill is None or not local:
                raise LogFull(
                    f"the output log of stream {self.stream}/{self.partition} has reached its "
                    f"budget of {self._budget} bytes, and consumers still need its epochs from "
                    f"{self._floor + 1} on; raise logBudget or restart these consumers"
                )
            self._spill_file(local[0], self._spill)

    def _spill_file(self, file: LogFile, spill: Spill) -> None:
        # Unique: an earlier process may have written an object, which is never replaced.
        name = f"{self._spill_prefix}{file.path.stem}-{uuid.uuid4().hex[:12]}"
        with self._writing:
            if file not in self._files:
                return
            data = file.path.read_bytes()
        spill.put(name, data)
        with self._writing:
            kept = file in self._files
            if kept:
                index = file.write_spilled_index(name)
                with self._changed:
                    file.replace_by_index(index, name)
        if not kept:  # truncated meanwhile
            self._discard(name)

    def _remove_files(self, files: list[LogFile]) -> None:
        for file in files:
            file.path.unlink(missing_ok=True)

    def _remove_spilled(self, files: list[LogFile]) -> None:
        """To be called without locks, because of the network."""
        for file in files:
            if file.spilled is not None:
                self._discard(file.spilled)

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
