"""The body of a response: frames with their payloads, on their way to one reader.

Small frames are sent together, and a short response is one write. What is ready is not kept for
what takes longer. A reader that takes nothing is left.

Design: docs/design/streams.md#edges.
"""

from __future__ import annotations

import asyncio
import time

import pyarrow as pa
from aiohttp import web

from rekindle.streams.epoch_lots import Lot
from rekindle.streams.http_server import SEND_BYTES
from rekindle.streams.io_thread import SLICE_S

STALL_S = 10.0
"""A reader that has not taken SEND_BYTES for this long is left."""
CONTENT_TYPE = "application/octet-stream"


class ResponseBody:
    """Raises ConnectionError, TimeoutError for a reader that takes nothing."""

    def __init__(self, http: web.BaseRequest) -> None:
        self._http = http
        self._response: web.StreamResponse | None = None  # of a long one
        self._pending = bytearray()
        self._slice_ends_at = time.monotonic() + SLICE_S

    async def add_lot(self, lot: Lot) -> None:
        """Whole epochs that are ready are not kept for others that take longer."""
        for frame, payload in lot:
            await self.add(frame, payload)
        if not lot or time.monotonic() >= self._slice_ends_at:
            await self._flush()
            await self._give_way()

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
                    await self._give_way()
        if len(self._pending) >= SEND_BYTES:
            await self._flush()

    async def end(self, frame: bytes) -> web.StreamResponse:
        self._pending += frame
        if self._response is None:
            return web.Response(body=bytes(self._pending), content_type=CONTENT_TYPE)
        async with asyncio.timeout(STALL_S):
            await self._response.write_eof(bytes(self._pending))
        return self._response

    async def _give_way(self) -> None:
        """A write that need not wait lets nobody else run."""
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
