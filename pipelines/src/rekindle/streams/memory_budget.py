"""Bounds the memory of responses, however slow their readers are.

Epochs of a local log are sent from its mapped files and need no memory. Rows that were divided into
shares, and files that were fetched from the store, need memory until the slowest of their readers
has them. Memory that several responses share is counted once. Used within one event loop.

Design: docs/design/streams.md#edges.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

MAX_PASSED = 16
"""How many later reservations may be granted before one that does not fit: without this limit a
large reservation would wait for ever while small ones come and go."""


@dataclass(eq=False, slots=True)
class Reservation:
    """Memory that one response holds, or waits for. Responses with the same `key` share it.
    `granted`: done when the response may allocate it."""

    key: Hashable
    size: int  # bytes
    granted: asyncio.Future[None]
    passed: int = field(default=0)  # how many later ones were granted before it


class MemoryBudget:
    """At most `max_bytes` are reserved at a time, or a single larger reservation."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._reserved: dict[Hashable, tuple[int, int]] = {}  # bytes, and how many hold them
        self._waiting: list[Reservation] = []  # in the order of calls

    @property
    def reserved_bytes(self) -> int:
        return sum(size for size, _ in self._reserved.values())

    @asynccontextmanager
    async def reserve(self, key: Hashable, size: int) -> AsyncIterator[Reservation]:
        """Wait until the memory is available. Granted in the order of calls, except that a key that
        is reserved already is granted at once, and that a few smaller ones may be granted before
        one that does not fit. Not to be nested: two responses could wait for each other."""
        waiting = Reservation(key, size, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._grant_waiting()
        try:
            await waiting.granted
        except asyncio.CancelledError:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
                self._grant_waiting()
            else:  # it was granted already
                self._release(waiting)
            raise
        try:
            yield waiting
        finally:
            self._release(waiting)

    def shrink(self, reservation: Reservation, size: int) -> None:
        """The response releases the shared memory and keeps `size` bytes of its own, without
        waiting, even above the limit."""
        own = Reservation((reservation.key, object()), size, reservation.granted)
        self._grant(own)
        self._release(reservation)
        reservation.key = own.key

    def _grant_waiting(self) -> None:
        blocked: list[Reservation] = []
        for waiting in self._waiting:
            if waiting.key in self._reserved:
                self._grant(waiting)
            elif self._fits(waiting.size) and all(b.passed < MAX_PASSED for b in blocked):
                for other in blocked:
                    other.passed += 1
                self._grant(waiting)
            else:
                blocked.append(waiting)
        self._waiting = blocked

    def _grant(self, waiting: Reservation) -> None:
        size, holders = self._reserved.get(waiting.key, (0, 0))
        self._reserved[waiting.key] = (max(size, waiting.size), holders + 1)
        if not waiting.granted.done():  # if it was cancelled, `reserve` releases it
            waiting.granted.set_result(None)

    def _fits(self, size: int) -> bool:
        return not self._reserved or self.reserved_bytes + size <= self._max_bytes

    def _release(self, reservation: Reservation) -> None:
        size, holders = self._reserved.pop(reservation.key)
        if holders > 1:
            self._reserved[reservation.key] = (size, holders - 1)
        else:
            self._grant_waiting()
