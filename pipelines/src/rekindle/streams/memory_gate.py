"""A bound for what responses hold in memory, whoever reads slowly.

Epochs of a local log are sent from its mapped files and need no memory. Rows that were divided into
shares, and files that were fetched from the store, do, until the slowest of their readers has them.
What several responses hold counts once. Used within one event loop.

Design: docs/design/streams.md#edges.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager


class MemoryGate:
    """Things of at most `max_bytes` together, or a single larger one."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held: dict[Hashable, tuple[int, int]] = {}  # bytes, and by how many
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def held_bytes(self) -> int:
        return sum(size for size, _ in self._held.values())

    @asynccontextmanager
    async def hold(self, key: Hashable, size: int) -> AsyncIterator[None]:
        """Wait until there is memory for it, in the order of calls. Not to be nested: two responses
        could wait for each other."""
        while not self._fits(key, size):
            woken = asyncio.get_running_loop().create_future()
            self._waiting.append(woken)
            try:
                await woken
            finally:
                if woken in self._waiting:
                    self._waiting.remove(woken)
        known, holders = self._held.get(key, (0, 0))
        self._held[key] = (max(known, size), holders + 1)
        try:
            yield
        finally:
            size_held, holders = self._held.pop(key)
            if holders > 1:
                self._held[key] = (size_held, holders - 1)
            else:
                self._wake_all()

    def _fits(self, key: Hashable, size: int) -> bool:
        return key in self._held or not self._held or self.held_bytes + size <= self._max_bytes

    def _wake_all(self) -> None:
        """Each looks again; those that do not fit wait on, behind newer ones for the same thing."""
        while self._waiting:
            woken = self._waiting.popleft()
            if not woken.done():
                woken.set_result(None)
