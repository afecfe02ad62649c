"""The epochs that an upstream replica keeps for newcomers, although its floor is higher. Pure.

A hold begins at the log's base when it is registered, and ends only when its session is released.
So a delayed poll, with a floor from before the session, truncates nothing that the hold covers.
Registering and releasing are idempotent. After a release a delayed poll may register the hold
again; the coordinator sees it in the next response, and releases it again. Holds are in memory
only: after a restart of the task the coordinator registers those that are still needed.

Design: docs/design/state-movement.md#holds.
"""

from __future__ import annotations

from collections.abc import Iterable

from rekindle.exchange.state_mover.messages import Hold, Session


class Holds:
    """The holds of one boot of a task on its output log."""

    def __init__(self) -> None:
        self._bases: dict[Session, int] = {}

    def update(
        self, registered: Iterable[Session], released: Iterable[Session], log_base: int
    ) -> None:
        """Apply a poll. `log_base`: the lowest epoch in the log; `last + 1` if it is empty."""
        for session in registered:
            self._bases.setdefault(session, log_base)
        for session in released:
            self._bases.pop(session, None)

    def floor(self, floor: int) -> int:
        """The epoch through which the log may be truncated: the coordinator's floor, or less
        because of holds."""
        return min([floor, *(base - 1 for base in self._bases.values())])

    def confirmed(self) -> tuple[Hold, ...]:
        """For the poll response."""
        return tuple(Hold(session, base) for session, base in self._bases.items())
