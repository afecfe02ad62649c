"""The I/O around `SaverCore`: a thread that saves one state after another.

Design: docs/design/task.md#epoch-loop, docs/design/checkpoints.md.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

from rekindle.checkpoints.manifest import Entry
from rekindle.checkpoints.store import UnreadableObject
from rekindle.engine.model import State
from rekindle.errors import ObjectMissing, RekindleError
from rekindle.protocol import EntryRef, RestorePoint
from rekindle.task.core.saver import SaverCore, SaverEffect, SaveState, SkipCheckpoint
from rekindle.task.core.snapshots import Held, Holder, StateSnapshot
from rekindle.task.state import TaskState
from rekindle.workers import CallTimer, Worker

_log = logging.getLogger(__name__)


class EntryStore(Protocol):
    """`rekindle.checkpoints.state.StateStore`, bound to one segment partition. `previous`: an entry
    whose objects may be reused."""

    def save(self, state: TaskState, previous: Entry | None) -> EntryRef: ...
    def load_entry(self, name: str) -> Entry: ...


class CheckpointSaver:
    """One thread; `offer` and `commit` return at once."""

    def __init__(self, store: EntryStore) -> None:
        self._core = SaverCore()
        self._call_timer = CallTimer()
        self._store = store
        self._changed = threading.Condition()
        self._next_save: SaveState | None = None
        self._reusable: tuple[str, Entry] | None = None  # the entry that was loaded last
        self._stopping = False
        self._worker = Worker("checkpoints", self._run)
        self._worker.start()  # last: its thread uses the attributes above

    @property
    def problem(self) -> str | None:
        """Why states are not saved. A save that waits for restored state is no problem here: the
        part of the task that fetches it reports that."""
        slow = self._call_timer.problem if self._core.state_is_complete else None
        return self._core.problem or self._worker.problem or slow

    def offer(self, state: TaskState) -> None:
        """The task has reached a state that is to be saved: one after a checkpoint epoch."""
        self._step(partial(self._core.state_reached, state))

    def commit(self, committed: RestorePoint | None) -> None:
        """The partition's entry `committed` is in the newest manifest."""
        if committed is not None:
            self._step(partial(self._core.entry_committed, committed))

    def state_incomplete(self) -> None:
        """Some of the restored state has to be fetched."""
        self._step(self._core.state_incomplete)

    def state_complete(self) -> None:
        """All of the restored state has been fetched."""
        self._step(self._core.state_complete)

    def refuse(self, objects: frozenset[str]) -> None:
        """These entries cannot be restored: they are not reported any more, and their objects are
        not referred to again."""
        if objects:
            self._step(partial(self._core.entries_refused, objects))

    def held(self, newest: State) -> tuple[Held, ...]:
        """The snapshots of checkpoints in progress and of partners, with their memory."""
        with self._changed:
            return self._core.snapshots.held(newest)

    def take(self, holder: Holder, state: TaskState) -> StateSnapshot:
        """Keep a state that is lent. Raises SnapshotsFull."""
        with self._changed:
            return self._core.snapshots.take(holder, state)

    def release(self, name: str) -> None:
        with self._changed:
            self._core.snapshots.release(name)

    def done(self) -> tuple[EntryRef, ...]:
        """Saved and not yet committed, oldest first."""
        with self._changed:
            return self._core.saved()

    def stop(self, timeout_s: float) -> None:
        """Finish what is being saved, within the timeout."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._worker.stop()
        self._worker.join(timeout_s)

    def _step(self, happened: Callable[[float], list[SaverEffect]]) -> None:
        """`happened`: a method of the core, but for the time."""
        with self._changed:
            for effect in happened(time.monotonic()):
                match effect:
                    case SaveState():
                        self._next_save = effect
                    case SkipCheckpoint(epoch):
                        _log.warning(
                            "the checkpoint of epoch %d is skipped: the store is slow", epoch
                        )
            self._changed.notify_all()

    # -- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        """Called again after an unexpected error (`Worker`): the save in progress was abandoned."""
        with self._changed:
            if self._next_save is None:
                self._step(self._core.save_abandoned)
        while (save := self._next()) is not None:
            self._save(save)

    def _next(self) -> SaveState | None:
        """Wait for a state to save; None when the thread has to end."""
        with self._changed:
            while not self._stopping:
                if self._next_save is not None:
                    save, self._next_save = self._next_save, None
                    return save
                wake_at = self._core.wake_at
                self._changed.wait(None if wake_at is None else wake_at - time.monotonic())
                self._step(self._core.woken)
        return None

    def _save(self, save: SaveState) -> None:
        epoch = save.state.epoch
        try:
            with self._call_timer.during(f"saving the checkpoint of epoch {epoch}"):
                ref = self._store.save(save.state, self._entry(save.reuse))
        except Exception as error:
            if not isinstance(error, (RekindleError, OSError)):
                _log.exception("checkpoint of epoch %d", epoch)
            self._step(partial(self._core.save_failed, str(error)))
            return
        self._step(partial(self._core.entry_saved, ref))
        self._worker.progressed()

    def _entry(self, name: str | None) -> Entry | None:
        if name is None:
            return None
        if self._reusable is None or self._reusable[0] != name:
            try:
                self._reusable = (name, self._store.load_entry(name))
            except (ObjectMissing, UnreadableObject) as error:
                _log.error("the state is saved as a whole: %s", error)
                return None
        return self._reusable[1]
