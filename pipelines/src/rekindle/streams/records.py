"""The format of an output log: records, one after another, of one branch in each file.

    0   magic "RKL", the format's version "2"
    4   u8  kind
    5   u8  1: idle, after each of its epochs; two bytes of zero
    8   u32 branch: 0 for the stable one, otherwise the attempt of a tentative one
    12  u32 epochs that it covers: 1; more if they have no rows; 0: a control record
    16  i64 epoch: the first of them, or the one that it is about
    24  i64 watermark after the last of them
    32  digest of each of them
    48  u64 length of the payload (without its padding)
    56  u32 blocks of 64 bytes of the record before it in the file; 0 for the first
    60  u32 CRC-32 of the payload, then of bytes 0..60
    64  payload

The payload of one epoch is an Arrow IPC stream, nothing without rows. A record of several epochs is
an empty record; its payload are the changes of its watermark: (i64 earlier watermark, i64 epochs of
the record up to the last one with it). Records begin on multiples of 64 bytes, so a mapped file
gives aligned buffers, and a header never lies across two pages.

A file is read forward, or backward from its end. The last record of a file may be an empty one that
grows in place (`rekindle.streams.tail`). Does not know directories, floors or readers.

Design: docs/design/streams.md#log-records.
"""

from __future__ import annotations

import struct
import zlib
from bisect import bisect_right
from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

import pyarrow as pa

MAGIC = b"RKL2"
ALIGN = 64
HEADER_BYTES = 64
_HEADER = struct.Struct("<4sB?2xIIqq16sQII")
_POSITION = struct.Struct("<4s8xIq24xQ")
"""Of the header only magic, count, epoch and length."""
_CHECKSUM_OFFSET = HEADER_BYTES - 4
_CHECKSUM = struct.Struct("<I")
WATERMARK_CHANGE = struct.Struct("<qq")
"""An earlier watermark, and the number of the record's epochs up to the last one with it."""
_SCAN_BYTES = 1 << 16


class RecordKind(IntEnum):
    """What a record is. The numbers are stored; the last three are reserved, and not written yet
    (docs/design/streams.md#log-records)."""

    STABLE = 1
    TENTATIVE = 2
    UNDO = 3  # of the tentative epochs from its own on
    RECONCILIATION_DONE = 4  # DPC's REC_DONE: corrections are complete through its epoch
    WINDOW_CHECKPOINT = 5  # checkpoint of an open window after its epoch


NO_DIGEST = "0" * 32
"""Of tentative epochs, which are not compared."""

_KINDS = {int(kind): kind for kind in RecordKind}


class DamagedRecord(Exception):
    """There is no sound record where one must begin."""

    def __init__(self, reason: str, offset: int) -> None:
        super().__init__(f"{reason} at offset {offset}")
        self.offset = offset


class Record(NamedTuple):
    """The header of a record, and its position in its file. A tuple, because creating a dataclass
    takes a twentieth of the time of reading a small epoch."""

    kind: RecordKind
    branch: int
    epoch: int
    epochs: int  # that it covers
    watermark: int
    digest: str
    start: int
    length: int  # of the payload, unpadded
    previous: int  # bytes of the record before it
    idle: bool = False

    @property
    def payload_start(self) -> int:
        """Offset of the payload."""
        return self.start + HEADER_BYTES

    @property
    def end(self) -> int:
        return self.start + HEADER_BYTES + self.length + -self.length % ALIGN

    @property
    def size(self) -> int:
        return self.end - self.start

    @property
    def next_epoch(self) -> int:
        return self.epoch + self.epochs

    @property
    def empty(self) -> bool:
        """Whether its epochs have no rows."""
        return self.epochs > 1 or not self.length


def encode_header(record: Record, payload_checksum: int) -> bytes:
    """`payload_checksum`: CRC-32. Raises ValueError if a field is out of its range."""
    digest = bytes.fromhex(record.digest)
    if len(digest) != 16:
        raise ValueError(f"a digest has 32 hexadecimal digits, not {record.digest!r}")
    try:
        header = _HEADER.pack(
            MAGIC,
            record.kind,
            record.idle,
            record.branch,
            record.epochs,
            record.epoch,
            record.watermark,
            digest,
            record.length,
            record.previous // ALIGN,
            0,
        )[:_CHECKSUM_OFFSET]
    except struct.error as error:
        raise ValueError(f"{record} does not fit the format: {error}") from error
    return header + _CHECKSUM.pack(zlib.crc32(header, payload_checksum))


def encode_rows(rows: pa.Table) -> pa.Buffer:
    """The payload of one epoch."""
    if not rows.num_rows:
        return pa.py_buffer(b"")
    size = pa.MockOutputStream()
    _write(rows, size)
    payload = pa.allocate_buffer(size.size())  # a growing one could be twice as large
    with pa.FixedSizeBufferWriter(payload) as sink:
        _write(rows, sink)
    return payload


def _write(rows: pa.Table, sink: pa.NativeFile) -> None:
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_table(rows)


def decode_rows(payload: pa.Buffer) -> pa.Table:
    """The rows of an epoch that has some; zero-copy over the payload's bytes."""
    return pa.ipc.open_stream(payload).read_all()


def watermark_changes(data: memoryview, record: Record) -> memoryview:
    """The payload of an empty record; nothing of another one."""
    return data[record.payload_start :][: record.length if record.epochs > 1 else 0]


def watermarks(payload: memoryview, record: Record, epoch: int) -> Iterator[int]:
    """The watermarks of a record's epochs from `epoch` on; `payload`: its `watermark_changes`."""
    at = epoch - record.epoch
    change, size = WATERMARK_CHANGE, WATERMARK_CHANGE.size
    known = len(payload) // size
    begin = bisect_right(range(known), at, key=lambda i: change.unpack_from(payload, i * size)[1])
    for index in range(begin, known):
        watermark, end = change.unpack_from(payload, index * size)
        while at < end:
            yield watermark
            at += 1
    for _ in range(at, record.epochs):
        yield record.watermark


def header_at(data: memoryview, start: int) -> Record:
    """The record at an offset, without a look at its checksum. Raises DamagedRecord."""
    record = _parse(data, start)
    if record.end > len(data):
        raise DamagedRecord("an incomplete record", start)
    return record


def _parse(data: memoryview, start: int) -> Record:
    if start + HEADER_BYTES > len(data):
        raise DamagedRecord("an incomplete record", start)
    magic, kind, idle, branch, count, epoch, watermark, digest, length, previous, _ = (
        _HEADER.unpack_from(data, start)
    )
    if magic != MAGIC:
        raise DamagedRecord(_other_format(magic), start)
    if kind not in _KINDS:
        raise DamagedRecord(f"a record of unknown kind {kind}", start)
    return Record(
        _KINDS[kind],
        branch,
        epoch,
        count,
        watermark,
        digest.hex(),
        start,
        length,
        previous * ALIGN,
        idle,
    )


def checksum(payload: pa.Buffer) -> int:
    """CRC-32 of a payload."""
    return zlib.crc32(payload)


def verify_checksum(data: memoryview, record: Record) -> int:
    """The CRC-32 of the payload. Raises DamagedRecord if the record does not match its checksum."""
    start, payload = record.start, record.payload_start
    found = zlib.crc32(data[payload : payload + record.length])
    if _CHECKSUM.unpack_from(data, start + _CHECKSUM_OFFSET)[0] != zlib.crc32(
        data[start : start + _CHECKSUM_OFFSET], found
    ):
        raise DamagedRecord("a record with a wrong checksum", start)
    return found


def headers(data: memoryview, start: int, end: int) -> Iterator[Record]:
    """The records from offset `start` to `end`, without a look at their checksums. Raises
    DamagedRecord where one does not follow the one before it."""
    before: Record | None = None
    next_epoch: int | None = None
    while start < end:
        record = header_at(data, start)
        if before is not None and (record.previous, record.branch) != (before.size, before.branch):
            raise DamagedRecord("a record that does not follow the one before it", start)
        if record.epochs:
            if next_epoch not in (record.epoch, None):
                raise DamagedRecord(f"epoch {record.epoch} instead of {next_epoch}", start)
            next_epoch = record.next_epoch
        yield record
        before, start = record, record.end


def forward(data: memoryview) -> Iterator[Record]:
    """The records of a file from its beginning. Raises DamagedRecord at the first unsound one."""
    for record in headers(data, 0, len(data)):
        verify_checksum(data, record)
        yield record


def backward(data: memoryview) -> Iterator[Record]:
    """The records of a file from its end. Raises DamagedRecord at the first unsound one."""
    if not len(data):
        return
    record = _last(data)
    while True:
        verify_checksum(data, record)
        yield record
        if not record.start:
            return
        start = record.start - record.previous
        if not record.previous or start < 0:
            raise DamagedRecord("a record without the one before it", record.start)
        before = header_at(data, start)
        if before.end != record.start:
            raise DamagedRecord("a record that does not end where the next one begins", start)
        record = before


def _last(data: memoryview) -> Record:
    """The record that ends with the data, searched backward for its magic. A payload may contain
    bytes that look like a header; their record has another end, or a wrong checksum."""
    at = len(data) if len(data) % ALIGN == 0 else 0
    while at > 0:
        begin = max(0, at - _SCAN_BYTES)
        scanned = bytes(data[begin:at])
        found = scanned.rfind(MAGIC)
        while found >= 0:
            start = begin + found
            if start % ALIGN == 0 and start + HEADER_BYTES <= len(data):
                try:
                    record = header_at(data, start)
                    if record.end == len(data):
                        verify_checksum(data, record)
                        return record
                except DamagedRecord:
                    pass
            found = scanned.rfind(MAGIC, 0, found)
        at = begin  # headers are aligned, and so is what is scanned: none lies across `begin`
    raise DamagedRecord("no record that ends there", len(data))


def locate(data: memoryview, start: int, end: int, epoch: int) -> int:
    """The offset of the record that holds `epoch`, which lies before `end`; `start`: of this record
    or of one before it. Raises DamagedRecord."""
    if end > len(data):
        raise DamagedRecord("an incomplete file", len(data))
    next_epoch: int | None = None
    while start < end:
        magic, count, first, length = _POSITION.unpack_from(data, start)
        if magic != MAGIC or (count and next_epoch not in (first, None)):
            break
        if first <= epoch < first + count:
            return start
        if count:
            next_epoch = first + count
        start += HEADER_BYTES + length + -length % ALIGN
    raise DamagedRecord(f"no record of epoch {epoch}", min(start, end))


def outline(data: memoryview) -> bytes:
    """The records of a file without their rows. Raises DamagedRecord."""
    parts: list[memoryview] = []
    for record in forward(data):
        parts.append(data[record.start : record.end if record.epochs > 1 else record.payload_start])
    return b"".join(parts)


def read_outline(content: memoryview) -> Iterator[tuple[Record, memoryview]]:
    """The records of an outline and their watermark changes. Their checksums, which also cover the
    rows, are not verified. Raises DamagedRecord."""
    start = 0
    while start < len(content):
        record = _parse(content, start)
        found = watermark_changes(content, record)
        yield record, found
        start += HEADER_BYTES + len(found) + -len(found) % ALIGN


def _other_format(magic: bytes) -> str:
    if magic[:3] == MAGIC[:3] and magic[3:].isdigit():
        return (
            f"a record of log format {magic[3:].decode()}; this release reads {MAGIC[3:].decode()}"
        )
    return "no record"
