"""Code that blocks, in a simulation: each program has a thread, and one thread runs at a time.

The thread of the simulation waits while a program runs; a program that waits for something hands
over to the simulation until that has happened. So runs are as reproducible as those of events.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

from rekindle_testing.simulation.scheduler import SimulatedProcess

Done = Callable[[Any], None]


class ProcessDied(BaseException):
    """Raised where a program waits: its process does not exist any more."""


class Program:
    """Runs `main` in a process, from now on until it returns or the process dies."""

    def __init__(self, process: SimulatedProcess, main: Callable[[], None]) -> None:
        self._process = process
        self._main = main
        self._may_run, self._has_paused = threading.Lock(), threading.Lock()
        self._may_run.acquire()
        self._has_paused.acquire()
        self._waits = 0  # the number of the last wait
        self._value: Any = None
        self._error: BaseException | None = None
        self._ended = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        process.on_death(self._end)
        process.after(0.0, lambda: self._resume(0, None))

    # --- called by the program ------------------------------------------------

    def wait(self, start: Callable[[Done], None]) -> Any:
        """Call `start` with a function `done`, wait until somebody calls `done(value)`, and return
        the value. `done` must not be called before `start` has returned."""
        self._waits += 1
        number = self._waits
        start(lambda value: self._process.do(lambda: self._resume(number, value)))
        self._has_paused.release()
        self._may_run.acquire()
        if self._process.dead:
            raise ProcessDied
        return self._value

    def sleep(self, seconds: float) -> None:
        self.wait(lambda done: self._process.after(seconds, lambda: done(None)))

    # --- called by the simulation ---------------------------------------------

    def _resume(self, number: int, value: Any) -> None:
        if self._ended or number != self._waits:
            return
        self._value = value
        self._hand_over()

    def _end(self) -> None:
        if not self._ended:
            self._hand_over()

    def _hand_over(self) -> None:
        self._may_run.release()
        self._has_paused.acquire()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _run(self) -> None:
        self._may_run.acquire()
        try:
            if not self._process.dead:
                self._main()
        except ProcessDied:
            pass
        except BaseException as error:
            self._error = error
        finally:
            self._ended = True
            self._has_paused.release()


class SimulatedEvent:
    """As `threading.Event`, for one program that waits."""

    def __init__(self, process: SimulatedProcess) -> None:
        self._process = process
        self._is_set = False
        self._done: Done | None = None

    def set(self) -> None:
        """Called by the program itself or by the simulation."""
        self._is_set = True
        done, self._done = self._done, None
        if done is not None:
            self._process.after(0.0, lambda: done(True))

    def clear(self) -> None:
        self._is_set = False

    def wait(self, program: Program, timeout_s: float) -> bool:
        if not self._is_set:

            def start(done: Done) -> None:
                self._done = done
                self._process.after(timeout_s, lambda: done(False))

            program.wait(start)
            self._done = None
        return self._is_set


class InlinePool(Executor):
    """Calls each function within `submit`, in the thread of the caller."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future
