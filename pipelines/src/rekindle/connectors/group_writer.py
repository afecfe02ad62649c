"""Which replica writes a group of epochs, where only one can: sessions fence each other. Pure.

All replicas of a task compute the same groups. A writer begins a session, which fences whoever had
one; what the former sessions have committed is decided then, and the *marker* says it: the last
epoch that is durable, written in one transaction with its rows. So a writer reads the marker after
the session has begun, and goes on after it. A writer that was fenced, or whose commit has an
outcome that it does not know, begins as if it had just started.

A session for each failure would let replicas fence each other forever. So whoever has seen another
one write, or was fenced, waits for `patience` for the other to commit the group, before it takes
over; each time longer, until it has committed a group itself.

Design: docs/design/exactly-once.md#topics-as-sinks.
"""

from __future__ import annotations

from dataclasses import dataclass

from rekindle.backoff import BackoffPolicy
from rekindle.streams.epochs import NO_EPOCH

PATIENCE = BackoffPolicy(first_s=3.0, longest_s=900.0)
"""At most as long as a transaction may take: else replicas would end each other's for ever."""
LOOK_S = 0.1
"""Seconds between two looks at the marker, of a replica that waits for another one."""


@dataclass(frozen=True, slots=True)
class Done:
    """The group is durable."""


@dataclass(frozen=True, slots=True)
class Look:
    """Read the newest marker that is committed, after so many seconds; others may be on their
    way."""

    after_s: float


@dataclass(frozen=True, slots=True)
class BeginSession:
    """Fence all others; then read the marker, when none is on its way any more."""


@dataclass(frozen=True, slots=True)
class WriteGroup:
    """Write the rows of the group and its marker, in one transaction of the session."""


Step = Done | Look | BeginSession | WriteGroup


class GroupWriter:
    """One replica's view. `through`: the newest marker that it has seen."""

    def __init__(self, patience: BackoffPolicy = PATIENCE) -> None:
        self.through = NO_EPOCH
        self._patience = patience
        self._has_session = False
        self._others_write = False
        self._wanted: int | None = None  # the last epoch of the group that is to be written
        self._wanted_at = 0.0
        self._looked_at: float | None = None  # since the group is wanted
        self._taken_over = 0  # times in a row
        self._has_looked = False

    def next_step(self, through: int, now: float) -> Step:
        """`through`: the last epoch of the group that is to be written."""
        if self.through >= through:
            return Done()
        if self._has_session:
            return WriteGroup()
        if self._wanted != through:
            self._wanted, self._wanted_at, self._looked_at = through, now, None
        if self._looked_at is None:
            return Look(0.0)
        if self._others_write:
            patience_s = self._patience.wait_s(self._taken_over + 1)
            if self._looked_at < self._wanted_at + patience_s:
                return Look(LOOK_S)
        return BeginSession()

    def marker_read(self, through: int, now: float) -> None:
        """Of a look."""
        if through > self.through and self._has_looked:
            self._others_write = True
        self._has_looked = True
        self.through, self._looked_at = max(self.through, through), now

    def session_begun(self, through: int) -> None:
        """`through`: the marker that was read then."""
        self.through = max(self.through, through)
        self._taken_over += int(self._others_write)
        self._has_session, self._others_write = True, False

    def committed(self, through: int) -> None:
        self.through = max(self.through, through)
        self._taken_over = 0

    def fenced(self) -> None:
        """Another replica has begun a session."""
        self.session_lost()
        self._others_write = True

    def session_lost(self) -> None:
        """A request of the session has failed, or has an outcome that is not known."""
        self._has_session = False
        self._wanted = None  # the patience begins anew
