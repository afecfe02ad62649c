"""The inputs of a simulated task: a source that time releases, or readers of upstream streams.

As in a task's process (`rekindle.task.inputs`), with a reader for each upstream partition and one
`StreamsCore`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from rekindle.engine.bounds import CallBounds, CallBuilder
from rekindle.exchange.routing import partitions_read
from rekindle.protocol import Upstream
from rekindle.streams.epochs import EpochInput
from rekindle.streams.reader_core import Subscription
from rekindle.task.core.inputs import StreamsCore, released_epoch, released_in_s
from rekindle.topology.model import Partition, Segment
from rekindle_testing.simulation.network import Network
from rekindle_testing.simulation.reading import Listener, SimulatedReader
from rekindle_testing.simulation.scheduler import Process
from rekindle_testing.simulation.values import rows_of, source_value, source_watermark

READ_AHEAD_BYTES = 1 << 20
_LEAST_WAIT_S = 0.001
_ORIGIN_US = 0  # epoch 0 begins when the simulation does


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
        return released_epoch(self._clock(), _ORIGIN_US, self._epoch_interval_us)

    def take(self, bounds: CallBounds) -> list[EpochInput]:
        call = CallBuilder(bounds)
        while not call.full and self._next <= self.head():
            epoch, partition = self._next, self._partition
            rows = rows_of(source_value(partition, epoch))
            before, after = (source_watermark(partition, e) for e in (epoch - 1, epoch))
            call.add(EpochInput(epoch, before, after, (rows,)))
            self._next += 1
        return call.epochs

    def when_ready(self, action: Callable[[], None]) -> None:
        wait_s = released_in_s(self._next, self._clock(), _ORIGIN_US, self._epoch_interval_us)
        self._process.after(max(_LEAST_WAIT_S, wait_s), action)

    def route(self, upstreams: Sequence[Upstream]) -> None:
        """A source has no upstreams."""

    def unreadable(self) -> tuple[str, ...]:
        return ()

    def problem(self) -> str | None:
        return None


class StreamInputs:
    """Streams of upstream segments."""

    def __init__(
        self,
        process: Process,
        network: Network,
        segment: Segment,
        partition: int,
        next_epoch: int,
        watermark: int,
        epoch_interval_s: float,
    ) -> None:
        partitions = [partitions_read(entry, partition) for entry in segment.inputs]
        self._core = StreamsCore(partitions, next_epoch, watermark, READ_AHEAD_BYTES)
        self._readers = [
            SimulatedReader(
                process,
                network,
                Subscription(segment.inputs[channel.input].stream, channel.partition, next_epoch),
                epoch_interval_s,
                Listener(
                    partial(self._core.has_buffer_space, channel),
                    partial(self._core.arrived, channel),
                    lambda progress: None,
                    self._call_ended,
                ),
            )
            for channel in self._core.channels
        ]
        self._taker: Callable[[], None] | None = None

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
                if reads(reader, upstream):
                    reader.route(upstream.endpoints)
        self._wake_all()

    def unreadable(self) -> tuple[str, ...]:
        return tuple(sorted({a for r in self._readers for a in r.core.choice.unreadable()}))

    def problem(self) -> str | None:
        return next((p for r in self._readers if (p := r.core.problem()) is not None), None)

    def _wake_all(self) -> None:
        for reader in self._readers:
            reader.wake()

    def _call_ended(self) -> None:
        self._wake_all()
        self._take_if_ready()


def reads(reader: SimulatedReader, upstream: Upstream) -> bool:
    subscription = reader.subscription
    return (subscription.stream, subscription.partition) == (upstream.stream, upstream.partition)
