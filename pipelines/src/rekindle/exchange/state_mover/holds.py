"""What an upstream replica keeps for newcomers, whatever floor it is given. Pure.

A hold begins at the log's base when it is registered, and ends only when it is released by name. So
a poll that is late, with a floor from before the session, truncates nothing that the hold covers.
Registering and releasing are idempotent. After a release a poll that is late may register the hold
again; the coordinator sees it in the next response, and releases it again. Kept in memory: after a
restart the coordinator registers what is still needed.

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
        """Follow a poll. `log_base`: the lowest epoch in the log; `last + 1` if it is empty."""
        for session in registered:
            self._bases.setdefault(session, log_base)
        for session in released:
            self._bases.pop(session, None)

    def floor(self, floor: int) -> int:
        """How far the log may be truncated, of the coordinator's floor."""
        return min([floor, *(base - 1 for base in self._bases.values())])

    def confirmed(self) -> tuple[Hold, ...]:
        """For the poll response."""
        return tuple(Hold(session, base) for session, base in self._bases.items())
