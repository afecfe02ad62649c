"""The state of windows of a number of rows: for each group the aggregates of its newest panes, in a
ring. Pure.

A pane has `slideRows` consecutive rows of a group, in the order of (epoch, input, row), and a
window the panes of `rows` rows; it is written in the epoch of the row that makes it full. Spark
computes the partials of each row. A group's pane with the number n is in the slot n modulo the
panes of a window, so what is there is replaced by the pane that comes after the windows that it was
in. `__w` is the slot, no time: nothing is ever dropped, and a group's newest panes are kept for
good. An operator that begins later than the topology counts from its first row.

A pane is the left fold of its rows, a window a fold of its panes in a constant order, so one call
over many epochs gives the same bits as one for each.

Design: docs/design/engine.md#windows-of-rows, docs/design/determinism.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pyarrow as pa

from rekindle.engine.epochs import EPOCH
from rekindle.engine.external_sort import ExternalSort
from rekindle.engine.session_state import LAST
from rekindle.engine.state.compaction import compact
from rekindle.engine.state.operator import OperatorState, append, chained
from rekindle.engine.state.reading import portions_of_groups, read_groups
from rekindle.engine.state.runs import (
    HASH,
    PANE,
    Int64s,
    Merge,
    RunShape,
    Uint64s,
    concatenate,
    fold,
    group_numbers,
    int64s,
    sort,
    uint64s,
)
from rekindle.engine.state.spill import RunFiles
from rekindle.engine.window_state import (
    ROW_ORDER,
    AdvanceResult,
    EpochRows,
    GroupShape,
    by_epoch,
    sorted_epochs,
    split_dropped,
)

PANE_NUMBER, PANE_ROWS = "__p", "__c"
"""Columns of the number of a slot's pane in its group, and of how many rows it has."""


@dataclass(frozen=True)
class RowWindowShape:
    """`panes`: how many a window has."""

    groups: GroupShape
    pane_rows: int
    panes: int

    @cached_property
    def run_shape(self) -> RunShape:
        place = ((PANE_NUMBER, pa.int64()), (PANE_ROWS, pa.int64()))
        merged = self.groups.run_shape
        partials = ((name, merged.schema.field(name).type) for name, _, _ in merged.partials)
        newest: Merge = "newest"
        return RunShape(
            merged.keys, tuple((name, kind, newest) for name, kind in (*place, *partials))
        )


def advance(
    shape: RowWindowShape,
    state: OperatorState,
    partials: pa.Table | None,
    files: RunFiles | None = None,
) -> AdvanceResult:
    """As `rekindle.engine.window_state.advance`; `partials` has one row for each of the input, with
    ROW_ORDER. Raises DiskFull."""
    groups = shape.groups
    found, late, null_event_time = split_dropped(partials, size_us=1000)  # the pane of others is 0
    closed = ExternalSort(groups.closed_schema, [EPOCH, LAST, *groups.key_names, PANE], files)
    if found is None:
        return AdvanceResult(state, closed.sorted(), late, null_event_time)
    order = np.lexsort((int64s(found.column(ROW_ORDER)), int64s(found.column(EPOCH))))
    rows = by_epoch(groups, found.take(pa.array(order)))
    written = []
    every = uint64s(rows.table.column(HASH))
    for hashes in portions_of_groups(state, rows.table, every, shape.panes):
        portion = _Portion(shape, state, rows, hashes)
        closed.add(portion.windows())
        written.append(portion.slots())
    digest = chained(state.digest, sorted_epochs(rows, 0, rows.table.num_rows))
    state = append(state, sort(concatenate(shape.run_shape, written)))
    state = compact(shape.run_shape, replace(state, digest=digest))
    return AdvanceResult(state, closed.sorted(), late, null_event_time)


class _Portion:
    """The panes of some groups with rows in a call: those of the state, and new ones. Ordered by
    group and number."""

    def __init__(
        self, shape: RowWindowShape, state: OperatorState, rows: EpochRows, hashes: Uint64s
    ) -> None:
        self._shape = shape
        self._merged = shape.groups.run_shape
        kept = read_groups(shape.run_shape, state, 0, shape.panes, hashes)
        new = np.flatnonzero(np.isin(uint64s(rows.table.column(HASH)), hashes))
        tables = [kept.select(self._merged.schema.names), rows.table.take(pa.array(new))]
        table = concatenate(self._merged, tables)
        group = group_numbers(table)
        number, count = self._numbers(kept, group)
        order = np.lexsort((number, group))  # stable: a pane's row of the state is its first
        group, number, count = group[order], number[order], count[order]
        begins = np.ones(len(order), dtype=np.bool_)
        begins[1:] = (group[1:] != group[:-1]) | (number[1:] != number[:-1])
        starts = np.flatnonzero(begins)
        last = np.append(starts[1:], len(order)) - 1
        self.panes = self._fold(table.take(pa.array(order)), np.cumsum(begins) - 1)
        self._group, self._number = group[starts], number[starts]
        self._count = np.add.reduceat(count, starts)
        of_row = order[last] - kept.num_rows
        self._is_new = of_row >= 0
        self._epoch = rows.epochs[new][np.maximum(of_row, 0)]

    def _numbers(self, kept: pa.Table, group: Int64s) -> tuple[Int64s, Int64s]:
        """The number of each row's pane, and of how many rows it is the aggregate. The rows of the
        state come first; `group`: of each row."""
        number, count = (int64s(kept.column(name)) for name in (PANE_NUMBER, PANE_ROWS))
        size = self._shape.pane_rows
        before = np.zeros(int(group.max()) + 1, dtype=np.int64)
        np.maximum.at(before, group[: len(number)], number * size + count)
        new = group[len(number) :]
        order = np.argsort(new, kind="stable")
        starts = np.flatnonzero(np.diff(new[order], prepend=-1))
        lengths = np.diff(starts, append=len(new))
        place = np.empty_like(new)
        place[order] = np.arange(len(new)) - np.repeat(starts, lengths)
        of_new = (before[new] + place) // size
        return np.concatenate([number, of_new]), np.concatenate([count, np.ones_like(new)])

    def _fold(self, rows: pa.Table, number: Int64s) -> pa.Table:
        """The left fold of rows with equal numbers, which are `__w` and the order of the result."""
        return fold(self._merged, [rows.set_column(0, PANE, pa.array(number))])

    def slots(self) -> pa.Table:
        """Rows to append: the newest panes of each group, of those that have new rows."""
        shape = self._shape
        ends = np.append(np.flatnonzero(np.diff(self._group)), len(self._group) - 1)
        newest = np.repeat(self._number[ends], np.diff(ends, prepend=-1))
        at = np.flatnonzero(self._is_new & (self._number > newest - shape.panes))
        number = self._number[at]
        rows = self.panes.take(pa.array(at))
        rows = rows.set_column(0, PANE, pa.array(number % shape.panes))
        rows = rows.append_column(PANE_NUMBER, pa.array(number))
        rows = rows.append_column(PANE_ROWS, pa.array(self._count[at]))
        return rows.select(shape.run_shape.schema.names)

    def windows(self) -> pa.Table:
        """The windows that are full, with EPOCH; `__w` is the number of the last pane."""
        shape = self._shape
        full = self._is_new & (self._count == shape.pane_rows)
        last = np.flatnonzero(full & (self._number >= shape.panes - 1))
        first = last - (shape.panes - 1)
        assert (self._number[first] == self._number[last] - shape.panes + 1).all()
        rows = self._combined(first)
        rows = rows.set_column(0, PANE, pa.array(self._number[last])).drop_columns([HASH])
        return rows.append_column(EPOCH, pa.array(self._epoch[last]))

    def _combined(self, first: Int64s) -> pa.Table:
        """The folds of the panes of windows that begin with these, in order: of parts of which each
        has a power of two panes and is the fold of its halves, the largest part first."""
        count, size = self._shape.panes, 1
        table, position = self.panes, np.arange(len(self._group))
        window, parts = pa.array(np.arange(len(first))), []
        while size <= count and len(first):
            if count & size:
                larger = count & ~(2 * size - 1)  # panes of the window that are before this part
                part = table.take(pa.array(position[first + larger]))
                parts.append(part.set_column(0, PANE, window))
            left = np.flatnonzero(self._group[: 1 - 2 * size] == self._group[2 * size - 1 :])
            halves = [table.take(pa.array(position[at])) for at in (left, left + size)]
            number = pa.array(np.arange(len(left)))
            table = fold(self._merged, [half.set_column(0, PANE, number) for half in halves])
            position = np.full(len(self._group), -1)
            position[left] = np.arange(len(left))
            size *= 2
        return fold(self._merged, parts[::-1])
