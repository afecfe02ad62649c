"""The state of one window operator: partial aggregates by pane, combined to windows that close.
Pure.

A window consists of panes of one slide each. Spark aggregates the rows of each (group, pane, epoch)
to partials; this module appends them to the operator's state (`rekindle.engine.state`) and combines
the panes of windows that close. A pane is the left fold of its epochs, a window a fold of its panes
in a constant order, so one call over many epochs gives the same bits as one call for each epoch.
That makes released output recoverable without saving state first.

Windows that begin before `OperatorState.first_live_pane_us` are not written: they are closed, or
the operator's definition began after them, so that rows of them may be missing
(`engine.state.operator.begins_after`).

Design: docs/design/engine.md#windows, docs/design/determinism.md.
Paper: FlameStream (Trofimov et al. 2019), section V.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rekindle.engine.epochs import EPOCH, Clock
from rekindle.engine.external_sort import ExternalSort
from rekindle.engine.state.compaction import compact
from rekindle.engine.state.operator import (
    BEGIN_OF_PANES,
    END_OF_PANES,
    OperatorState,
    append,
    chained,
    drop,
)
from rekindle.engine.state.panes import each_window, without_stale_tree_nodes
from rekindle.engine.state.runs import HASH, PANE, Merge, RunShape, int64s, sort
from rekindle.engine.state.spill import RunFiles
from rekindle.engine.window_assigners import WindowAssigner
from rekindle.exchange.hashing import hash_rows

ROW_COUNT = "__n"
ROW_ORDER = "__r"
"""Column of a row's position in the input's order."""
LATE = -(2**63) + 1
"""Value of `__w`, in place of a pane's start, for late rows: all their windows are closed."""
NULL_EVENT_TIME = -(2**63) + 2
"""Value of `__w` for rows without event time."""

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class GroupShape:
    """The layout of the aggregates of groups in an operator's state, for windows of any kind."""

    keys: tuple[pa.DataType, ...]
    partials: tuple[tuple[str, pa.DataType, Merge], ...]
    wide_sums: tuple[tuple[str, int], ...] = ()
    """Sums of decimals that are kept as two partials (`engine.exact_sums`): name and scale."""

    @property
    def key_names(self) -> list[str]:
        return self.run_shape.key_names

    @cached_property
    def run_shape(self) -> RunShape:
        return RunShape(self.keys, self.partials)

    @cached_property
    def closed_schema(self) -> pa.Schema:
        """Schema of closed windows; `__w` is what their kind makes of it."""
        kept = [field for field in self.run_shape.schema if field.name != HASH]
        return pa.schema([*kept, pa.field(EPOCH, pa.int64())])


@dataclass(frozen=True, kw_only=True)
class WindowShape(GroupShape):
    """The same for windows that consist of panes."""

    assigner: WindowAssigner


@dataclass(frozen=True, slots=True)
class AdvanceResult:
    """`closed`: windows, ordered by (epoch, window end, keys). `late`, `null_event_time`: numbers
    of rows that were dropped because they were late, or had no event time."""

    state: OperatorState
    closed: pa.Table
    late: int
    null_event_time: int


def advance(
    shape: WindowShape,
    state: OperatorState,
    partials: pa.Table | None,
    clock: Clock,
    files: RunFiles | None = None,
) -> AdvanceResult:
    """Append `partials` (columns `__k*`, `__w`: pane start, `__e`, `__n`, partials), close windows.

    A window closes in the first epoch whose watermark reaches its end. A row of a later epoch is
    late for that window, but is added to the windows of its pane that are still open. `files`: for
    closed windows that do not fit into memory. Raises DiskFull.
    """
    size_us = shape.assigner.panes_per_window * shape.assigner.pane_us
    rows, late, null_event_time = split_dropped(partials, size_us)
    if rows is not None:
        rows = _of_live_panes(rows, state.first_live_pane_us)
    ordered = None if rows is None else by_epoch(shape, rows)
    closed = ExternalSort(shape.closed_schema, [EPOCH, PANE, *shape.key_names], files)
    for part in _split_call(shape, ordered, clock):
        if ordered is not None:
            state = _append(shape, state, ordered, part)
        state = _close(shape, state, part, closed.add, files)
    if ordered is not None:
        state = compact(shape.run_shape, state)
    return AdvanceResult(state, closed.sorted(), late, null_event_time)


def split_dropped(partials: pa.Table | None, size_us: int) -> tuple[pa.Table | None, int, int]:
    """The partials of panes, and how many rows were dropped: late rows, and rows without event
    time. A row whose event time is so extreme that a window of it, of `size_us`, would begin or end
    outside of 64 bits is dropped, and counted, as one without event time."""
    if partials is None or not partials.num_rows:
        return None, 0, 0
    panes, counts = partials.column(PANE).to_numpy(), partials.column(ROW_COUNT).to_numpy()
    late = panes == LATE
    untimed = ~late & ((panes < BEGIN_OF_PANES + size_us) | (panes > END_OF_PANES - size_us))
    kept = ~(late | untimed)
    if not kept.all():
        partials = partials.filter(pa.array(kept))
    rows = partials if partials.num_rows else None
    return rows, int(counts[late].sum()), int(counts[untimed].sum())


def _of_live_panes(rows: pa.Table, first_us: int) -> pa.Table | None:
    """The rows of panes whose windows are all written, or still can be. No other row is in a
    window that is written."""
    live = rows.column(PANE).to_numpy() >= first_us
    if live.all():
        return rows
    return rows.filter(pa.array(live)) if live.any() else None


@dataclass(frozen=True, slots=True)
class EpochRows:
    """Rows with the columns of runs, ordered by epoch. `epochs`, `panes`: those of each row;
    `counts`: of how many rows of the input it is the aggregate."""

    table: pa.Table
    epochs: Int64s
    panes: Int64s
    counts: Int64s


def by_epoch(shape: GroupShape, partials: pa.Table) -> EpochRows:
    epochs = int64s(partials.column(EPOCH))
    if (np.diff(epochs) < 0).any():
        order = np.argsort(epochs, kind="stable")
        epochs, partials = epochs[order], partials.take(pa.array(order))
    schema = shape.run_shape.schema
    plain = pa.schema([field for field in schema if field.name != HASH])
    rows = partials.select(plain.names).cast(plain).combine_chunks()
    hashes = pa.array(hash_rows(rows, shape.key_names))
    rows = rows.add_column(schema.get_field_index(HASH), schema.field(HASH), hashes)
    return EpochRows(rows, epochs, int64s(rows.column(PANE)), int64s(partials.column(ROW_COUNT)))


def _split_call(shape: WindowShape, rows: EpochRows | None, clock: Clock) -> list[Clock]:
    """Divides the epochs of a call into parts. The rows of a part are appended at once, before its
    windows are closed. So a new part begins with each epoch that has a row for a pane of a window
    that an earlier epoch of the part closes. Windows of one pane have no such rows: they are
    late."""
    if rows is None or len(clock) < 2 or shape.assigner.panes_per_window == 1:
        return [clock] if clock else []
    numbers = np.array([e for e, _, _ in clock], dtype=np.int64)
    first = np.searchsorted(rows.epochs, numbers)
    end = np.searchsorted(rows.epochs, numbers, "right")
    bounds = [0]
    for at in range(1, len(clock)):
        before = clock[at][1]
        if before > clock[bounds[-1]][1] and first[at] < end[at]:
            lowest = int(rows.panes[first[at] : end[at]].min())
            if lowest + shape.assigner.pane_us <= before:
                bounds.append(at)
    return [clock[a:b] for a, b in pairwise([*bounds, len(clock)])]


def _append(
    shape: WindowShape, state: OperatorState, rows: EpochRows, part: Clock
) -> OperatorState:
    first = int(np.searchsorted(rows.epochs, part[0][0]))
    end = int(np.searchsorted(rows.epochs, part[-1][0], "right"))
    if first == end:
        return state
    touched = np.unique(rows.panes[first:end])
    epochs = sorted_epochs(rows, first, end)
    digest = chained(state.digest, epochs)
    tables = [table for _, table in epochs]
    state = append(state, tables[0] if len(tables) == 1 else sort(pa.concat_tables(tables)))
    return without_stale_tree_nodes(replace(state, digest=digest), touched, shape.assigner.pane_us)


def sorted_epochs(rows: EpochRows, first: int, end: int) -> list[tuple[int, pa.Table]]:
    """The rows of each epoch between two rows, in the order of runs."""
    starts = np.flatnonzero(np.diff(rows.epochs[first:end])) + first + 1
    return [
        (int(rows.epochs[a]), sort(rows.table.slice(a, b - a)))
        for a, b in pairwise([first, *starts.tolist(), end])
    ]


def _close(
    shape: WindowShape,
    state: OperatorState,
    part: Clock,
    add: Callable[[pa.Table], None],
    files: RunFiles | None,
) -> OperatorState:
    assigner = shape.assigner
    pane_us, count = assigner.pane_us, assigner.panes_per_window
    before, after = part[0][1], part[-1][2]
    first_panes, counts = assigner.closing(state.panes, before, after)
    live = first_panes >= -(-state.first_live_pane_us // pane_us)
    if not live.any():
        return state
    first_panes, counts = first_panes[live], None if counts is None else counts[live]
    watermarks_after = np.array([w for _, _, w in part], dtype=np.int64)
    epochs = np.array([e for e, _, _ in part], dtype=np.int64)

    def add_closed(rows: pa.Table) -> None:
        _, ends = assigner.bounds(int64s(rows.column(PANE)))
        closing = epochs[np.searchsorted(watermarks_after, ends, side="left")]
        add(rows.drop_columns([HASH]).append_column(EPOCH, pa.array(closing)))

    state = each_window(
        shape.run_shape, state, pane_us, count, first_panes, add_closed, files, counts
    )
    return drop(state, max(BEGIN_OF_PANES, assigner.first_live(after)))
