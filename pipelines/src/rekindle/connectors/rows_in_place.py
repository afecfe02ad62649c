"""Rows of a source that are read from its input files at each cut, instead of from a copy.

Cuts usually go forward, so one reader advances with them, and buffers the batches from the start of
the last cut on. A cut that begins before or after the buffered batches opens the files again at its
first row. The rows of a cut are one chunk, so that results do not depend on where the reader began.
Does not know the input formats.

Design: docs/design/exactly-once.md#sources.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa

from rekindle.connectors.cuts import Int64s
from rekindle.connectors.prepared import checksums
from rekindle.errors import SourceFailed
from rekindle.streams.digest import digest_table

ReadFrom = Callable[[int], Iterator[pa.RecordBatch]]
"""The batches of all files from this row on. Raises SourceFailed."""


class RowsInPlace:
    """Implements `rekindle.connectors.prepared.Rows`."""

    def __init__(self, source: str, schema: pa.Schema, num_rows: int, read_from: ReadFrom) -> None:
        self.schema = schema
        self.num_rows = num_rows
        self._source = source
        self._read_from = read_from
        self._batches: Iterator[pa.RecordBatch] | None = None
        self._buffered: deque[pa.RecordBatch] = deque()
        self._first = self._end = 0  # row numbers of the buffered batches

    def slice(self, start: int, length: int) -> pa.Table:
        """Raises SourceFailed."""
        if not length:
            return self.schema.empty_table()
        if self._batches is None or not self._first <= start <= self._end:
            self.close()
            self._batches = self._read_from(start)
            self._first = self._end = start
        while self._buffered and self._first + self._buffered[0].num_rows <= start:
            self._first += self._buffered.popleft().num_rows
        try:
            self._read_through(self._batches, start + length)
        except BaseException:
            self.close()  # a generator that failed has ended
            raise
        rows = pa.Table.from_batches(self._buffered, self.schema)
        return rows.slice(start - self._first, length).combine_chunks()

    def checksum(self, rows: pa.Table) -> int:
        """A checksum of the values, not of Arrow's buffers: in another process batches may begin at
        other rows."""
        return int.from_bytes(bytes.fromhex(digest_table(rows))[:8], signed=True)

    def checksums(self, starts: Int64s) -> Int64s:
        return checksums(self, starts)

    def close(self) -> None:
        self._batches = None
        self._buffered.clear()
        self._first = self._end = 0

    def _read_through(self, batches: Iterator[pa.RecordBatch], end: int) -> None:
        while self._end < end:
            batch = next(batches, None)
            if batch is None:
                raise SourceFailed(
                    f"source {self._source}: the input files end at row {self._end:,} instead of "
                    f"{self.num_rows:,}; they have changed since the source was opened: restore "
                    "them"
                )
            self._buffered.append(batch)
            self._end += batch.num_rows


class TextRowsInPlace(RowsInPlace):
    """Rows of text files, whose bytes are verified before they are parsed: cuts need no
    checksum."""

    def checksum(self, rows: pa.Table) -> int:
        return 0

    def checksums(self, starts: Int64s) -> Int64s:
        return np.zeros(len(starts), dtype=np.int64)
