"""Many epochs as one table and back. Pure.

Rows of all epochs of a call stand one below the other, each with its epoch number and the watermark
before it (`__meta`); a chain keeps their order, so the output is cut apart again by epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from rekindle.engine.model import EpochInput

META_TYPE = pa.struct([("e", pa.int64()), ("w", pa.int64())])


def meta_column(epochs: Any, watermarks: Any) -> pa.StructArray:
    fields = [pa.array(epochs, pa.int64()), pa.array(watermarks, pa.int64())]
    return pa.StructArray.from_arrays(fields, fields=list(META_TYPE))


def with_meta(schema: pa.Schema, epochs: Sequence[tuple[EpochInput, pa.Table]]) -> pa.Table:
    """The rows of all epochs, `__meta` first, in exactly the types of `schema`."""
    tables = [_conform(table, schema) for _, table in epochs]
    lengths = [t.num_rows for t in tables]
    numbers = np.repeat([e.epoch for e, _ in epochs], lengths).astype(np.int64)
    late = np.repeat(np.array([e.watermark_before for e, _ in epochs], np.int64), lengths)
    return (
        pa.concat_tables(tables)
        .combine_chunks()
        .add_column(0, "__meta", meta_column(numbers, late))
    )


def _conform(table: pa.Table, schema: pa.Schema) -> pa.Table:
    if table.schema == schema:
        return table
    return table.select(schema.names).cast(schema)


def split_by_epoch(
    schema: pa.Schema, rows: pa.Table | None, epochs: Sequence[int]
) -> list[pa.Table]:
    """Rows with a column `__e` -> one table an epoch, order kept within each."""
    if rows is None or not rows.num_rows:
        return [schema.empty_table() for _ in epochs]
    numbers = rows.column("__e").to_numpy()
    plain = rows.drop_columns(["__e"]).cast(schema)
    if (np.diff(numbers) < 0).any():  # a UNION ALL: each input has all epochs
        order = np.argsort(numbers, kind="stable")
        numbers, plain = numbers[order], plain.take(pa.array(order))
    bounds = np.searchsorted(numbers, [*epochs, epochs[-1] + 1])
    return [plain.slice(a, b - a) for a, b in pairwise(bounds)]
