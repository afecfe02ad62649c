"""Calls of the store for readers, one at a time, so that one that hangs blocks the next ones only
for a while.

A call that has not returned by its deadline is abandoned together with its thread, and the next one
gets a new thread. Knows neither logs nor the store. Used within one event loop.

Design: docs/design/task.md#threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from rekindle.errors import StoreError
from rekindle.streams.io_thread import CallThread

TIMEOUT_S = 30.0
"""To fetch a file of a log, of 16 MiB or one epoch."""
MAX_HANGING = 4
"""Calls that hang at a time; while there are so many, others fail at once."""
_NAME = "stream-store"
T = TypeVar("T")


class StoreCalls:
    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._thread = CallThread(_NAME)
        self._hanging: list[CallThread] = []
        self._waiting = 0

    def __len__(self) -> int:
        """Calls that wait for their turn."""
        return self._waiting

    async def run(self, function: Callable[[], T], what: str) -> T:
        """Call a function, and wait for its result. Raises what it raises, and StoreError with
        `what` if it does not return. If this is cancelled, a call that has begun continues until
        its deadline, and others wait for it (readers give up earlier than calls)."""
        self._waiting += 1
        try:
            await self._turn.acquire()
        finally:
            self._waiting -= 1
        running = asyncio.create_task(self._run(function, what))
        running.add_done_callback(self._ended)
        return await asyncio.shield(running)

    def _ended(self, running: asyncio.Task[Any]) -> None:
        self._turn.release()
        if not running.cancelled():
            running.exception()  # retrieve it: the caller may have been cancelled

    async def _run(self, function: Callable[[], T], what: str) -> T:
        self._hanging = [thread for thread in self._hanging if thread.alive]
        if len(self._hanging) >= MAX_HANGING:
            raise StoreError(f"{what}: not tried, since {MAX_HANGING} calls of the store hang")
        try:
            async with asyncio.timeout(TIMEOUT_S) as deadline:
                return await self._thread.run(function)
        except TimeoutError:
            if not deadline.expired():
                raise
        self._thread.stop(0)  # it ends once the call returns
        self._hanging.append(self._thread)
        self._thread = CallThread(_NAME)
        raise StoreError(f"{what}: the store has not responded within {TIMEOUT_S:g} s")

    def stop(self, timeout_s: float) -> None:
        """End the thread after its call in progress."""
        self._thread.stop(timeout_s)
