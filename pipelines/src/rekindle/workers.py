"""Threads that restart: an unexpected error is logged and reported, and the work starts again.
A call that does not return is reported too.

A `Worker` owns a thread. When its work raises an error, the error is logged and kept in `problem`
until the work makes progress, and the work is called again after a back-off. The thread ends only
when the work returns. The work itself handles failures that are expected (a store, a replica, a
disk).

Design: docs/design/task.md#threads.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rekindle.backoff import Backoff, BackoffPolicy

BACKOFF = BackoffPolicy(first_s=0.1, longest_s=5.0)
SLOW_CALL_S = 10.0
"""A call that takes longer is reported: a call of a network file system may never return."""

_log = logging.getLogger(__name__)


class Worker:
    """`work` may be called many times, one after another, in one thread. It calls `progressed`
    once it has done something, which clears the problem."""

    def __init__(
        self, name: str, work: Callable[[], None], *, policy: BackoffPolicy = BACKOFF
    ) -> None:
        self.name = name
        self.problem: str | None = None
        self.restarts = 0
        self._work = work
        self._longest_s = policy.longest_s
        self._backoff = Backoff(policy)
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
            self._backoff.succeeded()

    def stop(self) -> None:
        """Do not start the work again. A running call has to return by itself."""
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
                    f"{self._longest_s:g} s: {error!r}"
                )
            self._stopping.wait(self._backoff.failed())
            self.restarts += 1


class CallTimer:
    """Measures how long the current call of one thread takes; another thread reads `problem`, to
    report a call that does not return."""

    def __init__(
        self,
        slow_s: float = SLOW_CALL_S,
        clock: Callable[[], float] = time.monotonic,
        why: str = "the storage does not respond",
    ) -> None:
        """`why`: the probable reason, for the message, if a call takes longer than `slow_s`."""
        self._slow_s = slow_s
        self._clock = clock
        self._why = why
        self._call: tuple[str, float] | None = None

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        self._call = (what, self._clock())
        try:
            yield
        finally:
            self._call = None

    @property
    def problem(self) -> str | None:
        """What to report of the current call; None if there is none or it is not slow yet."""
        call = self._call
        if call is None or (took_s := self._clock() - call[1]) < self._slow_s:
            return None
        return f"{call[0]} has not ended after {took_s:.0f} s: {self._why}"
