"""Bounded calls of one replica over HTTP, within an event loop.

A call that is cancelled closes its connection, so nothing is left of it: neither memory nor a
thread, nor the response of a server that is frozen or gone. Decides nothing: `reader_core` says
which replica is called, and until when.

Design: docs/design/streams.md#edges.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
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
_REFUSED = (401, 421, 426)
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
        """`check_size` is called with an epoch and its bytes so far; an error ends the call."""
        self.address = address
        self._check_size = check_size
        self._identity = identity or Identity()
        self._url = f"http://{address}{PATH}"
        self._session: aiohttp.ClientSession | None = None

    async def read(self, request: ReadRequest, timeout_s: float) -> ReadResponse:
        """One call. At the deadline it returns the epochs that have arrived. Raises BelowFloor,
        CallTimedOut if none has arrived, StreamUnavailable for other failures."""
        decoder = ResponseDecoder(request, self._identity, self.address, self._check_size)
        try:
            async with asyncio.timeout(timeout_s):
                await self._receive(request, decoder)
        except TimeoutError as error:
            if not decoder.epochs:
                text = f"{self.address} sent no complete epoch within {timeout_s:g} s"
                raise CallTimedOut(text) from error
            await self.close()  # the rest of the response may still come
        except (aiohttp.ClientError, OSError) as error:
            raise StreamUnavailable(f"{self.address}: {error or repr(error)}") from error
        assert decoder.progress is not None
        return ReadResponse(decoder.progress, tuple(decoder.epochs))

    async def _receive(self, request: ReadRequest, decoder: ResponseDecoder) -> None:
        if self._session is None:
            self._session = _session()
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

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()


def _session() -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(
        limit=1, keepalive_timeout=15.0, use_dns_cache=False, socket_factory=_socket
    )
    return aiohttp.ClientSession(
        connector=connector,
        cookie_jar=DummyCookieJar(),
        timeout=ClientTimeout(total=None, connect=None, sock_connect=None),  # the call has one
        auto_decompress=False,
        read_bufsize=READ_BYTES,
        skip_auto_headers=("User-Agent", "Accept-Encoding", "Accept"),
    )


def _socket(address: Any) -> socket.socket:
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    try:
        set_options(made)
    except OSError:
        made.close()
        raise
    return made


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
