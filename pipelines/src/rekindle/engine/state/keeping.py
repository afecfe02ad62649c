"""Appends rows to a table that keeps them, and drops old ones. Pure.

Design: docs/decisions/0056-operators-and-tables.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pyarrow as pa

from rekindle.engine.state.compaction import compact
from rekindle.engine.state.operator import OperatorState, append, chained, drop
from rekindle.engine.state.runs import (
    NUMBER,
    PANE,
    Int64s,
    RunShape,
    int64s,
    sort,
)
from rekindle.exchange.hashing import hash_rows

SLICES = 8
"""Into how many slices the time is divided for which rows are kept."""
MIN_SLICE_US = 1_000_000
PLACE_BITS = 28
"""Bits of a row's number for its place in its epoch. The others are the epoch's."""


def slice_of(kept_us: int) -> int:
    """The length of a slice of a table whose rows are kept for this time."""
    return max(MIN_SLICE_US, -(-kept_us // SLICES))


def numbers_of(epochs: Int64s) -> Int64s:
    """The number of each row of an input, of which all rows of these epochs are given, in order."""
    starts = np.flatnonzero(np.diff(epochs, prepend=-1))
    place = np.arange(len(epochs)) - np.repeat(starts, np.diff(starts, append=len(epochs)))
    if len(place) and int(place.max()) >= 1 << PLACE_BITS:
        raise ValueError(f"an epoch has more than {1 << PLACE_BITS} rows")
    return (epochs << PLACE_BITS) + place


def epochs_of(numbers: Int64s) -> Int64s:
    return numbers >> PLACE_BITS


def rows_to_keep(
    shape: RunShape,
    slice_us: int,
    times: Int64s,
    numbers: Int64s,
    keys: Sequence[pa.ChunkedArray],
    values: Sequence[pa.ChunkedArray],
) -> pa.Table:
    """Rows with the columns of runs, in the order given."""
    by_name = dict(zip(shape.key_names, keys, strict=True))
    hashes = hash_rows(pa.table(by_name), shape.key_names) if keys else np.zeros(0, np.uint64)
    panes = times - times % slice_us
    columns = [pa.array(panes), pa.array(hashes), pa.array(times), pa.array(numbers)]
    return pa.table([*columns, *keys, *values], schema=shape.schema)


def keep(state: OperatorState, rows: pa.Table, epochs: Int64s | None = None) -> OperatorState:
    """With rows of the epochs of a call (`rows_to_keep`), in order. Those of panes that are not
    live are left out. `epochs`: of each row; without it, that of its number."""
    epochs = epochs_of(int64s(rows.column(NUMBER))) if epochs is None else epochs
    panes = int64s(rows.column(PANE))
    if len(panes) and int(panes.min()) < state.first_live_pane_us:
        live = panes >= state.first_live_pane_us
        rows, epochs = rows.filter(pa.array(live)), epochs[live]
    if not rows.num_rows:
        return state
    starts = np.flatnonzero(np.diff(epochs, prepend=-1))
    of_epochs = [
        (int(epochs[first]), sort(rows.slice(first, end - first)))
        for first, end in pairwise([*starts.tolist(), len(epochs)])
    ]
    digest = chained(state.digest, of_epochs)
    tables = [table for _, table in of_epochs]
    state = append(state, tables[0] if len(tables) == 1 else sort(pa.concat_tables(tables)))
    return replace(state, digest=digest)


def forget(shape: RunShape, state: OperatorState, slice_us: int, before_us: int) -> OperatorState:
    """Without the slices of which all rows have times below `before_us`; compacted."""
    return compact(shape, drop(state, before_us - before_us % slice_us))
