"""Which bytes are written to a log file, and where, to append an epoch. Pure.

A file's last record may be an empty one: consecutive epochs without rows. It grows by an epoch when
its header of 64 bytes is written again, in place, as the last step: a process that is killed before
that leaves the record without the epoch. Only the newest empty record of a process grows; readers
get it from memory (`GrowingRecord.content`), since its bytes change.

Design: docs/design/streams.md#log-records.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace

import pyarrow as pa

from rekindle.streams.records import ALIGN, WATERMARK_CHANGE, Record, RecordKind, encode_header

MAX_WATERMARK_CHANGES_BYTES = 4096
"""An empty record with more changes of its watermark is continued by another record."""
_MAX_EPOCHS = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class GrowingRecord:
    """The empty record at the end of a file, which may grow. `changes`: of its watermark,
    encoded."""

    record: Record
    header: bytes
    changes: bytes
    changes_checksum: int

    @property
    def content(self) -> bytes:
        """The record as it is in the file."""
        return self.header + self.changes + bytes(-len(self.changes) % ALIGN)


@dataclass(frozen=True, slots=True)
class Tail:
    """The end of a log file whose epochs are below `next_epoch`."""

    next_epoch: int
    size: int = 0
    records: int = 0
    newest_bytes: int = 0  # of the newest record
    growing: GrowingRecord | None = None

    @property
    def final_bytes(self) -> int:
        """So many bytes, from the begin of the file, do not change any more."""
        return self.size if self.growing is None else self.growing.record.start

    def with_record(self, record: Record) -> Tail:
        """The tail after a record that is in the file."""
        return Tail(record.next_epoch, record.end, self.records + 1, record.size)


@dataclass(frozen=True, slots=True)
class Appended:
    """The writes that append an epoch (offset and bytes, in this order), and the tail after them.
    `record`: the new record; None if the last one grows. `undo`: offset and bytes to write back if
    a write in place fails."""

    tail: Tail
    writes: tuple[tuple[int, bytes | pa.Buffer], ...]
    record: Record | None
    undo: tuple[int, bytes] | None = None


def append_epoch(
    tail: Tail,
    watermark: int,
    digest: str,
    payload: pa.Buffer,
    kind: RecordKind = RecordKind.STABLE,
    branch: int = 0,
    idle: bool = False,
) -> Appended:
    """Append epoch `tail.next_epoch`; an empty payload: it has no rows. Raises ValueError."""
    if not payload.size and tail.growing is not None:
        grown = _grown(tail, tail.growing, watermark, digest, kind, branch, idle)
        if grown is not None:
            return grown
    record = Record(
        kind,
        branch,
        tail.next_epoch,
        1,  # epochs
        watermark,
        digest,
        tail.size,
        payload.size,
        tail.newest_bytes,
        idle,
    )
    header = encode_header(record, zlib.crc32(payload))
    after = tail.with_record(record)
    if not payload.size:
        growing = GrowingRecord(record, header, changes=b"", changes_checksum=0)
        return Appended(replace(after, growing=growing), ((record.start, header),), record)
    padding = bytes(-payload.size % ALIGN)
    end = record.payload_start + payload.size
    writes = ((record.start, header), (record.payload_start, payload), (end, padding))
    return Appended(after, writes, record)


def _grown(
    tail: Tail,
    growing: GrowingRecord,
    watermark: int,
    digest: str,
    kind: RecordKind,
    branch: int,
    idle: bool,
) -> Appended | None:
    """The record with one more epoch; None if that needs another record."""
    old = growing.record
    same = (old.kind, old.branch, old.digest, old.idle) == (kind, branch, digest, idle)
    if not same or old.epochs == _MAX_EPOCHS:
        return None
    writes: tuple[tuple[int, bytes], ...] = ()
    changes, changes_checksum = growing.changes, growing.changes_checksum
    if watermark != old.watermark:
        if len(changes) >= MAX_WATERMARK_CHANGES_BYTES:
            return None
        change = WATERMARK_CHANGE.pack(old.watermark, old.epochs)
        at = old.payload_start + len(changes)
        # Beyond what the header in the file covers, so it may be lost until that is written.
        writes = ((at, change if len(changes) % ALIGN else change.ljust(ALIGN, b"\0")),)
        changes, changes_checksum = changes + change, zlib.crc32(change, changes_checksum)
    record = old._replace(epochs=old.epochs + 1, watermark=watermark, length=len(changes))
    header = encode_header(record, changes_checksum)
    grown = GrowingRecord(record, header, changes, changes_checksum)
    after = Tail(record.next_epoch, record.end, tail.records, record.size, grown)
    return Appended(after, (*writes, (record.start, header)), None, (old.start, growing.header))
