"""Connections over HTTP/1.1: makes them, and closes those that `Connections` names.

aiohttp parses what comes, within its limits for lines and headers. What a stranger sends is no
error of ours and is not logged; connections that are closed because of what they did not send are,
together, every few seconds at most.

Design: docs/design/streams.md#edges.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
from collections.abc import Awaitable, Callable

from aiohttp import web

from rekindle.streams.connections import IDLE_S, Close, Connections, limits
from rekindle.streams.sockets import set_options

SEND_BYTES = 128 << 10
"""What is written at once, and what waits in this process for the kernel's buffer."""
_SWEEP_S = 0.5
_REPORT_S = 10.0

_log = logging.getLogger(__name__)
_parser_log = logging.getLogger(f"{__name__}.parser")
_parser_log.setLevel(logging.CRITICAL)


class HttpServer(web.Server):
    """Makes the connections, and closes those that `Connections` names."""

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
            handler_cancellation=True,  # what a call holds goes with its connection
            tcp_keepalive=False,
        )
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.limits: Connections[web.RequestHandler] = Connections(*limits(descriptors))
        self._transports: dict[web.RequestHandler, asyncio.Transport] = {}
        self._loop = loop
        self._unreported = 0
        self._reported_at = -_REPORT_S

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        self._transports[handler] = transport
        transport.set_write_buffer_limits(SEND_BYTES)
        with contextlib.suppress(OSError):  # it is closed already
            set_options(transport.get_extra_info("socket"))
        peer = (transport.get_extra_info("peername") or ("unknown",))[0]
        self._close(self.limits.opened(handler, peer, self._loop.time()))

    def connection_lost(
        self, handler: web.RequestHandler, exc: BaseException | None = None
    ) -> None:
        super().connection_lost(handler, exc)
        self.limits.closed(handler)
        self._transports.pop(handler, None)

    def sweep(self) -> None:
        self._close(self.limits.expired(self._loop.time()))
        self._loop.call_later(_SWEEP_S, self.sweep)

    def abort(self, http: web.BaseRequest) -> web.StreamResponse:
        """Close a connection in the middle of its response."""
        if http.transport is not None:
            http.transport.abort()
        return web.StreamResponse()

    def abort_all(self) -> None:
        for transport in list(self._transports.values()):
            transport.abort()

    def _close(self, closed: list[Close[web.RequestHandler]]) -> None:
        for close in closed:
            if (transport := self._transports.get(close.connection)) is not None:
                transport.abort()
            if close.reason:
                self._unreported += 1
                self._report(close)

    def _report(self, close: Close[web.RequestHandler]) -> None:
        """Seldom, however many there are."""
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
