"""Tasks in a row, each a real consistency manager with a fake engine, and the links between them.

Task `k` reads stream `k` (of the task before it; for the first task a source) and one side source.
Links have latency and can be cut; what they would have delivered comes when they are healed, from
the log of the upstream. The output of a task is a list of records in the order of their appends, as
a client sees them. Events are in a heap; nothing here is random.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pyarrow as pa

from rekindle.consistency.core import ConsistencyCore
from rekindle.consistency.messages import (
    AnswerPartner,
    ConsistencyEffect,
    ConsistencySettings,
    DropFork,
    EmitReconciliationDone,
    EmitUndo,
    EndPostponement,
    ForkState,
    Policy,
    ProcessStable,
    ProcessTentative,
    ReadLive,
    RequestPostponement,
    ResumeStable,
    StopLive,
)
from rekindle.consistency.states import TRANSITIONS, ConsistencyState
from rekindle.streams.epochs import NO_EPOCH, BatchKind, EpochBatch, EpochInput
from rekindle.streams.sunion import Channel
from rekindle.table_memory import memory_bytes
from rekindle.transitions import StateMachine

INTERVAL_S = 1.0
CALL_S = 0.02
SCHEMA = pa.schema([("n", pa.int64())])
NO_ROWS = SCHEMA.empty_table()
EPOCH_BYTES = memory_bytes(pa.table({"n": [0]}, schema=SCHEMA))
"""Of memory: each epoch of a world has one row."""
MODULUS = 2**61 - 1

Happened = Callable[[Any, float], list[Any]]
"""A call of a method of a task's core, at a time."""
Cell = tuple[ConsistencyState, str]
COVERED: Counter[Cell] = Counter()
"""How often each cell of the table was used, by all worlds of a process."""


class Recording(StateMachine[ConsistencyState, str]):
    def step(self, event: str) -> None:
        COVERED[self.state, event] += 1
        super().step(event)


@dataclass(frozen=True, slots=True)
class Record:
    """One record of a task's output; `epoch` of a control record: what it names."""

    at: float
    kind: BatchKind
    epoch: int
    value: int = 0
    attempt: int = 0
    after: int = NO_EPOCH  # newest stable epoch before it
    channels: int = 0  # how many had delivered a tentative epoch

    @property
    def batch(self) -> EpochBatch:
        is_data = self.kind in (BatchKind.STABLE, BatchKind.TENTATIVE)
        rows = rows_of(self.value) if is_data else NO_ROWS
        return EpochBatch(
            "s", 0, self.epoch, self.epoch, rows, str(self.value), self.kind, self.attempt
        )


class Stream:
    """An output log."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.stable: list[Record] = []  # by epoch
        self.stable_and_done: list[Record] = []  # what a stable subscription gets, with REC_DONE
        self.tentative = NO_EPOCH  # newest tentative epoch that was not corrected
        self.grew: list[Callable[[], None]] = []

    def append(self, record: Record) -> None:
        self.records.append(record)
        match record.kind:
            case BatchKind.STABLE:
                self.stable.append(record)
                self.stable_and_done.append(record)
            case BatchKind.RECONCILIATION_DONE:
                self.stable_and_done.append(record)
                self.tentative = NO_EPOCH
            case BatchKind.TENTATIVE:
                self.tentative = max(self.tentative, record.epoch)
        for callback in self.grew:
            callback()


@functools.lru_cache(1 << 12)
def rows_of(value: int) -> pa.Table:
    return pa.table({"n": [value]}, schema=SCHEMA)


def fold(state: int, epoch: EpochInput) -> int:
    for table in epoch.inputs:
        for value in table["n"].to_pylist():
            state = (state * 31 + value + 1) % MODULUS
    return (state + epoch.watermark) % MODULUS


@dataclass(slots=True)
class Link:
    """What delivers one stream to one channel of a task: two subscriptions."""

    world: World
    task: Task
    channel: Channel
    stream: Stream
    latency_s: float = 0.01
    cut: bool = False
    next_stable: int = 0  # index in `stream.stable_and_done`
    live_from: int | None = None  # epoch
    next_live: int = 0  # index in `stream.records`
    reported: tuple[int, int] = (NO_EPOCH, NO_EPOCH)
    delivering: bool = False
    due_at: float = -1.0  # of a call that `deliver_now` has scheduled and that was not made yet

    def grew(self) -> None:
        self.world.at(self.world.now + self.latency_s, self.deliver)

    def deliver_now(self) -> None:
        """After a step of the task, which may have space now."""
        if not (self.delivering or self.cut or self.due_at == self.world.now):
            self.due_at = self.world.now
            self.world.at(self.due_at, self.deliver)

    def read_live(self, from_epoch: int) -> None:
        self.live_from = from_epoch
        records = self.stream.records
        self.next_live = next(
            (i for i, r in enumerate(records) if r.epoch >= from_epoch), len(records)
        )
        self.world.at(self.world.now, self.deliver)

    def deliver(self) -> None:
        """All that has come through, and that the task has space for."""
        self.due_at = -1.0
        if self.cut or self.delivering:
            return
        self.delivering = True
        while self._report() or self._stable() or self._live():
            pass
        self.delivering = False

    def _is_here(self, record: Record) -> bool:
        return record.at + self.latency_s <= self.world.now + 1e-9

    def _report(self) -> bool:
        last = reversed(self.stream.stable[-4:])
        newest = next((r.epoch for r in last if self._is_here(r)), self.reported[0])
        report = (newest, self.stream.tentative)
        if report == self.reported:
            return False
        self.reported = report
        self.task.step(lambda core, now: core.upstream_reported(self.channel, *report, now))
        return True

    def _stable(self) -> bool:
        if self.next_stable >= len(self.stream.stable_and_done):
            return False
        record = self.stream.stable_and_done[self.next_stable]
        if not self._is_here(record) or not self.task.core.may_read(self.channel):
            return False
        self.next_stable += 1
        self.task.receive(self.channel, record, live=False)
        return True

    def _live(self) -> bool:
        while self.live_from is not None and self.next_live < len(self.stream.records):
            record = self.stream.records[self.next_live]
            if not self._is_here(record) or not self.task.core.may_read(self.channel, live=True):
                return False
            self.next_live += 1
            is_control = record.kind in (BatchKind.UNDO, BatchKind.RECONCILIATION_DONE)
            if is_control or record.epoch >= self.live_from:
                if not is_control:
                    self.live_from = record.epoch + (record.kind is BatchKind.STABLE)
                self.task.receive(self.channel, record, live=True)
                return True
        return False


@dataclass(slots=True)
class Task:
    """A core, its engine and its output."""

    world: World
    core: ConsistencyCore
    stream: Stream = field(default_factory=Stream)
    links: dict[Channel, Link] = field(default_factory=dict)
    states: dict[int, int] = field(default_factory=lambda: {0: 0})  # by attempt; 0: the stable one
    arrived: dict[int, float] = field(default_factory=dict)  # first arrival of each epoch
    stable_resumed: int = 0  # how often a channel was read again
    most_buffered: tuple[int, int] = (0, 0)  # epochs and bytes
    woken_at: float | None = None

    def receive(self, channel: Channel, record: Record, live: bool) -> None:
        if record.kind in (BatchKind.STABLE, BatchKind.TENTATIVE):
            self.arrived.setdefault(record.epoch, self.world.now)
        self.step(lambda core, now: core.batch_received(channel, record.batch, now, live=live))
        self.note_buffered()

    def wake(self) -> None:
        self.step(ConsistencyCore.woken)

    def step(self, happened: Happened) -> None:
        for effect in happened(self.core, self.world.now):
            self._perform(effect)
        for link in self.links.values():
            link.deliver_now()
        wake_at = self.core.wake_at
        if wake_at is not None and wake_at != self.woken_at:
            self.woken_at = wake_at
            self.world.at(wake_at, self.wake)

    def note_buffered(self) -> None:
        """After a batch: nothing else makes more of them."""
        epochs, size = self.core.buffered()
        self.most_buffered = (
            max(epochs, self.most_buffered[0]),
            max(size, self.most_buffered[1]),
        )

    def _perform(self, effect: ConsistencyEffect) -> None:
        now = self.world.now
        match effect:
            case ProcessStable():
                epochs = self.core.take_stable(self._first_epochs)
                took_s = self.world.options.call_s + self.world.options.process_epoch_s * len(
                    epochs
                )
                self.world.at(now + took_s, partial(self._stable, epochs))
            case ProcessTentative():
                self.world.at(now + self.world.options.call_s, partial(self._tentative, effect))
            case ForkState(attempt, after):
                assert attempt not in self.states
                assert after == self._newest()
                self.states[attempt] = self.states[0]
            case DropFork(attempt):
                del self.states[attempt]
            case EmitUndo(from_epoch):
                self._append(BatchKind.UNDO, from_epoch)
            case EmitReconciliationDone(through):
                self._append(BatchKind.RECONCILIATION_DONE, through)
            case ReadLive(channel, from_epoch):
                self.links[channel].read_live(from_epoch)
            case StopLive(channel):
                self.links[channel].live_from = None
            case ResumeStable(channel, from_epoch):
                link = self.links[channel]
                read = link.stream.stable_and_done[: link.next_stable]
                assert len([r for r in read if r.kind is BatchKind.STABLE]) == from_epoch
                self.stable_resumed += 1
            case RequestPostponement() | EndPostponement() | AnswerPartner():
                self.world.send_to_partner(self, effect)

    def _first_epochs(self, ready: deque[EpochInput]) -> list[EpochInput]:
        count = min(len(ready), self.world.options.call_epochs)
        return [ready.popleft() for _ in range(count)]

    def _newest(self) -> int:
        return self.stream.stable[-1].epoch if self.stream.stable else NO_EPOCH

    def _append(
        self, kind: BatchKind, epoch: int, value: int = 0, attempt: int = 0, channels: int = 0
    ) -> None:
        self.stream.append(
            Record(self.world.now, kind, epoch, value, attempt, self._newest(), channels)
        )

    def _stable(self, epochs: Sequence[EpochInput]) -> None:
        for epoch in epochs:
            self.states[0] = fold(self.states[0], epoch)
            self._append(BatchKind.STABLE, epoch.epoch, self.states[0])
        self.step(lambda core, now: core.stable_processed(epochs[-1].epoch, now))

    def _tentative(self, call: ProcessTentative) -> None:
        state = self.states[call.attempt] = fold(self.states[call.attempt], call.epoch)
        epoch = call.epoch.epoch
        self._append(BatchKind.TENTATIVE, epoch, state, call.attempt, len(call.channels))
        self.step(lambda core, now: core.tentative_processed(call.attempt, epoch, now))


@dataclass(frozen=True, slots=True)
class WorldOptions:
    """How a world of tasks in a row is built (`tasks` of them); times in
    seconds."""

    tasks: int = 1
    max_delay_s: float | None = 3.0
    during_failure: Policy = Policy.PROCESS
    during_stabilization: Policy = Policy.PROCESS
    blocking_inputs: frozenset[int] = frozenset()
    read_ahead_bytes: int = 1 << 20
    max_buffered_epochs: int = 1024
    latencies: tuple[float, ...] = ()  # of the links, first task first; 0.01 if left out
    has_partner: bool = False
    call_epochs: int = 16  # of a stable call, at most
    call_s: float = CALL_S  # of any call
    process_epoch_s: float = 0.002  # of each epoch in a stable call


class World:
    def __init__(self, options: WorldOptions) -> None:
        self.options = options
        self.now = 0.0
        self.epochs = 0  # that the sources have released
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self.send_to_partner: Callable[[Task, ConsistencyEffect], None] = lambda task, effect: None
        latencies = itertools.chain(options.latencies, itertools.repeat(0.01))
        upstream, self.sources = Stream(), list[Stream]()
        self.sources.append(upstream)
        self.tasks: list[Task] = []
        for _ in range(options.tasks):
            side = Stream()
            self.sources.append(side)
            task = self._task([upstream, side], latencies)
            self.tasks.append(task)
            upstream = task.stream

    def _task(
        self, streams: list[Stream], latencies: itertools.chain[float], replica: int = 0
    ) -> Task:
        options = self.options
        settings = ConsistencySettings(
            inputs=[[0] for _ in streams],
            schemas=[SCHEMA for _ in streams],
            blocking_inputs=options.blocking_inputs,
            max_delay_s=options.max_delay_s,
            during_failure=options.during_failure,
            during_stabilization=options.during_stabilization,
            has_partner=options.has_partner,
            replica=replica,
            read_ahead_bytes=options.read_ahead_bytes,
            max_buffered_epochs=options.max_buffered_epochs,
            max_call_epochs=options.call_epochs,
        )
        core = ConsistencyCore(settings, 0, NO_EPOCH)
        core.machine = Recording("consistency", TRANSITIONS, ConsistencyState.STABLE)
        task = Task(self, core)
        for at, (stream, latency) in enumerate(zip(streams, latencies, strict=False)):
            link = Link(self, task, Channel(at, 0), stream, latency)
            task.links[link.channel] = link
            stream.grew.append(link.grew)
        return task

    @property
    def states(self) -> list[ConsistencyState]:
        return [task.core.state for task in self.tasks]

    @property
    def links(self) -> list[Link]:
        return [link for task in self.tasks for link in task.links.values()]

    def at(self, when: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (when, next(self._order), do))

    def run(self, until: float) -> None:
        """Release epochs and do what happens, until a time."""
        while (released_at := (self.epochs + 1) * INTERVAL_S) <= until:
            self._run(released_at)
            epoch, self.epochs = self.epochs, self.epochs + 1
            for number, source in enumerate(self.sources):
                source.append(Record(self.now, BatchKind.STABLE, epoch, epoch * 7 + number))
        self._run(until)

    def _run(self, until: float) -> None:
        while self._heap and self._heap[0][0] <= until:
            when, _, do = heapq.heappop(self._heap)
            self.now = max(self.now, when)
            do()
        self.now = until

    def cut(self, link: int) -> None:
        self.links[link].cut = True

    def heal(self, link: int) -> None:
        self.links[link].cut = False
        self.at(self.now, self.links[link].deliver)

    def heal_all(self) -> None:
        for at in range(len(self.links)):
            self.heal(at)


class Replicas(World):
    """Two replicas of one task, with links of their own, that ask each other."""

    MESSAGE_S = 0.05

    def __init__(self, options: WorldOptions) -> None:
        super().__init__(replace(options, has_partner=True))
        latencies = itertools.chain(options.latencies[2:], itertools.repeat(0.01))
        self.tasks.append(self._task(self.sources, latencies, replica=1))
        self.send_to_partner = self._send

    def _send(self, task: Task, effect: ConsistencyEffect) -> None:
        replica = self.tasks.index(task)
        match effect:
            case RequestPostponement(lease_s):
                self._deliver(
                    replica, lambda core, now: core.postponement_requested(replica, lease_s, now)
                )
            case EndPostponement():
                self._deliver(replica, ConsistencyCore.promise_ended)
            case AnswerPartner(promised=True, lease_s=lease_s):
                self._deliver(replica, lambda core, now: core.partner_promised(lease_s, now))
            case AnswerPartner():
                self._deliver(replica, ConsistencyCore.partner_refused)

    def _deliver(self, replica: int, happened: Happened) -> None:
        """To the partner of a replica."""
        self.at(self.now + self.MESSAGE_S, partial(self.tasks[1 - replica].step, happened))


def failure_free(options: WorldOptions, epochs: int) -> list[list[int]]:
    """The stable output of each task in a run without failures."""
    states, streams = [0] * options.tasks, [list[int]() for _ in range(options.tasks)]
    for epoch in range(epochs):
        value = epoch * 7
        for k in range(options.tasks):
            tables = [rows_of(v) for v in (value, epoch * 7 + k + 1)]
            value = states[k] = fold(states[k], EpochInput(epoch, epoch - 1, epoch, tuple(tables)))
            streams[k].append(value)
    return streams
