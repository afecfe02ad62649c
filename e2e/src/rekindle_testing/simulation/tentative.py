"""What may be tentative of one boot of a simulated task: its inputs, its output, and the checks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

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
from rekindle.task.core.branches import BranchEffect, BranchesCore, InputEvent
from rekindle.task.core.loop import LoopCore, ProcessEpochs
from rekindle_testing.simulation.branched import BranchedInputs
from rekindle_testing.simulation.output import SimulatedOutput
from rekindle_testing.simulation.surroundings import Surroundings
from rekindle_testing.simulation.tentative_checks import TentativeChecks
from rekindle_testing.simulation.values import values_in

if TYPE_CHECKING:
    from rekindle_testing.simulation.task import TaskProcess


class TentativeResults:
    """`settings`: None if the output of the task is always stable; then nothing is done here."""

    def __init__(
        self, task: TaskProcess, surroundings: Surroundings, settings: ConsistencySettings | None
    ) -> None:
        self._task = task
        self._around = surroundings
        self._settings = settings
        self._inputs: BranchedInputs | None = None
        self._output: SimulatedOutput | None = None
        self.checks: TentativeChecks | None = None  # once it is restored

    @property
    def are_possible(self) -> bool:
        return self._settings is not None

    @property
    def branches(self) -> BranchesCore | None:
        parts = self._task.core.parts
        return parts.branches if parts is not None else None

    # -- start -------------------------------------------------------------------------------------

    def open_inputs(self, next_epoch: int, epoch_interval_s: float) -> BranchedInputs:
        task, pod = self._task, self._task.pod
        self._inputs = BranchedInputs(
            task.process,
            self._around.network,
            pod.segment,
            pod.slot.partition,
            next_epoch,
            epoch_interval_s,
            self._feed,
            lambda: self.branches,
        )
        return self._inputs

    def begin_output(self, changed: Callable[[], None]) -> SimulatedOutput | None:
        if self._settings is not None:
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
        branches = self.branches
        if branches is None or self._inputs is None or self._output is None:
            return
        if self.checks is None:
            assert self._settings is not None, "it has branches"
            self.checks = TentativeChecks(self._task, self._around, self._settings, branches)
            self._inputs.restored()
        self._output.enter(branches.state)
        self._inputs.offer_space()
        self.checks.stepped()

    # -- the loop ----------------------------------------------------------------------------------

    def processing(self, call: ProcessEpochs) -> None:
        if self.checks is not None and call.attempt:
            self.checks.processing(call)

    def append(self, attempt: int, output: EpochOutput) -> None:
        assert self._output is not None, "only branches give tentative epochs"
        assert self.checks is not None, "it is restored"
        (value,) = values_in(output.rows)
        was_kept = self._output.append(attempt, output.epoch, value)
        self.checks.tentative_appended(attempt, output.epoch, value, was_kept=was_kept)
        self._task.step(partial(self._task.core.loop_reported, LoopCore.tentative_appended))

    def stable_appended(self, epoch: int) -> None:
        if self.checks is not None:
            self.checks.stable_appended(epoch)

    # -- effects -----------------------------------------------------------------------------------

    def perform(self, effect: BranchEffect) -> None:
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
