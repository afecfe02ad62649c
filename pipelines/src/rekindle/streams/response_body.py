"""The body of a response: sends frames with their payloads to one reader.

Small frames are sent together, and a short response is one write. Frames that are ready do not wait
for others that take longer. The connection of a reader that does not receive is closed.

Design: docs/design/streams.md#edges.
"""

from __future__ import annotations

import asyncio
import time

import pyarrow as pa
from aiohttp import web

from rekindle.streams.http_server import SEND_BYTES
from rekindle.streams.io_thread import SLICE_S
from rekindle.streams.response_frames import Frames

STALL_S = 10.0
"""The response fails if the reader does not receive SEND_BYTES within this time."""
CONTENT_TYPE = "application/octet-stream"


class ResponseBody:
    """Its methods raise ConnectionError, and TimeoutError if the reader does not receive."""

    def __init__(self, http: web.BaseRequest) -> None:
        self._http = http
        self._response: web.StreamResponse | None = None  # None while nothing has been written
        self._pending = bytearray()
        self._slice_ends_at = time.monotonic() + SLICE_S

    async def add_frames(self, frames: Frames) -> None:
        """Add frames. They are sent at once if the next ones take longer: if there are none here,
        or a slice of time has passed."""
        for frame, payload in frames:
            await self.add(frame, payload)
        if not frames or time.monotonic() >= self._slice_ends_at:
            await self._flush()
            await self._yield()

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
                if time.monotonic() >= self._slice_ends_at:
                    await self._yield()
        if len(self._pending) >= SEND_BYTES:
            await self._flush()

    async def end(self, frame: bytes) -> web.StreamResponse:
        self._pending += frame
        if self._response is None:
            return web.Response(body=bytes(self._pending), content_type=CONTENT_TYPE)
        async with asyncio.timeout(STALL_S):
            await self._response.write_eof(bytes(self._pending))
        return self._response

    async def _yield(self) -> None:
        """Let other coroutines run. A write that does not have to wait does not let them."""
        await asyncio.sleep(0)
        self._slice_ends_at = time.monotonic() + SLICE_S

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
