"""When a task ships its output log to the checkpoint store, and up to which epoch. Pure.

A reader that waits for capacity will need all output since it was lost. The log has it, but is
lost with the pod. So while a reader is far behind, the replica that saves checkpoints also ships
its log, up to the committed entry: all through that was agreed before it was committed. Nothing
that may still be disputed is shipped, nor what a replica computes that is cut off. A successor in a
new pod restores that entry, and serves what is before it out of the store.

The coordinator keeps the entries that responses name (`entries`): the one up to which the log is in
the store, and the one up to which it is being shipped.

A shipment is due after each committed entry, but not before the log has grown by a part of what the
reader waits for: so the number of pieces grows with the logarithm of a long wait.

Design: docs/design/checkpoints.md#output-logs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from rekindle.backoff import BackoffPolicy
from rekindle.protocol import PollRequest
from rekindle.streams.epochs import NO_EPOCH

FAR_BEHIND_INTERVALS = 6
"""So many checkpoint intervals a reader has to be behind. In normal operation it is at most three:
the coordinator does not wait for a partition that is further behind, and it is replayed for less
time than a task takes to start."""
WAIT_SHARE = 256
"""A shipment is due when the log has grown by this part of the wait: what is replayed after the
loss of a pod is at most that, or an interval."""
_MAX_KNOWN = 64
"""Limit of chained digests that are remembered, of the newest checkpoint epochs."""
_BACKOFF = BackoffPolicy(first_s=0.5, longest_s=30.0)


@dataclass(frozen=True, slots=True)
class ShipLog:
    """Ship the log through an epoch, the committed entry's; from the end of what is in the store
    on, or else from `first`, or the log's base if that is later. `chained`: digests of all output
    through some epochs, as the task knows them."""

    first: int
    through: int
    chained: Mapping[int, str]


class ShippingCore:
    """Of one task."""

    def __init__(self, interval_epochs: int, left_out_intervals: int = 0) -> None:
        """`left_out_intervals`: so many checkpoint epochs in a row may be left out in normal
        operation (`replayTarget`)."""
        self._failure = ""  # of the newest shipment; empty after a success
        self._far_behind = (FAR_BEHIND_INTERVALS + left_out_intervals) * interval_epochs
        self._known: dict[int, str] = {}
        self._floor = NO_EPOCH
        self._committed = NO_EPOCH
        self._is_saver = False
        self._shipped: int | None = None
        self._shipping: ShipLog | None = None
        self._failures = 0  # in a row
        self._retry_at = -math.inf

    @property
    def problem(self) -> str | None:
        """Why the newest shipment failed, while the task has to ship its log."""
        if not self._failure or not self._is_saver or not self._is_needed():
            return None
        return f"the output log cannot be shipped to the checkpoint store: {self._failure}"

    @property
    def wake_at(self) -> float | None:
        return self._retry_at if self._failures and self._due() else None

    def entries(self) -> tuple[int, ...]:
        """Epochs of the entries that the manifest has to keep for a successor in a new pod."""
        if not self._is_needed():
            return ()
        target = self._shipping.through if self._shipping is not None else None
        return tuple(sorted({e for e in (self._shipped, target) if e is not None}))

    def state_known(self, epoch: int, chained: str) -> None:
        """The chained digest of all output through a checkpoint epoch, or a restore point."""
        self._known[epoch] = chained
        while len(self._known) > _MAX_KNOWN:
            del self._known[min(self._known)]

    def adopted(self, through: int) -> None:
        """The task has begun with a log that is in the store through its restore point."""
        self._shipped = through

    def poll_accepted(self, poll: PollRequest, now: float) -> list[ShipLog]:
        """The newest desired state of a task that runs."""
        self._is_saver = poll.saver
        if poll.floor is not None:
            self._floor = poll.floor
        if poll.committed is not None:
            self._committed = poll.committed.epoch
        return self._next(now)

    def shipped(self, through: int, now: float) -> list[ShipLog]:
        """All pieces through an epoch are in the store."""
        self._shipping, self._shipped = None, through
        self._failures, self._failure = 0, ""
        return self._next(now)

    def failed(self, message: str, now: float) -> list[ShipLog]:
        self._shipping = None
        self._failures += 1
        self._retry_at = now + _BACKOFF.wait_s(self._failures)
        self._failure = message
        return []

    def woken(self, now: float) -> list[ShipLog]:
        """Time has passed."""
        return self._next(now)

    def _is_needed(self) -> bool:
        """Whether a reader is far behind."""
        return self._committed - self._floor > self._far_behind

    def _due(self) -> bool:
        if self._shipping is not None or not self._is_saver or self._committed not in self._known:
            return False
        grown = self._committed - (self._floor if self._shipped is None else self._shipped)
        wait = (self._committed - self._floor) // WAIT_SHARE
        return self._is_needed() and grown >= max(1, wait)

    def _next(self, now: float) -> list[ShipLog]:
        if not self._due() or (self._failures and now < self._retry_at):
            return []
        first = max(0, self._floor + 1 - self._far_behind)
        self._shipping = ShipLog(first, self._committed, dict(self._known))
        return [self._shipping]
