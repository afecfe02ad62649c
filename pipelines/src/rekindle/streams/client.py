"""Bounded calls of one replica over HTTP, within an event loop.

A call that is cancelled closes its connection, so nothing of it remains: no memory, no thread, no
response that might still arrive. Decides nothing: `reader_core` decides which replica is called,
and until when.

Design: docs/design/streams.md#edges.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Callable, Iterator
from typing import Any

import aiohttp
from aiohttp import ClientTimeout, DummyCookieJar

from rekindle.errors import BelowFloor
from rekindle.identity import Identity
from rekindle.streams.sockets import set_options
from rekindle.streams.wire import (
    MAX_ERROR_BYTES,
    PATH,
    CallTimedOut,
    CheckSize,
    ReadRequest,
    ReadResponse,
    ResponseDecoder,
    StreamRefused,
    StreamUnavailable,
)

READ_BYTES = 128 << 10
"""Bytes of a response that wait to be decoded; the socket is not read while there are twice as
many."""
CONNECT_S = 1.3
"""Timeout of a connection; the kernel repeats a lost packet of its handshake after 1 s."""
LOOP_DELAY_S = 0.05
"""If the event loop is later than this, the delay is this process's own, not the replica's."""
_REFUSED = (401, 421, 426)  # another token, topology or protocol version
_OTHER_PROTOCOL = (
    "its response is not HTTP/1.1: the task may be of a release that serves streams by Arrow "
    "Flight (stream protocol 2); use images of one release"
)


class StreamClient:
    """One connection to one replica, for one call at a time. After a failure it is closed and
    replaced. To be used within one event loop."""

    def __init__(
        self,
        address: str,
        identity: Identity | None = None,
        check_size: CheckSize = lambda epoch, size: None,
    ) -> None:
        """`check_size` is called with an epoch and the bytes of it that are announced so far; an
        error ends the call."""
        self.address = address
        self._check_size = check_size
        self._identity = identity or Identity()
        self._url = f"http://{address}{PATH}"
        self._session: aiohttp.ClientSession | None = None
        self._socket: socket.socket | None = None
        self._socket_made_at = 0.0
        self._unreachable = False

    async def read(self, request: ReadRequest, timeout_s: float) -> ReadResponse:
        """One call. At the deadline, or when its connection ends, it returns the epochs that have
        arrived. Raises BelowFloor, CallTimedOut if none has arrived in time, StreamUnavailable for
        other failures."""
        decoder = ResponseDecoder(request, self._identity, self.address, self._check_size)
        failure: StreamUnavailable | None = None
        try:
            async with asyncio.timeout(timeout_s) as limit:
                with self._adjusted(limit, timeout_s):
                    await self._receive(request, decoder)
        except TimeoutError:
            text = f"{self.address} sent no complete epoch within {timeout_s:g} s"
            unreachable = StreamUnavailable(f"{self.address}: no connection in {CONNECT_S:g} s")
            failure = unreachable if self._unreachable else CallTimedOut(text)
        except (aiohttp.ClientError, OSError) as error:
            failure = StreamUnavailable(f"{self.address}: {error or repr(error)}")
            failure.__cause__ = error
        if failure is not None:
            if not decoder.epochs:
                raise failure
            await self.close()  # the rest of the response may still arrive
        assert decoder.progress is not None
        return ReadResponse(decoder.progress, tuple(decoder.epochs), decoder.live)

    async def _receive(self, request: ReadRequest, decoder: ResponseDecoder) -> None:
        if self._session is None:
            self._session = _session(self._make_socket)
        headers = {"Content-Type": "application/json"}
        if (sent := self._identity.authorization) is not None:
            headers["Authorization"] = sent
        body = json.dumps(request.message(self._identity)).encode()
        try:
            response = await self._session.post(
                self._url, data=body, headers=headers, allow_redirects=False
            )
        except aiohttp.ClientResponseError as error:
            raise StreamRefused(f"{self.address}: {_OTHER_PROTOCOL}") from error
        async with response:
            if response.status != 200:
                raise await _refusal(response, self.address)
            async for chunk in response.content.iter_any():
                decoder.feed(chunk)
        if not decoder.ended:
            raise StreamUnavailable(f"{self.address} sent a response without an end")

    @contextlib.contextmanager
    def _adjusted(self, limit: asyncio.Timeout, timeout_s: float) -> Iterator[None]:
        """Moves the timeout: to now, if there is no connection within CONNECT_S; later, if the loop
        itself was late (because of other threads, or because the process was frozen), so that data
        that has arrived meanwhile is read first. The latter once, by at most `timeout_s`."""
        loop, expires_at = asyncio.get_running_loop(), limit.when()
        assert expires_at is not None
        self._unreachable = False

        def check_connection() -> None:
            remaining_s = self._socket_made_at + CONNECT_S - loop.time()
            if self._socket is None or remaining_s > 0:  # the loop was late
                timers.append(loop.call_later(max(remaining_s, CONNECT_S / 2), check_connection))
            elif not self._is_connected() and not limit.expired():
                self._unreachable = True
                limit.reschedule(loop.time())

        def check_late() -> None:
            late_s = loop.time() - expires_at
            if late_s > LOOP_DELAY_S and not limit.expired():
                limit.reschedule(loop.time() + min(2 * late_s, timeout_s))

        timers = [
            loop.call_later(CONNECT_S, check_connection),
            loop.call_at(expires_at - 0.001, check_late),  # before the limit, if both are late
        ]
        try:
            yield
        finally:
            for timer in timers:
                timer.cancel()

    def _make_socket(self, address: Any) -> socket.socket:
        family, kind, protocol, _, _ = address
        made = socket.socket(family, kind, protocol)
        try:
            set_options(made)
        except OSError:
            made.close()
            raise
        self._socket, self._socket_made_at = made, asyncio.get_running_loop().time()
        return made

    def _is_connected(self) -> bool:
        """Whether the kernel has made the connection; the loop may not have processed that yet."""
        try:
            return self._socket is not None and bool(self._socket.getpeername())
        except OSError:
            return False

    async def close(self) -> None:
        session, self._session = self._session, None
        self._socket = None
        if session is not None:
            await session.close()


def _session(make_socket: Callable[[Any], socket.socket]) -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(
        limit=1, keepalive_timeout=15.0, use_dns_cache=False, socket_factory=make_socket
    )
    return aiohttp.ClientSession(
        connector=connector,
        cookie_jar=DummyCookieJar(),
        timeout=ClientTimeout(total=None, sock_connect=None),  # the call has a deadline
        auto_decompress=False,
        read_bufsize=READ_BYTES,
        skip_auto_headers=("User-Agent", "Accept-Encoding", "Accept"),
    )


async def _refusal(response: aiohttp.ClientResponse, address: str) -> Exception:
    """The error that a replica has responded with."""
    with contextlib.suppress(ValueError, AttributeError, TypeError):
        body = b""
        while len(body) < MAX_ERROR_BYTES and (
            chunk := await response.content.read(MAX_ERROR_BYTES - len(body))
        ):
            body += chunk
        content = json.loads(body)
        text = str(content["message"])
        if content.get("error") == BelowFloor.__name__:
            return BelowFloor(text)
        refused = response.status in _REFUSED
        return (StreamRefused if refused else StreamUnavailable)(f"{address}: {text}")
    return StreamUnavailable(f"{address}: HTTP {response.status} {response.reason}")
