"""The inputs of a task: its own source, released by the wall clock, or upstream partitions.

Both deliver complete, consecutive epochs through one interface; `core.inputs` decides which
ones may be taken. Does not know engine, log or sinks.

Design: docs/design/epochs.md#cuts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from rekindle.connectors.source import ReplayableSource
from rekindle.engine.bounds import CallBounds, CallBuilder
from rekindle.errors import RekindleError
from rekindle.exchange.routing import Share, partitions_read, share_read
from rekindle.protocol import Upstream
from rekindle.streams.client import StreamClient
from rekindle.streams.epochs import EpochBatch, EpochInput
from rekindle.streams.io_thread import IoThread
from rekindle.streams.reader import REQUEST_BYTES, Client, PartitionReader
from rekindle.streams.reader_core import Subscription
from rekindle.streams.sunion import Channel
from rekindle.task.core.inputs import StreamsCore, long_pause_problem, released_epoch, released_in_s
from rekindle.topology.model import Input, Segment
from rekindle.workers import CallTimer

READ_AHEAD_BYTES = 32 << 20
"""Bytes that readers may buffer, and the same again in complete epochs."""

MIN_REQUEST_BYTES = 64 << 10
"""Minimum bytes of a reader's request; with many readers, the share of each may be smaller."""

Clock = Callable[[], float]
"""Unix time in seconds."""


class Inputs(Protocol):
    """Epochs of one task. `take` is called by the engine's thread, the rest by any."""

    def take(self, bounds: CallBounds, timeout_s: float) -> list[EpochInput]:
        """The next complete epochs: at least one unless the timeout passes; more rows or bytes
        than `bounds` allows only if the first epoch alone has them."""
        ...

    def head(self) -> int:
        """Newest epoch that time, or the upstreams, have released."""
        ...

    def route(self, upstreams: Sequence[Upstream]) -> None: ...
    def unreadable(self) -> tuple[str, ...]:
        """Addresses of upstream replicas that cannot be read."""
        ...

    def problem(self) -> str | None: ...
    def close(self) -> None: ...


class SourceInputs:
    """The epochs of a source that this task reads itself."""

    def __init__(
        self,
        source: ReplayableSource,
        next_epoch: int,
        watermark: int,
        *,
        origin_us: int,
        epoch_interval_us: int,
        clock: Clock = time.time,
    ) -> None:
        self._source = source
        self._next = next_epoch
        self._watermark = watermark
        self._origin_us = origin_us
        self._epoch_interval_us = epoch_interval_us
        self._clock = clock
        self._cut_ahead: EpochInput | None = None  # of epoch `_next`: it did not fit into the call
        self._calls = CallTimer()
        self._closed = threading.Event()

    def head(self) -> int:
        return released_epoch(self._clock(), self._origin_us, self._epoch_interval_us)

    def take(self, bounds: CallBounds, timeout_s: float) -> list[EpochInput]:
        if self.head() < self._next:
            wait_s = released_in_s(
                self._next, self._clock(), self._origin_us, self._epoch_interval_us
            )
            self._closed.wait(min(timeout_s, wait_s))
        call = CallBuilder(bounds)
        while not call.full and self._next <= self.head():
            try:
                self._cut_ahead = self._cut_ahead or self._cut()
            except Exception:
                if not call.epochs:
                    raise
                break  # the next call raises it again
            if not call.add(self._cut_ahead):
                break
            self._watermark, self._cut_ahead = self._cut_ahead.watermark, None
            self._next += 1
        return call.epochs

    def _cut(self) -> EpochInput:
        with self._calls.during(f"reading epoch {self._next} of the source"):
            cut = self._source.cut(self._next)
        after = max(self._watermark, cut.watermark)
        return EpochInput(self._next, self._watermark, after, (cut.rows,))

    def route(self, upstreams: Sequence[Upstream]) -> None:
        """A source has no upstreams."""

    def unreadable(self) -> tuple[str, ...]:
        return ()

    def problem(self) -> str | None:
        resumes_at = self._source.next_epoch_to_cut(self._next)
        return self._calls.problem or long_pause_problem(
            self._next, resumes_at, self._epoch_interval_us
        )

    def close(self) -> None:
        self._closed.set()
        self._source.close()


class StreamInputs:
    """The epochs of upstream streams: a reader for each partition, one SUnion, and one thread."""

    def __init__(
        self,
        segment: Segment,
        partition: int,
        next_epoch: int,
        watermark: int,
        *,
        stall_s: float = 3.0,
        connect: Callable[..., Client] = StreamClient,
        check_size: Callable[[str, int], None] = lambda what, size: None,
        read_ahead_bytes: int = READ_AHEAD_BYTES,
    ) -> None:
        """`stall_s`: a replica that returns nothing new for so long is left for another one.
        `check_size` is called with an epoch's name and the bytes of it that upstream partitions
        have announced so far; if it raises, the task fails before it receives them."""
        reads = [partitions_read(i, partition) for i in segment.inputs]
        self._changed = threading.Condition()
        self._core = StreamsCore(reads, next_epoch, watermark, read_ahead_bytes)
        self._closed = False
        self._check_epoch_size = check_size
        self._wake_needed = False  # whether a reader waits for buffer space
        self._io = IoThread("pulls", self._thread_died)
        self._readers: dict[tuple[str, int], list[PartitionReader]] = {}
        for channel in self._core.channels:
            input = segment.inputs[channel.input]
            share = share_read(input, segment.partitions, partition)
            reader = self._reader(channel, input, next_epoch, share, stall_s, connect)
            self._readers.setdefault((input.stream, channel.partition), []).append(reader)
        self._io.start()

    def _reader(
        self,
        channel: Channel,
        input: Input,
        next_epoch: int,
        share: Share | None,
        stall_s: float,
        connect: Callable[..., Client],
    ) -> PartitionReader:
        return PartitionReader(
            self._io,
            Subscription(input.stream, channel.partition, next_epoch, share),
            lambda batch: self._arrived(channel, batch),
            lambda: self._has_buffer_space(channel),
            stall_s=stall_s,
            connect=partial(connect, check_size=partial(self._check_size, channel)),
            on_fatal=self._fail,
            request_bytes=max(MIN_REQUEST_BYTES, min(REQUEST_BYTES, self._core.channel_bytes)),
        )

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._core.failed(error)
            self._changed.notify_all()

    def _check_size(self, channel: Channel, epoch: int, size: int) -> None:
        with self._changed:
            total = self._core.announce(channel, epoch, size)
        self._check_epoch_size(f"epoch {epoch} of the upstream partitions together", total)

    def _thread_died(self, reason: str) -> None:
        self._fail(RekindleError(f"{reason}; nothing is read any more, so the task starts again"))

    def _arrived(self, channel: Channel, batch: EpochBatch) -> None:
        with self._changed:
            try:
                self._core.arrived(channel, batch)
            finally:
                if self._core.may_take:
                    self._changed.notify_all()
                    self._offer_space()

    def _has_buffer_space(self, channel: Channel) -> bool:
        with self._changed:
            has_space = self._core.has_buffer_space(channel)
            self._wake_needed |= not has_space
            return has_space

    def _offer_space(self) -> None:
        """Called under the lock when there may be more space: wake the readers that lack it."""
        if self._wake_needed:
            self._wake_needed = False
            self._io.call(self._wake_readers)

    def _wake_readers(self) -> None:
        for reader in self._all():
            reader.wake()

    def take(self, bounds: CallBounds, timeout_s: float) -> list[EpochInput]:
        with self._changed:
            self._changed.wait_for(lambda: self._core.may_take or self._closed, timeout_s)
            taken = self._core.take(bounds)
            self._offer_space()
            return taken

    def head(self) -> int:
        return min(r.head for r in self._all())

    def route(self, upstreams: Sequence[Upstream]) -> None:
        for upstream in upstreams:
            for reader in self._readers.get((upstream.stream, upstream.partition), ()):
                reader.route(upstream.endpoints)

    def unreadable(self) -> tuple[str, ...]:
        return tuple(sorted({address for r in self._all() for address in r.unreadable()}))

    def problem(self) -> str | None:
        return next((p for r in self._all() if (p := r.problem()) is not None), None)

    def close(self) -> None:
        for reader in self._all():
            reader.close()
        self._io.stop()
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _all(self) -> list[PartitionReader]:
        return [reader for readers in self._readers.values() for reader in readers]
