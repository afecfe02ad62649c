"""A checksum of rows on their way: over IPC bytes, at the speed of memory.

It tells whether what arrived is what was sent or written by the same layout, no more; whether rows
are equal is said by their canonical digest (`rekindle.streams.digest`), at a quarter of the speed.

Design: docs/design/streams.md#flight.
"""

from __future__ import annotations

import zlib

import pyarrow as pa


def checksum_batch(batch: pa.RecordBatch) -> int:
    """CRC-32 of a batch's rows, without its schema."""
    return zlib.crc32(batch.serialize())


def checksum_table(table: pa.Table) -> int:
    """CRC-32 of a table's rows; other chunks give another one."""
    crc = 0
    for batch in table.to_batches():
        crc = zlib.crc32(batch.serialize(), crc)
    return crc
