"""A fast checksum of rows in transit, over their IPC bytes.

It only detects damage in transit: equal rows with another memory layout have another checksum. Rows
are compared by their canonical digest (`rekindle.streams.digest`), which is four
times slower.

Design: docs/design/streams.md#flight.
"""

from __future__ import annotations

import zlib

import pyarrow as pa


def checksum_batch(batch: pa.RecordBatch) -> int:
    """CRC-32 of a batch's rows, without its schema."""
    return zlib.crc32(batch.serialize())


def checksum_table(table: pa.Table) -> int:
    """CRC-32 of a table's rows; it depends on the chunks."""
    crc = 0
    for batch in table.to_batches():
        crc = zlib.crc32(batch.serialize(), crc)
    return crc
