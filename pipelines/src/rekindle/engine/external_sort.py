"""Sorts rows that may be larger than memory: in portions, in memory-mapped files.

Memory holds some megabytes of rows, and 16 bytes for each row while the order is computed.

Design: docs/design/engine.md#windows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rekindle.engine.canonical_order import sort_rows
from rekindle.engine.state.runs import Run, take_rows
from rekindle.engine.state.spill import RunFiles


class RowBuffer:
    """Rows in the order in which they are added: in memory, and beyond the files' `buffer_bytes`
    in mapped files. Raises DiskFull."""

    def __init__(self, schema: pa.Schema, files: RunFiles | None) -> None:
        self._schema = schema
        self._files = files
        self._tables: list[pa.Table] = []
        self._in_memory: list[pa.Table] = []  # the last ones; `_bytes` is their size
        self._bytes = 0

    def add(self, rows: pa.Table) -> None:
        if not rows.num_rows:
            return
        self._in_memory.append(rows)
        self._bytes += rows.nbytes
        if self._files is not None and self._bytes > self._files.buffer_bytes:
            whole = pa.concat_tables(self._in_memory)
            self._tables.append(_write_mapped(self._files, whole))
            self._in_memory, self._bytes = [], 0

    def table(self) -> pa.Table:
        tables = [*self._tables, *self._in_memory]
        return pa.concat_tables(tables) if tables else self._schema.empty_table()


class ExternalSort:
    """Sorts by `columns`, which identify a row, in ascending order. Raises DiskFull."""

    def __init__(self, schema: pa.Schema, columns: Sequence[str], files: RunFiles | None) -> None:
        """`files`: for rows beyond their `buffer_bytes`; without it, all rows stay in memory."""
        self._schema = schema
        self._columns = columns
        self._files = files
        self._tables: list[pa.Table] = []  # in memory; `_bytes` is their size
        self._bytes = 0
        self._mapped: list[pa.Table] = []

    def add(self, rows: pa.Table) -> None:
        if not rows.num_rows:
            return
        self._tables.append(rows)
        self._bytes += rows.nbytes
        if self._files is not None and self._bytes > self._files.buffer_bytes:
            self._mapped.append(_write_mapped(self._files, pa.concat_tables(self._tables)))
            self._tables, self._bytes = [], 0

    def sorted(self) -> pa.Table:
        if self._files is None or not self._mapped:
            rows = pa.concat_tables(self._tables) if self._tables else self._schema.empty_table()
            return sort_rows(rows, self._columns) if rows.num_rows else rows
        parts = [*self._mapped, *(table.combine_chunks() for table in self._tables)]
        rows = pa.concat_tables(parts)
        order = pc.sort_indices(rows, [(name, "ascending") for name in self._columns]).to_numpy()
        portions = min(rows.num_rows, -(-rows.nbytes // self._files.buffer_bytes))
        return pa.concat_tables(
            _write_mapped(self._files, take_rows(parts, chosen))
            for chosen in np.array_split(order, portions)
        )


def _write_mapped(files: RunFiles, rows: pa.Table) -> pa.Table:
    # RunFiles accepts only Runs, but the table of a Run may have any columns.
    (run,) = files.write(rows.schema, [Run(rows)])
    return run.table
