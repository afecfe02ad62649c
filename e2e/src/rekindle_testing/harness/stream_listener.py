"""A reader of a task's output from outside: when each epoch, UNDO and REC_DONE arrived, in order.

It reads what a downstream task would read: live calls of the task's log server, stable and
tentative epochs alike. The coordinator does not know it, so truncation does not wait for it: it
skips epochs that are truncated. An epoch's time is when the whole response had arrived.

Design: docs/design/streams.md#edges.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from types import TracebackType
from typing import Self

from rekindle.errors import BelowFloor
from rekindle.identity import Identity
from rekindle.streams.client import StreamClient
from rekindle.streams.epochs import BatchKind
from rekindle.streams.wire import LivePosition, ReadRequest, StreamUnavailable
from rekindle_testing.harness.stream_delays import Arrival

_REQUEST_BYTES = 8 << 20
_WAIT_S = 1.0
_TIMEOUT_S = 3.0
_RETRY_S = 0.2


class StreamListener:
    """Reads one partition of a stream at one address (`host:port`) in a thread of its own, from an
    epoch on that is not truncated yet."""

    def __init__(
        self, address: str, stream: str, identity: Identity, from_epoch: int, partition: int = 0
    ) -> None:
        self._address = address
        self._stream = stream
        self._partition = partition
        self._identity = identity
        self._arrivals: list[Arrival] = []
        self._next_epoch = from_epoch
        self._position = LivePosition()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stream-listener", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stopped.set()
        self._thread.join(_TIMEOUT_S + _WAIT_S)

    @property
    def arrivals(self) -> list[Arrival]:
        """What has arrived until now, oldest first."""
        return list(self._arrivals)

    def _run(self) -> None:
        asyncio.run(self._read())

    async def _read(self) -> None:
        client = StreamClient(self._address, self._identity)
        while not self._stopped.is_set():
            try:
                await self._read_next(client)
            except BelowFloor:
                self._next_epoch += 1
            except StreamUnavailable:
                await asyncio.sleep(_RETRY_S)
        with contextlib.suppress(OSError):
            await client.close()

    async def _read_next(self, client: StreamClient) -> None:
        request = ReadRequest(
            self._stream,
            self._partition,
            self._next_epoch,
            _REQUEST_BYTES,
            _WAIT_S,
            live=self._position,
        )
        response = await client.read(request, _TIMEOUT_S)
        now = time.time()
        for batch in response.epochs:
            self._arrivals.append(Arrival(now, batch.kind, batch.epoch, batch.rows.num_rows))
            if batch.kind is BatchKind.STABLE:
                self._next_epoch = batch.epoch + 1
        # Skip truncated epochs, also if the response has no epochs.
        self._next_epoch = max(self._next_epoch, response.progress.base)
        self._position = response.live or self._position
