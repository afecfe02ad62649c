"""The encoding of an epoch in a file of the output log, and the scan of a file.

    0   magic "RKL1"
    4   u32 length of the JSON header (padded with blanks)
    8   u64 length of the payload (without its padding)
    16  u32 CRC-32 of bytes 0..16, the header and the payload
    20  JSON header: epoch, watermark, digest, rows
    ..  payload: an Arrow IPC stream (nothing for an epoch without rows)

Payloads start and records end on multiples of 64 bytes, so that a mapped file gives aligned
buffers. Does not know directories, floors or readers.

Design: docs/design/streams.md#output-log.
"""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import dataclass

import pyarrow as pa

from rekindle.streams.epochs import EpochBatch

MAGIC = b"RKL1"
ALIGN = 64
_FIXED = struct.Struct("<4sIQI")
_MAX_HEADER = 1 << 16


@dataclass(frozen=True, slots=True)
class Record:
    """The position of an epoch in its file, and its header."""

    epoch: int
    watermark: int
    digest: str
    rows: int
    start: int  # of the record
    payload: int  # offset of the payload
    length: int  # of the payload, unpadded
    end: int

    @property
    def size(self) -> int:
        return self.end - self.start


def encode(batch: EpochBatch, start: int) -> tuple[Record, list[bytes | pa.Buffer]]:
    """The record of a batch that begins at offset `start` of its file, and the pieces to write."""
    payload = _payload(batch.rows)
    fields = {
        "epoch": batch.epoch,
        "watermark": batch.watermark,
        "digest": batch.digest,
        "rows": batch.rows.num_rows,
    }
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-(_FIXED.size + len(text)) % ALIGN)
    lengths = _FIXED.pack(MAGIC, len(text), payload.size, 0)[:16]
    crc = zlib.crc32(payload, zlib.crc32(text, zlib.crc32(lengths)))
    offset = start + _FIXED.size + len(text)
    padding = bytes(-payload.size % ALIGN)
    record = Record(
        batch.epoch,
        batch.watermark,
        batch.digest,
        batch.rows.num_rows,
        start,
        offset,
        payload.size,
        offset + payload.size + len(padding),
    )
    return record, [lengths + struct.pack("<I", crc) + text, payload, padding]


def _payload(rows: pa.Table) -> pa.Buffer:
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


def decode(payload: pa.Buffer, schema: pa.Schema) -> pa.Table:
    """The rows of a record; zero-copy over the buffer."""
    if not payload.size:
        return schema.empty_table()
    return pa.ipc.open_stream(payload).read_all()


def is_sound(data: memoryview, record: Record) -> bool:
    """Whether the checksum of a record in its file matches."""
    found = _record_at(data[: record.end], record.start)
    return isinstance(found, Record) and found.epoch == record.epoch


def scan(data: memoryview) -> tuple[list[Record], str | None]:
    """All sound records from the beginning, and the damage after them, if any."""
    records: list[Record] = []
    position = 0
    while position < len(data):
        found = _record_at(data, position)
        if isinstance(found, str):
            return records, f"{found} at offset {position}"
        if records and found.epoch != records[-1].epoch + 1:
            return records, f"epoch {found.epoch} follows {records[-1].epoch} at offset {position}"
        records.append(found)
        position = found.end
    return records, None


def _record_at(data: memoryview, start: int) -> Record | str:
    if start + _FIXED.size > len(data):
        return "an incomplete record"
    magic, header, length, crc = _FIXED.unpack_from(data, start)
    if magic != MAGIC or header > _MAX_HEADER:
        return "no record"
    offset = start + _FIXED.size + header
    end = offset + length + (-length % ALIGN)
    if end > len(data):
        return "an incomplete record"
    text = data[start + _FIXED.size : offset]
    lengths = zlib.crc32(data[start : start + 16])
    if crc != zlib.crc32(data[offset : offset + length], zlib.crc32(text, lengths)):
        return "a record with a wrong checksum"
    fields = json.loads(bytes(text))
    return Record(
        fields["epoch"],
        fields["watermark"],
        fields["digest"],
        fields["rows"],
        start,
        offset,
        length,
        end,
    )
