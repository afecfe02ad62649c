"""Runs the core of a task: one event at a time, under one lock.

Any thread tells what happened. The effects are performed under the lock too, in order, so what
performs them must not block: a port that has to wait for something has a thread and a queue of its
own. Simulations run their tasks with it as well.

Design: docs/design/task.md#threads.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from rekindle.task.core.messages import TaskCoreEvent, TaskEffect
from rekindle.task.core.task import TaskCore


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

    def tell(self, event: TaskCoreEvent) -> None:
        """Something has happened. An event that an effect leads to at once comes after the other
        effects."""
        with self.lock:
            if self._stepping:
                self._events.append(event)
                return
            self._stepping = True
            try:
                self._step(event)
                while self._events:
                    self._step(self._events.popleft())
            finally:
                self._stepping = False
                self._events.clear()

    def _step(self, event: TaskCoreEvent) -> None:
        for effect in event(self._clock()):
            self._perform(effect)
        self._stepped()
