"""The inputs of a task: its own source, released by the wall clock, or upstream partitions.

Both deliver complete, consecutive epochs through one interface. The clock only decides when a
source's epoch is released, never what is in it. Does not know engine, log or sinks.

Design: docs/design/epochs.md#cuts.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from rekindle.connectors.source import ReplayableSource
from rekindle.engine.bounds import CallBounds, CallBuilder, take_ready
from rekindle.exchange.routing import Share, partitions_read, share_read
from rekindle.protocol import Upstream
from rekindle.streams.epochs import EpochBatch, EpochInput
from rekindle.streams.flight import StreamClient
from rekindle.streams.reader import CALL_BYTES, PartitionReader, Subscription
from rekindle.streams.sunion import Channel, SUnion
from rekindle.topology.model import Input, Segment

AHEAD_BYTES = 32 << 20
"""Bytes that readers may buffer, and the same again in complete epochs."""

_DAY_US = 86_400_000_000
LONG_GAP_US = 365 * _DAY_US
"""A gap without rows that a source reports as a problem."""

MIN_CALL_BYTES = 64 << 10
"""Minimum bytes of a reader's call; with many readers, the share of each may be smaller."""

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
    def unreadable(self) -> tuple[str, ...]: ...
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
        interval_us: int,
        clock: Clock = time.time,
    ) -> None:
        self._source = source
        self._next = next_epoch
        self._watermark = watermark
        self._origin_us = origin_us
        self._interval_us = interval_us
        self._clock = clock
        self._peeked: EpochInput | None = None
        self._closed = threading.Event()

    def head(self) -> int:
        return released_epoch(self._clock(), self._origin_us, self._interval_us)

    def take(self, bounds: CallBounds, timeout_s: float) -> list[EpochInput]:
        if self.head() < self._next:
            due_us = self._origin_us + (self._next + 1) * self._interval_us
            self._closed.wait(min(timeout_s, max(0.0, due_us / 1e6 - self._clock())))
        call = CallBuilder(bounds)
        while not call.full and self._next <= self.head():
            try:
                self._peeked = self._peeked or self._cut()
            except Exception:
                if not call.epochs:
                    raise
                break  # the next call raises it again
            if not call.add(self._peeked):
                break
            self._watermark, self._peeked = self._peeked.watermark, None
            self._next += 1
        return call.epochs

    def _cut(self) -> EpochInput:
        cut = self._source.cut(self._next)
        after = max(self._watermark, cut.watermark)
        return EpochInput(self._next, self._watermark, after, (cut.rows,))

    def route(self, upstreams: Sequence[Upstream]) -> None:
        """A source has no upstreams."""

    def unreadable(self) -> tuple[str, ...]:
        return ()

    def problem(self) -> str | None:
        """Reports gaps of years, which usually mean a row with a wrong time: the task would wait
        that long for the next row."""
        epoch = self._source.next_change(self._next)
        gap_us = 0 if epoch is None else (epoch - self._next) * self._interval_us
        if epoch is None or gap_us < LONG_GAP_US:
            return None
        return (
            f"the source has no rows until epoch {epoch:,}, {gap_us // _DAY_US:,} days from now; "
            "correct the times of its rows, or raise speedup"
        )

    def close(self) -> None:
        self._closed.set()
        self._source.close()


class StreamInputs:
    """The epochs of upstream streams: a reader for each partition, one SUnion."""

    def __init__(
        self,
        segment: Segment,
        partition: int,
        next_epoch: int,
        watermark: int,
        *,
        stall_s: float = 3.0,
        connect: Callable[[str], StreamClient] = StreamClient,
        ahead_bytes: int = AHEAD_BYTES,
    ) -> None:
        reads = [partitions_read(i, partition) for i in segment.inputs]
        self._changed = threading.Condition()
        self._union = SUnion(reads, next_epoch, watermark, ahead_bytes)
        self._ready: deque[EpochInput] = deque()
        self._ready_bytes = 0
        self._ahead_bytes = ahead_bytes
        self._error: Exception | None = None
        self._closed = False
        self._readers: dict[tuple[str, int], list[PartitionReader]] = {}
        for channel in self._union.channels:
            input = segment.inputs[channel.input]
            share = share_read(input, segment.partitions, partition)
            reader = self._reader(channel, input, next_epoch, share, stall_s, connect)
            self._readers.setdefault((input.stream, channel.partition), []).append(reader)

    def _reader(
        self,
        channel: Channel,
        input: Input,
        next_epoch: int,
        share: Share | None,
        stall_s: float,
        connect: Callable[[str], StreamClient],
    ) -> PartitionReader:
        return PartitionReader(
            Subscription(input.stream, channel.partition, next_epoch, share),
            lambda batch: self._arrived(channel, batch),
            lambda: self._has_capacity(channel),
            stall_s=stall_s,
            connect=connect,
            on_fatal=self._fail,
            call_bytes=max(MIN_CALL_BYTES, min(CALL_BYTES, self._union.channel_bytes)),
        )

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _arrived(self, channel: Channel, batch: EpochBatch) -> None:
        with self._changed:
            try:
                complete = self._union.add(channel, batch)
            except Exception as error:
                self._error = error
                self._changed.notify_all()
                raise
            if complete:
                self._ready.extend(complete)
                self._ready_bytes += sum(e.nbytes for e in complete)
                self._changed.notify_all()

    def _has_capacity(self, channel: Channel) -> bool:
        with self._changed:
            return self._union.has_capacity(channel) and self._ready_bytes < self._ahead_bytes

    def take(self, bounds: CallBounds, timeout_s: float) -> list[EpochInput]:
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._error or self._closed, timeout_s)
            if self._error is not None:
                raise self._error
            taken = take_ready(self._ready, bounds)
            self._ready_bytes -= sum(e.nbytes for e in taken)
            return taken

    def head(self) -> int:
        return min(r.released for r in self._all())

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
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _all(self) -> list[PartitionReader]:
        return [reader for readers in self._readers.values() for reader in readers]


def released_epoch(now_s: float, origin_us: int, interval_us: int) -> int:
    """The newest epoch whose time has passed."""
    return int((int(now_s * 1_000_000) - origin_us) // interval_us) - 1
