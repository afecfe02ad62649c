"""A task without Spark and network: its core, and its ports around a fake engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
from state_parts import count_state, value_in_state

from rekindle.checkpoints.manifest import Entry
from rekindle.connectors.input_identity import InputFile
from rekindle.connectors.sink import EpochSink
from rekindle.connectors.source import EventTimes, SourceCut, SourceSummary
from rekindle.consistency.messages import ConsistencySettings
from rekindle.engine.bounds import CallBounds
from rekindle.engine.model import ChainResult, DroppedRows, EpochOutput, State
from rekindle.errors import SinkRefused, SourceFailed, StoreError
from rekindle.identity import Identity
from rekindle.protocol import (
    EntryRef,
    PollRequest,
    RestorePoint,
    SinkAssignment,
    SinkProgress,
    TaskProblem,
    TaskRef,
)
from rekindle.streams.epochs import NO_EPOCH, NO_WATERMARK, EpochBatch, EpochInput
from rekindle.streams.log import OutputLog
from rekindle.task.core.loop import (
    AppendEpochs,
    LoopCore,
    ProcessEpochs,
    RestartEngine,
    TakeEpochs,
)
from rekindle.task.core.messages import (
    CallSink,
    EndComparison,
    RefusePoll,
    Respond,
    StopSink,
    TaskEffect,
    TaskSettings,
)
from rekindle.task.core.parts import Parts
from rekindle.task.core.problems import SetProblem
from rekindle.task.core.saver import SaverCore, SaverEffect, SaveState
from rekindle.task.core.task import TaskCore
from rekindle.task.discard import discard_log_if_marked
from rekindle.task.earlier_boots import continue_log
from rekindle.task.engine_calls import EngineCalls, EngineParts
from rekindle.task.fence import NO_FENCE, FenceFile
from rekindle.task.inputs import SourceInputs
from rekindle.task.poll_handler import PollHandler
from rekindle.task.process import TaskProcess
from rekindle.task.saver import CheckpointSaver, EntryStore
from rekindle.task.sinks import SinkOpener, SinkWriters
from rekindle.task.state import TaskState
from rekindle.task.stream_inputs import StreamInputs
from rekindle.topology.model import Segment
from rekindle.topology.spec import SinkSpec
from rekindle_testing.waiting import eventually

SCHEMA = pa.schema([("n", pa.int64())])


SINK = SinkAssignment(query="q", from_epoch=0, sink=SinkSpec())


REF = TaskRef(segment="seg", partition=0, replica=0, incarnation=1)


class Counting:
    """Adds up all rows: output is the running sum, state is the sum."""

    output_schema = SCHEMA

    def __init__(self) -> None:
        self.dropped: dict[str, DroppedRows] = {}
        self.calls: list[list[int]] = []
        self.wrong: dict[int, int] = {}  # added to the output of an epoch, not to the state

    def process(self, state: State, epochs: Sequence[EpochInput]) -> ChainResult:
        self.calls.append([e.epoch for e in epochs])
        total = value_in_state(state, "sum")
        outputs = []
        for epoch in epochs:
            total += sum(epoch.inputs[0]["n"].to_pylist())
            reported = total + self.wrong.get(epoch.epoch, 0)
            rows = pa.table({"n": [reported]}, schema=SCHEMA)
            outputs.append(EpochOutput(epoch.epoch, epoch.watermark, rows))
        return ChainResult(tuple(outputs), count_state("sum", total))

    def match_columns(self, state: State) -> State:
        return state

    def join_deltas(self, state: State) -> State:
        return state

    def begins_after(self, state: State, bounds: Mapping[str, int]) -> State:
        return state


class Rows:
    """A source of `per_epoch` rows in each epoch."""

    schema = SCHEMA
    last_epoch = None
    input_files: tuple[InputFile, ...] = ()
    summary = SourceSummary(None, None, None)

    def __init__(self, per_epoch: int = 1) -> None:
        self.per_epoch = per_epoch
        self.fails = 0  # so many of the next cuts fail,
        self.fails_from = 0  # of epochs from this one on

    def cut(self, epoch: int) -> SourceCut:
        if self.fails and epoch >= self.fails_from:
            self.fails -= 1
            raise SourceFailed("the file cannot be read")
        return SourceCut(pa.table({"n": [epoch] * self.per_epoch}, schema=SCHEMA), epoch * 10)

    def event_times(self, epoch: int) -> EventTimes:
        return EventTimes(epoch * 10, epoch * 10)

    def next_epoch_to_cut(self, epoch: int) -> int | None:
        return epoch

    def close(self) -> None:
        pass


class FakeStates:
    def __init__(self) -> None:
        self.saved: list[tuple[int, str | None]] = []
        self.failures_left = 0

    def save(self, state: TaskState, previous: Entry | None) -> EntryRef:
        if self.failures_left:
            self.failures_left -= 1
            raise StoreError("the store is unavailable")
        self.saved.append((state.epoch, previous.segment if previous else None))
        return EntryRef(state.epoch, f"entry-{state.epoch}", "d", 7)

    def load_entry(self, name: str) -> Entry:
        return Entry(name, 0, 0, 0, (), {})


class MemorySink(EpochSink):
    conflict: str | None = None
    deleted = False  # the file that is in conflict

    def __init__(self) -> None:
        self.epochs: list[int] = []
        self.refuse = 0  # so many of the next writes

    def retry_conflicts(self, may_write: Callable[[int], bool]) -> None:
        if self.deleted and may_write(0):
            self.conflict = None

    def first_epoch(self) -> int:
        return 0

    def last_epoch(self, after: int = NO_EPOCH) -> int:
        return self.epochs[-1] if self.epochs else NO_EPOCH

    def write(self, batch: EpochBatch) -> bool:
        if self.refuse:
            self.refuse -= 1
            raise SinkRefused("query q: the disk is full")
        self.epochs.append(batch.epoch)
        return True


def make_handler(
    ref: TaskRef,
    fence_file: FenceFile | None = None,
    identity: Identity | None = None,
    event_times: Callable[[Sequence[int]], Mapping[int, tuple[int, int]]] = lambda epochs: {},
) -> PollHandler:
    """Of a task that has only a core."""
    fence = fence_file.read() if fence_file is not None else NO_FENCE
    own = identity or Identity()
    core = TaskCore(TaskSettings(ref, "boot", 10, 1_000_000, fence=fence, identity=own))

    def perform(effect: TaskEffect) -> None:
        if isinstance(effect, Respond | RefusePoll):
            handler.answered(effect)

    handler = PollHandler(TaskProcess(core, perform), fence_file, event_times)
    return handler


class FailingCore(TaskCore):
    """`failure`: why it has given up."""

    failure: Exception | None = None

    def _give_up(self, error: Exception) -> list[TaskEffect]:
        self.failure = self.failure or error
        return super()._give_up(error)


class ReadAhead:
    """The streams of a task that has not started yet."""

    def __init__(self, segment: Segment, settings: ConsistencySettings, **options: Any) -> None:
        made = TaskSettings(REF, "boot", 10, 1_000_000, consistency=settings)
        self.core = FailingCore(made)
        self.process = TaskProcess(self.core, lambda effect: None)
        self.process.tell(partial(self.core.streams_opened, 0, 0))
        self.inputs = StreamInputs(self.process, segment, 0, settings, 0, **options)

    def take(self, max_epochs: int, timeout_s: float) -> list[int]:
        """The epochs that a loop takes. Raises the error with which the task fails."""
        loop, streams = Mock(), self.core.streams
        assert streams is not None
        eventually(lambda: streams.may_take or self.core.failure is not None, timeout_s)
        if self.core.failure is not None:
            raise self.core.failure
        with self.process.lock:
            taken = streams.take(CallBounds(max_epochs))
        self.inputs.offer_space()
        assert taken is not None
        taken(loop, 0.0)
        return [e.epoch for call in loop.epochs_taken.call_args_list for e in call.args[0]]

    def processed(self, through: int) -> None:
        self.process.tell(
            partial(
                self.core.input_reported,
                lambda streams, now: streams.stable_processed(through, now),
            )
        )
        self.inputs.offer_space()


class Saver:
    """The saver of a task: what the loop and polls tell it."""

    def __init__(self, world: World, states: EntryStore) -> None:
        self.world = world
        self.port = CheckpointSaver(world.process, states)

    @property
    def problem(self) -> str | None:
        return self.world.core.saver.problem or self.port.problem

    def report(self, happened: Callable[[SaverCore, float], list[SaverEffect]]) -> None:
        self.world.keep_time()
        self.world.process.tell(partial(self.world.core.saver_reported, happened))

    def offer(self, state: TaskState) -> None:
        self.report(lambda saver, now: saver.state_reached(state, now))

    def commit(self, point: RestorePoint) -> None:
        self.world.poll(committed=point)

    def refuse(self, entries: frozenset[str]) -> None:
        self.world.poll(refused=tuple(entries))

    def done(self) -> tuple[EntryRef, ...]:
        with self.world.process.lock:
            return self.world.core.saver.saved()

    def stop(self, timeout_s: float) -> None:
        self.port.stop(timeout_s)


class Sinks:
    """The sinks of a task: what polls tell it."""

    def __init__(self, world: World, open_sink: SinkOpener) -> None:
        self.world = world
        self.port = SinkWriters(world.process, world.log, open_sink)

    def assign(self, sinks: Sequence[SinkAssignment]) -> None:
        self.world.keep_time()
        self.world.poll(sinks=tuple(sinks))

    def pause_after(self, through: int | None) -> None:
        self.world.poll(sinks_through=through)

    def progress(self) -> tuple[SinkProgress, ...]:
        with self.world.process.lock:
            return self.world.started.sinks.progress()

    def problem(self) -> str | None:
        with self.world.process.lock:
            return self.world.started.sinks.problem() or self.port.problem()

    def wait_until_durable(self, through: int, timeout_s: float) -> bool:
        def written() -> bool:
            with self.world.process.lock:
                return self.world.core.sinks_have_written(through)

        eventually(written, timeout_s)
        return True

    def stop(self) -> None:
        self.world.stopped.set()
        self.port.stop()


class World:
    """One task that reads a source, whose clock is set by hand. Back-offs are in real time."""

    def __init__(
        self,
        directory: Path,
        start: TaskState | None = None,
        per_epoch: int = 1,
        replicas: int = 1,
        states: EntryStore | None = None,
        open_sink: SinkOpener | None = None,
        log: OutputLog | None = None,
    ) -> None:
        self.now = 0.0
        self.chain, self.source, self.states, self.sink = (
            Counting(),
            Rows(per_epoch),
            FakeStates(),
            MemorySink(),
        )
        state = start or TaskState(NO_EPOCH, NO_WATERMARK, State())
        discard_log_if_marked(directory)
        self.log = log or OutputLog(directory, "s", 0, SCHEMA)
        earlier = continue_log(self.log, directory, state.epoch, has_no_partners=replicas == 1)
        self.earlier = earlier
        self.inputs = SourceInputs(
            self.source,
            state.epoch + 1,
            state.watermark,
            origin_us=0,
            epoch_interval_us=1_000_000,
            clock=lambda: self.now,
        )
        settings = TaskSettings(REF, "boot", 10, 1_000_000)
        self.core = FailingCore(settings, lambda: self.now)
        self.status = self.core.status
        self.process = TaskProcess(self.core, self._perform, self._stepped)
        self.parts = EngineParts(self.chain, self.log, source=self.inputs, earlier=earlier)
        self.calls = EngineCalls(self.process, lambda step: None, take_timeout_s=0)
        self.calls.begin(self.parts)
        self.saved: list[TaskState] = []  # states that a saver saves
        self.problems: list[str | None] = []  # as they were set
        self.stopped = threading.Event()
        self._keeps_time = False
        self._desired = PollRequest(fence=1, generation=1, task=REF)
        self.saver = Saver(self, states or self.states)
        self.sinks = Sinks(self, open_sink or (lambda _, __: self.sink))
        self.status.ports = self
        self.poll(restore=RestorePoint(epoch=state.epoch))
        restored = partial(
            self.core.restored,
            state,
            self.log.base,
            self.log.last,
            compare_files_from=earlier.compare_files_from,
        )
        self.process.tell(restored)

    @property
    def started(self) -> Parts:
        assert self.core.parts is not None
        return self.core.parts

    @property
    def loop(self) -> LoopCore:
        return self.started.loop

    def poll(self, **changes: object) -> None:
        """A poll with the desired state of the newest one, but for these fields."""
        self._desired = self._desired.model_copy(update=changes)
        self.process.tell(partial(self.core.poll_received, self._desired))

    def keep_time(self) -> None:
        """Wake the core when it wants to be, from now on."""
        if not self._keeps_time:
            self._keeps_time = True
            threading.Thread(target=self._keep_time, daemon=True).start()

    def _keep_time(self) -> None:
        while not self.stopped.wait(0.01):
            self.process.tell(self.core.woken)

    def run_to(self, now: float) -> None:
        """Compute all epochs that are released. Raises the error with which the task fails."""
        self.now = now
        while self.loop.state.epoch < self.inputs.head():
            self.run_next()

    def run_next(self) -> None:
        """One request of the loop, after its back-off."""
        wake_at = self.loop.wake_at
        if wake_at is not None:
            time.sleep(max(0.0, wake_at - time.monotonic()))
            self.process.tell(self.core.woken)
        self.calls.perform_next(0)
        if self.core.failure is not None:
            raise self.core.failure

    def pass_time(self) -> None:
        self.process.tell(partial(self.core.head_advanced, self.inputs.head()))

    def sums(self) -> list[int]:
        return [b.rows["n"][0].as_py() for b in self.log]

    # -- ports -----------------------------------------------------------------------------------

    def _stepped(self) -> None:
        if self.core.parts is None:
            return
        state = self.loop.state
        if (state.epoch + 1) % 10 == 0 and state not in self.saved and state.epoch >= 0:
            self.saved.append(state)

    def _perform(self, effect: TaskEffect) -> None:
        match effect:
            case TakeEpochs() | ProcessEpochs() | AppendEpochs() | RestartEngine():
                self.calls.request(effect)
            case SaveState():
                self.saver.port.save(effect)
            case CallSink():
                self.sinks.port.call(effect)
            case StopSink():
                self.sinks.port.stop_writer(effect)
            case SetProblem(_, problem):
                self.problems.append(problem.message if problem is not None else None)
            case EndComparison():
                self.earlier.stop_comparing()

    def log_bytes(self) -> int:
        return self.log.local_bytes

    def unreadable(self) -> tuple[str, ...]:
        return ()

    def problem(self) -> TaskProblem | None:
        sinks, saver = self.sinks.port.problem(), self.saver.port.problem
        message = sinks or saver
        return TaskProblem(message=message, saving=sinks is None) if message else None
