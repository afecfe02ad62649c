"""A branch of an output log: consecutive epochs in extents (log files). Pure.

The stable epochs are a branch, and those of each tentative attempt are another one. Each has its
own extents, so that a branch can be dropped without a change of others.

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
        """A branch without epochs; the first one will be `next_epoch`."""
        self._begin = next_epoch
        self._extents: list[E] = []

    @property
    def base(self) -> int:
        """Lowest epoch that can be read; `next_epoch` if there is none."""
        return max(self._begin, self._extents[0].first) if self._extents else self._begin

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

    def find(self, epoch: int) -> E | None:
        """The extent with this epoch, if there is one."""
        if not self.base <= epoch < self.next_epoch:
            return None
        return self._extents[bisect_right(self._extents, epoch, key=lambda x: x.first) - 1]

    def drop_through(self, floor: int) -> list[E]:
        """Drop the extents that have no epoch above `floor`."""
        kept = bisect_right(self._extents, floor, key=lambda x: x.last)
        return self._keep_from(kept, self.next_epoch)

    def begin_at(self, epoch: int) -> list[E]:
        """Drop the epochs before this one (at most `next_epoch`). An extent that has later ones too
        stays whole, but its epochs before this one can no longer be read."""
        dropped = self.drop_through(epoch - 1)
        self._begin = max(self._begin, epoch)
        return dropped

    def restart_at(self, epoch: int) -> list[E]:
        """Drop all extents; the next epoch is `epoch`."""
        return self._keep_from(len(self._extents), epoch)

    def _keep_from(self, index: int, begin: int) -> list[E]:
        dropped, self._extents = self._extents[:index], self._extents[index:]
        if not self._extents:
            self._begin = begin
        return dropped
