"""Which checkpoints are saved, and which are reported. Pure.

At most PENDING states wait for the store, each a snapshot (`core.snapshots`). If it is slow, older
ones are dropped, because only the newest checkpoint that all partitions have is committed; states
up to the committed entry are not saved at all. A state that could not be saved is saved again after
a back-off, unless newer ones have taken its place. A saved entry is reported until it is committed.

A save reuses objects of the newest entry that this task has saved and that may yet be committed, or
of the committed one. Garbage collection keeps both, and the coordinator refuses an entry whose
objects are missing. Once it has refused one, nothing that was saved until then is reused: the next
save has all of the state.

An entry that was saved while some of the restored state was not fetched yet refers to objects that
have not been read since they were written, and may be damaged. So it is reported only after they
have been fetched: until it is committed, older entries are kept, from which a task could be
restored instead. Does not know log, sinks or engine.

Design: docs/design/task.md#epoch-loop, docs/design/checkpoints.md#what-is-reused.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from rekindle.backoff import BackoffPolicy
from rekindle.protocol import EntryRef, RestorePoint
from rekindle.streams.epochs import NO_EPOCH
from rekindle.task.core.snapshots import Holder, Snapshots, SnapshotsFull, StateSnapshot
from rekindle.task.state import TaskState

PENDING = 2
"""Limit of states that wait to be saved."""
MAX_REPORTED = 64
"""Limit of saved entries that are reported until they are committed."""
_BACKOFF = BackoffPolicy(first_s=0.25, longest_s=5.0)


@dataclass(frozen=True, slots=True)
class SaveState:
    """Save a state. `reuse`: the entry whose objects may be reused, if any."""

    state: TaskState
    reuse: str | None


@dataclass(frozen=True, slots=True)
class SkipCheckpoint:
    """The checkpoint of this epoch is not saved, because newer ones wait."""

    epoch: int


SaverEffect = SaveState | SkipCheckpoint


class SaverCore:
    """Checkpoints of one task. `problem`: why the newest attempt failed; None after a success."""

    def __init__(self, snapshots: Snapshots | None = None) -> None:
        """`snapshots`: of the task; each state that waits or is being saved is one."""
        self.snapshots = snapshots or Snapshots()
        self.problem: str | None = None
        self._pending: deque[StateSnapshot] = deque()
        self._saving: StateSnapshot | None = None
        self._saved: deque[EntryRef] = deque()
        self._complete = True
        self._committed: RestorePoint | None = None
        self._distrusted = NO_EPOCH  # nothing of entries up to this epoch is reused
        self._failures = 0  # in a row
        self._retry_at = -math.inf

    @property
    def state_is_complete(self) -> bool:
        """Whether all restored state has been fetched, so that no save waits for it."""
        return self._complete

    @property
    def wake_at(self) -> float | None:
        waits = self._saving is None and self._pending
        return self._retry_at if waits else None

    def saved(self) -> tuple[EntryRef, ...]:
        """To be reported: saved and not yet committed, oldest first."""
        return tuple(self._saved) if self._complete else ()

    def state_reached(self, state: TaskState, now: float) -> list[SaverEffect]:
        """The state after a checkpoint epoch, which this task has to save."""
        skipped = [] if self._is_covered(state.epoch) else self._enqueue(state)
        return skipped + self._next_save(now)

    def entry_committed(self, point: RestorePoint, now: float) -> list[SaverEffect]:
        """The partition's entry `point` is in the newest manifest."""
        self._committed = point
        while self._saved and self._saved[0].epoch <= point.epoch:
            self._saved.popleft()
        while self._pending and self._pending[0].epoch <= point.epoch:
            self._drop_oldest()
        return self._next_save(now)

    def entries_refused(self, entries: frozenset[str], now: float) -> list[SaverEffect]:
        """These entries, which are named by their own objects, cannot be restored: objects that
        they need are missing or damaged. So may be all that the entries saved so far, and the save
        in progress, refer to. (Each poll repeats its refused entries; some are known already.)"""
        known = {done.object: done.epoch for done in self._saved}
        if self._committed is not None and self._committed.object is not None:
            known[self._committed.object] = self._committed.epoch
        if any(known[name] > self._distrusted for name in entries & known.keys()):
            saving = [self._saving.epoch] if self._saving is not None else []
            self._distrusted = max([*known.values(), *saving])
        self._saved = deque(done for done in self._saved if done.object not in entries)
        return self._next_save(now)

    def state_incomplete(self, now: float) -> list[SaverEffect]:
        """The task was restored, and some of its state has to be fetched from the store."""
        self._complete = False
        return self._next_save(now)

    def state_complete(self, now: float) -> list[SaverEffect]:
        """All of the restored state has been fetched."""
        self._complete = True
        return self._next_save(now)

    def entry_saved(self, done: EntryRef, now: float) -> list[SaverEffect]:
        self._end_save()
        self._failures, self.problem = 0, None
        if not self._is_covered(done.epoch):
            if len(self._saved) == MAX_REPORTED:
                # Drop the newest. The oldest is committed first, once sinks have its epochs.
                self._saved.pop()
            self._saved.append(done)
        return self._next_save(now)

    def save_failed(self, message: str, now: float) -> list[SaverEffect]:
        self._failures += 1
        self._retry_at = now + _BACKOFF.wait_s(self._failures)
        if (snapshot := self._saving) is not None:
            self.problem = f"the checkpoint of epoch {snapshot.epoch} cannot be saved: {message}"
            if len(self._pending) < PENDING and not self._is_covered(snapshot.epoch):
                self._pending.appendleft(snapshot)
                self._saving = None
            self._end_save()
        return self._next_save(now)

    def save_abandoned(self, now: float) -> list[SaverEffect]:
        """The thread that was saving has died. Its state is not saved again."""
        self._end_save()
        return self._next_save(now)

    def woken(self, now: float) -> list[SaverEffect]:
        """Time has passed."""
        return self._next_save(now)

    def _next_save(self, now: float) -> list[SaverEffect]:
        if self._saving is not None or not self._pending or now < self._retry_at:
            return []
        self._saving = self._pending.popleft()
        return [SaveState(self._saving.state, self._reusable())]

    def _enqueue(self, state: TaskState) -> list[SaverEffect]:
        """Keep a state until it is saved. If there are too many snapshots, the oldest that wait are
        dropped; if none waits, this state is skipped."""
        skipped: list[SaverEffect] = []
        while True:
            try:
                snapshot = self.snapshots.take(Holder.CHECKPOINT, state)
                break
            except SnapshotsFull:
                if not self._pending:
                    return [*skipped, SkipCheckpoint(state.epoch)]
                skipped.append(SkipCheckpoint(self._drop_oldest()))
        self._pending.append(snapshot)
        while len(self._pending) > PENDING:
            skipped.append(SkipCheckpoint(self._drop_oldest()))
        return skipped

    def _drop_oldest(self) -> int:
        """Drop the oldest snapshot that waits. Returns its epoch."""
        snapshot = self._pending.popleft()
        self.snapshots.release(snapshot.name)
        return snapshot.epoch

    def _end_save(self) -> None:
        if self._saving is not None:
            self.snapshots.release(self._saving.name)
            self._saving = None

    def _reusable(self) -> str | None:
        """The entry whose objects the next save may refer to."""
        if self._saved:
            newest = self._saved[-1]
            return newest.object if newest.epoch > self._distrusted else None
        committed = self._committed
        if committed is None or committed.epoch <= self._distrusted:
            return None
        return committed.object

    def _is_covered(self, epoch: int) -> bool:
        """Whether an entry of this epoch or a newer one is committed. (A task that was restored
        from an older entry computes such epochs again.)"""
        return self._committed is not None and epoch <= self._committed.epoch
