"""Reads the state of an operator: the fold of its base and its deltas. Pure.

A position in the order of runs is (start of a pane, bucket).

Design: docs/decisions/0044-window-state.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from rekindle.engine.state.operator import (
    OperatorState,
    between,
    overlaps,
    page_at,
    page_start,
    pages_of,
)
from rekindle.engine.state.remote import prioritize
from rekindle.engine.state.runs import (
    BUCKETS,
    HASH,
    PANE,
    Int64s,
    Run,
    RunShape,
    Uint64s,
    bucket_of,
    concatenate,
    fold,
    int64s,
    numbers_of_ranges,
    rows_within,
    uint64s,
)

GROUP_ROWS, GROUP_BYTES = 1 << 18, 16 << 20
"""Limit on rows of groups that are read at once, if that is more than one group."""
READ_PAGES = 16
"""Number of pages that are folded at once, which limits the memory for reading a whole base."""
ALL_BUCKETS = (0, BUCKETS)


def read(
    shape: RunShape,
    state: OperatorState,
    first: int,
    end: int,
    buckets: tuple[int, int] = ALL_BUCKETS,
) -> pa.Table:
    """The rows of all groups in the panes from `first` to before `end`, folded, in the order of
    runs. `buckets`: only those from the first to before the second."""
    return concatenate(shape, list(portions(shape, state, first, end, buckets)))


def portions(
    shape: RunShape,
    state: OperatorState,
    first: int,
    end: int,
    buckets: tuple[int, int] = ALL_BUCKETS,
) -> Iterator[pa.Table]:
    """As `read`, but in several tables, each of about READ_PAGES pages."""
    first = max(first, state.first_live_pane_us)
    if first >= end or state.is_empty:
        return
    low, high = page_at(state, first, bucket=0), page_at(state, end, bucket=0)
    prioritize(_unavailable(state, (low, high + 1), first, end))
    for at in range(low, high + 1, READ_PAGES):
        part = (at, min(at + READ_PAGES, high + 1))
        yield _read_pages(shape, state, part, first, end, buckets)


def _unavailable(
    state: OperatorState, part: tuple[int, int], first: int, end: int
) -> Iterator[Run]:
    """The runs that are not available, among those that are read for these pages and panes."""
    low, high = part
    through = state.folded_through[low:high].min()
    deltas = (delta.run for delta in state.deltas if delta.seq > through)
    for run in (*deltas, *(page.run for page in state.pages[low:high])):
        if run is not None and not run.is_available and overlaps(run, first, end):
            yield run


def _read_pages(
    shape: RunShape,
    state: OperatorState,
    part: tuple[int, int],
    first: int,
    end: int,
    buckets: tuple[int, int],
) -> pa.Table:
    """A part of `read`: the rows of the pages from the first index of `part` to before the
    second."""
    low, high = part
    tables: list[tuple[pa.Table, bool]] = []  # with whether its rows are values
    for page in state.pages[low:high]:
        if page.run is not None and overlaps(page.run, first, end):
            tables.append((between(page.run, (first, 0), (end, 0)), False))
    begin = max((first, 0), page_start(state, low)) if low else (first, 0)
    until = min((end, 0), page_start(state, high)) if high < len(state.pages) else (end, 0)
    through = state.folded_through[low:high]
    for delta in state.deltas:
        if delta.seq <= through.min() or not overlaps(delta.run, first, end):
            continue
        rows = between(delta.run, begin, until)
        if rows.num_rows and delta.seq <= through.max():
            panes = int64s(rows.column(PANE))
            at = pages_of(state, panes, bucket_of(uint64s(rows.column(HASH))))
            rows = rows.filter(pa.array(state.folded_through[at] < delta.seq))
        tables.append((rows, delta.has_values))
    if buckets != ALL_BUCKETS:
        tables = [
            (rows, are_values)
            for table, are_values in tables
            for rows in _in_buckets(table, buckets)
        ]
    return fold(shape, [rows for rows, _ in tables], [are_values for _, are_values in tables])


def _in_buckets(rows: pa.Table, buckets: tuple[int, int]) -> Iterator[pa.Table]:
    """The rows in a range of buckets, as slices without copies: closing a window reads the same run
    once for each range of buckets."""
    run, first = Run(rows), 0
    while first < run.rows:
        pane = int(run.panes[first])
        low, high = (run.position(pane, bucket) for bucket in buckets)
        if low < high:
            yield rows.slice(low, high - low)
        first = run.position(pane, BUCKETS)


def read_groups(
    shape: RunShape, state: OperatorState, first: int, end: int, hashes: Uint64s
) -> pa.Table:
    """As `read`, but only rows with these hashes (ascending, each once), and without reading the
    others."""
    first = max(first, state.first_live_pane_us)
    if first >= end or state.is_empty or not len(hashes):
        return shape.schema.empty_table()
    runs = [
        *((page.run, None, False) for page in state.pages if page.run is not None),
        *((delta.run, delta.seq, delta.has_values) for delta in state.deltas),
    ]
    touched = [found for found in runs if overlaps(found[0], first, end)]
    prioritize(run for run, _, _ in touched if not run.is_available)
    tables, are_values = [], []
    for run, seq, has_values in touched:
        chosen = _rows_of_groups(run, first, end, hashes)
        if seq is not None and len(chosen):
            page = pages_of(state, run.panes[chosen], bucket_of(run.hashes[chosen]))
            chosen = chosen[state.folded_through[page] < seq]
        if len(chosen):
            tables.append(run.table.take(pa.array(chosen)))
            are_values.append(has_values)
    return fold(shape, tables, are_values)


def _rows_of_groups(run: Run, first: int, end: int, hashes: Uint64s) -> Int64s:
    """The indices of rows in the panes from `first` to before `end` with one of these hashes."""
    found = [np.zeros(0, dtype=np.int64)]
    for pane, low, high in run.panes_at:
        if not first <= pane < end:
            continue
        rows = run.hashes[low:high]
        begin, after = hashes.searchsorted(rows[0]), hashes.searchsorted(rows[-1], "right")
        some = hashes[begin:after]
        if not len(some):
            continue
        if high - low > len(some):
            firsts = np.searchsorted(rows, some)
            lengths = np.searchsorted(rows, some, "right") - firsts
            found.append(numbers_of_ranges(firsts + low, lengths))
        else:
            at = np.minimum(np.searchsorted(some, rows), len(some) - 1)
            found.append(np.flatnonzero(some[at] == rows) + low)
    return np.concatenate(found)


def portions_of_groups(
    state: OperatorState, rows: pa.Table, hashes: Uint64s, further: int = 0
) -> Sequence[Uint64s]:
    """The hashes, ascending and each once, in portions whose groups have about GROUP_ROWS rows or
    GROUP_BYTES. `hashes`: of each row of a group; `rows`: some more of the operator's, from whose
    size and the state's that of a row is known; `further`: how many more rows a group may have."""
    if not len(hashes):
        return ()
    groups, counts = np.unique(hashes, return_counts=True)
    count, nbytes = state.rows + rows.num_rows, state.nbytes + rows.nbytes
    size = rows_within(GROUP_ROWS, GROUP_BYTES, count, nbytes)
    ends = np.cumsum(counts + further)
    cuts = np.searchsorted(ends, np.arange(size, int(ends[-1]), size))
    return [part for part in np.split(groups, np.unique(cuts)) if len(part)]


def hashes_between(
    state: OperatorState, first: int, end: int, column: str, low: int, high: int
) -> Uint64s:
    """The hash of each row of any run, in the panes from `first` to before `end`, whose value in a
    column of integers without NULLs is from `low` to `high`, both included: of all rows whose
    minimum or maximum is, and of some others that are merged with another row."""
    first = max(first, state.first_live_pane_us)
    runs = [run for run in state.runs() if overlaps(run, first, end)]
    prioritize(run for run in runs if not run.is_available)
    found = [np.zeros(0, dtype=np.uint64)]
    for run in runs:
        begin, after = run.position(first, 0), run.position(end, 0)
        values = int64s(run.table.column(column))[begin:after]
        found.append(run.hashes[begin:after][(values >= low) & (values <= high)])
    return np.concatenate(found)
