"""Reads the upstream streams of a task: the readers around the streams of its core.

Each upstream partition has a reader of stable epochs, and a live one while the core requests it;
all readers are in one thread. Does not know engine, log or sinks.

Design: docs/design/streams.md#sunion, docs/design/consistency.md#in-a-task.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from rekindle.consistency.messages import ConsistencySettings, ReadLive, ResumeStable, StopLive
from rekindle.errors import RekindleError
from rekindle.exchange.routing import Share, share_read
from rekindle.protocol import Endpoint, Upstream
from rekindle.streams.client import StreamClient
from rekindle.streams.epochs import EpochBatch
from rekindle.streams.io_thread import IoThread
from rekindle.streams.reader import REQUEST_BYTES, Client, PartitionReader
from rekindle.streams.reader_core import Subscription
from rekindle.streams.sunion import Channel
from rekindle.streams.wire import StreamProgress
from rekindle.task.core.streams import InputEvent, StreamsCore
from rekindle.task.core.upstreams import UpstreamReports
from rekindle.task.process import TaskProcess
from rekindle.topology.model import Input, Segment

MIN_REQUEST_BYTES = 64 << 10
"""Minimum bytes of a reader's request; with many readers, the share of each may be smaller."""


class StreamInputs:
    """Of a process whose core has opened its streams. `route` and `perform` are called under its
    lock, others by any thread."""

    def __init__(
        self,
        process: TaskProcess,
        segment: Segment,
        partition: int,
        settings: ConsistencySettings,
        next_epoch: int,
        *,
        stall_s: float = 3.0,
        connect: Callable[..., Client] = StreamClient,
        check_size: Callable[[str, int], None] = lambda what, size: None,
    ) -> None:
        """`stall_s`: a replica that returns nothing new for so long is left for another one.
        `check_size` is called with an epoch's name and the bytes of it that upstream partitions
        have announced so far; if it raises, the task fails before it receives them."""
        self._process = process
        self._may_be_tentative = settings.max_delay_s is not None
        self._segment = segment
        self._partition = partition
        self._stall_s = stall_s
        self._connect = connect
        self._check_epoch_size = check_size
        self._wake_needed = False  # whether a reader may wait for buffer space
        channels = self._streams.channels
        self._request_bytes = max(
            MIN_REQUEST_BYTES, min(REQUEST_BYTES, settings.read_ahead_bytes // len(channels))
        )
        self._reports = UpstreamReports(
            {channel: self._input(channel).stream for channel in channels}
        )
        self._endpoints: dict[tuple[str, int], tuple[Endpoint, ...]] = {}
        self._io = IoThread("pulls", self._thread_died)
        self._readers = {
            channel: self._reader(channel, next_epoch, live=False) for channel in channels
        }
        self._live_readers: dict[Channel, PartitionReader] = {}
        self._io.start()

    @property
    def _streams(self) -> StreamsCore:
        streams = self._process.core.streams
        assert streams is not None, "the core has opened its streams"
        return streams

    # -- readers ---------------------------------------------------------------------------------

    def _input(self, channel: Channel) -> Input:
        return self._segment.inputs[channel.input]

    def _reader(self, channel: Channel, from_epoch: int, *, live: bool) -> PartitionReader:
        input = self._input(channel)
        share: Share | None = share_read(input, self._segment.partitions, self._partition)
        connect = (
            self._connect
            if live
            else partial(self._connect, check_size=partial(self._check_size, channel))
        )
        return PartitionReader(
            self._io,
            Subscription(input.stream, channel.partition, from_epoch, share, live),
            partial(self._arrived, channel, live=live),
            lambda: self._has_buffer_space(channel, live),
            stall_s=self._stall_s,
            connect=connect,
            on_fatal=self._fail if not live else lambda error: None,
            request_bytes=self._request_bytes,
            on_progress=partial(self._progressed, channel, live)
            if self._may_be_tentative
            else None,
        )

    def _fail(self, error: Exception) -> None:
        self._process.tell(partial(self._process.core.call_failed, error))

    def _thread_died(self, reason: str) -> None:
        self._fail(RekindleError(f"{reason}; nothing is read any more, so the task starts again"))

    def _check_size(self, channel: Channel, epoch: int, size: int) -> None:
        with self._process.lock:
            total = self._streams.announce(channel, epoch, size)
        self._check_epoch_size(f"epoch {epoch} of the upstream partitions together", total)

    def _has_buffer_space(self, channel: Channel, live: bool) -> bool:
        with self._process.lock:
            has_space = self._streams.may_read(channel, live)
            self._wake_needed |= not has_space
            return has_space

    def offer_space(self) -> None:
        """Called when there may be more space, as after epochs were taken: wake the readers that
        lack it."""
        if self._wake_needed:
            self._wake_needed = False
            self._io.call(self._wake_readers)

    def _wake_readers(self) -> None:
        for reader in self._all_readers():
            reader.wake()

    def _all_readers(self) -> list[PartitionReader]:
        with self._process.lock:
            return [*self._readers.values(), *self._live_readers.values()]

    # -- events ----------------------------------------------------------------------------------

    def _arrived(self, channel: Channel, batch: EpochBatch, *, live: bool) -> None:
        with self._process.lock:
            if not live or channel in self._live_readers:
                self._report(
                    lambda streams, now: streams.batch_received(channel, batch, now, live=live)
                )

    def _progressed(self, channel: Channel, live: bool, progress: StreamProgress) -> None:
        """A replica has reported which epochs it has."""
        with self._process.lock:
            for event in self._reports.receive(channel, progress, live=live):
                self._report(event)

    def _report(self, happened: InputEvent) -> None:
        self._process.tell(partial(self._process.core.input_reported, happened))
        if self._streams.may_take:  # the epochs that are complete have a buffer of their own
            self.offer_space()

    # -- effects ---------------------------------------------------------------------------------

    def perform(self, effect: ReadLive | StopLive | ResumeStable) -> None:
        match effect:
            case ReadLive(channel, from_epoch):
                self._reports.live_began(channel)
                reader = self._live_readers[channel] = self._reader(channel, from_epoch, live=True)
                reader.route(
                    self._endpoints.get((reader.subscription.stream, channel.partition), ())
                )
            case StopLive(channel):
                self._reports.live_ended(channel)
                self._live_readers.pop(channel).close()
            case ResumeStable():
                self._wake_needed = True  # so that its reader of stable epochs is woken
        self.offer_space()

    def route(self, upstreams: Sequence[Upstream]) -> None:
        for upstream in upstreams:
            self._endpoints[upstream.stream, upstream.partition] = upstream.endpoints
        for reader in self._all_readers():
            subscription = reader.subscription
            endpoints = self._endpoints.get((subscription.stream, subscription.partition))
            if endpoints is not None:
                reader.route(endpoints)

    # -- status ----------------------------------------------------------------------------------

    def heads(self) -> tuple[int, ...]:
        """Of each channel: the newest epoch that a replica has released."""
        return tuple(reader.head for reader in self._readers.values())

    def head(self) -> int:
        return min(self.heads())

    def unreadable(self) -> tuple[str, ...]:
        """Addresses of replicas at which the last call failed."""
        readers = self._readers.values()
        return tuple(sorted({address for r in readers for address in r.unreadable()}))

    def problem(self) -> str | None:
        return next((p for r in self._readers.values() if (p := r.problem()) is not None), None)

    def close(self) -> None:
        for reader in self._all_readers():
            reader.close()
        self._io.stop()
