"""Saves checkpoints in the background, of states that the loop passes on.

At most PENDING states wait for the store. If it is slow, older ones are dropped, because only the
newest checkpoint that all partitions have is committed. A saved entry is reported until it is
committed. Does not know log, sinks or engine.

Design: docs/design/task.md#epoch-loop, docs/design/checkpoints.md.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import Protocol

from rekindle.backoff import Backoff, BackoffPolicy
from rekindle.checkpoints.manifest import Entry, EntryRef
from rekindle.errors import RekindleError
from rekindle.protocol import CheckpointDone, RestorePoint
from rekindle.task.state import TaskState
from rekindle.workers import CallTimer, Worker

PENDING = 2
KEPT = 64
_BACKOFF = BackoffPolicy(first_s=0.25, longest_s=5.0)

_log = logging.getLogger(__name__)


class EntryStore(Protocol):
    """`rekindle.checkpoints.state.StateStore`, bound to one segment partition."""

    def save(self, state: TaskState, previous: Entry | None) -> EntryRef: ...
    def load_entry(self, name: str) -> Entry: ...


class CheckpointSaver:
    """One thread; `offer` and `commit` return at once."""

    def __init__(self, store: EntryStore) -> None:
        self._problem: str | None = None
        self._calls = CallTimer()
        self._store = store
        self._changed = threading.Condition()
        self._pending: deque[TaskState] = deque()
        self._saved: deque[CheckpointDone] = deque()
        self._committed: RestorePoint | None = None
        self._previous: tuple[str, Entry] | None = None
        self._stopping = False
        self._busy = False
        self._worker = Worker("checkpoints", self._run).start()

    @property
    def problem(self) -> str | None:
        return self._problem or self._worker.problem or self._calls.problem

    def offer(self, state: TaskState) -> None:
        with self._changed:
            self._pending.append(state)
            while len(self._pending) > PENDING:
                dropped = self._pending.popleft()
                _log.warning(
                    "the checkpoint of epoch %d is skipped: the store is slow", dropped.epoch
                )
            self._changed.notify_all()

    def commit(self, committed: RestorePoint | None) -> None:
        """The partition's entry `committed` is in the newest manifest."""
        if committed is None:
            return
        with self._changed:
            self._committed = committed
            while self._saved and self._saved[0].epoch <= committed.epoch:
                self._saved.popleft()

    def done(self) -> tuple[CheckpointDone, ...]:
        """Saved and not yet committed, oldest first."""
        with self._changed:
            return tuple(self._saved)

    def stop(self, timeout_s: float) -> None:
        """Finish what is being saved, within the timeout."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._worker.stop()
        self._worker.join(timeout_s)

    def _run(self) -> None:
        backoff = Backoff(_BACKOFF)
        while (state := self._next()) is not None:
            try:
                with self._calls.during(f"saving the checkpoint of epoch {state.epoch}"):
                    ref = self._store.save(state, self._newest_committed())
            except Exception as error:
                if not isinstance(error, (RekindleError, OSError)):
                    _log.exception("checkpoint of epoch %d", state.epoch)
                self._problem = f"the checkpoint of epoch {state.epoch} cannot be saved: {error}"
                with self._changed:
                    if len(self._pending) < PENDING:
                        self._pending.appendleft(state)
                    self._changed.wait_for(lambda: self._stopping, backoff.failed())
                continue
            self._problem = None
            backoff.succeeded()
            done = CheckpointDone(
                epoch=ref.epoch, object=ref.object or "", digest=ref.digest, bytes=ref.bytes
            )
            with self._changed:
                if self._committed is None or done.epoch > self._committed.epoch:
                    if len(self._saved) == KEPT:
                        self._saved.pop()  # not the oldest, which slow sinks will reach first
                    self._saved.append(done)
            self._worker.progressed()

    def _next(self) -> TaskState | None:
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or self._pending)
            return None if self._stopping else self._pending.popleft()

    def _newest_committed(self) -> Entry | None:
        """The entry whose objects may be reused: only the newest committed one."""
        committed = self._committed
        if committed is None or committed.object is None:
            return None
        if self._previous is None or self._previous[0] != committed.object:
            self._previous = (committed.object, self._store.load_entry(committed.object))
        return self._previous[1]
