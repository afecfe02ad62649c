"""One pod of a task: its disk, and one process after another, each with a real `TaskCore`.

An effect of the core is a call that takes a random time; a process that dies in between has done a
part of it, or all of it without knowing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rekindle.coordinator.model import Partition, partition_of
from rekindle.engine.failure import EngineUnavailable
from rekindle.engine.model import EpochOutput, State
from rekindle.errors import ObjectMissing
from rekindle.protocol import (
    PollRequest,
    RestorePoint,
    SinkAssignment,
    TaskProblem,
    TaskRef,
    Upstream,
)
from rekindle.streams.epochs import EpochInput
from rekindle.streams.reader_core import WAIT_S
from rekindle.task.core.events import Woken
from rekindle.task.core.loop import (
    AppendEpochs,
    EngineFailed,
    EngineRestarted,
    EpochsAppended,
    EpochsProcessed,
    EpochsTaken,
    ProcessEpochs,
    RestartEngine,
    TakeEpochs,
)
from rekindle.task.core.messages import (
    CallFailedPermanently,
    CallSink,
    HeadAdvanced,
    LogTruncated,
    PollReceived,
    RefusePoll,
    Respond,
    SinkReported,
    TaskCoreEvent,
    TaskEffect,
    TaskRestored,
    TaskSettings,
)
from rekindle.task.core.saver import EntrySaved, SaveFailed, SaveState, SkipState
from rekindle.task.core.sink import (
    CallFailed,
    CheckConflicts,
    EpochWritten,
    LogGrew,
    OpenSink,
    SinkEffect,
    SinkEvent,
    SinkOpened,
    WriteEnded,
    WriteEpochs,
)
from rekindle.task.core.start import (
    AwaitEngine,
    CompleteStart,
    OpenInputs,
    RestoreState,
    StepFailed,
    StepSucceeded,
)
from rekindle.task.core.supervisor import DiscardLog, EndProcess, RouteInputs, TruncateLog
from rekindle.task.core.task import TaskCore
from rekindle.task.state import TaskState
from rekindle.topology.model import Segment, Slot
from rekindle_testing.simulation.checks import Checks
from rekindle_testing.simulation.disk import Disk
from rekindle_testing.simulation.inputs import (
    READ_EPOCHS,
    ReadReply,
    ReadRequest,
    SimulatedInputs,
    SourceInputs,
    StreamInputs,
)
from rekindle_testing.simulation.network import SINKS, STORE, Network, Refused, Reply, TimedOut
from rekindle_testing.simulation.outside import Down, SimulatedSinks, SimulatedStore
from rekindle_testing.simulation.scheduler import Process, Scheduler
from rekindle_testing.simulation.values import FoldedState, fold_input, rows_of, values_in

_TICK_S = 0.1
_RESTART_S = (0.5, 2.0)
_ENGINE_START_S = (0.5, 3.0)
_ENGINE_RESTART_S = (0.5, 2.0)
_CALL_S = (0.005, 0.15)
_APPEND_S = (0.0005, 0.004)
_TAKE_S, _TAKE_TIMEOUT_S = 0.05, 0.25
_WRITE_DEADLINE_S = 3.0
_SAVE_DEADLINE_S = 5.0


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What all tasks of a simulation share. `epoch_us`: the length of an epoch."""

    scheduler: Scheduler
    network: Network
    store: SimulatedStore
    sinks: SimulatedSinks
    checks: Checks
    epoch_us: int
    checkpoint_interval_epochs: int


class SimulatedPod:
    """A pod of a task. `address` is its host, and `skew_s` how far the clock of its node is
    ahead."""

    def __init__(
        self,
        surroundings: Surroundings,
        slot: Slot,
        segment: Segment,
        incarnation: int,
        address: str,
        skew_s: float,
    ) -> None:
        self.slot = slot
        self.segment = segment
        self.incarnation = incarnation
        self.address = address
        self.skew_s = skew_s
        self.was_ready = False
        self.slowness = 1.0  # of its engine
        self.disk = Disk()
        self.boots = 0
        self.boot: TaskProcess | None = None
        self._surroundings = surroundings
        self._gone = False
        self._frozen = False
        surroundings.network.servers[address] = self
        surroundings.scheduler.after(surroundings.scheduler.between(0.1, 1.0), self._start)

    @property
    def process(self) -> Process | None:
        return self.boot.process if self.boot is not None else None

    def serve(self, request: PollRequest | ReadRequest, reply: Reply) -> None:
        if self.boot is not None:
            self.boot.serve(request, reply)

    def _start(self) -> None:
        if not self._gone:
            self.boots += 1
            self.boot = TaskProcess(self, self._surroundings)
            if self._frozen:
                self.boot.process.freeze()

    def restart(self, down_s: float = 0.0) -> None:
        """Kill -9 the container, or it has ended: the kubelet starts it again, after `down_s`."""
        if self.boot is None or self._gone:
            return
        self.boot.process.die()
        self.boot = None
        scheduler = self._surroundings.scheduler
        scheduler.after(down_s + scheduler.between(*_RESTART_S), self._start)

    def freeze(self) -> None:
        self._frozen = True
        if self.boot is not None:
            self.boot.process.freeze()

    def thaw(self) -> None:
        self._frozen = False
        if self.boot is not None:
            self.boot.process.thaw()

    def remove(self) -> None:
        """The pod ends, with its disk."""
        self._gone = True
        if self.boot is not None:
            self.boot.process.die()
        self.boot = None
        if self._surroundings.network.servers.get(self.address) is self:
            del self._surroundings.network.servers[self.address]


class TaskProcess:
    """One boot of a task."""

    def __init__(self, pod: SimulatedPod, surroundings: Surroundings) -> None:
        scheduler = surroundings.scheduler
        self.pod = pod
        self.partition: Partition = partition_of(pod.slot)
        self.process = Process(scheduler, pod.address)
        self._around = surroundings
        self._scheduler = scheduler
        self._disk = pod.disk
        self._inputs: SimulatedInputs | None = None
        self._upstreams: Sequence[Upstream] = ()
        self._restored: TaskState | None = None
        self._engine_ready_at = scheduler.now + scheduler.between(*_ENGINE_START_S)
        self._engine_crashes = False
        self._reply: Reply | None = None
        self._waiting_reads: list[Callable[[], bool]] = []
        self._events: deque[TaskCoreEvent] = deque()
        self._stepping = False
        slot = pod.slot
        ref = TaskRef(
            segment=slot.segment,
            partition=slot.partition,
            replica=slot.replica,
            incarnation=pod.incarnation,
        )
        self.core = TaskCore(
            TaskSettings(
                ref,
                f"{slot.key}-{pod.incarnation}.{pod.boots}",
                surroundings.checkpoint_interval_epochs,
                surroundings.epoch_us,
                engine="e1",
                fence=self._disk.fence,
            )
        )
        self.process.every(_TICK_S, self._tick)

    @property
    def epoch(self) -> int | None:
        """The newest epoch that it certainly needs no input of; None before it has a restore
        point."""
        if self.core.parts is not None:
            return self.core.parts.loop.state.epoch
        return self.core.status.restored_from

    def crash_engine(self) -> None:
        """The next call of the engine fails."""
        self._engine_crashes = True

    # -- serving ---------------------------------------------------------------------------------

    def serve(self, request: PollRequest | ReadRequest, reply: Reply) -> None:
        if isinstance(request, ReadRequest):
            self._serve_read(request, reply)
            return
        self._reply = reply
        self.step(PollReceived(request))
        self._reply = None

    def _serve_read(self, request: ReadRequest, reply: Reply) -> None:
        if self.core.parts is None or request.incarnation not in (None, self.pod.incarnation):
            reply(Refused())
            return
        answered: list[bool] = []

        def answer() -> bool:
            """Whether there is something to reply with, or the time is over."""
            if answered:
                return True
            log, first = self._disk, request.from_epoch
            head = self._inputs.head() if self._inputs is not None else 0
            if first < log.base:
                reply(ReadReply(head, truncated=True))
            elif first <= log.last:
                last = min(log.last, first + READ_EPOCHS - 1)
                reply(ReadReply(head, tuple(log.values[e] for e in range(first, last + 1))))
            else:
                return False
            answered.append(True)
            return True

        def give_up() -> None:
            if not answer():
                answered.append(True)
                reply(ReadReply(self._inputs.head() if self._inputs is not None else 0))

        if not answer():
            self._waiting_reads.append(answer)
            self.process.after(WAIT_S, give_up)

    def _log_changed(self) -> None:
        self._waiting_reads = [answer for answer in self._waiting_reads if not answer()]

    # -- the core --------------------------------------------------------------------------------

    def _tick(self) -> None:
        if self._inputs is not None:
            self.step(HeadAdvanced(self._inputs.head()))
        self.step(Woken())

    def step(self, event: TaskCoreEvent) -> None:
        """Feed an event, and then those that effects of it lead to at once, in order."""
        self._events.append(event)
        if self._stepping:
            return
        self._stepping = True
        while self._events and not self.process.dead:
            for effect in self.core.step(self._events.popleft(), self._scheduler.now):
                self._perform(effect)
        self._stepping = False

    def _later(self, delay: tuple[float, float], event: TaskCoreEvent) -> None:
        self.process.after(self._scheduler.between(*delay), lambda: self.step(event))

    def _perform(self, effect: TaskEffect) -> None:
        match effect:
            case Respond(response):
                self._disk.fence = max(self._disk.fence, self.core.polls.fence)
                assert self._reply is not None
                self._reply(response)
            case RefusePoll(status, _):
                assert self._reply is not None
                self._reply(status)
            case RestoreState(point):
                self._restore(point)
            case OpenInputs():
                self._open_inputs()
            case AwaitEngine():
                left_s = max(0.0, self._engine_ready_at - self._scheduler.now)
                self.process.after(left_s, lambda: self.step(StepSucceeded()))
            case CompleteStart():
                self._complete_start()
            case TakeEpochs():
                self._take(effect)
            case ProcessEpochs(operators, epochs):
                self._process(operators, epochs)
            case AppendEpochs(outputs):
                self._append(deque(outputs))
            case RestartEngine():
                self._later(_ENGINE_RESTART_S, EngineRestarted())
            case SaveState(state):
                self._save(state)
            case CallSink(assigned, call):
                self._call_sink(assigned, call)
            case TruncateLog(floor):
                self._disk.truncate(floor)
                self._around.checks.retained()
                self.step(LogTruncated(self._disk.base))
            case RouteInputs(upstreams):
                self._upstreams = upstreams
                if self._inputs is not None:
                    self._inputs.route(upstreams)
            case DiscardLog():
                self._disk.discard = True
            case EndProcess(loop_s=loop_s):
                self.process.after(self._scheduler.between(0, min(1.0, loop_s)), self.pod.restart)
            case SkipState():
                pass

    # -- start -----------------------------------------------------------------------------------

    def _restore(self, point: RestorePoint) -> None:
        if point.object is None:
            self._restored = TaskState(point.epoch, 0, FoldedState())
            self.step(StepSucceeded())
            return
        name = point.object

        def ended(result: TaskState | Exception | None) -> None:
            if isinstance(result, Exception):
                self.step(StepFailed(TaskProblem(message="the store does not respond")))
            elif result is None:
                self.step(CallFailedPermanently(ObjectMissing(f"{name} does not exist")))
            else:
                self._restored = result
                self.step(StepSucceeded())

        self._outside(STORE, partial(self._around.store.load, name), ended, _SAVE_DEADLINE_S)

    def _open_inputs(self) -> None:
        assert self._restored is not None
        next_epoch = self._restored.epoch + 1
        pod, around = self.pod, self._around
        if pod.segment.inputs:
            interval_s = around.epoch_us / 1e6
            self._inputs = StreamInputs(
                self.process,
                around.network,
                pod.segment,
                pod.slot.partition,
                next_epoch,
                interval_s,
            )
            self._inputs.route(self._upstreams)
        else:
            self._inputs = SourceInputs(
                self.partition,
                next_epoch,
                lambda: self._scheduler.now + pod.skew_s,
                around.epoch_us,
            )
        self.step(StepSucceeded())

    def _complete_start(self) -> None:
        assert self._restored is not None
        alone = self.pod.segment.replicas == 1
        self._disk.start_at(self._restored.epoch + 1, keep=alone)
        self.pod.was_ready = True
        self.step(TaskRestored(self._restored, self._disk.base, self._disk.last))
        self._log_changed()

    # -- the loop --------------------------------------------------------------------------------

    def _take(self, effect: TakeEpochs) -> None:
        inputs, until = self._inputs, self._scheduler.now + _TAKE_TIMEOUT_S
        assert inputs is not None

        def take() -> None:
            epochs = inputs.take(effect.bounds)
            if epochs or self._scheduler.now >= until:
                self.step(EpochsTaken(epochs))
            else:
                self.process.after(_TAKE_S, take)

        take()

    def _process(self, operators: State, epochs: Sequence[EpochInput]) -> None:
        assert isinstance(operators, FoldedState)
        if self._engine_crashes:
            self._engine_crashes = False
            failed = EngineFailed(EngineUnavailable("the engine died", -9))
            self._later(_CALL_S, failed)
            return
        least_s, most_s = _CALL_S
        slow_s = least_s * self.pod.slowness, most_s * self.pod.slowness
        fold, outputs = operators.fold, []
        for epoch in epochs:
            fold = fold_input(fold, epoch)
            outputs.append(EpochOutput(epoch.epoch, 0, rows_of(fold)))
        self._later(slow_s, EpochsProcessed(outputs, FoldedState(fold=fold)))

    def _append(self, outputs: deque[EpochOutput]) -> None:
        def append_next() -> None:
            output = outputs.popleft()
            (value,) = values_in(output.rows)
            before = self._disk.append(output.epoch, value)
            self._around.checks.appended(self.pod, output.epoch, value, before)
            self.step(EpochsAppended([value]))
            self._log_changed()
            if outputs:
                self.process.after(self._scheduler.between(*_APPEND_S), append_next)

        self.process.after(self._scheduler.between(*_APPEND_S), append_next)

    # -- outside ---------------------------------------------------------------------------------

    def _outside(
        self,
        host: str,
        request: Callable[[], Any],
        ended: Callable[[Any], None],
        deadline_s: float,
    ) -> None:
        self._around.network.call(self.process, host, request, ended, deadline_s)

    def _save(self, state: TaskState) -> None:
        def ended(result: Any) -> None:
            if isinstance(result, (Down, Refused, TimedOut)):
                self.step(SaveFailed("the store does not respond"))
            else:
                self.step(EntrySaved(result))

        request = partial(self._around.store.save, self.partition, state)
        self._outside(STORE, request, ended, _SAVE_DEADLINE_S)

    def _call_sink(self, assigned: SinkAssignment, call: SinkEffect) -> None:
        match call:
            case OpenSink(after):
                self._open_sink(assigned, after)
            case WriteEpochs(from_epoch):
                self._write(assigned, from_epoch)
            case CheckConflicts():
                raise AssertionError("no file differs")

    def _sink(self, assigned: SinkAssignment, event: SinkEvent) -> None:
        self.step(SinkReported(assigned, event))

    def _open_sink(self, assigned: SinkAssignment, after: int) -> None:
        def ended(result: int | Exception) -> None:
            if isinstance(result, Exception):
                self._sink(assigned, CallFailed("down"))
            else:
                self._sink(assigned, SinkOpened(result))

        sinks = self._around.sinks
        request = partial(sinks.last, assigned.query, self.partition, after)
        self._outside(SINKS, request, ended, _WRITE_DEADLINE_S)

    def _write(self, assigned: SinkAssignment, epoch: int) -> None:
        """Write an epoch, then the next one, as long as there is one."""
        parts, log = self.core.parts, self._disk
        core = parts.sinks.cores.get(assigned.query) if parts is not None else None
        if core is None or core.assigned != assigned:
            return
        if epoch > log.last or not core.may_write(epoch):
            self._sink(assigned, LogGrew(log.last))
            self._sink(assigned, WriteEnded())
            return
        if epoch < log.base:
            self._around.checks.failed(f"{self.pod.slot.key}: epoch {epoch} left the log unwritten")
            return
        value = log.values[epoch]

        def ended(result: str | Exception) -> None:
            if isinstance(result, Exception):
                self._sink(assigned, CallFailed("down"))
            else:
                self._around.checks.written(assigned.query, self.partition, epoch, value, result)
                self._sink(assigned, EpochWritten(epoch))
                self._write(assigned, epoch + 1)

        sinks = self._around.sinks
        request = partial(sinks.write, assigned.query, self.partition, epoch, value)
        self._outside(SINKS, request, ended, _WRITE_DEADLINE_S)
