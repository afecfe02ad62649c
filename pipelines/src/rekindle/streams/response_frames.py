"""The frames of a response: epochs are read from a log, divided into shares and encoded, in
batches.

A batch is read when the one before it has been sent, so that a slow reader keeps little in memory.
The event loop itself reads only epochs that are probably in memory. The rest is done in threads:
shares and older epochs in one, large epochs in another, files in the store in a third.

Knows neither HTTP nor which topology a reader belongs to (`rekindle.identity`).

Design: docs/design/streams.md#edges.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Hashable, Mapping
from functools import partial
from typing import Any, Protocol

import pyarrow as pa

from rekindle.errors import BelowFloor
from rekindle.exchange.routing import Share
from rekindle.exchange.shuffle import Shares, SharesCache, group_by_share
from rekindle.streams import records
from rekindle.streams.epochs import NO_EPOCH, BatchKind
from rekindle.streams.io_thread import SLICE_S, CallThread
from rekindle.streams.live_history import Position, Span
from rekindle.streams.live_output import LiveOutput
from rekindle.streams.log import OutputLog
from rekindle.streams.log_reading import MAX_READ_EPOCHS, EncodedEpoch
from rekindle.streams.memory_budget import MemoryBudget
from rekindle.streams.store_calls import StoreCalls
from rekindle.streams.wire import (
    MAX_PART_BYTES,
    ReadRequest,
    control_frame,
    epoch_frame,
    live_fields,
)
from rekindle.table_memory import object_bytes

SERVE_BYTES = 112 << 20
"""Memory for readers, by default."""
_SHARES_CACHE_FRACTION = 1 / 7
_RESPONSES_FRACTION = 4 / 7
"""The part of the memory that all responses may reserve; a larger epoch is sent alone. The rest is
used by logs, for fetched files."""
PORTION_BYTES = 1 << 20
"""Older epochs that are sent without a share are read in portions of this size."""
BATCH_BYTES = 128 << 10
"""Small epochs are read, divided and sent in batches of this size."""
LARGE_BYTES = 4 << 20
"""Larger epochs are read and divided in a separate thread."""
_CALL_SHARES_FRACTION = 1 / 4
"""A call ends when its shares fill this part of the cache of shares, or after one larger epoch, so
that other calls that read the same epochs still find their shares in the cache."""
ROUND_S = 0.25
"""The thread of shares works for each waiting call once within this time."""

Frames = list[tuple[bytes, pa.Buffer | None]]
"""A batch of frames with their payloads. An empty batch: the next one takes longer, so frames that
are ready should be sent."""


class _Read(Protocol):
    """Reads epochs of a log: `OutputLog.read_local`, or `read_fetched` of one file."""

    def __call__(
        self, epoch: int, max_bytes: int, max_epochs: int = ..., /, *, at_least_one: bool = ...
    ) -> list[EncodedEpoch]: ...


class ResponseFrames:
    """The frames of all responses of a server; used within one event loop."""

    def __init__(self, memory_bytes: int = SERVE_BYTES) -> None:
        cached_bytes = int(_SHARES_CACHE_FRACTION * memory_bytes)
        self._call_shares_bytes = int(_CALL_SHARES_FRACTION * cached_bytes)
        self._shares_cache = SharesCache(cached_bytes)
        self._budget = MemoryBudget(int(_RESPONSES_FRACTION * memory_bytes))
        self._rows_thread = CallThread("stream-rows")
        self._large_thread = CallThread("stream-large")
        self._store_calls = StoreCalls()

    def stop(self, timeout_s: float) -> None:
        """End the threads after their calls in progress."""
        for thread in (self._rows_thread, self._large_thread, self._store_calls):
            thread.stop(timeout_s)

    async def read(self, log: OutputLog, request: ReadRequest) -> AsyncGenerator[Frames]:
        """The batches of a call. The first one has an epoch, if there is one. Raises BelowFloor,
        LogCorrupt, StoreError."""
        batches = self._read(_Call(log, request, self._call_shares_bytes))
        async with contextlib.aclosing(batches):
            async for frames in batches:
                yield frames

    async def read_live(self, output: LiveOutput, request: ReadRequest) -> AsyncGenerator[Frames]:
        """As `read`, for a live request: batches of all kinds in their order."""
        call, from_epoch = _Call(output.log, request, self._call_shares_bytes), request.from_epoch
        position = position_in(output, request)
        while not call.full and (following := output.next(position, from_epoch)) is not None:
            span, log = following
            if span.is_control:
                yield [(control_frame(span.kind, span.first, span.number), None)]
                call.add_sent(None)
                position = Position(span.number + 1, NO_EPOCH)
                continue
            call.begin_span(log, span)
            batches = self._read(call)
            try:
                async with contextlib.aclosing(batches):
                    async for frames in batches:
                        yield frames
            except BelowFloor:
                if span.kind is BatchKind.STABLE:
                    raise
                # Tentative epochs were dropped meanwhile: the reader continues after them.
            read_any = call.epoch > span.first
            if read_any:
                # After a tentative epoch its stable version is still needed, earlier ones are not.
                from_epoch = call.epoch - (span.kind is BatchKind.TENTATIVE)
            gone = not read_any and not call.full
            position = Position(span.number, span.last + 1 if gone else call.epoch)

    async def _read(self, call: _Call) -> AsyncGenerator[Frames]:
        log = call.log
        while not call.complete:
            if (spilled := log.spilled(call.epoch)) is not None:
                name, size = spilled
                if call.begun:
                    yield []
                async with self._budget.reserve(name, 2 * size):  # the file, and its shares
                    fetched = log.fetched(name)
                    if fetched is None:
                        fetched = await self._store_calls.run(partial(log.fetch, name), name)
                    while not call.complete and log.spilled(call.epoch) == spilled:
                        batches = self._next_batches(
                            call, partial(log.read_fetched, fetched), reserved=True
                        )
                        async with contextlib.aclosing(batches):
                            async for frames in batches:
                                yield frames
                call.portion.clear()
            elif call.epoch <= log.last:
                batches = self._next_batches(call, log.read_local, reserved=False)
                async with contextlib.aclosing(batches):
                    async for frames in batches:
                        yield frames
            else:
                return

    async def _next_batches(
        self, call: _Call, read: _Read, *, reserved: bool
    ) -> AsyncGenerator[Frames]:
        """At least one batch, unless the epoch was truncated. `reserved`: its memory is reserved
        already."""
        if call.share is not None:
            slice_s = min(SLICE_S, ROUND_S / (1 + len(self._rows_thread)))
            small = partial(self._small_shares, call, read, slice_s)
            if frames := await self._rows_thread.run(small):
                yield frames
                return
        elif call.log.is_recent(call.epoch) and (portion := read(call.epoch, BATCH_BYTES)):
            yield call.take(portion)
            return
        thread = self._rows_thread
        portion = await thread.run(partial(_portion, call, read))
        if not portion:
            if call.begun:
                yield []
            thread = self._large_thread
            max_bytes, max_epochs = 0, 1  # one epoch, whatever its size
            portion = await thread.run(
                partial(read, call.epoch, max_bytes, max_epochs, at_least_one=True)
            )
        share = call.share
        if share is None or not portion or (payload := portion[0].payload) is None:
            if frames := call.take(portion):
                yield frames
            return
        batches = self._large_share(call, share, portion[0], payload, thread, reserved)
        async with contextlib.aclosing(batches):
            async for frames in batches:
                yield frames

    def _small_shares(self, call: _Call, read: _Read, slice_s: float) -> Frames:
        """Shares of the next small epochs: at least one, and as many as the time allows. Epochs
        that were read and are not divided yet are kept in `call.portion`."""
        assert call.share is not None
        ends_at = time.monotonic() + slice_s
        frames: Frames = []
        portion = call.portion or read(call.epoch, BATCH_BYTES)[::-1]
        while portion and not call.complete:
            epoch, watermark, digest, payload, _, idle = portion.pop()
            rows, checksum, shares_bytes = None, 0, 0
            if payload is not None:
                divided = self._shares(call, call.share, epoch, payload)
                shares_bytes = divided.nbytes
                rows, checksum = _encode(divided[call.share.index])
            frame = epoch_frame(
                epoch, watermark, digest, rows, checksum, live=call.live_fields, idle=idle
            )
            frames.append((frame, rows))
            call.add_sent(rows, shares_bytes)
            if time.monotonic() >= ends_at:
                break
        call.portion = portion
        return frames

    async def _large_share(
        self,
        call: _Call,
        share: Share,
        encoded: EncodedEpoch,
        payload: pa.Buffer,
        thread: CallThread,
        reserved: bool,
    ) -> AsyncGenerator[Frames]:
        """The share of one epoch, in parts; each is encoded when the one before it has been
        sent."""
        epoch, watermark, digest, _, _, idle = encoded
        key, size = _shares_key(call.log, share, epoch), payload.size
        if call.begun:
            yield []
        async with (
            contextlib.nullcontext() if reserved else self._budget.reserve(key, size) as reservation
        ):
            divided = await thread.run(partial(self._shares, call, share, epoch, payload))
            shares_bytes, parts = divided.nbytes, _parts(divided[share.index])
            del divided
            count = len(parts)
            for number in range(count):
                rows, checksum = await thread.run(partial(_encode, parts.pop(0)))
                if reservation is not None and not parts:  # the last part
                    self._budget.shrink(reservation, 0 if rows is None else rows.size)
                call.add_sent(rows, 0 if number else shares_bytes, epochs=number + 1 == count)
                frame = epoch_frame(
                    epoch,
                    watermark,
                    digest,
                    rows,
                    checksum,
                    number,
                    count,
                    call.live_fields,
                    idle=idle,
                )
                yield [(frame, rows)]

    def _shares(self, call: _Call, share: Share, epoch: int, payload: pa.Buffer) -> Shares:
        return self._shares_cache.get(
            _shares_key(call.log, share, epoch),
            lambda: group_by_share(records.decode_rows(payload), share.key_by, share.partitions),
        )


def _portion(call: _Call, read: _Read) -> list[EncodedEpoch]:
    """The next epochs of at most PORTION_BYTES, or one of at most LARGE_BYTES; none if it is
    larger."""
    if call.share is None and (portion := read(call.epoch, min(PORTION_BYTES, call.bytes_left))):
        return portion
    max_epochs = 1
    return read(call.epoch, LARGE_BYTES, max_epochs)


def position_in(output: LiveOutput, request: ReadRequest) -> Position | None:
    """The position from which a live request continues; None if it begins, or if its position is in
    the output of another process."""
    at = request.live
    return Position(at.span, at.epoch) if at is not None and at.boot == output.boot else None


def _shares_key(log: OutputLog, share: Share, epoch: int) -> Hashable:
    return log.stream, log.partition, log.attempt, epoch, share.key_by, share.partitions


class _Call:
    """The progress of one response, and whether it is complete. `bytes_left`: memory that its
    reader may still need for further epochs."""

    def __init__(self, log: OutputLog, request: ReadRequest, shares_bytes: int) -> None:
        self.log = log
        self.share = request.share
        self.epoch = request.from_epoch  # the next one
        self.bytes_left = request.max_bytes
        self.through: int | None = None  # the last epoch of a span; None: all of the log
        self.live_fields: Mapping[str, Any] | None = None  # of the frames
        self.full = False  # no further epoch may be sent
        self.complete = False  # no further epoch of this span, or at all, is to be sent
        self.portion: list[EncodedEpoch] = []
        """Epochs that have been read and not divided yet, the next one last."""
        self._object_bytes = object_bytes(len(log.schema))
        self._epochs = 0
        self._shares_bytes_left = shares_bytes

    @property
    def begun(self) -> bool:
        """Whether an epoch has been sent."""
        return self._epochs > 0

    def begin_span(self, log: OutputLog, span: Span) -> None:
        """The next epochs are those of a span."""
        self.log, self.epoch, self.through = log, span.first, span.last
        self.live_fields = live_fields(span.kind, span.attempt, span.number)
        self.complete = self.full
        self.portion.clear()

    def take(self, portion: list[EncodedEpoch]) -> Frames:
        """The frames of epochs that are sent without a share, as they are in the log."""
        frames: Frames = []
        for epoch, watermark, digest, payload, checksum, idle in portion:
            if self._epochs and self.bytes_left < self._reader_bytes(payload):
                self.complete = self.full = True
            if self.complete:
                break
            frame = epoch_frame(
                epoch, watermark, digest, payload, checksum, live=self.live_fields, idle=idle
            )
            frames.append((frame, payload))
            self.add_sent(payload)
        return frames

    def add_sent(
        self, payload: pa.Buffer | None, shares_bytes: int = 0, *, epochs: int = 1
    ) -> None:
        """An epoch is sent, or with `epochs=0` a part of it; `shares_bytes`: of its shares."""
        self.bytes_left -= self._reader_bytes(payload)
        self._shares_bytes_left -= shares_bytes
        self.epoch += epochs
        self._epochs += epochs
        if self._epochs == MAX_READ_EPOCHS or (
            self._epochs and min(self.bytes_left, self._shares_bytes_left) <= 0
        ):
            self.complete = self.full = True
        elif self.through is not None and self.epoch > self.through:
            self.complete = True

    def _reader_bytes(self, payload: pa.Buffer | None) -> int:
        """Memory that the reader needs for an epoch; an epoch without rows needs little."""
        return records.ALIGN if payload is None else int(payload.size) + self._object_bytes


def _encode(rows: pa.Table) -> tuple[pa.Buffer | None, int]:
    """Rows as they are sent, and their checksum."""
    if not rows.num_rows:
        return None, 0
    payload = records.encode_rows(rows)
    return payload, records.checksum(payload)


def _parts(rows: pa.Table) -> list[pa.Table]:
    """The rows of a share in parts of bounded size, so that a large one is not copied at once."""
    if rows.nbytes <= MAX_PART_BYTES:
        return [rows]
    most = max(1, rows.num_rows * MAX_PART_BYTES // rows.nbytes)
    return [rows.slice(at, most) for at in range(0, rows.num_rows, most)]
