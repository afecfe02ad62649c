"""What a task serves: reads of its output, each of which waits a while for what is new."""

from __future__ import annotations

from collections.abc import Callable

from rekindle.streams.epochs import BatchKind
from rekindle.streams.reader_core import WAIT_S
from rekindle.streams.wire import StreamProgress
from rekindle_testing.simulation.disk import Disk
from rekindle_testing.simulation.network import Reply
from rekindle_testing.simulation.output import SimulatedOutput
from rekindle_testing.simulation.reading import (
    READ_EPOCHS,
    OutputItem,
    ReadReply,
    SimulatedRead,
)
from rekindle_testing.simulation.scheduler import SimulatedProcess


class LogServer:
    """`head`: the newest epoch that the inputs have released. `output`: of a task whose output may
    be tentative."""

    def __init__(
        self,
        process: SimulatedProcess,
        disk: Disk,
        head: Callable[[], int],
        is_fetched: Callable[[int, int, Callable[[], None]], bool],
    ) -> None:
        """`is_fetched`: as `SimulatedShipping.is_fetched`."""
        self.output: SimulatedOutput | None = None
        self._process = process
        self._disk = disk
        self._head = head
        self._is_fetched = is_fetched
        self._waiting: list[Callable[[], bool]] = []

    def serve(self, request: SimulatedRead, reply: Reply) -> None:
        answered: list[bool] = []
        before = self._reported()

        def answer() -> bool:
            """Whether there is something to reply with, or the time is over."""
            if answered:
                return True
            found = self._reply_to(request)
            if found is None and request.live is None and self._reported() != before:
                found = ReadReply(self._progress())
            if found is None:
                return False
            reply(found)
            answered.append(True)
            return True

        def give_up() -> None:
            if not answer():
                answered.append(True)
                reply(ReadReply(self._progress()))

        if not answer():
            self._waiting.append(answer)
            self._process.after(WAIT_S, give_up)

    def changed(self) -> None:
        """To be called after each change of the log or of other output."""
        self._waiting = [answer for answer in self._waiting if not answer()]

    def _progress(self) -> StreamProgress:
        log = self._disk
        report = self.output.report if self.output is not None else None
        return StreamProgress(log.base, log.last, max(self._head(), log.last), report)

    def _reported(self) -> object:
        """What a reader of stable epochs hears even if there is no further one."""
        if self.output is None:
            return None
        report = self.output.report
        return report.state, report.newest_tentative > self._disk.last, report.corrected_through

    def _reply_to(self, request: SimulatedRead) -> ReadReply | None:
        """None while there is nothing new."""
        log, first = self._disk, request.from_epoch
        until = min(log.last, first + READ_EPOCHS - 1)
        if log.base <= first and not self._is_fetched(first, until, self.changed):
            return None
        if request.live is not None and self.output is not None:
            found = self.output.read(request)
            if found is None:
                return ReadReply(self._progress(), truncated=True)
            items, position = found
            return ReadReply(self._progress(), items, position=position) if items else None
        if first < log.base:
            return ReadReply(self._progress(), truncated=True)
        if first > log.last:
            return None
        last = min(log.last, first + READ_EPOCHS - 1)
        epochs = range(first, last + 1)
        items = tuple(OutputItem(BatchKind.STABLE, epoch, log.values[epoch]) for epoch in epochs)
        return ReadReply(self._progress(), items)
