"""Threads that do not end in silence: what one raises is said, and it starts again.

A `Worker` owns a thread. What its work raises by mistake, as for a header with a field that it does
not expect, is logged, stands in `problem` until the work goes on, and the work is called again
after a back-off that grows to MAX_BACK_OFF_S. Only the work itself, by returning, ends its thread.
What is expected to fail (a store, a replica, a disk) is for the work to handle.

Design: docs/design/task.md#threads.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

FIRST_BACK_OFF_S = 0.1
MAX_BACK_OFF_S = 5.0

_log = logging.getLogger(__name__)


class Worker:
    """`work` may be called many times, one after another, in one thread. It calls `progressed`
    once it has done something, which takes the problem back."""

    def __init__(
        self, name: str, work: Callable[[], None], *, first_back_off_s: float = FIRST_BACK_OFF_S
    ) -> None:
        self.name = name
        self.problem: str | None = None
        self.restarts = 0
        self._work = work
        self._first_back_off_s = first_back_off_s
        self._back_off_s = first_back_off_s
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> Worker:
        self._thread.start()
        return self

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def progressed(self) -> None:
        """The work goes on: what it failed of has passed."""
        if self.problem is not None:
            self.problem = None
            self._back_off_s = self._first_back_off_s

    def stop(self) -> None:
        """Do not start the work again; it has to end by itself."""
        self._stopping.set()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._work()
                return
            except Exception as error:
                _log.exception("thread %s failed", self.name)
                self.problem = (
                    f"thread {self.name} failed and starts again, at most every "
                    f"{MAX_BACK_OFF_S:g} s: {error!r}"
                )
            self._stopping.wait(self._back_off_s)
            self._back_off_s = min(2 * self._back_off_s, MAX_BACK_OFF_S)
            self.restarts += 1
