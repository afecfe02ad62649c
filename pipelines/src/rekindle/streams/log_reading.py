"""Reading epochs from the bytes of an output log, within limits. Pure.

Design: docs/design/streams.md#log-records.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import pyarrow as pa

from rekindle.streams import records
from rekindle.streams.digest import chain_digest
from rekindle.streams.records import Record

MAX_READ_EPOCHS = 256
"""Maximum epochs of one read: empty ones hardly count for its limit in bytes."""


class EncodedEpoch(NamedTuple):
    """An epoch as it is in the log. `payload`: its rows as an Arrow IPC stream, None without rows;
    `checksum`: CRC-32 of it, which matches. A tuple, as `Record` is."""

    epoch: int
    watermark: int
    digest: str
    payload: pa.Buffer | None
    checksum: int
    idle: bool = False

    def chained_after(self, before: str) -> str:
        """The chained digest after this epoch; `before`: before it."""
        return chain_digest(before, self.epoch, self.watermark, self.digest, self.idle)


class View:
    """Records between two offsets, whose bytes do not change any more. `copied_from`: the offset in
    the file, if they are a copy of the empty record at its end, which grows with each further epoch
    without rows."""

    __slots__ = ("content", "copied_from", "data", "end", "start")

    def __init__(
        self, data: pa.Buffer, start: int, end: int, copied_from: int | None = None
    ) -> None:
        self.data = data
        self.content = memoryview(data)
        self.start = start
        self.end = end
        self.copied_from = copied_from

    def records(self, epoch: int) -> Iterator[Record]:
        """From the record that holds `epoch` on, with checksums unread. Raises DamagedRecord."""
        begin = records.locate(self.content, self.start, self.end, epoch)
        return records.headers(self.content, begin, self.end)

    def watermark_changes(self, record: Record) -> memoryview:
        """As `records.watermark_changes`. Raises DamagedRecord if the record does not match its
        sum."""
        records.verify_checksum(self.content, record)
        return records.watermark_changes(self.content, record)


@dataclass(slots=True)
class Reading:
    """The epochs of one read, from `next_epoch` on: at most `max_epochs`, and not more than `left`
    bytes of records, but with `at_least_one` the first one whatever its size."""

    next_epoch: int
    left: int
    at_least_one: bool = True
    max_epochs: int = MAX_READ_EPOCHS
    epochs: list[EncodedEpoch] = field(default_factory=list)
    complete: bool = False

    def take(self, view: View) -> int:
        """Read on in a view that has the next epoch; the offset in the file from which the epoch
        after that is looked for. Raises DamagedRecord; the epochs before it have been read."""
        end = view.end
        for record in view.records(self.next_epoch):
            added = self._add_empty(view, record) if record.empty else self._add_rows(view, record)
            if not added:
                end = record.start
                break
            if self._is_full(records.ALIGN):  # so the next header need not be read
                end = record.end
                break
        return end if view.copied_from is None else view.copied_from

    def _add_rows(self, view: View, record: Record) -> bool:
        """Read the record's epoch, if it is not one too many."""
        if self._is_full(record.size):
            return False
        checksum = records.verify_checksum(view.content, record)
        payload = view.data.slice(record.payload_start, record.length)
        self._add(record, record.watermark, payload, checksum)
        self.left -= record.size
        return True

    def _add_empty(self, view: View, record: Record) -> bool:
        """Read epochs of an empty record; False if some are left."""
        changes = view.watermark_changes(record)
        for watermark in records.watermarks(changes, record, self.next_epoch):
            if self._is_full(records.ALIGN):
                return False
            self._add(record, watermark, None, 0)
            self.left -= records.ALIGN
        return True

    def _add(
        self, record: Record, watermark: int, payload: pa.Buffer | None, checksum: int
    ) -> None:
        epoch, digest, idle = self.next_epoch, record.digest, record.idle
        self.epochs.append(EncodedEpoch(epoch, watermark, digest, payload, checksum, idle))
        self.next_epoch += 1

    def _is_full(self, size: int) -> bool:
        """Whether an epoch of this size is one too many."""
        epochs = len(self.epochs)
        too_large = size > self.left and (epochs > 0 or not self.at_least_one)
        self.complete = too_large or epochs == self.max_epochs
        return self.complete
