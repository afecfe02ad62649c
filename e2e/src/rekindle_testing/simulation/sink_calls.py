"""The calls of a task's sinks: open one, then write epoch after epoch of the log."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from rekindle.protocol import SinkAssignment
from rekindle.task.core.messages import CallSink, SinkReported
from rekindle.task.core.sink import (
    CallFailed,
    CheckConflicts,
    EpochWritten,
    LogGrew,
    OpenSink,
    SinkEvent,
    SinkOpened,
    WriteEnded,
    WriteEpochs,
)
from rekindle_testing.simulation.network import SINKS
from rekindle_testing.simulation.surroundings import Surroundings

if TYPE_CHECKING:
    from rekindle_testing.simulation.task import TaskProcess

_DEADLINE_S = 3.0


class SinkCalls:
    """Of one boot of a task."""

    def __init__(self, task: TaskProcess, surroundings: Surroundings) -> None:
        self._task = task
        self._around = surroundings

    def call(self, effect: CallSink) -> None:
        match effect.call:
            case OpenSink(after):
                self._open(effect.assigned, after)
            case WriteEpochs(from_epoch):
                self._write(effect.assigned, from_epoch)
            case CheckConflicts():
                raise AssertionError("no file differs")

    def _report(self, assigned: SinkAssignment, event: SinkEvent) -> None:
        self._task.step(SinkReported(assigned, event))

    def _open(self, assigned: SinkAssignment, after: int) -> None:
        def ended(result: int | Exception) -> None:
            if isinstance(result, Exception):
                self._report(assigned, CallFailed("down"))
            else:
                self._report(assigned, SinkOpened(result))

        sinks = self._around.sinks
        request = partial(sinks.last, assigned.query, self._task.partition, after)
        self._around.network.call(self._task.process, SINKS, request, ended, _DEADLINE_S)

    def _write(self, assigned: SinkAssignment, epoch: int) -> None:
        """Write an epoch, then the next one, as long as there is one."""
        task, log, checks = self._task, self._task.pod.disk, self._around.checks
        parts = task.core.parts
        core = parts.sinks.cores.get(assigned.query) if parts is not None else None
        if core is None or core.assigned != assigned:
            return
        if epoch > log.last or not core.may_write(epoch):
            self._report(assigned, LogGrew(log.last))
            self._report(assigned, WriteEnded())
            return
        if epoch < log.base:
            checks.failed(f"{task.pod.slot.key}: epoch {epoch} left the log unwritten")
            return
        value, query, sinks = log.values[epoch], assigned.query, self._around.sinks

        def write() -> None:
            in_file = sinks.write(query, task.partition, epoch, value)
            checks.written(query, task.partition, epoch, value, in_file)

        def ended(result: Exception | None) -> None:
            if isinstance(result, Exception):
                self._report(assigned, CallFailed("down"))
            else:
                self._report(assigned, EpochWritten(epoch))
                self._write(assigned, epoch + 1)

        self._around.network.call(task.process, SINKS, write, ended, _DEADLINE_S)
