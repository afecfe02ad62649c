"""Concatenates epochs to one table and splits it again. Pure.

The table has the rows of all epochs of a call in order, each with its epoch number and the
watermark before it; a chain keeps their order, so the output is split again by epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pyarrow as pa

from rekindle.streams.epochs import EpochInput

EPOCH, LATE_BEFORE = "__e", "__late"
"""A row's epoch number, and the watermark before that epoch, which decides if it is late."""
Clock = Sequence[tuple[int, int, int]]
"""(epoch, watermark before, watermark) of the epochs of a call, in order."""
COPIED_BYTES = 1 << 20
"""If epochs are smaller than this on average, they are copied into one batch."""
SYSTEM_COLUMNS = pa.schema([(EPOCH, pa.int64()), (LATE_BEFORE, pa.int64())])
"""The system columns, before the columns of the rows."""


def concatenate_epochs(
    schema: pa.Schema, epochs: Sequence[tuple[EpochInput, pa.Table]]
) -> pa.Table:
    """The epochs concatenated, system columns first, in exactly the types of `schema`."""
    tables = [_with_schema(table, schema) for _, table in epochs]
    lengths = [t.num_rows for t in tables]
    system = [[e.epoch, e.watermark_before] for e, _ in epochs]
    numbers, late = np.repeat(np.array(system, np.int64), lengths, axis=0).T
    rows = pa.concat_tables(tables)
    if rows.nbytes < COPIED_BYTES * len(epochs):  # many small batches would cost more
        rows = rows.combine_chunks()
    columns = [pa.array(np.ascontiguousarray(c)) for c in (numbers, late)]
    return pa.table([*columns, *rows.columns], schema=pa.schema([*SYSTEM_COLUMNS, *schema]))


def _with_schema(table: pa.Table, schema: pa.Schema) -> pa.Table:
    if table.schema == schema:
        return table
    return table.select(schema.names).cast(schema)


def split_by_epoch(
    schema: pa.Schema, rows: pa.Table | None, epochs: Sequence[int]
) -> list[pa.Table]:
    """Rows with a column EPOCH -> one table for each epoch, in the same order. Without that
    column there is only one epoch."""
    if rows is None or not rows.num_rows:
        return [schema.empty_table() for _ in epochs]
    if EPOCH not in rows.column_names:
        (_,) = epochs
        return [rows.cast(schema)]
    numbers = rows.column(EPOCH).to_numpy()
    plain = rows.drop_columns([EPOCH]).cast(schema)
    if (np.diff(numbers) < 0).any():  # a UNION ALL: each input has all epochs
        order = np.argsort(numbers, kind="stable")
        numbers, plain = numbers[order], plain.take(pa.array(order))
    bounds = np.searchsorted(numbers, [*epochs, epochs[-1] + 1])
    return [plain.slice(a, b - a) for a, b in pairwise(bounds)]
