"""What a reader outside of the topology has, and which UNDO and REC_DONE it has to get. Pure.

A reader of tentative results holds tentative epochs until their stable versions come. It may have
read them at another replica, or before a restart, whose order of output nobody has any more. So
UNDO and REC_DONE follow from what the reader holds, not only from what a replica has sent.

Design: docs/design/stream-sinks.md#corrections.
Paper: DPC (Balazinska et al. 2005), sections 3.2 to 3.5.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from rekindle.streams.epochs import NO_EPOCH, BatchKind


class Control(NamedTuple):
    """`UNDO`: drop the tentative epochs from `epoch` on. `REC_DONE`: all that was dropped through
    `epoch` has come again, stable."""

    kind: BatchKind
    epoch: int


@dataclass(frozen=True, slots=True)
class Cursor:
    """`next_stable`: the next stable epoch. `held`: the lowest and the highest tentative epoch
    that the reader holds, both at `next_stable` or above; None: it holds none. `correcting`: the
    highest epoch that it has dropped and not got again; NO_EPOCH: none."""

    next_stable: int
    held: tuple[int, int] | None = None
    correcting: int = NO_EPOCH

    def before_stable(self, epoch: int) -> tuple[list[Control], Cursor]:
        """What the reader has to get before the stable version of an epoch, and the cursor after
        that."""
        if self.held is None or epoch < self.held[0]:
            return [], self
        return self.undo(self.held[0])

    def after_stable(self, epoch: int) -> Cursor:
        """The reader has got the stable version of an epoch, which is the next one."""
        if epoch != self.next_stable:
            raise ValueError(f"epoch {epoch} is not the next stable one, {self.next_stable}")
        return replace(self, next_stable=epoch + 1)

    @property
    def is_corrected(self) -> bool:
        """Whether REC_DONE is due: all that was dropped has come again."""
        return self.correcting != NO_EPOCH and self.next_stable > self.correcting

    def first_tentative(self, epoch: int) -> int:
        """Of tentative epochs in order that begin with `epoch`, the first that the reader lacks."""
        return max(epoch, self.next_stable, NO_EPOCH if self.held is None else self.held[1] + 1)

    def after_tentative(self, epoch: int) -> Cursor:
        """The reader has got a tentative epoch."""
        lowest = epoch if self.held is None else self.held[0]
        return replace(self, held=(lowest, epoch))

    def undo(self, from_epoch: int) -> tuple[list[Control], Cursor]:
        """The reader drops the tentative epochs from `from_epoch` on, if it holds any."""
        if self.held is None or self.held[1] < from_epoch:
            return [], self
        lowest, highest = self.held
        first = max(from_epoch, lowest)
        held = (lowest, first - 1) if first > lowest else None
        moved = replace(self, held=held, correcting=max(self.correcting, highest))
        return [Control(BatchKind.UNDO, first)], moved

    def reconciliation_done(self) -> tuple[list[Control], Cursor]:
        """All corrections have been sent: REC_DONE, if the reader has dropped anything since the
        last one."""
        if self.correcting == NO_EPOCH:
            return [], self
        done = Control(BatchKind.RECONCILIATION_DONE, self.next_stable - 1)
        return [done], replace(self, correcting=NO_EPOCH)
