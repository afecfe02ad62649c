"""The streams that one boot of a simulated task reads, what may be tentative of its output, and the
checks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa

from rekindle.consistency.messages import (
    ConsistencySettings,
    EmitReconciliationDone,
    EmitUndo,
    ReadLive,
    ResumeStable,
    StopLive,
)
from rekindle.engine.model import EpochOutput
from rekindle.protocol import TaskPhase
from rekindle.streams.epochs import BatchKind, EpochBatch
from rekindle.task.core.loop import LoopCore, ProcessEpochs
from rekindle.task.core.streams import InputEffect, InputEvent, StreamsCore
from rekindle_testing.simulation.output import SimulatedOutput
from rekindle_testing.simulation.streams import SimulatedStreams
from rekindle_testing.simulation.surroundings import Surroundings
from rekindle_testing.simulation.tentative_checks import TentativeChecks
from rekindle_testing.simulation.values import values_in

if TYPE_CHECKING:
    from rekindle_testing.simulation.task import TaskBoot


class TentativeResults:
    """`settings`: None if the task reads a source; then nothing is done here."""

    def __init__(
        self, task: TaskBoot, surroundings: Surroundings, settings: ConsistencySettings | None
    ) -> None:
        self._task = task
        self._around = surroundings
        self._settings = settings
        self._may_be_tentative = settings is not None and settings.max_delay_s is not None
        self._inputs: SimulatedStreams | None = None
        # If its output may be tentative; `checks`: once it is restored.
        self._output: SimulatedOutput | None = None
        self.checks: TentativeChecks | None = None

    @property
    def streams(self) -> StreamsCore | None:
        return self._task.core.streams

    # -- start -------------------------------------------------------------------------------------

    def open_inputs(self, next_epoch: int, epoch_interval_s: float) -> SimulatedStreams:
        task, pod = self._task, self._task.pod
        self._inputs = SimulatedStreams(
            task.process,
            self._around.network,
            pod.segment,
            pod.slot.partition,
            next_epoch,
            epoch_interval_s,
            self._may_be_tentative,
            self._feed,
            lambda: self.streams,
        )
        return self._inputs

    def begin_output(self, changed: Callable[[], None]) -> SimulatedOutput | None:
        if self._may_be_tentative:
            task = self._task
            self._output = SimulatedOutput(task.pod.disk, task.core.status.boot_id, changed)
        return self._output

    # -- events ------------------------------------------------------------------------------------

    def _feed(self, event: InputEvent, batch: EpochBatch | None) -> None:
        if self.checks is not None and batch is not None:
            self.checks.arrived(batch)
        self._task.step(partial(self._task.core.input_reported, event))

    def tick(self) -> None:
        if self._inputs is None or self.checks is None:
            return
        if self._task.core.status.phase is not TaskPhase.LIVE:
            self._task.step(partial(self._task.core.heads_checked, self._inputs.heads))
        self.checks.tick(self._inputs.better_replicas(), self._inputs.announced)

    def stepped(self) -> None:
        """After each step of the core and its effects."""
        streams = self.streams
        if streams is None or self._inputs is None:
            return
        if self._output is not None and self.checks is None:
            assert self._settings is not None, "it reads streams"
            self.checks = TentativeChecks(self._task, self._around, self._settings, streams)
        self._inputs.restored()
        if self._output is not None:
            self._output.enter(streams.state)
        self._inputs.offer_space()
        if self.checks is not None:
            self.checks.stepped()

    # -- the loop ----------------------------------------------------------------------------------

    def processing(self, call: ProcessEpochs) -> None:
        if self.checks is not None and call.attempt:
            self.checks.processing(call)

    def computed(self, epoch: int, rows: pa.Table) -> None:
        """A tentative epoch has these rows."""
        if self.checks is not None:
            self.checks.computed(epoch, rows)

    def append(self, attempt: int, output: EpochOutput) -> None:
        assert self._output is not None, "its output may be tentative"
        assert self.checks is not None, "it is restored"
        (value,) = values_in(output.rows)
        was_kept = self._output.append(attempt, output.epoch, value)
        self.checks.tentative_appended(attempt, output.epoch, value, was_kept=was_kept)
        self._task.step(partial(self._task.core.loop_reported, LoopCore.tentative_appended))

    def stable_appended(self, epoch: int) -> None:
        if self.checks is not None:
            self.checks.stable_appended(epoch)

    # -- effects -----------------------------------------------------------------------------------

    def perform(self, effect: InputEffect) -> None:
        assert self._output is not None, "output is there before the task is Live"
        assert self._inputs is not None, "its inputs are open"
        assert self.checks is not None, "it is restored"
        match effect:
            case EmitUndo(from_epoch):
                self._output.control(BatchKind.UNDO, from_epoch)
                self.checks.undone(from_epoch)
            case EmitReconciliationDone(through):
                self._output.control(BatchKind.RECONCILIATION_DONE, through)
                self.checks.reconciled(through)
            case ReadLive() | StopLive() | ResumeStable():
                self._inputs.perform(effect)

    def truncate(self, floor: int) -> None:
        if self._output is not None:
            self._output.truncate(floor)
