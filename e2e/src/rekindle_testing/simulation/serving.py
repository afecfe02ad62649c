"""What a task serves: reads of its output log, each of which waits a while for the next epoch."""

from __future__ import annotations

from collections.abc import Callable

from rekindle.streams.reader_core import WAIT_S
from rekindle_testing.simulation.disk import Disk
from rekindle_testing.simulation.inputs import READ_EPOCHS, ReadReply, ReadRequest
from rekindle_testing.simulation.network import Reply
from rekindle_testing.simulation.scheduler import Process


class LogServer:
    """`head`: the newest epoch that the inputs have released."""

    def __init__(self, process: Process, disk: Disk, head: Callable[[], int]) -> None:
        self._process = process
        self._disk = disk
        self._head = head
        self._waiting: list[Callable[[], bool]] = []

    def serve(self, request: ReadRequest, reply: Reply) -> None:
        answered: list[bool] = []

        def answer() -> bool:
            """Whether there is something to reply with, or the time is over."""
            if answered:
                return True
            found = self._reply_to(request)
            if found is None:
                return False
            reply(found)
            answered.append(True)
            return True

        def give_up() -> None:
            if not answer():
                answered.append(True)
                reply(ReadReply(self._head()))

        if not answer():
            self._waiting.append(answer)
            self._process.after(WAIT_S, give_up)

    def log_changed(self) -> None:
        self._waiting = [answer for answer in self._waiting if not answer()]

    def _reply_to(self, request: ReadRequest) -> ReadReply | None:
        """None while the log ends before the first requested epoch."""
        log, first = self._disk, request.from_epoch
        if first < log.base:
            return ReadReply(self._head(), truncated=True)
        if first > log.last:
            return None
        last = min(log.last, first + READ_EPOCHS - 1)
        return ReadReply(self._head(), tuple(log.values[e] for e in range(first, last + 1)))
