"""Serves the epochs of a task's log to other tasks: one event loop for all connections.

A call is bounded: it waits at most MAX_WAIT_S for its first epoch, without a thread, and is woken
by the log; then it sends until `max_bytes`. Epochs are read in small portions, each when the one
before it is on its way, so that a slow reader makes nothing wait in memory. The loop works for a
few milliseconds at a time; what takes longer is done in threads of its own: shares and older epochs
in one, large epochs in another, files in the store in a third.

Knows logs, not engines; the reader decides which replica to call, and when.

Design: docs/design/streams.md#edges.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncGenerator, Callable, Hashable
from functools import partial
from typing import Protocol

import pyarrow as pa
from aiohttp import web

from rekindle.errors import BelowFloor, RekindleError
from rekindle.exchange.routing import Share
from rekindle.exchange.shuffle import Split, SplitCache, split
from rekindle.identity import Identity
from rekindle.streams import records
from rekindle.streams.epochs import NO_EPOCH
from rekindle.streams.http_server import SEND_BYTES, HttpServer
from rekindle.streams.io_thread import STOP_S, CallThread, IoThread
from rekindle.streams.log import OutputLog
from rekindle.streams.log_reading import READ_EPOCHS, EncodedEpoch
from rekindle.streams.memory_gate import MemoryGate
from rekindle.streams.sockets import listen
from rekindle.streams.wire import (
    MAX_PART_BYTES,
    MAX_REQUEST_BYTES,
    PATH,
    MessageIdentity,
    ReadRequest,
    StreamProgress,
    StreamRefused,
    StreamUnavailable,
    epoch_frame,
    error_body,
    first_frame,
    last_frame,
)

MAX_WAIT_S = 1.0
MAX_CALL_S = 90.0
"""Readers have given up long before."""
STALL_S = 10.0
"""A reader that has not taken SEND_BYTES for this long is left."""
SPLIT_CACHE_BYTES = 16 << 20
HELD_BYTES = 64 << 20
"""What all responses may hold in memory, or one epoch."""
PORTION_BYTES = 1 << 20
LOT_BYTES = 128 << 10
"""Small epochs are read, divided and sent in lots of this size."""
LARGE_BYTES = 4 << 20
"""Larger epochs have a thread of their own."""
CALL_SPLIT_BYTES = SPLIT_CACHE_BYTES // 4
"""Splits of one call, or one: the others that read these epochs find them in the cache."""
SLICE_S = 0.005
"""What the loop, and the thread of shares, do for one call before they turn to the next one."""
ROUND_S = 0.25
"""Within this, the thread of shares turns to each call that waits for it."""

CONTENT_TYPE = "application/octet-stream"

_log = logging.getLogger(__name__)


class _Refusal(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, error: Exception, *, close: bool = False) -> None:
        super().__init__(str(error))
        # Of one that is not our reader, the connection is closed.
        self.close = close or status in (400, 401, 404, 413)
        self.status = status
        self.error = error


class _Served:
    """A log, its head, and the calls that wait for it; but for `changed` of the event loop."""

    def __init__(self, log: OutputLog, head: Callable[[], int], io: IoThread) -> None:
        self.log = log
        self.head = head
        self.schema = log.schema.serialize()
        self._io = io
        self._waiting: dict[asyncio.Future[None], int] = {}
        self._notified = False
        log.listen(self._changed)

    async def wait_for(self, epoch: int, timeout_s: float) -> None:
        """Wait until the log has the epoch."""
        loop = asyncio.get_running_loop()
        waiting: asyncio.Future[None] = loop.create_future()
        self._waiting[waiting] = epoch  # before the look at the log, whose thread looks at this
        try:
            if self.log.last < epoch and timeout_s > 0:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(timeout_s):
                        await waiting
        finally:
            del self._waiting[waiting]

    def wake_all(self) -> None:
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(None)

    def _changed(self) -> None:
        """From the thread that has changed the log."""
        if self._waiting and not self._notified:
            self._notified = True
            self._io.call(self._wake)

    def _wake(self) -> None:
        self._notified = False
        last = self.log.last
        for waiting, epoch in self._waiting.items():
            if epoch <= last and not waiting.done():
                waiting.set_result(None)


class StreamServer:
    """A stream is unknown before `serve_log`: a restarted task does not serve readers before it is
    consistent."""

    def __init__(
        self,
        address: str,
        port: int,
        identity: Identity | None = None,
        incarnation: int | None = None,
        on_death: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """Binds (raises OSError) and serves. `incarnation` is that of the task that serves;
        `on_death` is called, from any thread, when it serves no longer."""
        self._identity = identity or Identity()
        self._incarnation = incarnation
        self._logs: dict[tuple[str, int], _Served] = {}
        self._splits = SplitCache(SPLIT_CACHE_BYTES)
        self._gate = MemoryGate(HELD_BYTES)
        self._rows_thread = CallThread("stream-rows")
        self._large_thread = CallThread("stream-large")
        self._store_thread = CallThread("stream-store")
        self._stopped = False
        self._socket = listen(address, port)
        self.port: int = self._socket.getsockname()[1]
        self._io = IoThread("stream-server", on_death)
        self._http = HttpServer(self._handle, self._io.loop)
        self._io.start()
        self._io.call(self._http.listen, self._socket)

    def serve_log(self, log: OutputLog, head: Callable[[], int] = lambda: NO_EPOCH) -> None:
        self._logs[(log.stream, log.partition)] = _Served(log, head, self._io)

    def stop(self) -> None:
        """End all calls, close all connections, end the threads."""
        self._stopped = True
        logs, self._logs = self._logs, {}
        for served in logs.values():
            served.log.close()
        self._io.call(self._close, list(logs.values()))
        self._io.stop()
        self._socket.close()
        for thread in (self._rows_thread, self._large_thread, self._store_thread):
            thread.stop(STOP_S / 4)

    def _close(self, logs: list[_Served]) -> None:
        for served in logs:
            served.wake_all()
        self._http.close()

    # -- a call ----------------------------------------------------------------------------------

    async def _handle(self, http: web.BaseRequest) -> web.StreamResponse:
        connection = http.protocol
        try:
            async with asyncio.timeout(MAX_CALL_S):
                return await self._respond(http)
        except _Refusal as refusal:
            return _error(refusal.status, refusal.error, close=refusal.close)
        except (ConnectionError, TimeoutError):
            return self._http.abort(http)
        except Exception as error:
            _log.exception("a call of a reader failed")
            return self._http.abort(http) if http.writer.output_size else _error(500, error)
        finally:
            self._http.limits.idle(connection, self._io.loop.time())

    async def _respond(self, http: web.BaseRequest) -> web.StreamResponse:
        request = await self._request(http)
        if not self._http.admit(http):
            most = self._http.limits.max_admitted
            text = f"{most} readers have connections; raise the limit of open files of this task"
            raise _Refusal(503, StreamUnavailable(text), close=True)
        served = self._logs.get((request.stream, request.partition))
        if served is None:
            stream = f"{request.stream}/{request.partition}"
            raise _Refusal(
                503, StreamUnavailable(f"this task does not serve stream {stream} (yet)")
            )
        log = served.log
        if request.share is not None:
            _require_columns(request.share, log)
        await served.wait_for(request.from_epoch, min(request.wait_s, MAX_WAIT_S))
        if self._stopped:
            raise _Refusal(503, StreamUnavailable("this task is stopping"))
        lots = self._lots(log, request)
        async with contextlib.aclosing(lots):
            first: Lot
            try:
                first = await anext(lots, [])
            except BelowFloor as error:
                raise _Refusal(416, error) from error
            except RekindleError as error:
                raise _Refusal(503, error) from error
            body = _Body(http)
            progress = StreamProgress(log.base, log.last, max(served.head(), log.last))
            sender = MessageIdentity.of(self._identity, self._incarnation)
            await body.add(first_frame(sender, progress, served.schema), None)
            await body.add_lot(first)
            try:
                async for lot in lots:
                    await body.add_lot(lot)
            except RekindleError as error:
                # What has been sent is whole; the next call meets the error again.
                _log.warning("a response ends early: %s", error)
        return await body.end(last_frame())

    async def _request(self, http: web.BaseRequest) -> ReadRequest:
        if not self._identity.accepts(http.headers.get("Authorization")):
            raise _Refusal(401, StreamRefused("this port needs the topology's token"))
        if http.method != "POST" or http.path != PATH:
            raise _Refusal(404, StreamUnavailable(f"only POST {PATH} is served here"))
        body = b""
        while chunk := await http.content.read(MAX_REQUEST_BYTES + 1 - len(body)):
            body += chunk
        if len(body) > MAX_REQUEST_BYTES:
            raise _Refusal(413, ValueError(f"a request has at most {MAX_REQUEST_BYTES} bytes"))
        try:
            message = json.loads(body)
            # Before the rest: a request of another release may have other fields.
            self._admit(MessageIdentity.read(message))
            return ReadRequest.of(message)
        except (
            ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError,
        ) as error:  # fmt: skip
            raise _Refusal(400, ValueError(f"not a valid request: {error!r}")) from error

    def _admit(self, sender: MessageIdentity) -> None:
        """Refuse requests that are not for this task."""
        if (reason := sender.unfit_versions()) is not None:
            raise _Refusal(426, StreamRefused(f"request refused: {reason}"))
        if (reason := self._identity.mismatch(sender.topology)) is not None:
            raise _Refusal(421, StreamRefused(f"request refused: {reason}"))
        meant = sender.incarnation
        if meant is not None and self._incarnation is not None and meant != self._incarnation:
            reason = f"it is for incarnation {meant}, this is {self._incarnation}"
            raise _Refusal(410, StreamUnavailable(f"request refused: {reason}"))

    # -- epochs ----------------------------------------------------------------------------------

    async def _lots(self, log: OutputLog, request: ReadRequest) -> AsyncGenerator[Lot]:
        """Frames with their payloads; each lot is taken when the one before it is on its way."""
        call = _Call(log, request)
        while not call.complete:
            if (spilled := log.spilled(call.epoch)) is not None:
                name, size = spilled
                async with self._gate.hold(name, 2 * size):  # as it is, and divided
                    fetched = log.fetched(name)
                    if fetched is None:
                        fetched = await self._store_thread.run(partial(log.fetch, name))
                    while not call.complete and log.spilled(call.epoch) == spilled:
                        lots = self._next_lots(call, partial(log.read_fetched, fetched), held=True)
                        async with contextlib.aclosing(lots):
                            async for lot in lots:
                                yield lot
            elif call.epoch <= log.last:
                lots = self._next_lots(call, log.read_local, held=False)
                async with contextlib.aclosing(lots):
                    async for lot in lots:
                        yield lot
            else:
                return

    async def _next_lots(self, call: _Call, read: _Read, *, held: bool) -> AsyncGenerator[Lot]:
        """At least one, unless the epoch is gone. `held`: whether the gate is held already."""
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
            thread = self._large_thread
            portion = await thread.run(partial(read, call.epoch, 0, 1, at_least_one=True))
        share = call.share
        if share is None or not portion or (payload := portion[0].payload) is None:
            yield call.take(portion)
            return
        lots = self._large_share(call, share, portion[0], payload, thread, held)
        async with contextlib.aclosing(lots):
            async for lot in lots:
                yield lot

    def _small_shares(self, call: _Call, read: _Read, slice_s: float) -> Lot:
        """Shares of the next small epochs: at least one, and as many as the time allows."""
        assert call.share is not None
        ends_at = time.monotonic() + slice_s
        lot: Lot = []
        for encoded in read(call.epoch, LOT_BYTES):
            epoch, watermark, digest, payload, _ = encoded
            rows, checksum, split_bytes = None, 0, 0
            if payload is not None:
                divided = self._split(call, call.share, epoch, payload)
                split_bytes = divided.nbytes
                rows, checksum = _encode(divided[call.share.index])
            lot.append((epoch_frame(epoch, watermark, digest, rows, checksum), rows))
            call.took(rows, split_bytes)
            if call.complete or time.monotonic() >= ends_at:
                break
        return lot

    async def _large_share(
        self,
        call: _Call,
        share: Share,
        encoded: EncodedEpoch,
        payload: pa.Buffer,
        thread: CallThread,
        held: bool,
    ) -> AsyncGenerator[Lot]:
        """The share of one epoch, in parts; each is encoded when the one before it is on its
        way."""
        epoch, watermark, digest, *_ = encoded
        key, size = _split_key(call.log, share, epoch), payload.size
        async with contextlib.nullcontext() if held else self._gate.hold(key, size):
            divided = await thread.run(partial(self._split, call, share, epoch, payload))
            parts = _parts(divided[share.index])
            for number, part in enumerate(parts):
                rows, checksum = await thread.run(partial(_encode, part))
                call.took(rows, 0 if number else divided.nbytes, epochs=number + 1 == len(parts))
                yield [
                    (
                        epoch_frame(epoch, watermark, digest, rows, checksum, number, len(parts)),
                        rows,
                    )
                ]

    def _split(self, call: _Call, share: Share, epoch: int, payload: pa.Buffer) -> Split:
        return self._splits.get(
            _split_key(call.log, share, epoch),
            lambda: split(records.decode_rows(payload), share.key_by, share.partitions),
        )


Lot = list[tuple[bytes, pa.Buffer | None]]
"""Frames with their payloads."""


class _Read(Protocol):
    """Epochs of a log, as `OutputLog.read_local`."""

    def __call__(
        self, epoch: int, max_bytes: int, max_epochs: int = ..., /, *, at_least_one: bool = ...
    ) -> list[EncodedEpoch]: ...


def _portion(call: _Call, read: _Read) -> list[EncodedEpoch]:
    """The next epochs, or a single one that is not too large either."""
    if call.share is None and (portion := read(call.epoch, min(PORTION_BYTES, call.left))):
        return portion
    return read(call.epoch, LARGE_BYTES, 1)


def _split_key(log: OutputLog, share: Share, epoch: int) -> Hashable:
    return log.stream, log.partition, epoch, share.key_by, share.partitions


class _Call:
    """What a call has been sent, and whether that is all."""

    def __init__(self, log: OutputLog, request: ReadRequest) -> None:
        self.log = log
        self.share = request.share
        self.epoch = request.from_epoch  # the next one
        self.left = request.max_bytes
        self.complete = False
        self._epochs = 0
        self._split_bytes_left = CALL_SPLIT_BYTES

    def take(self, portion: list[EncodedEpoch]) -> Lot:
        """The frames of epochs that are sent as they are."""
        lot: Lot = []
        for epoch, watermark, digest, payload, checksum in portion:
            if self._epochs and self.left < _sent_bytes(payload):
                self.complete = True
            if self.complete:
                break
            lot.append((epoch_frame(epoch, watermark, digest, payload, checksum), payload))
            self.took(payload)
        return lot

    def took(self, payload: pa.Buffer | None, split_bytes: int = 0, *, epochs: int = 1) -> None:
        """An epoch is sent, or with `epochs=0` a part of it; `split_bytes`: of its split."""
        self.left -= _sent_bytes(payload)
        self._split_bytes_left -= split_bytes
        self.epoch += epochs
        self._epochs += epochs
        if self._epochs == READ_EPOCHS or (
            self._epochs and min(self.left, self._split_bytes_left) <= 0
        ):
            self.complete = True


def _sent_bytes(payload: pa.Buffer | None) -> int:
    return records.ALIGN + (0 if payload is None else int(payload.size))


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


class _Body:
    """The body of a response: frames on their way, small ones together; a short response is one
    write. Raises ConnectionError, TimeoutError for a reader that takes nothing."""

    def __init__(self, http: web.BaseRequest) -> None:
        self._http = http
        self._response: web.StreamResponse | None = None  # of a long one
        self._pending = bytearray()
        self._slice_ends_at = time.monotonic() + SLICE_S

    async def add_lot(self, lot: Lot) -> None:
        """Whole epochs that are ready are not kept for others that take longer."""
        for frame, payload in lot:
            await self.add(frame, payload)
        if time.monotonic() >= self._slice_ends_at:
            await self._flush()
            await asyncio.sleep(0)  # a write that need not wait lets nobody else run
            self._slice_ends_at = time.monotonic() + SLICE_S

    async def add(self, frame: bytes, payload: pa.Buffer | None) -> None:
        self._pending += frame
        if payload is None:
            pass
        elif payload.size <= SEND_BYTES // 4:
            self._pending += memoryview(payload)
        else:
            await self._flush()
            rows = memoryview(payload)
            for at in range(0, len(rows), SEND_BYTES):
                await self._write(rows[at : at + SEND_BYTES])
        if len(self._pending) >= SEND_BYTES:
            await self._flush()

    async def end(self, frame: bytes) -> web.StreamResponse:
        self._pending += frame
        if self._response is None:
            return web.Response(body=bytes(self._pending), content_type=CONTENT_TYPE)
        async with asyncio.timeout(STALL_S):
            await self._response.write_eof(bytes(self._pending))
        return self._response

    async def _flush(self) -> None:
        if self._pending:
            pending, self._pending = self._pending, bytearray()
            await self._write(pending)

    async def _write(self, data: bytearray | memoryview) -> None:
        async with asyncio.timeout(STALL_S):
            if self._response is None:
                self._response = web.StreamResponse()
                self._response.content_type = CONTENT_TYPE
                self._response.enable_chunked_encoding()
                await self._response.prepare(self._http)
            await self._response.write(data)


def _require_columns(share: Share, log: OutputLog) -> None:
    if absent := sorted(set(share.key_by) - set(log.schema.names)):
        text = f"stream {log.stream} has no columns {', '.join(map(repr, absent))} to share by"
        raise _Refusal(400, ValueError(text))


def _error(status: int, error: Exception, *, close: bool = False) -> web.Response:
    response = web.json_response(error_body(error), status=status)
    if close:
        response.force_close()
    return response
