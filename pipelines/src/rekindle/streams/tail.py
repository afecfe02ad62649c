"""What appending an epoch writes to a log file, and where. Pure.

A file's last record may be a run of empty epochs, which grows by one header of 64 bytes, written in
place as the last step: a process that is killed before it leaves the shorter run. Only the newest
run of a process grows; readers get it from memory (`OpenRun.content`), since its bytes change.

Design: docs/design/streams.md#log-records.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace

import pyarrow as pa

from rekindle.streams.records import ALIGN, LEVEL, Record, RecordKind, encode_header

RUN_LEVELS_BYTES = 4096
"""A run with more changes of its watermark is continued by another record."""
_MAX_EPOCHS = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class OpenRun:
    """The run at the end of a file, which may grow. `levels`: its earlier watermarks."""

    record: Record
    header: bytes
    levels: bytes
    levels_sum: int

    @property
    def content(self) -> bytes:
        """The record as it is in the file."""
        return self.header + self.levels + bytes(-len(self.levels) % ALIGN)


@dataclass(frozen=True, slots=True)
class Tail:
    """The end of a log file that holds `epochs`.. up to `next_epoch`."""

    next_epoch: int
    size: int = 0
    records: int = 0
    newest_bytes: int = 0  # of the newest record
    run: OpenRun | None = None

    @property
    def closed(self) -> int:
        """The offset up to which bytes do not change any more."""
        return self.size if self.run is None else self.run.record.start

    def with_record(self, record: Record) -> Tail:
        """The tail after a record that is in the file."""
        return Tail(record.next_epoch, record.end, self.records + 1, record.size)


@dataclass(frozen=True, slots=True)
class Appended:
    """The writes that append an epoch, in this order, and the tail after them. `record`: the new
    record; None if a run has grown. `undo`: what a failed write in place may have damaged."""

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
) -> Appended:
    """Append epoch `tail.next_epoch`; an empty payload: it has no rows. Raises ValueError."""
    if not payload.size and tail.run is not None:
        grown = _grown(tail, tail.run, watermark, digest, kind, branch)
        if grown is not None:
            return grown
    record = Record(
        kind,
        branch,
        tail.next_epoch,
        1,
        watermark,
        digest,
        tail.size,
        payload.size,
        tail.newest_bytes,
    )
    header = encode_header(record, zlib.crc32(payload))
    after = tail.with_record(record)
    if not payload.size:
        run = OpenRun(record, header, b"", 0)
        return Appended(replace(after, run=run), ((record.start, header),), record)
    padding = bytes(-payload.size % ALIGN)
    end = record.payload + payload.size
    writes = ((record.start, header), (record.payload, payload), (end, padding))
    return Appended(after, writes, record)


def _grown(
    tail: Tail, run: OpenRun, watermark: int, digest: str, kind: RecordKind, branch: int
) -> Appended | None:
    """The run with one more epoch; None if that needs another record."""
    old = run.record
    if (old.kind, old.branch, old.digest) != (kind, branch, digest) or old.epochs == _MAX_EPOCHS:
        return None
    writes: tuple[tuple[int, bytes], ...] = ()
    levels, levels_sum = run.levels, run.levels_sum
    if watermark != old.watermark:
        if len(levels) >= RUN_LEVELS_BYTES:
            return None
        level = LEVEL.pack(old.watermark, old.epochs)
        at = old.payload + len(levels)
        # Beyond what the header in the file covers, so it may be lost until that is written.
        writes = ((at, level if len(levels) % ALIGN else level.ljust(ALIGN, b"\0")),)
        levels, levels_sum = levels + level, zlib.crc32(level, levels_sum)
    record = old._replace(epochs=old.epochs + 1, watermark=watermark, length=len(levels))
    header = encode_header(record, levels_sum)
    grown = OpenRun(record, header, levels, levels_sum)
    after = Tail(record.next_epoch, record.end, tail.records, record.size, grown)
    return Appended(after, (*writes, (record.start, header)), None, (old.start, run.header))
