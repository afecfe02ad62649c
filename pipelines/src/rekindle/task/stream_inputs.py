"""The epochs of upstream streams: the I/O around `StreamsCore`.

Each upstream partition has a reader of stable epochs, and a live one while the core requests it;
all readers are in one thread. If output may be tentative, UNDO and REC_DONE are written to it here,
under the lock of the core, so that they are in order with the epochs that the loop appends. Does
not know engine or sinks.

Design: docs/design/streams.md#sunion, docs/design/consistency.md#in-a-task.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from rekindle.consistency.messages import (
    ConsistencySettings,
    EmitReconciliationDone,
    EmitUndo,
    ReadLive,
    ResumeStable,
    StopLive,
)
from rekindle.engine.bounds import CallBounds
from rekindle.engine.model import EpochOutput
from rekindle.errors import RekindleError
from rekindle.exchange.routing import Share, share_read
from rekindle.protocol import Endpoint, Partner, Upstream
from rekindle.streams.client import StreamClient
from rekindle.streams.epochs import EpochBatch
from rekindle.streams.io_thread import IoThread
from rekindle.streams.live_output import LiveOutput
from rekindle.streams.reader import REQUEST_BYTES, Client, PartitionReader
from rekindle.streams.reader_core import Subscription
from rekindle.streams.sunion import Channel
from rekindle.streams.wire import StreamProgress
from rekindle.task.attempts import AttemptFile
from rekindle.task.core.loop import TentativeCompleted
from rekindle.task.core.status import TaskStatus
from rekindle.task.core.streams import InputEffect, StreamsCore, Taken
from rekindle.task.core.upstreams import UpstreamReports
from rekindle.topology.model import Input, Segment

MIN_REQUEST_BYTES = 64 << 10
"""Minimum bytes of a reader's request; with many readers, the share of each may be smaller."""


class StreamInputs:
    """The methods of the section "the loop" are called by the engine's thread, others by any."""

    def __init__(
        self,
        segment: Segment,
        partition: int,
        settings: ConsistencySettings,
        next_epoch: int,
        watermark: int,
        *,
        stall_s: float = 3.0,
        connect: Callable[..., Client] = StreamClient,
        check_size: Callable[[str, int], None] = lambda what, size: None,
        attempts: AttemptFile | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`stall_s`: a replica that returns nothing new for so long is left for another one.
        `check_size` is called with an epoch's name and the bytes of it that upstream partitions
        have announced so far; if it raises, the task fails before it receives them."""
        self._changed = threading.Condition()
        self._core = StreamsCore(settings, next_epoch, watermark)
        self.may_be_tentative = settings.max_delay_s is not None
        self._segment = segment
        self._partition = partition
        self._stall_s = stall_s
        self._connect = connect
        self._check_epoch_size = check_size
        self._attempts = attempts
        self._clock = clock
        self._output: LiveOutput | None = None
        self._closed = False
        self._wake_needed = False  # whether a reader may wait for buffer space
        self._request_bytes = max(
            MIN_REQUEST_BYTES,
            min(REQUEST_BYTES, settings.read_ahead_bytes // len(self._core.channels)),
        )
        self._reports = UpstreamReports(
            {channel: self._input(channel).stream for channel in self._core.channels}
        )
        self._endpoints: dict[tuple[str, int], tuple[Endpoint, ...]] = {}
        self._io = IoThread("pulls", self._thread_died)
        self._readers = {
            channel: self._reader(channel, next_epoch, live=False)
            for channel in self._core.channels
        }
        self._live_readers: dict[Channel, PartitionReader] = {}
        self._io.start()

    def attach(self, output: LiveOutput) -> None:
        """`output`: of the task, if it `may_be_tentative`. Called before it can be Live."""
        self._output = output

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
            on_progress=partial(self._progressed, channel, live) if self.may_be_tentative else None,
        )

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._core.failed(error)
            self._changed.notify_all()

    def _thread_died(self, reason: str) -> None:
        self._fail(RekindleError(f"{reason}; nothing is read any more, so the task starts again"))

    def _check_size(self, channel: Channel, epoch: int, size: int) -> None:
        with self._changed:
            total = self._core.announce(channel, epoch, size)
        self._check_epoch_size(f"epoch {epoch} of the upstream partitions together", total)

    def _has_buffer_space(self, channel: Channel, live: bool) -> bool:
        with self._changed:
            has_space = self._core.may_read(channel, live)
            self._wake_needed |= not has_space
            return has_space

    def _wake_readers(self) -> None:
        with self._changed:
            readers = self._all_readers()
        for reader in readers:
            reader.wake()

    # -- events ----------------------------------------------------------------------------------

    def _arrived(self, channel: Channel, batch: EpochBatch, *, live: bool) -> None:
        with self._changed:
            if not live or channel in self._live_readers:
                self._step(partial(self._core.batch_received, channel, batch, live=live))

    def _progressed(self, channel: Channel, live: bool, progress: StreamProgress) -> None:
        """A replica has reported which epochs it has."""
        with self._changed:
            for event in self._reports.receive(channel, progress, live=live):
                self._step(partial(event, self._core))

    def update_partner(self, partner: Partner | None, boot: str) -> None:
        """The other replica's messages in a poll; `boot`: of this task."""
        with self._changed:
            self._apply(self._core.update_partner(partner, boot, self._clock()))
            if self._core.may_take:
                self._changed.notify_all()

    def allow_tentative(self) -> None:
        """From now on output may be tentative."""
        with self._changed:
            self._apply(self._core.allow_tentative(self._clock()))

    def check_heads(self) -> None:
        """To be called while the task is not Live: decide whether an input is missing, because
        none of its replicas has responded for long. Does not wait."""
        with self._changed:
            heads = [reader.head for reader in self._readers.values()]
            self._apply(self._core.check_heads(heads, self._clock()))
            if self._core.may_take:
                self._changed.notify_all()

    def _step(self, happened: Callable[[float], list[InputEffect]]) -> None:
        """`happened`: a method of the core, but for the time. Called under the lock."""
        try:
            self._apply(happened(self._clock()))
        finally:
            if self._core.may_take:
                self._changed.notify_all()

    def _apply(self, effects: Sequence[InputEffect]) -> None:
        for effect in effects:
            match effect:
                case ReadLive(channel, from_epoch):
                    self._read_live(channel, from_epoch)
                case StopLive(channel):
                    self._reports.live_ended(channel)
                    self._live_readers.pop(channel).close()
                case ResumeStable():
                    self._wake_needed = True  # so that its reader of stable epochs is woken
                case EmitUndo(from_epoch):
                    self._attached_output().undo(from_epoch)
                case EmitReconciliationDone(through):
                    self._attached_output().reconciliation_done(through)
        if self._output is not None:
            self._output.enter(self._core.state)
        if self._core.may_take or effects:
            self._offer_space()

    def _offer_space(self) -> None:
        """Called under the lock when there may be more space: wake the readers that lack it."""
        if self._wake_needed:
            self._wake_needed = False
            self._io.call(self._wake_readers)

    def _read_live(self, channel: Channel, from_epoch: int) -> None:
        self._reports.live_began(channel)
        reader = self._live_readers[channel] = self._reader(channel, from_epoch, live=True)
        reader.route(self._endpoints.get((self._input(channel).stream, channel.partition), ()))

    def _attached_output(self) -> LiveOutput:
        assert self._output is not None, "output is attached before the task is Live"
        return self._output

    # -- the loop --------------------------------------------------------------------------------

    def take(self, bounds: CallBounds, timeout_s: float) -> Taken | None:
        """What the loop processes next: complete epochs, as many as `bounds` allows but at least
        one, or a tentative one. None at the timeout. Raises the first error of a reader or of the
        core."""
        until = self._clock() + timeout_s
        with self._changed:
            while not self._core.may_take and not self._closed:
                now, wake_at = self._clock(), self._core.wake_at
                if wake_at is not None and wake_at <= now:
                    self._step(self._core.woken)
                elif now >= until:
                    break
                else:
                    self._changed.wait(min(until, until if wake_at is None else wake_at) - now)
            taken = self._core.take(bounds)
            self._offer_space()
            return taken

    def stable_processed(self, through: int) -> None:
        """The stable epochs through this one are in the log."""
        with self._changed:
            self._step(partial(self._core.stable_processed, through))
            self._offer_space()

    def append(self, attempt: int, output: EpochOutput) -> None:
        """Append a tentative epoch. Raises OSError."""
        if self._attempts is not None:
            self._attempts.reserve(attempt)
        self._attached_output().append(attempt, output.epoch, output.watermark, output.rows)

    def tentative_completed(self, completed: TentativeCompleted) -> None:
        with self._changed:
            attempt, epoch = completed.attempt, completed.epoch
            if completed.failed:
                self._apply(self._core.leave_out(attempt, epoch, self._clock()))
            else:
                self._step(partial(self._core.tentative_processed, attempt, epoch))

    # -- status and routes -----------------------------------------------------------------------

    def report(self, status: TaskStatus) -> None:
        """Update the status: whether output is tentative, and what is missing."""
        with self._changed:
            core = self._core
            names = sorted({self._input(channel).name for channel in core.missing()})
            status.set_consistency(core.state, core.tentative_epoch, names, core.partner)

    def head(self) -> int:
        return min(r.head for r in self._readers.values())

    def route(self, upstreams: Sequence[Upstream]) -> None:
        with self._changed:
            for upstream in upstreams:
                self._endpoints[upstream.stream, upstream.partition] = upstream.endpoints
            readers = self._all_readers()
        for reader in readers:
            subscription = reader.subscription
            endpoints = self._endpoints.get((subscription.stream, subscription.partition))
            if endpoints is not None:
                reader.route(endpoints)

    def unreadable(self) -> tuple[str, ...]:
        """Addresses of replicas at which the last call failed."""
        readers = self._readers.values()
        return tuple(sorted({address for r in readers for address in r.unreadable()}))

    def problem(self) -> str | None:
        return next((p for r in self._readers.values() if (p := r.problem()) is not None), None)

    def close(self) -> None:
        with self._changed:
            readers = self._all_readers()
            self._closed = True
            self._changed.notify_all()
        for reader in readers:
            reader.close()
        self._io.stop()

    def _all_readers(self) -> list[PartitionReader]:
        return [*self._readers.values(), *self._live_readers.values()]
