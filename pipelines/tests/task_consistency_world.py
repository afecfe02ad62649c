"""A row of real task cores whose output may be tentative, with a fake engine.

As `consistency_world`, but the consistency manager is in a `TaskCore`: calls go through its loop,
and results come from a log and its branches. The engine may fail, and calls take time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from consistency_world import (
    SCHEMA,
    Happened,
    Record,
    Stream,
    Task,
    World,
    WorldOptions,
    fold,
    rows_of,
)

from rekindle.consistency.messages import (
    ConsistencySettings,
    EmitReconciliationDone,
    EmitUndo,
    ReadLive,
    ResumeStable,
    StopLive,
)
from rekindle.engine.failure import EngineUnavailable, OutOfMemory
from rekindle.engine.model import EpochOutput, State
from rekindle.protocol import Partner, PollRequest, PollResponse, RestorePoint, TaskRef
from rekindle.streams.epochs import NO_EPOCH, BatchKind
from rekindle.task.core.loop import (
    AppendEpochs,
    AppendTentative,
    LoopCore,
    LoopEffect,
    ProcessEpochs,
    RestartEngine,
)
from rekindle.task.core.messages import (
    Respond,
    TaskCoreEvent,
    TaskEffect,
    TaskSettings,
)
from rekindle.task.core.problems import SetProblem
from rekindle.task.core.saver import SkipCheckpoint
from rekindle.task.core.start import AwaitEngine, CompleteStart, OpenInputs, RestoreState
from rekindle.task.core.streams import StreamsCore
from rekindle.task.core.supervisor import RouteInputs
from rekindle.task.core.task import TaskCore
from rekindle.task.state import TaskState

REF = TaskRef(segment="seg", partition=0, replica=0, incarnation=1)
RESTART_S = 0.2


@dataclass(frozen=True, slots=True)
class FoldedState(State):
    """A sum of all rows."""

    value: int = 0


@dataclass(slots=True)
class CoreTask(Task):
    """A task core, its engine, log and branches. `states` is not used: the loop has them.

    `fails`: how the next calls of the engine fail, by their kind: "memory" (out of memory), "crash"
    (the JVM dies), "operator" (only tentative calls) or "". `appends_fail`: how the next appends of
    tentative epochs fail: "disk" or "". Both are consumed from their ends.
    """

    task_core: TaskCore = field(kw_only=True)
    fails: dict[BatchKind, list[str]] = field(default_factory=dict)
    appends_fail: list[str] = field(default_factory=list)
    calls: list[tuple[int, int, int]] = field(default_factory=list)  # attempt, first and last epoch
    forks: dict[int, FoldedState] = field(default_factory=dict)  # as appended, by attempt
    result: FoldedState = field(default_factory=FoldedState)  # of the newest call

    @property
    def streams(self) -> StreamsCore:
        assert self.task_core.streams is not None
        return self.task_core.streams

    @property
    def stable_state(self) -> TaskState:
        assert self.task_core.parts is not None
        return self.task_core.parts.loop.state

    def start(self) -> None:
        self.poll()
        state = TaskState(NO_EPOCH, NO_EPOCH, FoldedState())
        self.send(partial(self.task_core.restored, state, 0, NO_EPOCH))
        self.send(partial(self.task_core.head_advanced, 0))  # so that it is Live

    def poll(self, partner: Partner | None = None) -> None:
        restore = RestorePoint(epoch=NO_EPOCH)
        poll = PollRequest(
            fence=1, generation=1, task=self.task_core.ref, restore=restore, partner=partner
        )
        self.send(partial(self.task_core.poll_received, poll))

    def step(self, happened: Happened) -> None:
        self.send(partial(self.task_core.input_reported, happened))

    def wake(self) -> None:
        self.send(self.task_core.woken)

    def send(self, event: TaskCoreEvent) -> None:
        for effect in event(self.world.now):
            self._perform_effect(effect)
        if self.task_core.parts is None:
            return
        for link in self.links.values():
            link.deliver_now()
        wake_at = self.task_core.wake_at
        if wake_at is not None and wake_at > self.world.now and wake_at != self.woken_at:
            self.woken_at = wake_at
            self.world.at(wake_at, self.wake)

    def report(self, happened: Callable[[LoopCore, float], list[LoopEffect]]) -> None:
        self.send(partial(self.task_core.loop_reported, happened))

    def _perform_effect(self, effect: TaskEffect) -> None:
        now = self.world.now
        match effect:
            case ProcessEpochs(_, epochs, attempt):
                process_epoch_s = 0.0 if attempt else self.world.options.process_epoch_s
                self.calls.append((attempt, epochs[0].epoch, epochs[-1].epoch))
                took_s = self.world.options.call_s + process_epoch_s * len(epochs)
                self.world.at(now + took_s, partial(self._process_call, effect))
            case AppendEpochs(outputs):
                self._append_stable(outputs)
            case AppendTentative():
                self._append_tentative(effect)
            case RestartEngine():
                self.world.at(now + RESTART_S, partial(self.report, LoopCore.engine_restarted))
            case EmitUndo() | EmitReconciliationDone() | ReadLive() | StopLive():
                self._perform(effect)
            case ResumeStable() | Respond() | RouteInputs() | SkipCheckpoint() | SetProblem():
                pass
            case RestoreState() | OpenInputs() | AwaitEngine() | CompleteStart():
                pass
            case _:
                raise AssertionError(f"unexpected: {effect}")

    def _process_call(self, call: ProcessEpochs) -> None:
        self.report(self._processed(call))

    def _processed(self, call: ProcessEpochs) -> Callable[[LoopCore, float], list[LoopEffect]]:
        failures = self.fails.get(BatchKind.TENTATIVE if call.attempt else BatchKind.STABLE)
        match failures.pop() if failures else "":
            case "memory" if len(call.epochs) > 1 or call.attempt:
                return lambda loop, now: loop.engine_failed(OutOfMemory("too much"), now)
            case "crash" if len(call.epochs) > 1 or call.attempt:
                error = EngineUnavailable("the JVM died", -9)
                return lambda loop, now: loop.engine_failed(error, now)
            case "operator" if call.attempt:
                return lambda loop, now: loop.tentative_failed("a cast failed", now)
        assert isinstance(call.operators, FoldedState)
        stable = self.stable_state.operators
        assert call.operators == (self.forks.get(call.attempt, stable) if call.attempt else stable)
        value, outputs = call.operators.value, list[EpochOutput]()
        for epoch in call.epochs:
            value = fold(value, epoch)
            outputs.append(EpochOutput(epoch.epoch, epoch.watermark, rows_of(value)))
        state = self.result = FoldedState(value=value)
        return lambda loop, now: loop.epochs_processed(outputs, state, now)

    def _append_stable(self, outputs: Sequence[EpochOutput]) -> None:
        for output in outputs:
            self._append(BatchKind.STABLE, output.epoch, value_of(output))
        digests = [str(value_of(output)) for output in outputs]
        self.report(lambda loop, now: loop.epochs_appended(digests, now))

    def _append_tentative(self, effect: AppendTentative) -> None:
        if self.appends_fail and self.appends_fail.pop() == "disk":
            self.report(lambda loop, now: loop.tentative_failed("the disk is full", now))
            return
        output = effect.output
        self._append(BatchKind.TENTATIVE, output.epoch, value_of(output), effect.attempt)
        self.forks[effect.attempt] = self.result
        self.report(LoopCore.tentative_appended)


def value_of(output: EpochOutput) -> int:
    return int(output.rows["n"][0].as_py())


class CoreWorld(World):
    """A world of task cores."""

    tasks: list[CoreTask]  # type: ignore[assignment]

    def _task(self, streams: list[Stream], latencies: Any, replica: int = 0) -> CoreTask:
        plain = super()._task(streams, latencies, replica)
        ref = REF.model_copy(update={"replica": replica})
        options = self.options
        settings = ConsistencySettings(
            inputs=[[0] for _ in streams],
            schemas=[SCHEMA for _ in streams],
            blocking_inputs=options.blocking_inputs,
            max_delay_s=options.max_delay_s,
            during_failure=options.during_failure,
            during_stabilization=options.during_stabilization,
            replica=replica,
            read_ahead_bytes=options.read_ahead_bytes,
            max_buffered_epochs=options.max_buffered_epochs,
            max_call_epochs=options.call_epochs,
        )
        core = TaskCore(
            TaskSettings(
                ref,
                f"boot {replica}",
                checkpoint_interval_epochs=10,
                epoch_interval_us=1_000_000,
                consistency=settings,
                input_names=[f"input-{at}" for at in range(len(streams))],
            )
        )
        task = CoreTask(self, plain.core, plain.stream, plain.links, task_core=core)
        for link in plain.links.values():
            link.task = task
        task.start()
        task.core = task.streams  # type: ignore[assignment]  # what links and `World` ask
        return task


class CoreReplicas(CoreWorld):
    """Two replicas of one task, with links of their own. A coordinator polls each
    of them every POLL_S; what it says of the other one is from the poll before."""

    POLL_S = 0.5

    def __init__(self, options: WorldOptions) -> None:
        super().__init__(options)
        self.responses: dict[int, PollResponse] = {}
        self.not_polled: set[int] = set()  # replicas from which the coordinator gets no responses
        self.tasks.append(self._task(self.sources, itertools.repeat(0.01), replica=1))
        for replica in (0, 1):
            self.at(self.POLL_S * (1 + replica / 2), partial(self._poll, replica))

    def _poll(self, replica: int) -> None:
        self.at(self.now + self.POLL_S, partial(self._poll, replica))
        if replica in self.not_polled:
            self.responses.pop(replica, None)
            return
        other, task = self.responses.get(1 - replica), self.tasks[replica]
        partner = None
        if other is not None:
            partner = Partner(
                replica=1 - replica, boot=other.boot_id, asks=other.asks, answer=other.answer
            )
        self.responses[replica] = task.task_core.response()
        task.poll(partner)


def play_cuts(world: World, cuts: Sequence[tuple[float, int, bool]], settle_s: float = 25) -> None:
    """Cut and heal links at their times; then nothing fails any more."""
    for at, link, is_cut in cuts:
        world.run(at)
        (world.cut if is_cut else world.heal)(link)
    world.heal_all()
    world.run(world.now + settle_s)


def records_of(task: Task, kind: BatchKind) -> list[Record]:
    return [record for record in task.stream.records if record.kind is kind]


__all__ = ["CoreReplicas", "CoreTask", "CoreWorld", "WorldOptions", "play_cuts", "records_of"]
