"""The inputs of a simulated task: a source that time releases, or readers of upstream streams.

As in a task's process (`rekindle.task.inputs`), with a `ReaderCore` for each upstream partition and
one `StreamsCore`; calls go over the simulated network.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Protocol

from rekindle.coordinator.model import Partition
from rekindle.engine.bounds import CallBounds, CallBuilder
from rekindle.exchange.routing import partitions_read
from rekindle.protocol import Upstream
from rekindle.streams.epochs import EpochBatch, EpochInput
from rekindle.streams.reader_core import (
    CallFailed,
    CallReturned,
    ReadEpochs,
    ReaderCore,
    ReaderEvent,
    ReaderWoken,
    Subscription,
)
from rekindle.streams.replica_choice import DeliverEpochs, RoutesChanged
from rekindle.streams.sunion import Channel
from rekindle.task.core.inputs import StreamsCore, released_epoch, released_in_s
from rekindle.topology.model import Segment
from rekindle_testing.simulation.network import Network, Refused, TimedOut
from rekindle_testing.simulation.scheduler import Process
from rekindle_testing.simulation.values import rows_of, source_value

READ_EPOCHS = 16
"""Epochs that a call of a reader returns at most."""
_READ_AHEAD_BYTES = 1 << 20
_LEAST_WAIT_S = 0.001


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """Of a reader: epochs from a number on, of one incarnation."""

    incarnation: int | None
    from_epoch: int


@dataclass(frozen=True, slots=True)
class ReadReply:
    """`values` of consecutive epochs from the requested one on; none: nothing new. `truncated`: the
    log no longer has it."""

    head: int
    values: tuple[str, ...] = ()
    truncated: bool = False


class SimulatedInputs(Protocol):
    def head(self) -> int: ...
    def take(self, bounds: CallBounds) -> list[EpochInput]: ...
    def when_ready(self, action: Callable[[], None]) -> None: ...
    def route(self, upstreams: Sequence[Upstream]) -> None: ...
    def unreadable(self) -> tuple[str, ...]: ...
    def problem(self) -> str | None: ...


class SourceInputs:
    """A source. `clock`: Unix time of its node, in seconds."""

    def __init__(
        self,
        process: Process,
        partition: Partition,
        next_epoch: int,
        clock: Callable[[], float],
        epoch_interval_us: int,
    ) -> None:
        self._process = process
        self._partition = partition
        self._next = next_epoch
        self._clock = clock
        self._epoch_interval_us = epoch_interval_us

    def head(self) -> int:
        return released_epoch(self._clock(), 0, self._epoch_interval_us)

    def take(self, bounds: CallBounds) -> list[EpochInput]:
        call = CallBuilder(bounds)
        while not call.full and self._next <= self.head():
            rows = rows_of(source_value(self._partition, self._next))
            call.add(EpochInput(self._next, 0, 0, (rows,)))
            self._next += 1
        return call.epochs

    def when_ready(self, action: Callable[[], None]) -> None:
        wait_s = released_in_s(self._next, self._clock(), 0, self._epoch_interval_us)
        self._process.after(max(_LEAST_WAIT_S, wait_s), action)

    def route(self, upstreams: Sequence[Upstream]) -> None:
        """A source has no upstreams."""

    def unreadable(self) -> tuple[str, ...]:
        return ()

    def problem(self) -> str | None:
        return None


@dataclass(slots=True)
class _Reader:
    core: ReaderCore
    channel: Channel
    stream: str
    wakes_at: float = inf  # when a back-off ends


class StreamInputs:
    """Streams of upstream segments."""

    def __init__(
        self,
        process: Process,
        network: Network,
        segment: Segment,
        partition: int,
        next_epoch: int,
        interval_s: float,
    ) -> None:
        reads = [partitions_read(entry, partition) for entry in segment.inputs]
        self._core = StreamsCore(reads, next_epoch, 0, _READ_AHEAD_BYTES)
        self._process = process
        self._network = network
        self._readers = [
            self._reader(channel, segment.inputs[channel.input].stream, next_epoch, interval_s)
            for channel in self._core.channels
        ]
        self._taker: Callable[[], None] | None = None

    def _reader(self, channel: Channel, stream: str, next_epoch: int, interval_s: float) -> _Reader:
        subscription = Subscription(stream, channel.partition, next_epoch)
        return _Reader(ReaderCore(subscription, stall_s=2 * interval_s + 2), channel, stream)

    def head(self) -> int:
        return min(r.core.head for r in self._readers)

    def take(self, bounds: CallBounds) -> list[EpochInput]:
        taken = self._core.take(bounds)
        self._wake_all()
        return taken

    def when_ready(self, action: Callable[[], None]) -> None:
        """Call it once there is something to take."""
        self._taker = action
        self._take_if_ready()

    def _take_if_ready(self) -> None:
        if self._core.may_take and (taker := self._taker) is not None:
            self._taker = None
            taker()

    def route(self, upstreams: Sequence[Upstream]) -> None:
        for upstream in upstreams:
            for reader in self._readers:
                if (reader.stream, reader.channel.partition) == (
                    upstream.stream,
                    upstream.partition,
                ):
                    self._step(reader, RoutesChanged(upstream.endpoints))
        self._wake_all()

    def unreadable(self) -> tuple[str, ...]:
        return tuple(sorted({a for r in self._readers for a in r.core.choice.unreadable()}))

    def problem(self) -> str | None:
        return next((p for r in self._readers if (p := r.core.problem()) is not None), None)

    def _wake_all(self) -> None:
        for reader in self._readers:
            self._wake(reader)

    def _wake(self, reader: _Reader) -> None:
        """It calls again, now or when a back-off ends."""
        self._step(reader, ReaderWoken(self._core.has_buffer_space(reader.channel)))
        wake_at = reader.core.wake_at()
        if wake_at is None or wake_at >= reader.wakes_at:
            return
        reader.wakes_at = wake_at

        def wake() -> None:
            if reader.wakes_at == wake_at:
                reader.wakes_at = inf
                self._wake(reader)

        wait_s = wake_at - self._process.scheduler.now
        self._process.after(max(_LEAST_WAIT_S, wait_s), wake)

    def _step(self, reader: _Reader, event: ReaderEvent, reply: ReadReply | None = None) -> None:
        first = event.epochs[0] if isinstance(event, CallReturned) and event.epochs else 0
        for effect in reader.core.step(event, self._process.scheduler.now):
            match effect:
                case ReadEpochs():
                    self._call(reader, effect)
                case DeliverEpochs(epochs):
                    assert reply is not None
                    for epoch in epochs:
                        self._deliver(reader, epoch, reply.values[epoch - first])

    def _deliver(self, reader: _Reader, epoch: int, value: str) -> None:
        batch = EpochBatch(reader.stream, reader.channel.partition, epoch, 0, rows_of(value), value)
        self._core.arrived(reader.channel, batch)

    def _call(self, reader: _Reader, call: ReadEpochs) -> None:
        def ended(result: ReadReply | Refused | TimedOut) -> None:
            if isinstance(result, ReadReply) and not result.truncated:
                epochs = tuple(range(call.epoch, call.epoch + len(result.values)))
                self._step(reader, CallReturned(call.call, result.head, epochs), result)
            else:
                truncated = isinstance(result, ReadReply)
                timed_out = isinstance(result, TimedOut)
                self._step(reader, CallFailed(call.call, truncated, timed_out))
            self._wake_all()
            self._take_if_ready()

        host = call.address.rpartition(":")[0]
        request = ReadRequest(call.incarnation, call.epoch)
        self._network.call(self._process, host, request, ended, call.deadline_s)
