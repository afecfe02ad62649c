"""Serves the epochs of a task's log to other tasks: one event loop for all connections.

A call is bounded: it waits at most MAX_WAIT_S for its first epoch, without a thread, and is woken
by the log; then it sends until `max_bytes`. Epochs are read in small portions, each when the one
before it is on its way, so that a slow reader makes nothing wait in memory. What takes long is done
in threads of its own: one for large epochs, one for files in the store.

Knows logs, not engines; the reader decides which replica to call, and when.

Design: docs/design/streams.md#edges.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable

import pyarrow as pa
from aiohttp import web

from rekindle.errors import BelowFloor, RekindleError
from rekindle.exchange.routing import Share
from rekindle.exchange.shuffle import SplitCache, split
from rekindle.identity import Identity
from rekindle.streams import records
from rekindle.streams.epochs import NO_EPOCH
from rekindle.streams.http_server import SEND_BYTES, HttpServer
from rekindle.streams.io_thread import STOP_S, CallThread, IoThread
from rekindle.streams.log import OutputLog
from rekindle.streams.log_reading import READ_EPOCHS, EncodedEpoch
from rekindle.streams.memory_gate import MemoryGate
from rekindle.streams.sockets import ACCEPTED, BACKLOG, listen
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
QUICK_BYTES = 128 << 10
"""Epochs up to this size are read and divided in the event loop itself."""

CONTENT_TYPE = "application/octet-stream"

_log = logging.getLogger(__name__)


class _Refusal(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, error: Exception) -> None:
        super().__init__(str(error))
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
        self._store_thread = CallThread("stream-store")
        self._stopped = False
        self._socket = listen(address, port)
        self.port: int = self._socket.getsockname()[1]
        self._io = IoThread("stream-server", on_death)
        self._http = HttpServer(self._handle, self._io.loop)
        self._listener: asyncio.Server | None = None
        self._io.start()
        self._io.run(self._listen(), 10.0)

    async def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        # asyncio accepts as many at once as it is told of a backlog; the kernel may hold more.
        self._listener = await loop.create_server(self._http, sock=self._socket, backlog=ACCEPTED)
        self._socket.listen(BACKLOG)
        self._http.sweep()

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
        for thread in (self._rows_thread, self._store_thread):
            thread.stop(STOP_S / 4)

    def _close(self, logs: list[_Served]) -> None:
        if self._listener is not None:
            self._listener.close()
        for served in logs:
            served.wake_all()
        self._http.abort_all()

    # -- a call ----------------------------------------------------------------------------------

    async def _handle(self, http: web.BaseRequest) -> web.StreamResponse:
        connection = http.protocol
        try:
            async with asyncio.timeout(MAX_CALL_S):
                return await self._respond(http)
        except _Refusal as refusal:
            return _error(refusal.status, refusal.error)
        except (ConnectionError, TimeoutError):
            return self._http.abort(http)
        except Exception as error:
            _log.exception("a call of a reader failed")
            return self._http.abort(http) if http.writer.output_size else _error(500, error)
        finally:
            self._http.limits.idle(connection, self._io.loop.time())

    async def _respond(self, http: web.BaseRequest) -> web.StreamResponse:
        request = await self._request(http)
        self._http.limits.busy(http.protocol)
        served = self._logs.get((request.stream, request.partition))
        if served is None:
            stream = f"{request.stream}/{request.partition}"
            raise _Refusal(
                503, StreamUnavailable(f"this task does not serve stream {stream} (yet)")
            )
        log = served.log
        await served.wait_for(request.from_epoch, min(request.wait_s, MAX_WAIT_S))
        if self._stopped:
            raise _Refusal(503, StreamUnavailable("this task is stopping"))
        epochs = self._epochs(log, request)
        async with contextlib.aclosing(epochs):
            try:
                first = await anext(epochs, None)
            except BelowFloor as error:
                raise _Refusal(416, error) from error
            except RekindleError as error:
                raise _Refusal(503, error) from error
            body = _Body(http)
            progress = StreamProgress(log.base, log.last, max(served.head(), log.last))
            sender = MessageIdentity.of(self._identity, self._incarnation)
            await body.add(first_frame(sender, progress, served.schema), None)
            if first is not None:
                await body.add(*first)
            try:
                async for frame, payload in epochs:
                    await body.add(frame, payload)
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
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
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

    async def _epochs(
        self, log: OutputLog, request: ReadRequest
    ) -> AsyncGenerator[tuple[bytes, pa.Buffer | None], None]:
        """Frames with their payloads; each is taken when the one before it is on its way."""
        epoch, left, count = request.from_epoch, request.max_bytes, 0
        while count < READ_EPOCHS and (not count or left > 0):
            async with self._portion(log, epoch, left, request) as portion:
                if not portion:
                    return
                for encoded in portion:
                    size = records.ALIGN + (encoded.payload.size if encoded.payload else 0)
                    if count and (count == READ_EPOCHS or left < (1 if request.share else size)):
                        return
                    sent = 0
                    async with contextlib.aclosing(
                        self._frames(log, encoded, request.share)
                    ) as frames:
                        async for frame, payload in frames:
                            sent += records.ALIGN + (payload.size if payload is not None else 0)
                            yield frame, payload
                    epoch, left, count = epoch + 1, left - sent, count + 1

    @contextlib.asynccontextmanager
    async def _portion(
        self, log: OutputLog, epoch: int, left: int, request: ReadRequest
    ) -> AsyncIterator[list[EncodedEpoch]]:
        """The next epochs of the log."""
        if small := log.read_small(epoch, QUICK_BYTES):
            yield small
            return
        if epoch > log.last:
            yield []
            return
        max_bytes = PORTION_BYTES if request.share else min(PORTION_BYTES, left)
        if (spilled := log.spilled(epoch)) is None:
            yield await self._rows_thread.run(lambda: log.read_encoded(epoch, max_bytes))
            return
        name, size = spilled
        async with self._gate.hold(name, 2 * size):  # as it is, and divided
            yield await self._store_thread.run(lambda: log.read_encoded(epoch, max_bytes))

    async def _frames(
        self, log: OutputLog, encoded: EncodedEpoch, share: Share | None
    ) -> AsyncGenerator[tuple[bytes, pa.Buffer | None], None]:
        epoch, watermark, digest, payload, checksum = encoded
        if payload is None or share is None:
            yield epoch_frame(epoch, watermark, digest, payload, checksum), payload
            return
        key = (log.stream, log.partition, epoch, share.key_by, share.partitions)
        small, spilled = payload.size <= QUICK_BYTES, log.spilled(epoch) is not None
        async with (
            contextlib.nullcontext() if small or spilled else self._gate.hold(key, payload.size)
        ):

            def rows() -> pa.Table:
                tables = self._splits.get(
                    key,
                    lambda: split(records.decode_rows(payload), share.key_by, share.partitions),
                )
                return tables[share.index]

            table = rows() if small else await self._rows_thread.run(rows)
            parts = _parts(table)
            for number, part in enumerate(parts):
                encode = _Encode(part)
                quick = part.nbytes <= QUICK_BYTES
                rows_sent, found = encode() if quick else await self._rows_thread.run(encode)
                yield (
                    epoch_frame(epoch, watermark, digest, rows_sent, found, number, len(parts)),
                    rows_sent,
                )


class _Encode:
    """Encodes rows; their checksum too."""

    def __init__(self, rows: pa.Table) -> None:
        self._rows = rows

    def __call__(self) -> tuple[pa.Buffer | None, int]:
        if not self._rows.num_rows:
            return None, 0
        payload = records.encode_rows(self._rows)
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


def _error(status: int, error: Exception) -> web.Response:
    response = web.json_response(error_body(error), status=status)
    if status in (400, 401, 404, 413):  # not one of our readers
        response.force_close()
    return response
