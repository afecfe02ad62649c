"""What must hold of the tentative results of one boot of a task, after every step.

Invariant: docs/invariants.md#i3. Paper: DPC (Balazinska et al. 2005), sections 2 and 3.2 to 3.5.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from rekindle.consistency.messages import ConsistencySettings
from rekindle.protocol import ConsistencyState, Postponement, TaskPhase
from rekindle.streams.epochs import NO_EPOCH, BatchKind, EpochBatch
from rekindle.streams.sunion import Channel
from rekindle.task.core.loop import LoopPhase, ProcessEpochs
from rekindle.task.core.streams import StreamsCore
from rekindle_testing.simulation.output_order import OutputOrder
from rekindle_testing.simulation.streams import Announced
from rekindle_testing.simulation.surroundings import Surroundings
from rekindle_testing.simulation.values import FoldedState

if TYPE_CHECKING:
    from rekindle_testing.simulation.task import TaskBoot

_SLACK_S = 0.8
"""How much later than `maxDelay` a result may be: by a tick, a stable call that is in progress, and
the tentative one."""
_CALL_S = 0.15
"""The longest call of an engine that is not slow: an epoch also waits for those before it that
arrived together with it, or shortly before."""
_SLOW_CALL_S = 6.0
"""The longest call of a slow engine, about."""
_PAUSE_S = 0.3
"""If more time is between two ticks, the process was frozen."""
_BACKLOG_EPOCHS = 2
"""A task that is not further behind its inputs has caught up."""
_SUSPENDED_TICKS = 1
"""For so many ticks a replica that has promised to serve may suspend new input."""
_ANNOUNCED_S = 4.0
_ANNOUNCED_TIMES = 4
"""For so long, and in so many responses, an epoch that an upstream has put out may be missing."""
_SWITCH_TICKS = 30
"""Within so many ticks a reader has left a replica whose output is not stable."""


class TentativeChecks:
    def __init__(
        self,
        task: TaskBoot,
        surroundings: Surroundings,
        settings: ConsistencySettings,
        streams: StreamsCore,
    ) -> None:
        assert settings.max_delay_s is not None
        self.streams = streams
        self.stabilizes_since = 0.0
        self.asked_at = 0.0  # when it asked its partner last
        self.partner_since = 0.0
        self._task = task
        self._around = surroundings
        self._max_delay_s = settings.max_delay_s
        self._order = OutputOrder()
        self._state = ConsistencyState.STABLE
        self._partner: object = None
        self._request: Postponement | None = None
        self._suspended_ticks = 0
        # The newest attempt, and the state after its last epoch, which is also its output
        # (`values`).
        self._newest_branch: tuple[int, str] = (0, "")
        # For the check that results come in time. `_exempt_at`: when that was last not promised.
        self._arrivals: dict[int, float] = {}
        self._counts_from: dict[int, float] = {}  # its arrival, or later if it waits for others
        self._newest_arrived = NO_EPOCH
        self._newest_output = task.pod.disk.last
        self._output_at = self._exempt_at = self._ticked_at = self.now
        self._slow_until = 0.0
        self._catching_up = True
        self._ignored: dict[str, int] = {}  # for how many ticks a better replica was not read

    @property
    def now(self) -> float:
        return self._task.process.scheduler.now

    def _fail_if(self, invariant: str, problem: str) -> None:
        """`problem`: "" if there is none."""
        pod = self._task.pod
        if problem:
            self._around.checks.failed(
                f"{invariant}: {pod.slot.key} incarnation {pod.incarnation}: {problem}"
            )

    # -- the order of the output -------------------------------------------------------------------

    def stable_appended(self, epoch: int) -> None:
        self._note_output(epoch)
        self._fail_if("I3", self._order.stable(epoch))

    def tentative_appended(self, attempt: int, epoch: int, value: str, *, was_kept: bool) -> None:
        """`was_kept`: it is in the output; False if the epoch is stable already."""
        self._newest_branch = attempt, value
        if not was_kept:
            return
        self._note_output(epoch)
        self._around.checks.tentative(self._task.partition, epoch, value)
        self._fail_if("I3", self._order.new_tentative(attempt, epoch))

    def undone(self, from_epoch: int) -> None:
        self._fail_if("I3", self._order.undo(from_epoch))

    def reconciled(self, through: int) -> None:
        self._fail_if("I3", self._order.reconciliation_done(through))

    def stepped(self) -> None:
        state, before = self.streams.state, self._state
        self._state = state
        if state is ConsistencyState.STABLE:
            self._fail_if("I3", self._order.settled())
        elif state is ConsistencyState.STABILIZATION and before is not state:
            self.stabilizes_since = self.now
        if self.streams.partner.partner != self._partner:
            self._partner, self.partner_since = self.streams.partner.partner, self.now
        if (request := self.streams.partner.asks) != self._request and request is not None:
            self._request = request
            if request.lease_s:  # 0: it ends its request
                self.asked_at = self.now

    # -- what is computed --------------------------------------------------------------------------

    def processing(self, call: ProcessEpochs) -> None:
        """A tentative epoch follows the stable state, or the one before it on its branch; its input
        is what upstreams have put out for this epoch."""
        (epoch,) = call.epochs
        if not self.streams.may_be_tentative:
            self._fail_if("I3", f"epoch {epoch.epoch} is tentative before the task was Live")
        state, partition, checks = call.operators, self._task.partition, self._around.checks
        assert isinstance(state, FoldedState)
        attempt, fold = self._newest_branch
        if call.attempt != attempt:
            fold = checks.expected.output(partition, epoch.epoch - 1)
            parts = self._task.core.parts
            stable = parts.loop.state.operators if parts is not None else None
            if checks.is_wrong(state.fold) and state == stable:
                fold = state.fold
            self._newest_branch = call.attempt, fold
        if state.fold != fold:
            self._fail_if(
                "I3", f"tentative epoch {epoch.epoch} of attempt {call.attempt} has a wrong state"
            )
        if unknown := checks.unknown_input(partition, epoch):
            self._fail_if("I3", f"tentative epoch {epoch.epoch} has {unknown}, of another epoch")

    def computed(self, epoch: int, rows: pa.Table) -> None:
        """A tentative epoch says that a row has not come only if that is so."""
        expected = self._around.checks.expected
        if row := expected.contradicted(self._task.partition, epoch, rows):
            self._fail_if("I3", f"tentative epoch {epoch} has {row}, which is contradicted later")

    # -- in time -----------------------------------------------------------------------------------

    def arrived(self, batch: EpochBatch) -> None:
        is_epoch = batch.kind in (BatchKind.STABLE, BatchKind.TENTATIVE)
        if is_epoch and batch.epoch > self._newest_arrived:
            for epoch in range(max(self._newest_arrived, self._newest_output) + 1, batch.epoch + 1):
                before = self._counts_from.get(epoch - 1, -_CALL_S)
                self._counts_from[epoch] = max(self.now, before + _CALL_S)
                self._arrivals[epoch] = self.now
            self._newest_arrived = batch.epoch

    def _note_output(self, epoch: int) -> None:
        if epoch > self._newest_output:
            for done in range(self._newest_output + 1, epoch + 1):
                self._arrivals.pop(done, None)
                self._counts_from.pop(done, None)
            self._newest_output, self._output_at = epoch, self.now

    def tick(self, better: frozenset[str], announced: dict[Channel, Announced]) -> None:
        """`better`: replicas that should be read instead of those that are. `announced`: what
        replicas that are read have put out, and has not arrived; what is no longer needed goes."""
        now = self.now
        self._ignored = {address: self._ignored.get(address, 0) + 1 for address in better}
        if ignored := [a for a, ticks in self._ignored.items() if ticks > _SWITCH_TICKS]:
            self._fail_if("I3", f"{ignored} have stable output, and others are read")
        begun = self.streams.tentative_epoch
        if begun is not None and not self.streams.may_be_tentative:
            self._note_output(begun)  # it could not be processed; its stable result comes later
        if self._is_exempt():
            self._exempt_at, self._catching_up = now, True
        self._ticked_at = now
        for channel, epoch in list(announced.items()):
            if epoch.epoch <= self._newest_output:  # its turn is over
                del announced[channel]
                continue
            since = max(epoch.since, self._exempt_at)
            if now > since + _ANNOUNCED_S and epoch.times >= _ANNOUNCED_TIMES:
                self._fail_if(
                    "I3",
                    f"tentative epoch {epoch.epoch} of {channel} was put out {now - since:.2f} s "
                    "ago by a replica that is read, and has not arrived",
                )
        if self._newest_output >= self._newest_arrived - _BACKLOG_EPOCHS:
            self._catching_up = False
        arrived_at = self._arrivals.get(self._newest_output + 1)
        if arrived_at is not None:
            counts_from = self._counts_from[self._newest_output + 1]
            since = max(counts_from, self._exempt_at, self._output_at if self._catching_up else 0.0)
            if now > since + self._max_delay_s + _SLACK_S:
                self._fail_if(
                    "I3",
                    f"epoch {self._newest_output + 1} arrived at {arrived_at:.2f} s, and has no "
                    f"result after {now - since:.2f} s",
                )
        self._around.checks.check_promises(self._task.pod)

    def _is_exempt(self) -> bool:
        """Whether nobody promises that results come in time: the task was not Live yet, its engine
        is slow or down, it is frozen, or it suspends new input."""
        now, parts = self.now, self._task.core.parts
        if self._task.pod.slow:
            self._slow_until = now + _SLOW_CALL_S
        is_down = parts is None or parts.loop.phase is LoopPhase.RESTARTING
        was_frozen = now > self._ticked_at + _PAUSE_S
        suspends = self.streams.suspends(now)
        self._suspended_ticks = self._suspended_ticks + 1 if suspends else 0
        core = self._task.core
        has_failed = core.status.phase is TaskPhase.FAILED or self._task.is_failing
        gives_none = not self.streams.may_be_tentative or core.supervisor.ended or has_failed
        return is_down or was_frozen or gives_none or now < self._slow_until or suspends

    def breaks_promise(self, asked_at: float) -> bool:
        """Whether it has suspended new input for some time, although it began to correct after its
        partner, which it has not lost since, had asked it to serve."""
        was_known = self.partner_since < asked_at
        is_late = self.stabilizes_since > asked_at
        return was_known and is_late and self._suspended_ticks > _SUSPENDED_TICKS
