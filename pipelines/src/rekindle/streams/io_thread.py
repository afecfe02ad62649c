"""Threads for I/O: one that runs an event loop, and one for calls that block.

All pulls of a task run in one event loop, and all connections of its stream server in another. Such
a thread should never end by itself: if it does, `on_death` is called, since otherwise nobody would
notice that nothing is read or served any more. Knows neither streams nor HTTP.

Design: docs/design/task.md#threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

STOP_S = 2.0
SLICE_S = 0.005
"""How long one response may occupy a loop, or a thread of calls, before the next one's turn."""

SWITCH_S = 0.0005
"""CPython's switch interval, for the whole process: how long a thread that computes in Python keeps
the interpreter lock. A loop waits for the lock after each read and write of a socket: with
CPython's 5 ms, one thread that computes makes 64 pulls several times as slow, and calls pass their
deadlines."""

_log = logging.getLogger(__name__)
T = TypeVar("T")


class IoThread:
    """A thread with an event loop. `on_death` is called from it with the reason if it ends without
    `stop`; what it served can only be started again with the process."""

    def __init__(self, name: str, on_death: Callable[[str], None] = lambda reason: None) -> None:
        self.loop = asyncio.new_event_loop()
        self._name = name
        self._on_death = on_death
        self._stopping = False
        self._lock = threading.Lock()  # so that nothing is scheduled on a closed loop
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_S))
        self._thread.start()

    def call(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call a function in the thread, soon; from any thread. Ignored once it has ended."""
        with self._lock:
            if not self.loop.is_closed():
                self.loop.call_soon_threadsafe(function, *arguments)

    def stop(self, timeout_s: float = STOP_S) -> None:
        """Cancel what runs, and end the thread."""
        self._stopping = True
        self.call(self.loop.stop)
        if self._thread.ident is None:
            self._close()
        elif self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                _log.error("thread %s has not ended within %g s", self._name, timeout_s)

    def _run(self) -> None:
        reason = "its loop was stopped"
        try:
            self.loop.run_forever()
        except BaseException as error:
            reason = repr(error)
            if not self._stopping:
                _log.exception("thread %s failed", self._name)
        try:
            self._cancel_tasks()
        finally:
            self._close()
            if not self._stopping:
                self._on_death(f"thread {self._name} has ended: {reason}")

    def _cancel_tasks(self) -> None:
        """Cancel all tasks, and let them close what they have opened. First let each begin: some
        were created only to close something."""
        self.loop.run_until_complete(asyncio.sleep(0))
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        with contextlib.suppress(Exception):
            if tasks:
                self.loop.run_until_complete(asyncio.wait(tasks, timeout=STOP_S / 2))
            # Closing is completed by callbacks.
            self.loop.run_until_complete(asyncio.sleep(0))

    def _close(self) -> None:
        with self._lock:
            self.loop.close()


class CallThread:
    """A thread for calls that block, one after another; it starts with the first call. A call that
    never returns does not keep the process from ending."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._stopping = False
        self._thread: threading.Thread | None = None

    def __len__(self) -> int:
        """Calls that have not begun."""
        return len(self._calls)

    @property
    def alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    async def run(self, function: Callable[[], T]) -> T:
        """Call a function in the thread, and wait for its result. If this is cancelled before the
        function has begun, it is not called."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def ended(result: T | None, error: BaseException | None) -> None:
            if done.done():
                return
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(result)  # type: ignore[arg-type]

        def call() -> None:
            result: T | None = None
            failure: BaseException | None = None
            try:
                result = function()
            except BaseException as error:
                failure = error
            with contextlib.suppress(RuntimeError):  # the loop is closed: no coroutine waits
                loop.call_soon_threadsafe(ended, result, failure)

        self._add(call)
        try:
            return await done
        except asyncio.CancelledError:
            with self._changed, contextlib.suppress(ValueError):
                self._calls.remove(call)
            raise

    def stop(self, timeout_s: float) -> None:
        """End the thread after the call in progress."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _add(self, call: Callable[[], None]) -> None:
        with self._changed:
            self._calls.append(call)
            self._changed.notify()
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                try:
                    thread.start()
                except BaseException:  # the next call tries again
                    self._calls.pop()
                    raise
                self._thread = thread

    def _run(self) -> None:
        while (call := self._next()) is not None:
            call()
            del call  # so that its arguments are freed while the thread waits

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._calls or self._stopping)
            return None if self._stopping else self._calls.popleft()
