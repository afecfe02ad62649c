"""The calls of a task's sinks: open one, then write epoch after epoch of the log."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from rekindle.protocol import SinkAssignment
from rekindle.task.core.messages import CallSink
from rekindle.task.core.sink import CheckConflicts, OpenSink, SinkCore, SinkEffect, WriteEpochs
from rekindle_testing.simulation.network import SINKS
from rekindle_testing.simulation.surroundings import Surroundings

if TYPE_CHECKING:
    from rekindle_testing.simulation.task import TaskBoot

_TIMEOUT_S = 3.0


class SinkCalls:
    """Of one boot of a task."""

    def __init__(self, task: TaskBoot, surroundings: Surroundings) -> None:
        self._task = task
        self._around = surroundings
        # By query and epoch: the value that a sink had to write where the file has another value.
        self._conflicts: dict[str, dict[int, str]] = {}

    def call(self, effect: CallSink) -> None:
        match effect.call:
            case OpenSink(after, read_first_epoch):
                self._open(effect.assigned, after, read_first_epoch)
            case WriteEpochs(from_epoch):
                self._write(effect.assigned, from_epoch)
            case CheckConflicts():
                self._check_conflicts(effect.assigned)

    def _report(
        self, assigned: SinkAssignment, happened: Callable[[SinkCore, float], list[SinkEffect]]
    ) -> None:
        self._task.step(partial(self._task.core.sink_reported, assigned, happened))

    def _failed(self, assigned: SinkAssignment) -> None:
        self._report(assigned, lambda sink, now: sink.call_failed("down", now))

    def _open(self, assigned: SinkAssignment, after: int, read_first_epoch: bool) -> None:
        self._conflicts[assigned.query] = {}

        def ended(result: int | Exception) -> None:
            if isinstance(result, Exception):
                self._failed(assigned)
            else:
                first = 0 if read_first_epoch else None
                self._report(assigned, lambda sink, now: sink.opened(result, first, now))

        sinks = self._around.sinks
        request = partial(sinks.last, assigned.query, self._task.partition, after)
        self._around.network.call(self._task.process, SINKS, request, ended, _TIMEOUT_S)

    def _write(self, assigned: SinkAssignment, epoch: int) -> None:
        """Write an epoch, then the next one, as long as there is one."""
        task, log, checks = self._task, self._task.pod.disk, self._around.checks
        desired = task.core.polls.desired
        if epoch > log.last or not task.core.may_write(assigned, epoch):
            self._report(assigned, lambda sink, now: sink.log_grew(log.last, now))
            self._report(assigned, SinkCore.write_ended)
            return
        if epoch < log.base:
            checks.failed(f"{task.pod.slot.key}: epoch {epoch} was truncated and not written")
            return
        value, query, sinks = log.values[epoch], assigned.query, self._around.sinks
        if desired is not None:
            checks.writes(task.pod, epoch, value, desired.sinks_through)
        in_file = value

        def write() -> None:
            nonlocal in_file
            in_file = sinks.write(query, task.partition, epoch, value)
            checks.written(query, task.partition, epoch, value, in_file)

        def ended(result: Exception | None) -> None:
            if isinstance(result, Exception):
                self._failed(assigned)
            else:
                if in_file != value:
                    self._conflicts[query][epoch] = value
                conflict = self._conflict(query)
                self._report(assigned, lambda sink, now: sink.epoch_written(epoch, conflict, now))
                self._write(assigned, epoch + 1)

        self._around.network.call(task.process, SINKS, write, ended, _TIMEOUT_S)

    def _check_conflicts(self, assigned: SinkAssignment) -> None:
        """Write each epoch whose file is gone."""
        task, query, sinks = self._task, assigned.query, self._around.sinks
        checks, conflicts = self._around.checks, self._conflicts[assigned.query]
        may_write = partial(task.core.may_write, assigned)
        written = [epoch for epoch in sorted(conflicts) if may_write(epoch)]

        def write() -> None:
            for epoch in written:
                value = conflicts[epoch]
                in_file = sinks.write(query, task.partition, epoch, value)
                checks.written(query, task.partition, epoch, value, in_file)
                if in_file == value:
                    del conflicts[epoch]

        def ended(result: Exception | None) -> None:
            if isinstance(result, Exception):
                self._failed(assigned)
            else:
                conflict = self._conflict(query)
                self._report(assigned, lambda sink, now: sink.conflicts_checked(conflict, now))

        self._around.network.call(task.process, SINKS, write, ended, _TIMEOUT_S)

    def _conflict(self, query: str) -> str | None:
        found = self._conflicts[query]
        if not found:
            return None
        return f"files of {self._task.partition.key} at epochs {sorted(found)} differ"
