"""What one call is sent: the frames of its epochs, read from a log and divided into shares in lots.

Each lot is taken when the one before it is on its way, so that a slow reader makes nothing wait in
memory. The loop itself reads only what is probably in memory; what takes longer is done in threads:
shares and older epochs in one, large epochs in another, files in the store in a third.

Knows neither HTTP nor identities.

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
from rekindle.exchange.shuffle import Split, SplitCache, split
from rekindle.streams import records
from rekindle.streams.epochs import NO_EPOCH, BatchKind
from rekindle.streams.io_thread import SLICE_S, CallThread
from rekindle.streams.live_history import Position, Run
from rekindle.streams.live_output import LiveOutput
from rekindle.streams.log import OutputLog
from rekindle.streams.log_reading import READ_EPOCHS, EncodedEpoch
from rekindle.streams.memory_budget import MemoryBudget
from rekindle.streams.store_calls import StoreCalls
from rekindle.streams.wire import (
    MAX_PART_BYTES,
    ReadRequest,
    control_frame,
    epoch_frame,
    live_marks,
)
from rekindle.table_memory import object_bytes

SERVE_BYTES = 112 << 20
"""Memory for readers, by default."""
_SPLIT_CACHE_SHARE = 1 / 7
_HELD_SHARE = 4 / 7
"""What all responses may hold, or one epoch. The rest is the log's, for fetched files."""
PORTION_BYTES = 1 << 20
LOT_BYTES = 128 << 10
"""Small epochs are read, divided and sent in lots of this size."""
LARGE_BYTES = 4 << 20
"""Larger epochs have a thread of their own."""
_CALL_SPLIT_SHARE = 1 / 4
"""Of the cache, splits of one call, or one: the others that read these epochs find them there."""
ROUND_S = 0.25
"""Within this, the thread of shares turns to each call that waits for it."""

Lot = list[tuple[bytes, pa.Buffer | None]]
"""Frames with their payloads. An empty one: what comes next takes longer."""


class _Read(Protocol):
    """Epochs of a log, as `OutputLog.read_local`."""

    def __call__(
        self, epoch: int, max_bytes: int, max_epochs: int = ..., /, *, at_least_one: bool = ...
    ) -> list[EncodedEpoch]: ...


class EpochLots:
    """Of all calls of a server; within one event loop."""

    def __init__(self, memory_bytes: int = SERVE_BYTES) -> None:
        cached_bytes = int(_SPLIT_CACHE_SHARE * memory_bytes)
        self._call_split_bytes = int(_CALL_SPLIT_SHARE * cached_bytes)
        self._splits = SplitCache(cached_bytes)
        self._budget = MemoryBudget(int(_HELD_SHARE * memory_bytes))
        self._rows_thread = CallThread("stream-rows")
        self._large_thread = CallThread("stream-large")
        self._store_calls = StoreCalls()

    def stop(self, timeout_s: float) -> None:
        """End the threads after their calls in progress."""
        for thread in (self._rows_thread, self._large_thread, self._store_calls):
            thread.stop(timeout_s)

    async def read(self, log: OutputLog, request: ReadRequest) -> AsyncGenerator[Lot]:
        """The lots of a call. The first one has an epoch, if there is one. Raises BelowFloor,
        LogCorrupt, StoreError."""
        lots = self._read(_Call(log, request, self._call_split_bytes))
        async with contextlib.aclosing(lots):
            async for lot in lots:
                yield lot

    async def read_live(self, output: LiveOutput, request: ReadRequest) -> AsyncGenerator[Lot]:
        """As `read`, of a live request: all kinds in their order."""
        call, from_epoch = _Call(output.log, request, self._call_split_bytes), request.from_epoch
        position = position_in(output, request)
        while not call.full and (following := output.next(position, from_epoch)) is not None:
            run, log = following
            if run.is_control:
                yield [(control_frame(run.kind, run.first, run.segment), None)]
                call.took(None)
                position = Position(run.segment + 1, NO_EPOCH)
                continue
            call.turn_to(log, run)
            lots = self._read(call)
            try:
                async with contextlib.aclosing(lots):
                    async for lot in lots:
                        yield lot
            except BelowFloor:
                if run.kind is BatchKind.STABLE:
                    raise
                # Tentative epochs were dropped meanwhile: the reader goes on behind them.
            read_any = call.epoch > run.first
            if read_any:
                from_epoch = call.epoch - (run.kind is BatchKind.TENTATIVE)
            gone = not read_any and not call.full
            position = Position(run.segment, run.last + 1 if gone else call.epoch)

    async def _read(self, call: _Call) -> AsyncGenerator[Lot]:
        log = call.log
        while not call.complete:
            if (spilled := log.spilled(call.epoch)) is not None:
                name, size = spilled
                if call.begun:
                    yield []
                async with self._budget.reserve(name, 2 * size):  # as it is, and divided
                    fetched = log.fetched(name)
                    if fetched is None:
                        fetched = await self._store_calls.run(partial(log.fetch, name), name)
                    while not call.complete and log.spilled(call.epoch) == spilled:
                        lots = self._next_lots(
                            call, partial(log.read_fetched, fetched), reserved=True
                        )
                        async with contextlib.aclosing(lots):
                            async for lot in lots:
                                yield lot
                call.portion.clear()
            elif call.epoch <= log.last:
                lots = self._next_lots(call, log.read_local, reserved=False)
                async with contextlib.aclosing(lots):
                    async for lot in lots:
                        yield lot
            else:
                return

    async def _next_lots(self, call: _Call, read: _Read, *, reserved: bool) -> AsyncGenerator[Lot]:
        """At least one, unless the epoch is gone. `reserved`: its memory is reserved already."""
        if call.share is not None:
            slice_s = min(SLICE_S, ROUND_S / (1 + len(self._rows_thread)))
            small = partial(self._small_shares, call, read, slice_s)
            if lot := await self._rows_thread.run(small):
                yield lot
                return
        elif call.log.is_recent(call.epoch) and (portion := read(call.epoch, LOT_BYTES)):
            yield call.take(portion)
            return
        thread = self._rows_thread
        portion = await thread.run(partial(_portion, call, read))
        if not portion:
            if call.begun:
                yield []
            thread = self._large_thread
            portion = await thread.run(partial(read, call.epoch, 0, 1, at_least_one=True))
        share = call.share
        if share is None or not portion or (payload := portion[0].payload) is None:
            if lot := call.take(portion):
                yield lot
            return
        lots = self._large_share(call, share, portion[0], payload, thread, reserved)
        async with contextlib.aclosing(lots):
            async for lot in lots:
                yield lot

    def _small_shares(self, call: _Call, read: _Read, slice_s: float) -> Lot:
        """Shares of the next small epochs: at least one, and as many as the time allows. What was
        read and is not divided yet is kept for the next slice."""
        assert call.share is not None
        ends_at = time.monotonic() + slice_s
        lot: Lot = []
        portion = call.portion or read(call.epoch, LOT_BYTES)[::-1]
        while portion and not call.complete:
            epoch, watermark, digest, payload, _ = portion.pop()
            rows, checksum, split_bytes = None, 0, 0
            if payload is not None:
                divided = self._split(call, call.share, epoch, payload)
                split_bytes = divided.nbytes
                rows, checksum = _encode(divided[call.share.index])
            frame = epoch_frame(epoch, watermark, digest, rows, checksum, marks=call.marks)
            lot.append((frame, rows))
            call.took(rows, split_bytes)
            if time.monotonic() >= ends_at:
                break
        call.portion = portion
        return lot

    async def _large_share(
        self,
        call: _Call,
        share: Share,
        encoded: EncodedEpoch,
        payload: pa.Buffer,
        thread: CallThread,
        reserved: bool,
    ) -> AsyncGenerator[Lot]:
        """The share of one epoch, in parts; each is encoded when the one before it is on its
        way."""
        epoch, watermark, digest, *_ = encoded
        key, size = _split_key(call.log, share, epoch), payload.size
        if call.begun:
            yield []
        async with (
            contextlib.nullcontext() if reserved else self._budget.reserve(key, size) as reservation
        ):
            divided = await thread.run(partial(self._split, call, share, epoch, payload))
            split_bytes, parts = divided.nbytes, _parts(divided[share.index])
            del divided
            count = len(parts)
            for number in range(count):
                rows, checksum = await thread.run(partial(_encode, parts.pop(0)))
                if reservation is not None and not parts:  # nothing else of the epoch
                    self._budget.shrink(reservation, 0 if rows is None else rows.size)
                call.took(rows, 0 if number else split_bytes, epochs=number + 1 == count)
                frame = epoch_frame(
                    epoch, watermark, digest, rows, checksum, number, count, call.marks
                )
                yield [(frame, rows)]

    def _split(self, call: _Call, share: Share, epoch: int, payload: pa.Buffer) -> Split:
        return self._splits.get(
            _split_key(call.log, share, epoch),
            lambda: split(records.decode_rows(payload), share.key_by, share.partitions),
        )


def _portion(call: _Call, read: _Read) -> list[EncodedEpoch]:
    """The next epochs, or a single one that is not too large either."""
    if call.share is None and (portion := read(call.epoch, min(PORTION_BYTES, call.left))):
        return portion
    return read(call.epoch, LARGE_BYTES, 1)


def position_in(output: LiveOutput, request: ReadRequest) -> Position | None:
    """Where a live request goes on; None if it begins, as it does in another process."""
    at = request.live
    return Position(at.segment, at.epoch) if at is not None and at.boot == output.boot else None


def _split_key(log: OutputLog, share: Share, epoch: int) -> Hashable:
    return log.stream, log.partition, log.attempt, epoch, share.key_by, share.partitions


class _Call:
    """What a call has been sent, and whether that is all. `left`: of the memory that its reader may
    need for the epochs."""

    def __init__(self, log: OutputLog, request: ReadRequest, split_bytes: int) -> None:
        self.log = log
        self.share = request.share
        self.epoch = request.from_epoch  # the next one
        self.left = request.max_bytes
        self.through: int | None = None  # the last one of a run; None: all that there are
        self.marks: Mapping[str, Any] | None = None  # of the frames
        self.full = False  # nothing else may be sent
        self.complete = False  # or nothing else of this run
        self.portion: list[EncodedEpoch] = []
        """Epochs that have been read to be divided, the next one last."""
        self._object_bytes = object_bytes(len(log.schema))
        self._epochs = 0
        self._split_bytes_left = split_bytes

    @property
    def begun(self) -> bool:
        """Whether it has been sent an epoch."""
        return self._epochs > 0

    def turn_to(self, log: OutputLog, run: Run) -> None:
        """The next epochs are of another branch."""
        self.log, self.epoch, self.through = log, run.first, run.last
        self.marks = live_marks(run.kind, run.attempt, run.segment)
        self.complete = self.full
        self.portion.clear()

    def take(self, portion: list[EncodedEpoch]) -> Lot:
        """The frames of epochs that are sent as they are."""
        lot: Lot = []
        for epoch, watermark, digest, payload, checksum in portion:
            if self._epochs and self.left < self._bytes(payload):
                self.complete = self.full = True
            if self.complete:
                break
            frame = epoch_frame(epoch, watermark, digest, payload, checksum, marks=self.marks)
            lot.append((frame, payload))
            self.took(payload)
        return lot

    def took(self, payload: pa.Buffer | None, split_bytes: int = 0, *, epochs: int = 1) -> None:
        """An epoch is sent, or with `epochs=0` a part of it; `split_bytes`: of its split."""
        self.left -= self._bytes(payload)
        self._split_bytes_left -= split_bytes
        self.epoch += epochs
        self._epochs += epochs
        if self._epochs == READ_EPOCHS or (
            self._epochs and min(self.left, self._split_bytes_left) <= 0
        ):
            self.complete = self.full = True
        elif self.through is not None and self.epoch > self.through:
            self.complete = True

    def _bytes(self, payload: pa.Buffer | None) -> int:
        """Without rows an epoch costs its reader hardly anything."""
        return records.ALIGN if payload is None else int(payload.size) + self._object_bytes


def _encode(rows: pa.Table) -> tuple[pa.Buffer | None, int]:
    """Rows as they are sent, and their checksum."""
    if not rows.num_rows:
        return None, 0
    payload = records.encode_rows(rows)
    return payload, records.checksum(payload)


def _parts(rows: pa.Table) -> list[pa.Table]:
    """A large share is not copied at once."""
    if rows.nbytes <= MAX_PART_BYTES:
        return [rows]
    most = max(1, rows.num_rows * MAX_PART_BYTES // rows.nbytes)
    return [rows.slice(at, most) for at in range(0, rows.num_rows, most)]
