"""Threads that restart: an unexpected error is logged and reported, and the work starts again.

A `Worker` owns a thread. When its work raises an error, the error is logged and kept in `problem`
until the work makes progress, and the work is called again after a back-off that grows to
MAX_BACK_OFF_S. The thread ends only when the work returns. The work itself handles failures that
are expected (a store, a replica, a disk).

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
    once it has done something, which clears the problem."""

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
        """The work makes progress: its last failure is over."""
        if self.problem is not None:
            self.problem = None
            self._back_off_s = self._first_back_off_s

    def stop(self) -> None:
        """Do not start the work again. A call that is under way has to return by itself."""
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
