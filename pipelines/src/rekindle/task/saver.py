"""The checkpoints' thread: saves one state after another, as the core requests.

Design: docs/design/task.md#epoch-loop, docs/design/checkpoints.md.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Protocol

from rekindle.checkpoints.manifest import Entry
from rekindle.checkpoints.store import UnreadableObject
from rekindle.errors import ObjectMissing, RekindleError
from rekindle.protocol import EntryRef
from rekindle.task.core.saver import SaverCore, SaverEffect, SaveState
from rekindle.task.process import TaskProcess
from rekindle.task.state import TaskState
from rekindle.workers import CallTimer, Worker

_log = logging.getLogger(__name__)


class EntryStore(Protocol):
    """`rekindle.checkpoints.state.StateStore`, bound to one segment partition. `previous`: an entry
    whose objects may be reused."""

    def save(self, state: TaskState, previous: Entry | None) -> EntryRef: ...
    def load_entry(self, name: str) -> Entry: ...


class CheckpointSaver:
    """One thread."""

    def __init__(self, process: TaskProcess, store: EntryStore) -> None:
        self._process = process
        self._call_timer = CallTimer()
        self._store = store
        self._requests = SimpleQueue[SaveState | None]()  # None: the thread has to end
        self._reusable: tuple[str, Entry] | None = None  # the entry that was loaded last
        self._stopping = False
        self._worker = Worker("checkpoints", self._run)
        self._worker.start()  # last: its thread uses the attributes above

    @property
    def problem(self) -> str | None:
        """Of the thread. A save that waits for restored state is no problem here: the part of the
        task that fetches it reports that."""
        is_complete = self._process.core.saver.state_is_complete
        return self._worker.problem or (self._call_timer.problem if is_complete else None)

    def save(self, request: SaveState) -> None:
        self._requests.put(request)

    def stop(self, timeout_s: float) -> None:
        """Finish what is being saved, within the timeout."""
        self._stopping = True
        self._requests.put(None)
        self._worker.stop()
        self._worker.join(timeout_s)

    # -- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        """Called again after an unexpected error (`Worker`): the save in progress was abandoned."""
        with self._process.lock:
            if self._requests.empty():
                self._report(SaverCore.save_abandoned)
        while (save := self._requests.get()) is not None and not self._stopping:
            self._save(save)

    def _report(self, happened: Callable[[SaverCore, float], list[SaverEffect]]) -> None:
        self._process.tell(partial(self._process.core.saver_reported, happened))

    def _save(self, save: SaveState) -> None:
        epoch = save.state.epoch
        try:
            with self._call_timer.during(f"saving the checkpoint of epoch {epoch}"):
                ref = self._store.save(save.state, self._entry(save.reuse))
        except Exception as error:
            if not isinstance(error, (RekindleError, OSError)):
                _log.exception("checkpoint of epoch %d", epoch)
            message = str(error)
            self._report(lambda saver, now: saver.save_failed(message, now))
            return
        self._report(lambda saver, now: saver.entry_saved(ref, now))
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
