"""Limits one call of a chain: epochs, rows and bytes. Pure.

A limit on rows is not enough: two hundred thousand rows are 5 MB of numbers or 400 MB of text. The
first epoch is taken whatever its size, because an epoch is never divided; `rekindle.engine.memory`
decides whether it fits into memory at all.

Design: docs/design/engine.md#calls.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

from rekindle.streams.epochs import EpochInput

MAX_EPOCHS = 64
MAX_ROWS = 200_000
CALL_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class CallBounds:
    """`max_bytes` is the size of the input rows in Arrow."""

    max_epochs: int = MAX_EPOCHS
    max_rows: int = MAX_ROWS
    max_bytes: int = CALL_BYTES

    def with_max_epochs(self, max_epochs: int) -> CallBounds:
        """The same bounds with at most `max_epochs` epochs."""
        return replace(self, max_epochs=min(self.max_epochs, max_epochs))


@dataclass(slots=True)
class CallBuilder:
    """Collects the epochs of a call one after another."""

    bounds: CallBounds
    epochs: list[EpochInput] = field(default_factory=list)
    rows: int = 0
    bytes: int = 0

    @property
    def full(self) -> bool:
        return len(self.epochs) >= self.bounds.max_epochs

    def add(self, epoch: EpochInput) -> bool:
        """Add the next epoch; False if it would exceed the bounds."""
        rows, size = self.rows + epoch.num_rows, self.bytes + epoch.nbytes
        fits = rows <= self.bounds.max_rows and size <= self.bounds.max_bytes
        if self.full or (self.epochs and not fits):
            return False
        self.epochs.append(epoch)
        self.rows, self.bytes = rows, size
        return True


def take_ready(ready: deque[EpochInput], bounds: CallBounds) -> list[EpochInput]:
    """Remove the epochs of one call from the front of `ready`."""
    call = CallBuilder(bounds)
    while ready and call.add(ready[0]):
        ready.popleft()
    return call.epochs
