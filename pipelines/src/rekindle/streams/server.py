"""Serves the epochs of a task's log to other tasks: one event loop for all connections.

A call is bounded: it waits at most MAX_WAIT_S for its first epoch, without a thread, and is woken
by the log; then it sends until `max_bytes`. `response_frames` reads the epochs, in batches,
`response_body` sends them. A *live* request is for all output of a task, also tentative (`wire`).
The loop works for a few milliseconds at a time.

Knows logs, not engines; the reader decides which replica to call, and when.

Design: docs/design/streams.md#edges.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

import pyarrow as pa
from aiohttp import web

from rekindle.errors import BelowFloor, ObjectMissing, RekindleError
from rekindle.exchange.routing import Share
from rekindle.identity import Identity
from rekindle.protocol import ConsistencyState
from rekindle.streams.epochs import NO_EPOCH
from rekindle.streams.http_server import HttpServer
from rekindle.streams.io_thread import STOP_S, IoThread
from rekindle.streams.live_output import LiveOutput
from rekindle.streams.log import OutputLog
from rekindle.streams.response_body import ResponseBody
from rekindle.streams.response_frames import SERVE_BYTES, Frames, ResponseFrames, position_in
from rekindle.streams.sockets import listen
from rekindle.streams.wire import (
    LENT_PATH,
    MAX_REQUEST_BYTES,
    PATH,
    MessageIdentity,
    ReadRequest,
    StreamProgress,
    StreamRefused,
    StreamUnavailable,
    error_body,
    first_frame,
    last_frame,
    lent_digest,
)

MAX_WAIT_S = 1.0
MAX_CALL_S = 90.0
"""Readers have given up long before."""
_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_INVALID = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)

LentReader = Callable[[str], AbstractAsyncContextManager[bytes]]
"""Reads an object that the task lends. The context ends once it is sent. Raises ObjectMissing."""


class _Refusal(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, error: Exception, *, close: bool = False) -> None:
        super().__init__(str(error))
        # After these statuses the connection is closed: the peer is no reader of this topology.
        self.close = close or status in (400, 401, 404, 413)
        self.status = status
        self.error = error


class _Served:
    """A log, its head, and the calls that wait for it. Used in the event loop, except `_changed`.
    `output`: None if the output of the task is never tentative."""

    def __init__(
        self, log: OutputLog, head: Callable[[], int], io: IoThread, output: LiveOutput | None
    ) -> None:
        self.log = log
        self.head = head
        self.output = output
        self.schema = log.schema.serialize()
        self._io = io
        self._waiting_for_epoch: dict[asyncio.Future[None], int] = {}
        self._waiting_until: dict[asyncio.Future[None], Callable[[], bool]] = {}
        self._notified = False
        log.listen(self._changed)
        if output is not None:
            output.listen(self._changed)

    async def wait(self, request: ReadRequest, timeout_s: float) -> None:
        """Wait until there is something for a request. If output may be tentative, a change of its
        state also ends the wait, so that a reader soon knows that it has to request live output."""
        output = self.output
        if output is None:
            await self.wait_for(request.from_epoch, timeout_s)
        elif request.live is not None:
            position = position_in(output, request)
            await self._wait_until(
                lambda: output.next(position, request.from_epoch) is not None, timeout_s
            )
        else:
            log, before = self.log, _reported(output)
            await self._wait_until(
                lambda: log.last >= request.from_epoch or _reported(output) != before, timeout_s
            )

    async def _wait_until(self, ready: Callable[[], bool], timeout_s: float) -> None:
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting_until[waiting] = ready
        try:
            if timeout_s > 0 and not ready():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(timeout_s):
                        await waiting
        finally:
            del self._waiting_until[waiting]

    async def wait_for(self, epoch: int, timeout_s: float) -> None:
        """Wait until the log has the epoch."""
        loop = asyncio.get_running_loop()
        waiting: asyncio.Future[None] = loop.create_future()
        # Before `log.last` is read: the thread that appends checks whether a call waits.
        self._waiting_for_epoch[waiting] = epoch
        try:
            if self.log.last < epoch and timeout_s > 0:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(timeout_s):
                        await waiting
        finally:
            del self._waiting_for_epoch[waiting]

    def wake_all(self) -> None:
        for waiting in (*self._waiting_for_epoch, *self._waiting_until):
            if not waiting.done():
                waiting.set_result(None)

    def _changed(self) -> None:
        """Called by the thread that has changed the log."""
        if (self._waiting_for_epoch or self._waiting_until) and not self._notified:
            self._notified = True
            self._io.call(self._wake)

    def _wake(self) -> None:
        self._notified = False
        last = self.log.last
        for waiting, epoch in self._waiting_for_epoch.items():
            if epoch <= last and not waiting.done():
                waiting.set_result(None)
        for waiting, ready in self._waiting_until.items():
            if not waiting.done() and ready():
                waiting.set_result(None)


def _reported(output: LiveOutput) -> tuple[ConsistencyState, bool, int]:
    """What ends the wait of a call for stable epochs when it changes: the state, whether there are
    tentative epochs that are not corrected, and the epoch of the newest REC_DONE."""
    report = output.report
    return report.state, report.newest_tentative > output.log.last, report.corrected_through


class StreamServer:
    """Serves streams and state. A stream is not served before `serve_log`: a restarted task has to
    restore its state and reopen its log first."""

    def __init__(
        self,
        address: str,
        port: int,
        identity: Identity | None = None,
        incarnation: int | None = None,
        on_death: Callable[[str], None] = lambda reason: None,
        memory_bytes: int = SERVE_BYTES,
    ) -> None:
        """Binds (raises OSError) and serves. `incarnation`: of this task; `on_death` is called,
        from any thread, when the server has died. `memory_bytes`: for responses, and for the files
        that logs have fetched for them."""
        self._identity = identity or Identity()
        self._incarnation = incarnation
        self._logs: dict[tuple[str, int], _Served] = {}
        self._frames = ResponseFrames(memory_bytes)
        self._lent: LentReader | None = None
        self._stopped = False
        self._socket = listen(address, port)
        self.port: int = self._socket.getsockname()[1]
        self._io = IoThread("stream-server", on_death)
        self._http = HttpServer(self._handle, self._io.loop)
        self._io.start()
        self._io.call(self._http.listen, self._socket)

    def serve_log(
        self,
        log: OutputLog,
        head: Callable[[], int] = lambda: NO_EPOCH,
        output: LiveOutput | None = None,
    ) -> None:
        """`output`: None if the log's epochs are never tentative."""
        self._logs[(log.stream, log.partition)] = _Served(log, head, self._io, output)

    def serve_lent(self, read: LentReader) -> None:
        """`read` is called in the server's event loop."""
        self._lent = read

    def stop(self) -> None:
        """End all calls, close all connections, end the threads."""
        self._stopped = True
        logs, self._logs = self._logs, {}
        for served in logs.values():
            served.log.close()
            if served.output is not None:
                served.output.close()
        self._io.call(self._close, list(logs.values()))
        self._io.stop()
        self._socket.close()
        self._frames.stop(STOP_S / 4)

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
            self._http.open_connections.idle(connection, self._io.loop.time())

    async def _respond(self, http: web.BaseRequest) -> web.StreamResponse:
        message = await self._message(http)
        if http.path == LENT_PATH:
            return await self._respond_with_lent(http, message)
        request = _parsed(ReadRequest.of, message)
        self._admit_connection(http)
        served = self._logs.get((request.stream, request.partition))
        if served is None:
            stream = f"{request.stream}/{request.partition}"
            raise _Refusal(
                503, StreamUnavailable(f"this task does not serve stream {stream} (yet)")
            )
        log = served.log
        if request.share is not None:
            _require_columns(request.share, log)
        await served.wait(request, min(request.wait_s, MAX_WAIT_S))
        if self._stopped:
            raise _Refusal(503, StreamUnavailable("this task is stopping"))
        output = served.output
        if output is None or request.live is None:
            batches = self._frames.read(log, request)
        else:
            batches = self._frames.read_live(output, request)
        async with contextlib.aclosing(batches):
            first: Frames
            try:
                first = await anext(batches, [])
            except BelowFloor as error:
                raise _Refusal(416, error) from error
            except RekindleError as error:
                raise _Refusal(503, error) from error
            body = ResponseBody(http)
            report = output.report if output is not None else None
            progress = StreamProgress(log.base, log.last, max(served.head(), log.last), report)
            sender = MessageIdentity.of(self._identity, self._incarnation)
            await body.add(first_frame(sender, progress, served.schema), None)
            if first:
                await body.add_frames(first)
            try:
                async for frames in batches:
                    await body.add_frames(frames)
            except RekindleError as error:
                # The epochs that were sent are complete; the next call gets the error.
                _log.warning("a response ends early: %s", error)
        return await body.end(last_frame())

    async def _respond_with_lent(
        self, http: web.BaseRequest, message: dict[str, Any]
    ) -> web.StreamResponse:
        """The digest of an object, and its bytes."""
        name = _parsed(lambda content: str(content["name"]), message)
        self._admit_connection(http)
        if self._lent is None:
            raise _Refusal(404, ObjectMissing("this task lends no state"))
        try:
            async with self._lent(name) as data:
                body = ResponseBody(http)
                await body.add(lent_digest(data), pa.py_buffer(data))
                return await body.end(b"")
        except ObjectMissing as error:
            raise _Refusal(404, error) from error

    def _admit_connection(self, http: web.BaseRequest) -> None:
        if not self._http.admit(http):
            most = self._http.open_connections.max_admitted
            text = f"{most} readers have connections; raise the limit of open files of this task"
            raise _Refusal(503, StreamUnavailable(text), close=True)

    async def _message(self, http: web.BaseRequest) -> dict[str, Any]:
        """The JSON of a request that is for this task."""
        if not self._identity.accepts(http.headers.get("Authorization")):
            raise _Refusal(401, StreamRefused("this port needs the topology's token"))
        if http.method != "POST" or http.path not in (PATH, LENT_PATH):
            text = f"only POST {PATH} and {LENT_PATH} are served here"
            raise _Refusal(404, StreamUnavailable(text))
        body = b""
        while chunk := await http.content.read(MAX_REQUEST_BYTES + 1 - len(body)):
            body += chunk
        if len(body) > MAX_REQUEST_BYTES:
            raise _Refusal(413, ValueError(f"a request has at most {MAX_REQUEST_BYTES} bytes"))
        message: dict[str, Any] = _parsed(json.loads, body)
        # Before the other fields, which may be different in another release.
        self._admit(_parsed(MessageIdentity.read, message))
        return message

    def _admit(self, sender: MessageIdentity) -> None:
        """Refuse requests that are not for this task."""
        if (reason := sender.unfit_versions()) is not None:
            raise _Refusal(426, StreamRefused(f"request refused: {reason}"))
        if (reason := self._identity.mismatch(sender.topology)) is not None:
            raise _Refusal(421, StreamRefused(f"request refused: {reason}"))
        wanted, own = sender.incarnation, self._incarnation
        if wanted is not None and own is not None and wanted != own:
            reason = f"it is for incarnation {wanted}, this is {own}"
            raise _Refusal(410, StreamUnavailable(f"request refused: {reason}"))


def _parsed(parse: Callable[[Any], _T], content: Any) -> _T:
    try:
        return parse(content)
    except _INVALID as error:
        raise _Refusal(400, ValueError(f"not a valid request: {error!r}")) from error


def _require_columns(share: Share, log: OutputLog) -> None:
    if absent := sorted(set(share.key_by) - set(log.schema.names)):
        text = f"stream {log.stream} has no columns {', '.join(map(repr, absent))} to share by"
        raise _Refusal(400, ValueError(text))


def _error(status: int, error: Exception, *, close: bool = False) -> web.Response:
    response = web.json_response(error_body(error), status=status)
    if close:
        response.force_close()
    return response
