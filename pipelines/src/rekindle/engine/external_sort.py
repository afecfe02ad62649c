"""Sorts rows that may be larger than memory: in portions, in memory-mapped files.

Memory holds some megabytes of rows, and 16 bytes for each row while the order is computed.

Design: docs/design/engine.md#windows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rekindle.engine.canonical_order import sort_rows
from rekindle.engine.state.runs import Run
from rekindle.engine.state.spill import RunFiles


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
            self._mapped.append(self._write_mapped(self._files, pa.concat_tables(self._tables)))
            self._tables, self._bytes = [], 0

    def sorted(self) -> pa.Table:
        if self._files is None or not self._mapped:
            rows = pa.concat_tables(self._tables) if self._tables else self._schema.empty_table()
            return sort_rows(rows, self._columns) if rows.num_rows else rows
        parts = [*self._mapped, *(table.combine_chunks() for table in self._tables)]
        rows = pa.concat_tables(parts)
        order = pc.sort_indices(rows, [(name, "ascending") for name in self._columns]).to_numpy()
        starts = np.cumsum([0, *(part.num_rows for part in parts)])
        portions = min(rows.num_rows, -(-rows.nbytes // self._files.buffer_bytes))
        return pa.concat_tables(
            self._write_mapped(self._files, _take(parts, starts, chosen))
            for chosen in np.array_split(order, portions)
        )

    def _write_mapped(self, files: RunFiles, rows: pa.Table) -> pa.Table:
        # RunFiles accepts only Runs, but the table of a Run may have any columns.
        (run,) = files.write(rows.schema, [Run(rows)])
        return run.table


def _take(
    parts: Sequence[pa.Table], starts: npt.NDArray[np.int64], chosen: npt.NDArray[np.uint64]
) -> pa.Table:
    """The rows with these numbers in the concatenation of `parts`. Arrow's `take` of a chunked
    array would copy the whole column of strings for each call."""
    order = np.argsort(chosen, kind="stable")
    ascending = chosen[order].astype(np.int64)
    bounds = np.searchsorted(ascending, starts)
    found = [
        part.take(pa.array(ascending[low:high] - start))
        for part, start, low, high in zip(parts, starts, bounds, bounds[1:], strict=False)
        if high > low
    ]
    inverse = np.empty(len(order), dtype=np.int64)
    inverse[order] = np.arange(len(order))
    return pa.concat_tables(found).combine_chunks().take(pa.array(inverse))
