"""Graceful termination by signals: open files are closed, temporary files are removed.

The first SIGINT, SIGTERM or SIGHUP raises `Terminated` in the main thread, so that context managers
clean up; later ones are ignored, since they would interrupt the clean-up. A signal that was ignored
when the process started (SIGHUP under nohup) stays ignored.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Terminated(BaseException):
    """Not an Exception, so that failure handling does not catch it."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number

    @property
    def exit_code(self) -> int:
        return 128 + self.number


def _raise_once(number: int, frame: FrameType | None) -> None:
    for other in SIGNALS:
        signal.signal(other, signal.SIG_IGN)
    raise Terminated(number)


@contextlib.contextmanager
def terminated_by_signals() -> Iterator[None]:
    """The body raises `Terminated` on a signal. Does nothing outside of the main thread, since only
    the main thread gets signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, _raise_once)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def signals_blocked() -> Iterator[set[int]]:
    """For work that must not be interrupted: signals are delivered at its end. Yields the previous
    signal mask, for a child process that is started meanwhile."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield {int(number) for number in before}
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def keeping_signal_handlers() -> Iterator[None]:
    """For calls of libraries that set signal handlers of their own."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                if signal.getsignal(number) not in (handler, signal.SIG_IGN):
                    signal.signal(number, handler)


def end_process(status: int) -> NoReturn:
    """End this process whatever its threads do: one that waits for a dead peer would keep it alive,
    and one that returns from native code while the interpreter ends may crash it. What is
    registered with `atexit` is not called."""
    try:
        for output in (sys.stdout, sys.stderr):
            if output is not None:  # None: it was closed when the process started
                output.flush()
    except BrokenPipeError:
        pass  # nobody reads it any more
    except OSError as error:
        status = status or 1
        print(f"the output cannot be written: {error}", file=sys.stderr)
    finally:
        os._exit(status)
