"""Files that a source prepares on its task's disk: complete or absent, and verified on read.

A prepared source is an index of its epochs, and an Arrow file of rows, unless they are read in
place (`connectors.rows_in_place`). Both are flushed to disk before they are renamed, the index
last, so a power loss leaves no partial file. The index contains its own checksum, and one for the
rows of each epoch, which each cut verifies. Does not know the input formats.

Design: docs/design/exactly-once.md#sources.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa

from rekindle.connectors.cuts import Int64s
from rekindle.errors import SourceFailed
from rekindle.streams.checksum import checksum_table

MAX_BATCH_ROWS = 65_536
MAX_BATCH_BYTES = 64 << 20
_CHECKSUM = b"rekindle.checksum"
IN_PLACE = b"rekindle.inPlace"
"""In the metadata of the index, if rows are read in place: what is read of each file, JSON."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PreparedSource:
    """`rows` is memory-mapped, None if rows are read in place; `index` has a row for each epoch
    that has rows in any partition."""

    rows: pa.Table | None
    index: pa.Table


class DamagedRows(SourceFailed):
    """Rows differ from those that were prepared."""


class Rows(Protocol):
    """The rows of a source in the order of their epochs."""

    schema: pa.Schema
    num_rows: int

    def slice(self, start: int, length: int) -> pa.Table:
        """`length` rows from `start` on. Raises SourceFailed; DamagedRows if the input has other
        bytes than when it was prepared."""
        ...

    def checksum(self, rows: pa.Table) -> int:
        """The checksum of a slice; equal in each process that uses the same index."""
        ...

    def checksums(self, starts: Int64s) -> Int64s:
        """The checksums of the slices from each start to the next one, the last to the end."""
        ...

    def close(self) -> None: ...


class MappedRows:
    """Rows in a memory-mapped file."""

    def __init__(self, table: pa.Table) -> None:
        self.schema = table.schema
        self.num_rows = table.num_rows
        self._table = table

    def slice(self, start: int, length: int) -> pa.Table:
        return self._table.slice(start, length)

    def checksum(self, rows: pa.Table) -> int:
        return checksum_table(rows)

    def checksums(self, starts: Int64s) -> Int64s:
        return checksums(self, starts)

    def close(self) -> None:
        self._table = self.schema.empty_table()


def write_rows(
    path: Path, schema: pa.Schema, parts: Iterable[Iterable[pa.RecordBatch]]
) -> list[int]:
    """Write parts into one Arrow file and flush it to disk. Returns the row count of each part."""
    counts = []
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        for part in parts:
            counts.append(0)
            for batch in part:
                writer.write(batch)
                counts[-1] += batch.num_rows
    _flush(path)
    return counts


def reordered(table: pa.Table, order: Int64s) -> Iterator[pa.RecordBatch]:
    """The rows of a table in another order, in batches. Arrow's `take` would first copy each column
    into one contiguous array, which cannot hold more than 2 GB of text."""
    small = table.nbytes <= MAX_BATCH_BYTES
    batches = table.combine_chunks().to_batches() if small else table.to_batches()
    firsts = np.cumsum([0, *(batch.num_rows for batch in batches)])[:-1]
    size = _batch_rows(table)
    for start in range(0, len(order), size):
        rows = order[start : start + size]
        batch_of = np.searchsorted(firsts, rows, side="right") - 1
        by_batch = np.argsort(batch_of, kind="stable")
        chosen, first_of = np.unique(batch_of[by_batch], return_index=True)
        gathered = [
            batches[n].take(pa.array(rows[places] - firsts[n]))
            for n, places in zip(chosen, np.split(by_batch, first_of[1:]), strict=True)
        ]
        inverse = pa.array(np.argsort(by_batch, kind="stable"))
        yield from pa.Table.from_batches(gathered).combine_chunks().take(inverse).to_batches()


def _batch_rows(table: pa.Table) -> int:
    """Rows for each batch, within MAX_BATCH_ROWS and MAX_BATCH_BYTES."""
    large: int = table.num_rows * MAX_BATCH_BYTES // max(1, table.nbytes)
    return max(1, min(MAX_BATCH_ROWS, large))


def publish(written: Path, final: Path) -> None:
    """Rename a written file to its final name, durably."""
    written.replace(final)
    _flush(final.parent)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_memory_mapped(path: Path) -> pa.Table:
    return pa.ipc.open_file(pa.memory_map(str(path))).read_all()


def with_checksum(index: pa.Table, metadata: dict[bytes, bytes]) -> pa.Table:
    """The index with `metadata` as schema metadata, and a checksum of both."""
    return index.replace_schema_metadata({**metadata, _CHECKSUM: _checksum(index, metadata)})


def _checksum(index: pa.Table, metadata: dict[bytes, bytes]) -> bytes:
    digest = hashlib.blake2b(str(checksum_table(index.combine_chunks())).encode(), digest_size=16)
    for key in sorted(metadata.keys() - {_CHECKSUM}):
        digest.update(b"%d %b%d %b" % (len(key), key, len(metadata[key]), metadata[key]))
    return digest.hexdigest().encode()


def load(rows: Path, index: Path) -> PreparedSource | None:
    """The prepared source; None if it is absent or damaged."""
    if not index.exists():
        return None
    try:
        found = open_memory_mapped(index)
        metadata = found.schema.metadata or {}
        if metadata.get(_CHECKSUM) == _checksum(found.replace_schema_metadata(None), metadata):
            return PreparedSource(None if IN_PLACE in metadata else open_memory_mapped(rows), found)
        problem: object = "its checksum does not match"
    except (OSError, pa.ArrowException) as error:
        problem = error
    _log.warning("the prepared source %s is damaged (%s); it is prepared again", index, problem)
    return None


def checksums(rows: Rows, starts: Int64s) -> Int64s:
    """Implements `Rows.checksums` by `Rows.checksum`."""
    ends = np.append(starts[1:], rows.num_rows)
    return np.array(
        [rows.checksum(rows.slice(int(a), int(b - a))) for a, b in zip(starts, ends, strict=True)],
        dtype=np.int64,
    )
