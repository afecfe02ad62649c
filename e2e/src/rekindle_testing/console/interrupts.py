"""Stops a program on Ctrl-C or a signal: once, at any time, with no processes left."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

import psutil

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_END_TIMEOUT_S = 10.0


class Interrupted(BaseException):
    """Raised in the main thread by the first signal; no later one interrupts the clean-up."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Interruption:
    """Whether a signal may still interrupt."""

    def __init__(self) -> None:
        self._is_cleaning_up = False

    def ignore_signals(self) -> None:
        """From now on signals are ignored: the clean-up has begun."""
        self._is_cleaning_up = True

    def handle(self, number: int, _: FrameType | None) -> None:
        if not self._is_cleaning_up:
            self._is_cleaning_up = True
            raise Interrupted(number)


@contextlib.contextmanager
def interruptible() -> Iterator[Interruption]:
    """SIGINT, SIGTERM and SIGHUP raise `Interrupted`, the first one only."""
    interruption = Interruption()
    before = {number: signal.signal(number, interruption.handle) for number in _SIGNALS}
    try:
        yield interruption
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def interrupt_main_thread() -> None:
    """From another thread: as if the program got a SIGTERM, even if it waits for input."""
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, signal.SIGTERM)


def end_children() -> None:
    """Kill child processes that an interrupted start has left.

    Launchers of process nodes are left: they clean up after their node once this process is gone.
    """
    with contextlib.suppress(psutil.Error):
        children = [c for c in psutil.Process().children() if not _is_launcher(c)]
        left = [process for c in children for process in (c, *c.children(recursive=True))]
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, _END_TIMEOUT_S)


def _is_launcher(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return "launcher" in process.cmdline()
    return False
