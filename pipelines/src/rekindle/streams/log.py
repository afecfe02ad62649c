"""The output log: the newest epochs of one stream partition, on local disk.

It is a bounded cache, not a source of truth: lost epochs are computed again with the same bits, so
it is never fsynced. Each read checks the record's checksum. A log that is opened ends before the
first damage, a torn tail or a flipped bit; for damage that is found later, `damage` is set and the
owner reopens the log. Damaged epochs that no consumer needs any more, or that are tentative, are
dropped instead. It does not know network or engine. The caller decides through which epoch it is
truncated, from its beginning; an epoch above that floor is never removed (invariant I5): over
budget, whole files are spilled to the checkpoint store, or appends fail.

Design: docs/design/streams.md#output-log.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from rekindle.errors import (
    BelowFloor,
    DifferentResults,
    LogCorrupt,
    LogFull,
    ObjectMissing,
    RekindleError,
)
from rekindle.streams import records
from rekindle.streams.branches import Branch
from rekindle.streams.epochs import NO_EPOCH, BatchKind, EpochBatch, Result
from rekindle.streams.fetched_files import FetchedFile, FetchedFiles
from rekindle.streams.log_files import (
    LogFile,
    ShippedFile,
    adopt_file,
    forget_floor,
    load_log_files,
    new_log_file,
    read_floor,
    read_outline,
    refuse_shipped,
    write_floor,
)
from rekindle.streams.log_reading import MAX_READ_EPOCHS, EncodedEpoch, Reading, View
from rekindle.streams.records import DamagedRecord, Record, RecordKind
from rekindle.streams.retention import file_bytes as file_bytes_with
from rekindle.streams.retention import retained_floor
from rekindle.streams.tail import append_epoch

LOG_FILE_BYTES = 16 << 20
LOG_FILE_RECORDS = 1024
FETCHED_BYTES = 32 << 20
"""Memory for spilled files that are kept for the next read of them; a single one may be larger."""
_FETCHED_FRACTION = 2 / 7
_DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_CURSORS = 64
"""Places in files that are remembered: where reads in order go on."""

_log = logging.getLogger(__name__)


def fetched_bytes(serve_bytes: int) -> int:
    """The part of fetched files in the memory for readers; the rest is the server's."""
    return int(_FETCHED_FRACTION * serve_bytes)


class Spill(Protocol):
    """Holds the files that exceed the local budget (the checkpoint store)."""

    def put(self, name: str, data: bytes) -> object: ...
    def get(self, name: str) -> bytes:
        """Raises ObjectMissing if it is gone for good."""
        ...

    def delete(self, name: str) -> object: ...


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
        attempt: int = 0,
        fetched_bytes: int = FETCHED_BYTES,
    ) -> None:
        """`attempt`: of a tentative branch; 0: the stable one."""
        self.stream = stream
        self.partition = partition
        self.schema = schema
        self.attempt = attempt
        self._kind = BatchKind.TENTATIVE if attempt else BatchKind.STABLE
        self._directory = directory
        self._budget = budget
        self._spill = spill
        self._spill_prefix = spill_prefix
        self._file_bytes = min(file_bytes, max(1, budget // 8)) if budget else file_bytes
        # Locks, acquired in this order. Calls of the store, which may be slow, hold only the first.
        self._appending = threading.Lock()  # held by the one appender
        self._writing = threading.Lock()  # held while files are changed
        self._changed = threading.Condition()  # held to read or change the index, not for I/O
        self._closed = False
        self._listeners: list[Callable[[], None]] = []
        self._floor = NO_EPOCH
        self._retain_bytes = 0
        self.damage: str | None = None
        """Damage that a read found; the log has to be reopened, and ends before it then."""
        self._fetched = FetchedFiles(fetched_bytes)
        self._cursors: dict[int, int] = {}  # by epoch, the offset from which to look for it
        self._no_rows = schema.empty_table()
        self._branch: Branch[LogFile] = Branch(0)
        directory.mkdir(parents=True, exist_ok=True)
        loaded = load_log_files(
            directory, with_spilled=spill is not None, floor=read_floor(directory)
        )
        # Consumers that start again, as this process does, may need epochs at or below that floor.
        forget_floor(directory)
        for file in loaded.files:
            if file is loaded.files[0]:
                self._branch.restart_at(file.first)
            self._branch.add(file)
        for damage in loaded.dropped:
            _log.warning(
                "output log: %s; no consumer in the topology needs what is lost: the log begins "
                "with epoch %d now",
                *(damage, self.base),
            )
        if loaded.cut:
            _log.warning(
                "output log ends before damage: %s; the epochs from there are computed again",
                loaded.cut,
            )

    # -- reading ---------------------------------------------------------------------------------

    @property
    def base(self) -> int:
        """Lowest epoch that can be read; `last + 1` if there is none."""
        with self._changed:
            return self._branch.base

    @property
    def last(self) -> int:
        """Newest epoch, NO_EPOCH if there never was one."""
        with self._changed:
            return self._branch.next_epoch - 1

    @property
    def local_bytes(self) -> int:
        """Bytes on local disk."""
        with self._changed:
            return sum(f.size for f in self._branch.extents if f.spilled is None)

    def results(self, from_epoch: int) -> dict[int, Result]:
        """Digest and watermark of each epoch that it holds, from an epoch on, but of those that
        another task has shipped. Raises LogCorrupt."""
        with self._changed:
            shipped = [f.last for f in self._branch.extents if f.adopted]
            from_epoch = max([self._branch.base, from_epoch, *(last + 1 for last in shipped)])
        found: dict[int, Result] = {}
        while part := dict(self._results(from_epoch)):
            found |= part
            from_epoch = max(part) + 1
        return found

    def wait_for(self, epoch: int, timeout_s: float) -> bool:
        """Wait until `epoch` is in the log (or was truncated); False at the timeout or on close."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while self._branch.next_epoch <= epoch and not self._closed:
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(left)
            return not self._closed

    def listen(self, changed: Callable[[], None]) -> None:
        """Call `changed`, which must not block, after each change, from the thread that made it."""
        with self._changed:
            self._listeners.append(changed)

    def spilled(self, epoch: int) -> tuple[str, int] | None:
        """Name and bytes of the object that has the epoch, if it is in the store, which may be
        slow."""
        with self._changed:
            file = self._branch.find(epoch)
            return None if file is None or file.spilled is None else (file.spilled, file.size)

    def read(self, from_epoch: int, max_bytes: int, *, local: bool = False) -> list[EpochBatch]:
        """Consecutive epochs from `from_epoch`, at least one if it exists, zero-copy from the
        mapped file. Raises BelowFloor for an epoch below the base. `local`: no spilled
        epochs."""
        if local:
            found = self.read_local(from_epoch, max_bytes, at_least_one=True)
        else:
            found = self.read_encoded(from_epoch, max_bytes)
        return [self.decode(epoch) for epoch in found]

    def read_encoded(self, from_epoch: int, max_bytes: int) -> list[EncodedEpoch]:
        """As `read`, without a look at the rows."""
        return self._read(Reading(from_epoch, max_bytes), self._fetch)

    def read_local(
        self,
        from_epoch: int,
        max_bytes: int,
        max_epochs: int = MAX_READ_EPOCHS,
        *,
        at_least_one: bool = False,
    ) -> list[EncodedEpoch]:
        """As `read_encoded`, but no spilled epochs; with `at_least_one` the first one may be
        larger. It takes no longer than to read `max_bytes` of local files."""
        reading = Reading(from_epoch, max_bytes, at_least_one, max_epochs)
        return self._read(reading, lambda file: None)

    def read_fetched(
        self,
        fetched: FetchedFile,
        from_epoch: int,
        max_bytes: int,
        max_epochs: int = MAX_READ_EPOCHS,
        *,
        at_least_one: bool = False,
    ) -> list[EncodedEpoch]:
        """As `read_local`, of a spilled file; nothing if the epoch is not in it."""
        reading = Reading(from_epoch, max_bytes, at_least_one, max_epochs)
        return self._read(
            reading, lambda file: fetched if file.spilled == fetched.name else None, local=False
        )

    def fetch(self, name: str) -> FetchedFile:
        """A spilled file; the store may be slow. Whoever holds it need not fetch it again. Raises
        LogCorrupt if its object is gone (BelowFloor if no consumer needs it), StoreError."""
        assert self._spill is not None
        try:
            return self._fetched.get(name, self._spill.get)
        except ObjectMissing as missing:
            with self._changed:
                file = next((f for f in self._branch.extents if f.spilled == name), None)
            if file is None:  # truncated meanwhile
                raise
            what = f"epoch {file.first}"
            raise self._unreadable(file, what, file.last, missing) from missing

    def fetched(self, name: str) -> FetchedFile | None:
        """A spilled file that need not be fetched."""
        return self._fetched.find(name)

    def is_recent(self, epoch: int) -> bool:
        """Whether the epoch is in the file that is appended to, so its bytes are probably in
        memory."""
        with self._changed:
            newest = self._branch.newest
            return newest is not None and newest.first <= epoch and newest.spilled is None

    def _read(
        self,
        reading: Reading,
        fetch: Callable[[LogFile], FetchedFile | None],
        *,
        local: bool = True,
    ) -> list[EncodedEpoch]:
        """`fetch`: the bytes of a spilled file; None: the reading ends before it. `local`: whether
        it reads local files, too."""
        from_epoch = reading.next_epoch
        with self._changed:
            if from_epoch < self._branch.base:
                raise BelowFloor(
                    f"epoch {from_epoch} of stream {self.stream}/{self.partition} is no longer in "
                    f"the log, which begins at {self.base}; read from another replica, or "
                    f"restore from a later epoch"
                )
        fetched_again = False
        while not reading.complete:
            if (found := self._view(reading.next_epoch, fetch)) is None:
                break
            file, view = found
            if file.spilled is None and not local:
                break
            try:
                offset = reading.take(view)
                self._remember(reading.next_epoch, offset)
            except DamagedRecord as damage:
                if file.spilled is not None and not fetched_again:
                    self._fetched.drop(file.spilled)
                    fetch, fetched_again = self._fetch, True  # here, although it may be slow
                elif reading.epochs:
                    break  # the next read finds it
                else:
                    what = f"epoch {from_epoch}"
                    raise self._unreadable(file, what, from_epoch, damage) from None
        return reading.epochs

    def decode(self, encoded: EncodedEpoch) -> EpochBatch:
        rows = self._no_rows if encoded.payload is None else records.decode_rows(encoded.payload)
        return EpochBatch(
            self.stream,
            self.partition,
            encoded.epoch,
            encoded.watermark,
            rows,
            encoded.digest,
            self._kind,
            self.attempt,
            encoded.idle,
        )

    # -- writing ---------------------------------------------------------------------------------

    def start_at(self, epoch: int, *, keep: bool = True) -> None:
        """Make `epoch` appendable: a log that ends before `epoch - 1` would have a gap and is
        emptied. A log that already holds more stays, and is compared with what is appended, or with
        `keep=False` is emptied as well."""
        with self._appending, self._writing:
            with self._changed:
                if keep and self._branch.next_epoch >= epoch:
                    return
                gone = self._branch.restart_at(epoch)
                self._cursors.clear()
            self._remove_files(gone)
        self._remove_spilled(gone)

    def adopt(self, shipped: Sequence[ShippedFile]) -> None:
        """Begin with files that another task has shipped to the store, without a gap and up to the
        next epoch; the log is empty. Nothing of them is fetched before it is read. Raises
        OSError."""
        with self._appending, self._writing:
            # The oldest first: a process that is killed in between leaves no log that begins later
            # than its readers need.
            files = [adopt_file(self._directory, file) for file in shipped]
            with self._changed:
                if self._branch.extents or self._branch.next_epoch != files[-1].last + 1:
                    raise ValueError("only an empty log that begins behind them adopts files")
                self._branch.restart_at(files[0].first)
                for file in files:
                    self._branch.add(file)
                self._notify()

    def append(self, batch: EpochBatch) -> bool:
        """Add an epoch; True if it is new. An epoch that exists already must be equal; one that
        was truncated is ignored. Raises DifferentResults, LogFull, LogCorrupt once damage was
        found; after OSError the log is unchanged.
        """
        if (batch.kind, batch.attempt) != (self._kind, self.attempt):
            raise ValueError(
                f"only {self._kind.lower()} epochs of attempt {self.attempt} enter this log, not "
                f"{batch.kind} ones of attempt {batch.attempt}"
            )
        with self._appending:
            if batch.epoch <= self.last:
                self._compare(batch)
                return False
            if batch.epoch > self.last + 1:
                raise ValueError(f"epoch {batch.epoch} cannot follow {self.last} in the log")
            self._free_budget()
            payload = records.encode_rows(batch.rows)
            while True:
                try:
                    self._write(batch, payload)
                    return True
                except OSError as error:
                    if error.errno not in _DISK_FULL or not self._drop_retained():
                        raise

    def truncate(self, floor: int) -> None:
        """Epochs at or below `floor` are no longer needed: remove the files that have no other
        epochs, unless they are retained."""
        with self._writing:
            risen, self._floor = floor > self._floor, max(self._floor, floor)
            with self._changed:
                gone = self._branch.drop_through(
                    retained_floor(self._branch.extents, floor, self._retain_bytes)
                )
                self._notify()
            self._remove_files(gone)
            if risen and self.base <= self._floor:
                # Without it, damage of a retained file costs the epochs after it, too, when the
                # log is opened: they are computed again.
                with contextlib.suppress(OSError):
                    write_floor(self._directory, self._floor)
        self._remove_spilled(gone)

    def retain(self, retain_bytes: int) -> None:
        """Keep the newest files that `truncate` would remove, up to `retain_bytes` and half of the
        budget, for readers outside of the topology, who have no holds. Over budget, and on a full
        disk, these files are removed first."""
        if self._budget is not None:
            retain_bytes = min(retain_bytes, self._budget // 2)
        with self._writing:
            self._retain_bytes = retain_bytes

    def drop_oldest(self) -> bool:
        """Remove the oldest file, unless it is the only one. Returns whether one was removed."""
        with self._writing:
            with self._changed:
                files = self._branch.extents
                gone = self._branch.drop_through(files[0].last) if len(files) > 1 else []
                self._notify()
            self._remove_files(gone)
        return bool(gone)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            for file in self._branch.extents:
                file.unmap()
            self._notify()

    # -- private ---------------------------------------------------------------------------------

    def _notify(self) -> None:
        """Called under `_changed`."""
        self._changed.notify_all()
        for changed in self._listeners:
            changed()

    def _write(self, batch: EpochBatch, payload: pa.Buffer) -> None:
        """The next epoch. Raises LogCorrupt, OSError."""
        with self._writing:
            self._refuse_damage()
            file = self._writable(batch.epoch)
            appended = append_epoch(
                file.tail,
                batch.watermark,
                batch.digest,
                payload,
                RecordKind.TENTATIVE if self.attempt else RecordKind.STABLE,
                self.attempt,
                batch.idle,
            )
            file.write(appended)
            with self._changed:
                if file is not self._branch.newest:
                    self._branch.add(file)
                file.set_tail(appended.tail, appended.record)
                self._notify()

    def _view(
        self, epoch: int, fetch: Callable[[LogFile], FetchedFile | None]
    ) -> tuple[LogFile, View] | None:
        """Where this epoch is; None if there is no such epoch, or its file is not fetched."""
        with self._changed:
            file = self._branch.find(epoch)
            if file is None:
                return None
            growing = file.tail.growing
            if growing is not None and epoch >= growing.record.epoch:
                # An empty record that grows in place: its bytes in the file may change.
                content = pa.py_buffer(growing.content)
                return file, View(content, 0, content.size, growing.record.start)
            start = self._cursors.get(epoch) if epoch > file.first else None
            if start is None:
                start = file.offset_before(epoch)
            end = file.tail.final_bytes
            if file.spilled is None:
                return file, View(file.map(end), start, end)
        fetched = fetch(file)  # without the lock: it may be slow
        return None if fetched is None else (file, View(fetched.data, start, end))

    def _remember(self, epoch: int, offset: int) -> None:
        """`epoch`, unless it begins another file, is looked for from this offset on."""
        with self._changed:
            self._cursors.pop(epoch, None)
            self._cursors[epoch] = offset
            if len(self._cursors) > _CURSORS:
                self._cursors.pop(next(iter(self._cursors)))

    def _fetch(self, file: LogFile) -> FetchedFile:
        assert file.spilled is not None
        return self.fetch(file.spilled)

    def _unreadable(
        self, file: LogFile, what: str, epoch: int, damage: DamagedRecord | ObjectMissing
    ) -> RekindleError:
        """The error of `what`, through `epoch`, which cannot be read. If no consumer needs that, or
        it is tentative and never computed again, what is kept through this file is dropped;
        otherwise the log ends before the damage when it is opened the next time."""
        where = file.spilled or file.path
        verb = "is missing with" if isinstance(damage, ObjectMissing) else "is damaged in"
        what = f"{what} of stream {self.stream}/{self.partition} {verb}"
        with self._writing:
            if epoch > self._floor and not self.attempt:
                return self._damaged(file, f"{what} {where} ({damage})")
            through = file.last if self.attempt else min(file.last, self._floor)
            gone: list[LogFile] = []
            with self._changed:
                if file in self._branch.extents:
                    gone = self._branch.begin_at(through + 1)
                    self._notify()
                base = self._branch.base
            self._remove_files(gone)
        self._remove_spilled(gone)
        why = "it is tentative" if self.attempt else "no consumer in the topology needs it"
        _log.warning(
            "%s %s (%s); %s: the log begins with epoch %d now", *(what, where, damage, why, base)
        )
        kept = (
            "what is tentative"
            if self.attempt
            else "what is kept for readers outside of the topology"
        )
        return BelowFloor(f"{what} {kept}; the log begins with epoch {base} now")

    def _damaged(self, file: LogFile, found: str) -> LogCorrupt:
        """Called under `_writing`."""
        message = (
            f"{found}; the task restarts, drops its output log from there on and computes the "
            f"epochs again"
        )
        with self._changed:
            files = self._branch.extents
        if file.spilled is not None and file in files:
            # Spilled bytes are not checked when a log is opened, so the file is removed now, and
            # those after it: a log without its first files would begin at a later epoch.
            for later in files[files.index(file) :]:
                later.path.unlink(missing_ok=True)
        if file.adopted:  # the object may still be in the store, and would be adopted again
            with contextlib.suppress(OSError):
                refuse_shipped(self._directory)
        self.damage = self.damage or message
        return LogCorrupt(message)

    def _refuse_damage(self) -> None:
        """Files of a damaged log may be gone, and must not be created again."""
        if self.damage is not None:
            raise LogCorrupt(self.damage)

    def _results(self, epoch: int) -> Iterator[tuple[int, Result]]:
        """Results from an epoch on, of one file at most. Raises LogCorrupt; BelowFloor if no
        consumer needs what is damaged."""
        with self._changed:
            file = self._branch.find(epoch)
            outline = file.path if file is not None and file.spilled is not None else None
        if file is None or file.adopted:
            return
        try:
            found = self._records(epoch) if outline is None else read_outline(outline)
            for record, changes in found:
                first = max(epoch, record.epoch)
                for at, watermark in enumerate(records.watermarks(changes, record, first), first):
                    yield at, Result(record.digest, watermark, record.idle)
                epoch = max(epoch, record.next_epoch)
        except FileNotFoundError:  # truncated meanwhile
            return
        except DamagedRecord as damage:
            raise self._unreadable(file, f"epoch {epoch}", epoch, damage) from None

    def _records(self, epoch: int) -> Iterator[tuple[Record, memoryview]]:
        """The records of a file from the one that holds `epoch` on; watermark changes of each."""
        found = self._view(epoch, self._fetch)
        if found is not None:
            for record in found[1].records(epoch):
                yield record, found[1].watermark_changes(record)

    def _compare(self, batch: EpochBatch) -> None:
        try:
            _, mine = next(self._results(batch.epoch), (batch.epoch, None))
        except BelowFloor:  # damaged, and only retained
            return
        if mine is None:  # truncated
            return
        if mine != (now := Result.of(batch)):
            raise DifferentResults(
                f"epoch {batch.epoch} of stream {self.stream}/{self.partition} was computed again "
                f"with another result: {mine} in the log, now {now}; does the operator use a "
                f"function that is not deterministic?"
            )

    def _writable(self, epoch: int) -> LogFile:
        """The newest file, or a new one if that is full or spilled."""
        newest = self._branch.newest
        if newest is not None and newest.spilled is None:
            file_bytes = file_bytes_with(self._file_bytes, self._retain_bytes)
            if newest.size < file_bytes and newest.tail.records < LOG_FILE_RECORDS:
                return newest
            with self._changed:
                newest.seal()
        return new_log_file(self._directory, epoch)

    def _free_budget(self) -> None:
        """Keep local bytes below the budget: remove what is only retained, then spill the oldest
        files, or raise LogFull."""
        if self._budget is None:
            return
        while self.local_bytes >= self._budget:
            if self._drop_retained():
                continue
            with self._changed:
                local = [f for f in self._branch.extents if f.spilled is None]
            if self._spill is None or not local:
                raise LogFull(
                    f"the output log of stream {self.stream}/{self.partition} has reached its "
                    f"budget of {self._budget} bytes, and consumers still need its epochs from "
                    f"{self._floor + 1} on; raise logBudget or restart these "
                    f"consumers"
                )
            self._spill_file(local[0], self._spill)

    def _drop_retained(self) -> bool:
        """Remove the oldest file if no consumer needs it; whether there was one."""
        with self._writing:
            with self._changed:
                oldest = next(iter(self._branch.extents), None)
                if oldest is None or oldest.spilled is not None or oldest.last > self._floor:
                    return False
                gone = self._branch.drop_through(oldest.last)
                self._notify()
            self._remove_files(gone)
        return True

    def _spill_file(self, file: LogFile, spill: Spill) -> None:
        # Unique: an earlier process may have written an object, which is never replaced.
        name = f"{self._spill_prefix}{file.path.stem}-{uuid.uuid4().hex[:12]}"
        with self._writing:
            self._refuse_damage()
            if file not in self._branch.extents:
                return
            data = file.path.read_bytes()
        try:
            outline = records.outline(memoryview(data))
        except DamagedRecord as damage:
            error = self._unreadable(file, f"an epoch from {file.first} on", file.last, damage)
            if isinstance(error, BelowFloor):  # the file is gone
                return
            raise error from None
        written = file.write_outline(name, len(data), outline)  # first: the disk may be full
        try:
            spill.put(name, data)
            self._replace_by_outline(file, written, name)
        finally:
            written.unlink(missing_ok=True)

    def _replace_by_outline(self, file: LogFile, written: Path, name: str) -> None:
        replaced: Path | None = None
        try:
            with self._writing:
                if file in self._branch.extents:
                    outline = written.replace(file.path.with_suffix(".spilled"))
                    with self._changed:
                        replaced = file.replace_by_outline(outline, name)
                    replaced.unlink(missing_ok=True)
        finally:
            if replaced is None:  # truncated meanwhile
                self._discard(name)

    def _remove_files(self, files: list[LogFile]) -> None:
        """To be called without `_changed`, which the loop of a server takes."""
        for file in files:
            file.path.unlink(missing_ok=True)

    def _remove_spilled(self, files: list[LogFile]) -> None:
        """To be called without locks, because of the network."""
        for file in files:
            if file.spilled is not None:
                self._fetched.drop(file.spilled)
                if not file.adopted:
                    self._discard(file.spilled)

    def _discard(self, name: str) -> None:
        self._fetched.drop(name)
        if self._spill is None:
            return
        try:
            self._spill.delete(name)
        except Exception as error:
            _log.warning("spilled log %s was not deleted: %s", name, error)

    def __iter__(self) -> Iterator[EpochBatch]:
        """All epochs, oldest first (for tests and tools)."""
        for epoch in range(self.base, self.last + 1):
            yield from self.read(epoch, 0)
