"""A fast checksum of rows in a file, over their IPC bytes.

It only detects damage: equal rows with another memory layout have another checksum. Rows
are compared by their canonical digest (`rekindle.streams.digest`), which is four
times slower.

Design: docs/design/streams.md#digest.
"""

from __future__ import annotations

import zlib

import pyarrow as pa


def checksum_table(table: pa.Table) -> int:
    """CRC-32 of a table's rows; it depends on the chunks."""
    crc = 0
    for batch in table.to_batches():
        crc = zlib.crc32(batch.serialize(), crc)
    return crc
