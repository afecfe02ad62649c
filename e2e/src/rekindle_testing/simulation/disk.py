"""A task's disk: its output log, the highest fence, marks, results of earlier boots.

It outlives the containers of a pod, not the pod. What is kept of earlier boots, and how it is
compared, is as in `rekindle.task.earlier_boots`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rekindle.errors import DifferentResults, NotDeterministic
from rekindle.streams.epochs import NO_EPOCH

_RESULTS_BEFORE_MAJORITY = 2


@dataclass(slots=True)
class Disk:
    """The log holds the values of epochs `base` to `last`. `discard`, `compare`: the marks that the
    log has to be discarded, and that files which sinks have written from it may be wrong."""

    values: dict[int, str] = field(default_factory=dict)
    base: int = 0
    last: int = NO_EPOCH
    fence: int = NO_EPOCH
    discard: bool = False
    compare: bool = False
    unreadable: bool = False  # the next access for a partner fails
    next_attempt: int = 1  # the first number of a tentative branch that no boot may have used
    # Of a task without partners: an epoch, and its different results.
    disputed: tuple[int, tuple[str, ...]] | None = None
    # By epoch that is to be computed again: what earlier boots have computed.
    earlier: dict[int, tuple[str, ...]] = field(default_factory=dict)
    # By first epoch, the name and the last epoch of pieces in the store that were not fetched yet.
    shipped: dict[int, tuple[str, int]] = field(default_factory=dict)
    refuses_shipped: bool = False

    def held_log(self, alone: bool) -> tuple[int, int] | None:
        """As `earlier_boots.held_log`."""
        is_doubted = self.discard or self.compare or self.disputed is not None
        is_empty = not self.values and not self.shipped
        return None if is_doubted or not alone or is_empty else (self.base, self.last)

    def adopt(self, shipped: dict[int, tuple[str, int]], through: int) -> None:
        """The log begins with pieces in the store, through an epoch."""
        self._empty(through + 1)
        self.shipped, self.base = shipped, min(shipped)

    def fetched(self, first: int, values: dict[int, str]) -> None:
        if self.shipped.pop(first, None) is not None:
            self.values |= {e: value for e, value in values.items() if e >= self.base}

    def cut(self, epoch: int) -> None:
        """The log ends before an epoch."""
        self.values = {e: value for e, value in self.values.items() if e < epoch}
        self.shipped = {first: end for first, end in self.shipped.items() if first < epoch}
        self.last, self.base = epoch - 1, min(self.base, epoch)

    def start_at(self, epoch: int, alone: bool) -> int | None:
        """As `earlier_boots.continue_log`. `alone`: the task has no partners, so that a log that
        reaches to `epoch` stays. Returns the first epoch of which sinks may have written a wrong
        file; None: they have not. Raises NotDeterministic."""
        self._discard_marked(epoch)
        if self.disputed is not None and self.disputed[0] < epoch:
            self.disputed = None  # a trusted checkpoint covers the epoch
        if self.disputed is None:
            self.earlier = {e: (value,) for e, value in self.values.items() if e >= epoch}
            if not (alone and self.last + 1 >= epoch):
                self._empty(epoch)
            return epoch if self.compare else None
        disputed_epoch, results = self.disputed
        if len(results) > _RESULTS_BEFORE_MAJORITY:
            raise NotDeterministic(f"epoch {disputed_epoch} was computed with different results")
        self._empty(epoch)
        self.earlier = {disputed_epoch: results}
        compare_files_from = epoch if self.compare else disputed_epoch
        self.compare = True
        return compare_files_from

    def check(self, epoch: int, value: str, alone: bool) -> str | None:
        """As `EarlierBoots.check`, before an epoch is appended."""
        before = self.earlier.pop(epoch, ())
        if all(value == result for result in before):
            return None
        if not alone:
            return f"epoch {epoch} differs from what an earlier boot of this replica had in its log"
        if value not in before:
            self.disputed = epoch, (*before, value)
            # Computed again; after three different results that does not help.
            error = DifferentResults if len(before) < _RESULTS_BEFORE_MAJORITY else NotDeterministic
            raise error(f"epoch {epoch} was computed with different results")
        self.disputed = None
        return None if value == before[0] else f"epoch {epoch} was wrong in the output log"

    def append(self, epoch: int, value: str) -> str:
        """Append an epoch. Returns the value that the log has: of an earlier boot, if it has one.
        Of a truncated epoch there is none to compare with."""
        assert epoch <= self.last + 1, f"epoch {epoch} cannot follow {self.last}"
        if epoch > self.last:
            self.values[epoch] = value
            self.last = epoch
        return self.values.get(epoch, value)

    def access_fails(self) -> bool:
        failed, self.unreadable = self.unreadable, False
        return failed

    def truncate(self, floor: int) -> None:
        for epoch in range(self.base, min(floor, self.last) + 1):
            self.values.pop(epoch, None)  # it may be in a piece that was not fetched
        self.base = max(self.base, min(floor, self.last) + 1)
        self.shipped = {f: piece for f, piece in self.shipped.items() if piece[1] >= self.base}

    def _discard_marked(self, epoch: int) -> None:
        if self.discard:
            self._empty(epoch)
            self.disputed = None
            self.discard, self.compare = False, True

    def _empty(self, epoch: int) -> None:
        self.values, self.base, self.last, self.shipped = {}, epoch, epoch - 1, {}
