"""The branches of an output log: the stable one, and a tentative one for each attempt. Pure.

A branch is a sequence of consecutive epochs in extents (log files) of its own, so that dropping it
touches no other. A tentative branch forks from the stable one after an epoch: up to there it reads
the stable epochs, above it only its own, however far the stable branch gets meanwhile.

Paper: DPC (Balazinska et al. 2005), section 3.3. Design: docs/design/streams.md#branches.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Generic, Protocol, TypeVar


class Extent(Protocol):
    """Consecutive epochs `first..last`, at least one; the newest extent of a branch may grow."""

    @property
    def first(self) -> int: ...
    @property
    def last(self) -> int: ...


E = TypeVar("E", bound=Extent)


class Branch(Generic[E]):
    """Consecutive epochs `base..next_epoch - 1`."""

    def __init__(self, next_epoch: int) -> None:
        """Without epochs; the first one will be `next_epoch`."""
        self._begin = next_epoch
        self._extents: list[E] = []

    @property
    def base(self) -> int:
        """Lowest epoch that can be read; `next_epoch` if there is none."""
        return self._extents[0].first if self._extents else self._begin

    @property
    def next_epoch(self) -> int:
        return self._extents[-1].last + 1 if self._extents else self._begin

    @property
    def extents(self) -> tuple[E, ...]:
        """Oldest first."""
        return tuple(self._extents)

    @property
    def newest(self) -> E | None:
        return self._extents[-1] if self._extents else None

    def add(self, extent: E) -> None:
        """Raises ValueError if it does not follow the newest one."""
        if extent.first != self.next_epoch:
            raise ValueError(f"epoch {extent.first} cannot follow {self.next_epoch - 1}")
        self._extents.append(extent)

    def holding(self, epoch: int) -> E | None:
        """The extent with this epoch, if there is one."""
        if not self.base <= epoch < self.next_epoch:
            return None
        return self._extents[bisect_right(self._extents, epoch, key=lambda x: x.first) - 1]

    def drop_through(self, floor: int) -> list[E]:
        """Drop the extents that have no epoch above `floor`."""
        kept = bisect_right(self._extents, floor, key=lambda x: x.last)
        return self._keep_from(kept, self.next_epoch)

    def restart_at(self, epoch: int) -> list[E]:
        """Drop all extents; the next epoch is `epoch`."""
        return self._keep_from(len(self._extents), epoch)

    def _keep_from(self, index: int, begin: int) -> list[E]:
        dropped, self._extents = self._extents[:index], self._extents[index:]
        if not self._extents:
            self._begin = begin
        return dropped


class Branches(Generic[E]):
    """The stable branch of a log, and the tentative ones by their attempt."""

    def __init__(self) -> None:
        self.stable: Branch[E] = Branch(0)
        self._tentative: dict[int, Branch[E]] = {}
        self._forked_after: dict[int, int] = {}

    def fork(self, attempt: int, after: int) -> Branch[E]:
        """A tentative branch that follows stable epoch `after`. Raises ValueError."""
        if attempt < 1 or attempt in self._forked_after:
            raise ValueError(f"attempt {attempt} cannot begin a branch")
        if not self.stable.base - 1 <= after < self.stable.next_epoch:
            raise ValueError(f"a branch cannot follow epoch {after}, which the log does not hold")
        self._tentative[attempt] = Branch(after + 1)
        self._forked_after[attempt] = after
        return self._tentative[attempt]

    def holding(self, attempt: int, epoch: int) -> E | None:
        """The extent with this epoch, as the branch sees it. Raises KeyError if it was dropped."""
        stable = epoch <= self._forked_after[attempt]
        return (self.stable if stable else self._tentative[attempt]).holding(epoch)

    def drop(self, attempt: int) -> list[E]:
        """Forget a tentative branch; returns its extents. Raises KeyError."""
        del self._forked_after[attempt]
        return list(self._tentative.pop(attempt).extents)
