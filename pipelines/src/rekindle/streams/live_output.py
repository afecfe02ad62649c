"""All output of a task that may be tentative, in its order: its log, and a branch for each attempt.

A tentative branch is a log of its own in a directory of its own, so dropping it touches no other.
A floor does not truncate it; it is neither compared nor spilled; and the next process of the task
does not read but delete it. Its bytes are bounded: the oldest epochs are dropped first, and readers
continue after them. An epoch that is stable already does not enter it.

Design: docs/design/streams.md#branches.
Paper: DPC (Balazinska et al. 2005), sections 3.3 and 3.4.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa

from rekindle.protocol import ConsistencyState
from rekindle.streams.epochs import BatchKind, EpochBatch
from rekindle.streams.live_history import LiveHistory, Position, Span
from rekindle.streams.log import OutputLog
from rekindle.streams.records import NO_DIGEST
from rekindle.streams.wire import LiveReport

TENTATIVE_BYTES = 64 << 20
"""Of all branches of a task on local disk."""
FILE_BYTES = TENTATIVE_BYTES // 16


class LiveOutput:
    """Thread-safe: one writer, many readers. `boot` is another one for each process."""

    def __init__(
        self,
        log: OutputLog,
        directory: Path,
        boot: str,
        max_bytes: int = TENTATIVE_BYTES,
        file_bytes: int = FILE_BYTES,
    ) -> None:
        """Deletes what an earlier process has left in `directory`. Raises OSError."""
        if directory.exists():
            shutil.rmtree(directory)
        self.log = log
        self.boot = boot
        self._directory = directory
        self._max_bytes = max_bytes
        self._file_bytes = file_bytes
        self._lock = threading.Lock()
        self._history = LiveHistory()
        self._branches: dict[int, OutputLog] = {}  # by attempt, oldest first
        self._state = ConsistencyState.STABLE
        self._listeners: list[Callable[[], None]] = []

    # -- reading ---------------------------------------------------------------------------------

    @property
    def report(self) -> LiveReport:
        """What each response tells a reader."""
        history = self._history
        return LiveReport(self.boot, self._state, history.tentative, history.corrected)

    @property
    def local_bytes(self) -> int:
        """Of the branches."""
        with self._lock:
            return self._local_bytes()

    def next(self, position: Position | None, from_epoch: int) -> tuple[Span, OutputLog] | None:
        """What follows a position of a reader (None: it begins), and the log that has the epochs;
        None if there is nothing yet."""
        stable = self.log.last
        with self._lock:
            position = position or self._history.begin(from_epoch, stable)
            while (span := self._history.next(position, from_epoch, stable)) is not None:
                if not span.attempt:
                    return span, self.log
                branch = self._branches[span.attempt]
                if (base := branch.base) <= span.first:
                    return span, branch
                self._history.begin_at(span.attempt, base)  # epochs before `base` were damaged
            return None

    def has(self, position: Position) -> bool:
        """Whether the order of the output from a position on is known."""
        with self._lock:
            return self._history.has(position)

    def listen(self, changed: Callable[[], None]) -> None:
        """Call `changed`, which must not block, after each change of the branches, the controls or
        the state, from the thread that made it. The log has listeners of its own."""
        with self._lock:
            self._listeners.append(changed)

    # -- writing ---------------------------------------------------------------------------------

    def append(
        self, attempt: int, epoch: int, watermark: int, rows: pa.Table, idle: bool = False
    ) -> bool:
        """Add an epoch to the branch of an attempt, whose number is above all earlier ones; whether
        it is there now. Raises OSError, after which it is not."""
        log, stable = self.log, self.log.last
        if epoch <= stable:
            return False
        branch = self._branches.get(attempt)
        if branch is None:
            branch = OutputLog(
                self._directory / str(attempt),
                log.stream,
                log.partition,
                log.schema,
                file_bytes=self._file_bytes,
                attempt=attempt,
            )
        if branch.last != epoch - 1:  # it begins, or an epoch could not be written
            branch.start_at(epoch, keep=False)
            with self._lock:
                self._history.begin_at(attempt, epoch)
        kind = BatchKind.TENTATIVE
        batch = EpochBatch(
            log.stream, log.partition, epoch, watermark, rows, NO_DIGEST, kind, attempt, idle
        )
        branch.append(batch)
        with self._lock:
            self._branches[attempt] = branch
            self._history.append(kind, epoch, stable, attempt)
            self._drop_beyond()
        self._changed()
        return True

    def undo(self, from_epoch: int) -> None:
        self._control(BatchKind.UNDO, from_epoch)

    def reconciliation_done(self, through: int) -> None:
        self._control(BatchKind.RECONCILIATION_DONE, through)

    def _control(self, kind: BatchKind, epoch: int) -> None:
        stable = self.log.last
        with self._lock:
            self._history.append(kind, epoch, stable)
        self._changed()

    def enter(self, state: ConsistencyState) -> None:
        """Set the consistency state that responses tell readers."""
        if state is not self._state:
            self._state = state
            self._changed()

    def truncate(self, floor: int) -> None:
        """All readers have the stable versions of epochs through `floor`."""
        with self._lock:
            self._history.truncate(floor)
            self._drop_unreadable()

    def close(self) -> None:
        with self._lock:
            for branch in self._branches.values():
                branch.close()

    # -- private ---------------------------------------------------------------------------------

    def _changed(self) -> None:
        for changed in self._listeners:
            changed()

    def _local_bytes(self) -> int:
        return sum(branch.local_bytes for branch in self._branches.values())

    def _drop_beyond(self) -> None:
        """Called under the lock: drops the oldest epochs until the branches have at most
        `max_bytes`, or only the newest file is left."""
        self._drop_unreadable()
        while self._local_bytes() > self._max_bytes:
            attempt, branch = next(iter(self._branches.items()))
            if branch.drop_oldest():
                self._history.begin_at(attempt, branch.base)
            elif len(self._branches) > 1:
                self._history.begin_at(attempt, branch.last + 1)
                self._drop(attempt)
            else:
                return

    def _drop_unreadable(self) -> None:
        readable = self._history.attempts()
        for attempt in [a for a in self._branches if a not in readable]:
            self._drop(attempt)

    def _drop(self, attempt: int) -> None:
        branch = self._branches.pop(attempt)
        branch.truncate(branch.last)
        shutil.rmtree(self._directory / str(attempt), ignore_errors=True)
