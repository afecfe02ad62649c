"""Connections over HTTP/1.1: accepts them, and closes those that `Connections` names.

aiohttp parses requests, within its limits for lines and headers. Invalid requests of other programs
are no errors of ours and are not logged. Connections that were closed because they sent no valid
request are logged, together in one message every few seconds.

Design: docs/design/streams.md#edges.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable

from aiohttp import web

from rekindle.streams.connections import IDLE_S, Close, Connections, limits
from rekindle.streams.sockets import raise_descriptor_limit, set_options

SEND_BYTES = 128 << 10
"""Bytes that are written at once, and that may wait in this process for the kernel's buffer."""
MAX_ACCEPTS = 64
"""Connections that are accepted in one call, before existing ones have their turn."""
CHECK_S = 0.05
"""Time between calls of `Connections.make_room`."""
_SWEEP_S = 0.5
_REPORT_S = 10.0
_NO_DESCRIPTORS_S = 1.0
_MAX_LINE_BYTES = 4 << 10

_log = logging.getLogger(__name__)
_parser_log = logging.getLogger(f"{__name__}.parser")
_parser_log.setLevel(logging.CRITICAL)


class _Connection(web.RequestHandler):
    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """A short response: that of aiohttp repeats what was received, and is several times as
        long."""
        if request.writer.output_size > 0:
            raise ConnectionError("an error in the middle of a response")
        response = web.Response(status=status, text=f"{status}: not a valid request\n")
        response.force_close()
        return response


class HttpServer(web.Server):
    """Accepts connections, and closes those that `Connections` names."""

    def __init__(
        self,
        handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        super().__init__(
            handler,
            loop=loop,
            access_log=None,
            logger=_parser_log,
            keepalive_timeout=IDLE_S,
            lingering_time=0,
            handler_cancellation=True,  # a call releases its memory when its connection ends
            tcp_keepalive=False,
            max_line_size=_MAX_LINE_BYTES,
            max_field_size=_MAX_LINE_BYTES,
        )
        self.open_connections: Connections[web.RequestHandler] = Connections(
            *limits(raise_descriptor_limit())
        )
        self._listening: socket.socket | None = None
        self._connecting: set[asyncio.Task[None]] = set()
        self._transports: dict[web.RequestHandler, asyncio.Transport] = {}
        self._loop = loop
        self._unreported = 0
        self._reported_at = -_REPORT_S

    def __call__(self) -> web.RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)

    def listen(self, listening: socket.socket) -> None:
        """Accept connections from now on."""
        self._listening = listening
        self._loop.add_reader(listening, self._accept)
        self._sweep()

    def close(self) -> None:
        """Accept no more, and close all connections."""
        if self._listening is not None:
            self._loop.remove_reader(self._listening)
            self._listening = None
        self.abort_all()

    def abort_all(self) -> None:
        for transport in list(self._transports.values()):
            transport.abort()

    def _accept(self) -> None:
        assert self._listening is not None
        for _ in range(MAX_ACCEPTS):
            if self.open_connections.full:
                self._pause(CHECK_S)
                return
            try:
                connected, address = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                _log.error("no connection to the port of streams can be accepted: %s", error)
                self._pause(_NO_DESCRIPTORS_S)
                return
            connected.setblocking(False)
            handler = self()
            self.open_connections.opened(handler, address[0], self._loop.time())
            task = self._loop.create_task(self._connect(handler, connected))
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)

    def _pause(self, for_s: float) -> None:
        """Accept no connection for a while: new ones wait in the kernel's backlog."""
        if self._listening is not None:
            self._loop.remove_reader(self._listening)
            self._loop.call_later(for_s, self._resume)

    def _resume(self) -> None:
        if self._listening is None:
            return
        if self.open_connections.full:
            self._loop.call_later(CHECK_S, self._resume)  # first, in case the next line raises
            self._close(self.open_connections.make_room(self._loop.time()))
        else:
            self._loop.add_reader(self._listening, self._accept)

    async def _connect(self, handler: web.RequestHandler, connected: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: handler, connected)
        except BaseException:
            self.open_connections.closed(handler)
            connected.close()
            raise

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        self._transports[handler] = transport
        if handler not in self.open_connections:  # closed by `Connections` before it was set up
            transport.abort()
        transport.set_write_buffer_limits(SEND_BYTES)
        with contextlib.suppress(OSError):  # it is closed already
            set_options(transport.get_extra_info("socket"))

    def admit(self, http: web.BaseRequest) -> bool:
        """The connection has sent a valid request. Returns whether it may be served."""
        closed = self.open_connections.admitted(http.protocol, self._loop.time())
        self._close(closed or [])
        return closed is not None

    def connection_lost(
        self, handler: web.RequestHandler, exc: BaseException | None = None
    ) -> None:
        super().connection_lost(handler, exc)
        self.open_connections.closed(handler)
        self._transports.pop(handler, None)

    def _sweep(self) -> None:
        self._loop.call_later(_SWEEP_S, self._sweep)
        self._close(self.open_connections.expired(self._loop.time()))

    def abort(self, http: web.BaseRequest) -> web.StreamResponse:
        """Close a connection in the middle of its response."""
        if http.transport is not None:
            http.transport.abort()
        return web.StreamResponse()

    def _close(self, closed: list[Close[web.RequestHandler]]) -> None:
        for close in closed:
            if (transport := self._transports.get(close.connection)) is not None:
                transport.abort()
            if close.reason:
                self._unreported += 1
                self._report(close)

    def _report(self, close: Close[web.RequestHandler]) -> None:
        """Log closed connections, at most once in _REPORT_S."""
        now = self._loop.time()
        if now - self._reported_at < _REPORT_S:
            return
        _log.warning(
            "%d connections to the port of streams were closed, the latest from %s: %s",
            self._unreported,
            close.peer,
            close.reason,
        )
        self._unreported, self._reported_at = 0, now
