"""A task without Spark, network and files: its components with a fake engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pyarrow as pa
from state_parts import count_state, value_in_state

from rekindle.checkpoints.manifest import Entry
from rekindle.connectors.input_identity import InputFile
from rekindle.connectors.source import EventTimes, SourceCut, SourceSummary
from rekindle.engine.model import ChainResult, DroppedRows, EpochOutput, State
from rekindle.errors import SinkRefused, SourceFailed, StoreError
from rekindle.protocol import EntryRef, SinkAssignment, TaskRef
from rekindle.streams.epochs import NO_EPOCH, NO_WATERMARK, EpochBatch, EpochInput
from rekindle.streams.log import OutputLog
from rekindle.task.core.phases import TaskEvent
from rekindle.task.core.status import TaskComponents, TaskStatus
from rekindle.task.discard import discard_log_if_marked
from rekindle.task.earlier_boots import continue_log
from rekindle.task.inputs import SourceInputs
from rekindle.task.loop import EpochLoop
from rekindle.task.saver import CheckpointSaver
from rekindle.task.sinks import SinkWriters
from rekindle.task.state import TaskState
from rekindle.topology.spec import SinkSpec

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


class MemorySink:
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


class World:
    """One task's components around a loop; the clock is set by hand."""

    def __init__(
        self,
        directory: Path,
        start: TaskState | None = None,
        per_epoch: int = 1,
        replicas: int = 1,
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
        self.log = OutputLog(directory, "s", 0, SCHEMA)
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
        self.saver = CheckpointSaver(self.states)
        self.sinks = SinkWriters(
            self.log, state.epoch, lambda _, __: self.sink, earlier.compare_files_from
        )
        self.status = TaskStatus(
            REF, "boot", origin_us=0, epoch_interval_us=1_000_000, clock=lambda: self.now
        )
        self.status.step(TaskEvent.START_BEGUN)
        self.status.step(TaskEvent.STARTED)
        self.status.restored_from = state.epoch
        self.status.components = TaskComponents(self.log, self.inputs, self.sinks, self.saver)
        self.saved: list[TaskState] = []
        self.loop = EpochLoop(
            chain=self.chain,
            state=state,
            inputs=self.inputs,
            log=self.log,
            checkpoint_interval_epochs=10,
            save=self.saved.append,
            status=self.status,
            wait=lambda _: False,
            earlier=earlier,
        )

    def run_to(self, now: float) -> None:
        self.now = now
        while self.loop.run_call(0):
            pass

    def sums(self) -> list[int]:
        return [b.rows["n"][0].as_py() for b in self.log]
