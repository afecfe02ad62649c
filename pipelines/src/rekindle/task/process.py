"""Runs the core of a task: one event at a time, under one lock.

Any thread tells what happened. The effects are performed under the lock too, in order, so what
performs them must not block: a port that has to wait for something has a thread and a queue of its
own. Simulations run their tasks with it as well.

Design: docs/design/task.md#threads.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from rekindle.task.core.messages import TaskCoreEvent, TaskEffect
from rekindle.task.core.task import TaskCore

_log = logging.getLogger(__name__)


class TaskProcess:
    """`perform`: performs an effect, or hands it to its port; `stepped` is called after each event
    and its effects."""

    def __init__(
        self,
        core: TaskCore,
        perform: Callable[[TaskEffect], None],
        stepped: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.core = core
        self.lock = threading.RLock()
        """Held while the core is stepped, and by other threads while they read it."""
        self._perform = perform
        self._stepped = stepped
        self._clock = clock
        self._events = deque[TaskCoreEvent]()
        self._stepping = False
        self._error: Exception | None = None  # the first one since `tell` took the lock

    def tell(self, event: TaskCoreEvent) -> None:
        """Something has happened. An event that an effect leads to at once comes after the other
        effects. Raises the first error of the core or of an effect, once it has failed the task:
        whichever thread told the event, no part waits for an effect that was not performed."""
        with self.lock:
            self._events.append(event)
            if self._stepping:
                return
            self._stepping, self._error = True, None
            try:
                while self._events:
                    self._step(self._events.popleft())
            finally:
                self._stepping = False
            if self._error is not None:
                raise self._error

    def _step(self, event: TaskCoreEvent) -> None:
        try:
            effects = event(self._clock())
        except Exception as error:
            self._fail(error)
            return
        for effect in effects:
            try:
                self._perform(effect)
            except Exception as error:  # the others are performed: one may end the process
                self._fail(error)
        try:
            self._stepped()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        _log.error("the task cannot continue", exc_info=error)
        if self._error is None:
            self._error = error
            self._events.appendleft(partial(self.core.call_failed, error))
