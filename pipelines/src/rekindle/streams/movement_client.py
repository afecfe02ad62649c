"""Sends a newcomer's requests to a donor, within an event loop.

Design: docs/design/state-movement.md#over-http.
"""

from __future__ import annotations

import asyncio
import json

import aiohttp
from aiohttp import ClientTimeout, DummyCookieJar

from rekindle.exchange.state_mover.messages import MessageToDonor, MessageToNewcomer
from rekindle.identity import Identity
from rekindle.streams.movement_wire import STATE_PATH, max_reply_bytes, reply_of, request_body
from rekindle.streams.wire import MAX_ERROR_BYTES, StreamRefused, StreamUnavailable

CALL_S = 30.0
CONNECT_S = 3.0
_FINAL = (400, 401, 404, 410, 413, 421, 426)
"""Statuses for which a retry is useless: the donor is another task, or of another release."""


class DonorClient:
    """Calls of one newcomer. `chunk_bytes`: the maximum size of a chunk."""

    def __init__(self, identity: Identity, chunk_bytes: int, connections: int) -> None:
        self._identity = identity
        self._max_reply_bytes = max_reply_bytes(chunk_bytes)
        self._connections = connections
        self._session: aiohttp.ClientSession | None = None

    async def ask(
        self, address: str, incarnation: int, message: MessageToDonor
    ) -> MessageToNewcomer | None:
        """The donor's answer; None if it has none yet. Raises StreamUnavailable; StreamRefused if
        another attempt does not help."""
        try:
            async with asyncio.timeout(CALL_S):
                return await self._ask(address, incarnation, message)
        except TimeoutError:
            raise StreamUnavailable(f"{address}: no answer within {CALL_S:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise StreamUnavailable(f"{address}: {error or repr(error)}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise StreamUnavailable(f"{address} sent {error}") from error

    async def _ask(
        self, address: str, incarnation: int, message: MessageToDonor
    ) -> MessageToNewcomer | None:
        if self._session is None:
            self._session = self._open()
        headers = {"Content-Type": "application/json"}
        if (sent := self._identity.authorization) is not None:
            headers["Authorization"] = sent
        body = json.dumps(request_body(message, incarnation, self._identity)).encode()
        url = f"http://{address}{STATE_PATH}"
        async with self._session.post(
            url, data=body, headers=headers, allow_redirects=False
        ) as response:
            if response.status != 200:
                raise await _error(response, address)
            content = bytearray()
            async for part in response.content.iter_any():
                content += part
                if len(content) > self._max_reply_bytes:
                    raise ValueError(f"more than {self._max_reply_bytes} bytes")
        return reply_of(content, self._identity)

    def _open(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=self._connections, use_dns_cache=False),
            cookie_jar=DummyCookieJar(),
            timeout=ClientTimeout(total=None, sock_connect=CONNECT_S),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept-Encoding", "Accept"),
        )

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()


async def _error(response: aiohttp.ClientResponse, address: str) -> StreamUnavailable:
    text = (await response.content.read(MAX_ERROR_BYTES)).decode(errors="replace")
    try:
        text = str(json.loads(text)["message"])
    except (ValueError, KeyError, TypeError):
        text = f"HTTP {response.status}: {text[:300]}"
    refused = response.status in _FINAL
    return (StreamRefused if refused else StreamUnavailable)(f"{address}: {text}")
