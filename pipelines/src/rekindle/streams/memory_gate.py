"""A bound for what responses hold in memory, whoever reads slowly.

Epochs of a local log are sent from its mapped files and need no memory. Rows that were divided into
shares, and files that were fetched from the store, do, until the slowest of their readers has them.
What several responses hold counts once. Used within one event loop.

Design: docs/design/streams.md#edges.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

MAX_PASSED = 16
"""How many others may get memory before one that needs more than there is: without this limit it
would never get any while small ones come and go."""


@dataclass(eq=False, slots=True)
class Hold:
    """What one response holds, or waits for."""

    key: Hashable
    size: int
    turn: asyncio.Future[None]
    passed: int = field(default=0)  # by others that came later


class MemoryGate:
    """Things of at most `max_bytes` together, or a single larger one."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held: dict[Hashable, tuple[int, int]] = {}  # bytes, and by how many
        self._waiting: list[Hold] = []  # in the order of calls

    @property
    def held_bytes(self) -> int:
        return sum(size for size, _ in self._held.values())

    @asynccontextmanager
    async def hold(self, key: Hashable, size: int) -> AsyncIterator[Hold]:
        """Wait until there is memory for it, in the order of calls; but what is held already is
        held by one more at once, and a few that need less may pass. Not to be nested: two responses
        could wait for each other."""
        waiting = Hold(key, size, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._give_turns()
        try:
            await waiting.turn
        except asyncio.CancelledError:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
                self._give_turns()
            else:  # it was its turn already
                self._let_go(waiting)
            raise
        try:
            yield waiting
        finally:
            self._let_go(waiting)

    def needs_only(self, hold: Hold, size: int) -> None:
        """The response needs so many bytes of its own instead, and does not wait for them."""
        own = Hold((hold.key, object()), size, hold.turn)
        self._take(own)
        self._let_go(hold)
        hold.key = own.key

    def _give_turns(self) -> None:
        blocked: list[Hold] = []
        for waiting in self._waiting:
            if waiting.key in self._held:
                self._take(waiting)
            elif self._fits(waiting.size) and all(b.passed < MAX_PASSED for b in blocked):
                for other in blocked:
                    other.passed += 1
                self._take(waiting)
            else:
                blocked.append(waiting)
        self._waiting = blocked

    def _take(self, waiting: Hold) -> None:
        size, holders = self._held.get(waiting.key, (0, 0))
        self._held[waiting.key] = (max(size, waiting.size), holders + 1)
        if not waiting.turn.done():  # it may have been cancelled, and gives it back
            waiting.turn.set_result(None)

    def _fits(self, size: int) -> bool:
        return not self._held or self.held_bytes + size <= self._max_bytes

    def _let_go(self, hold: Hold) -> None:
        size, holders = self._held.pop(hold.key)
        if holders > 1:
            self._held[hold.key] = (size, holders - 1)
        else:
            self._give_turns()
