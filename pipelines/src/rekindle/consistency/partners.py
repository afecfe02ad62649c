"""Which of two replicas stabilizes first, while the other serves. Pure.

A replica asks its partner before it stabilizes; the partner's promise is a lease. The replica that
asks counts it from when it sent the request, the partner from when it received the request, so the
lease ends earlier for the replica that relies on it. Of two that ask at the same time, the one with
the lower index goes first. After a timeout without an answer, a replica stabilizes anyway.

Design: docs/design/consistency.md#one-partner-stabilizes-at-a-time.
Paper: DPC (Balazinska et al. 2005), section 3.4.
"""

from __future__ import annotations

import math
from enum import Enum, auto

ANSWER_S = 1.0
"""Timeout of a request to the partner."""
RETRY_S = 1.0
"""Time between a refusal and the next request."""


class Permission(Enum):
    BEGIN = auto()
    ASK = auto()
    WAIT = auto()


class Partners:
    """The leases of one replica."""

    def __init__(self, replica: int, present: bool, lease_s: float) -> None:
        self.lease_s = lease_s
        self._replica = replica
        self._present = present
        self._asked_at: float | None = None
        self._retry_at = -math.inf
        self._serving_until = -math.inf  # this replica has promised to serve for the partner
        self._served_until = -math.inf  # the partner has promised to serve for this replica

    def permission(self, now: float) -> Permission:
        """Whether this replica may begin to stabilize."""
        if now < self._serving_until:
            return Permission.WAIT
        if not self._present or now < self._served_until:
            return Permission.BEGIN
        if self._asked_at is not None:
            no_answer = now >= self._asked_at + ANSWER_S
            return Permission.BEGIN if no_answer else Permission.WAIT
        return Permission.WAIT if now < self._retry_at else Permission.ASK

    def asked(self, now: float) -> None:
        self._asked_at = now

    def served(self, now: float) -> bool:
        """Whether the partner serves in place of this replica."""
        return now < self._served_until

    def renewal_due(self, now: float) -> bool:
        """Half of the lease has passed."""
        return self.served(now) and self._asked_at is None and now >= self._renew_at()

    def _renew_at(self) -> float:
        return self._served_until - self.lease_s / 2

    def wakes(self) -> list[float]:
        times = [self._serving_until, self._served_until, self._retry_at, self._renew_at()]
        return [*times, self._asked_at + ANSWER_S] if self._asked_at is not None else times

    def requested(self, by: int, lease_s: float, is_stabilizing: bool, now: float) -> bool:
        """The partner `by` asks. Returns whether this replica promises to serve; `is_stabilizing`:
        whether it corrects epochs already, and its new input waits until that is done."""
        goes_first = self._asked_at is not None and self._replica < by
        if is_stabilizing or goes_first:
            return False
        self._asked_at = None
        self._serving_until = max(self._serving_until, now + lease_s)
        return True

    def promise_ended(self) -> None:
        """The partner no longer needs what this replica has promised."""
        self._serving_until = -math.inf

    def promised(self, lease_s: float) -> None:
        """The partner promises to serve."""
        if self._asked_at is not None:
            self._served_until = self._asked_at + lease_s
            self._asked_at = None

    def refused(self, now: float) -> None:
        if self._asked_at is not None:
            self._asked_at = None
            self._retry_at = now + RETRY_S

    def changed(self, present: bool) -> None:
        """All leases are void if the partner is lost."""
        self._present = present
        if not present:
            self._asked_at = None
            self._serving_until = self._served_until = self._retry_at = -math.inf

    def ended(self, now: float) -> bool:
        """This replica has stabilized, or has stopped stabilizing. Returns whether the partner must
        be notified."""
        was_served = self.served(now)
        self._asked_at, self._served_until = None, -math.inf
        return was_served
