"""A sparse index of a log file: epoch and offset of one record in about every 16 KiB.

Design: docs/design/streams.md#log-records.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right

SPACING_BYTES = 16 << 10


class SparseIndex:
    """Epochs and offsets of some records of a file; the first one begins at 0."""

    __slots__ = ("_epochs", "_offsets")

    def __init__(self) -> None:
        self._epochs = array("q")
        self._offsets = array("q")

    def add(self, epoch: int, offset: int) -> None:
        """Add a record behind all others. It is kept if it is far enough from the last one kept."""
        if not self._offsets or offset - self._offsets[-1] >= SPACING_BYTES:
            self._epochs.append(epoch)
            self._offsets.append(offset)

    def offset_before(self, epoch: int) -> int:
        """The offset of a record that holds `epoch`, or of one before it."""
        found = bisect_right(self._epochs, epoch) - 1
        return self._offsets[found] if found >= 0 else 0

    def __len__(self) -> int:
        return len(self._offsets)
