"""The state of session windows: the aggregates of each group in intervals of the gap's length,
joined to sessions that close. Pure.

Rows of one group are in the same session if their event times are less than the gap apart, and so
are all rows of a pane, which is one gap long. So Spark aggregates rows by (group, pane, epoch), as
for other windows, with the first and the last event time: an *interval*. A session is a chain of
intervals, each of which begins less than the gap after the ones before it end.

A session closes in the first epoch whose watermark is not before its end, which is its last event
time plus the gap. So with the *cutoff*, the watermark minus the gap, an interval is closed, with
all that it is chained to, if their last event time is at or before the cutoff. In each epoch the
intervals that the cutoff passes are read, with those of their groups that follow: those of sessions
that close are results, and the others are added to the interval that they are chained to. What the
cutoff has passed is dead. So the table has what was added in the last gap of event time, however
long sessions are. Rows that come for a pane that the cutoff is in get a pane that begins within it,
after the cutoff and not after their last event time: they must not be added to what is dead.

An interval of an epoch is late if it is chained to nothing that is after the cutoff before its
epoch. A session is written once: a row that is not late but within the gap of one that is closed
begins another one.

Sessions are a function of (state, epoch, rows), and their aggregates are added in an order that
depends on nothing else: by epoch, and what is joined in an epoch by first event time.

Design: docs/design/engine.md#sessions, docs/design/determinism.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

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
from rekindle.engine.state.reading import hashes_between, portions_of_groups, read_groups
from rekindle.engine.state.runs import (
    HASH,
    PANE,
    Int64s,
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
    AdvanceResult,
    EpochRows,
    GroupShape,
    by_epoch,
    split_dropped,
)

FIRST, LAST = "__first", "__last"
"""Partials: the first and the last event time of rows."""


@dataclass(frozen=True, slots=True)
class _Cutoffs:
    """The watermarks before and after an epoch, minus the gap."""

    epoch: int
    before: int
    after: int


def advance(
    shape: GroupShape,
    gap_us: int,
    state: OperatorState,
    lacks_us: int,
    partials: pa.Table | None,
    clock: Clock,
    files: RunFiles | None = None,
) -> AdvanceResult:
    """As `rekindle.engine.window_state.advance`. `lacks_us`: sessions that begin less than the gap
    after it are not written, because rows through then may be missing. Raises DiskFull."""
    seq = state.seq
    rows, late, null_event_time = split_dropped(partials, 2 * gap_us)
    ordered = None if rows is None else _with_rows_after(by_epoch(shape, rows), lacks_us)
    closed = ExternalSort(shape.closed_schema, [EPOCH, LAST, *shape.key_names], files)
    first_us = lacks_us if lacks_us == BEGIN_OF_PANES else lacks_us + gap_us
    for epoch, before, after in clock:
        cutoffs = _Cutoffs(epoch, _minus(before, gap_us), _minus(after, gap_us))
        found = _Epoch(shape, gap_us, state, _rows_of_epoch(ordered, epoch), cutoffs)

        def add(sessions: pa.Table, epoch: int = epoch) -> None:
            starts = int64s(sessions.column(FIRST))
            sessions = sessions.set_column(0, PANE, pa.array(starts)).drop_columns([HASH])
            sessions = sessions.append_column(
                EPOCH, pa.array(np.full(len(starts), epoch, dtype=np.int64))
            )
            closed.add(sessions.filter(pa.array(starts >= first_us)))

        state = found.advanced(add)
        late += found.late
    if state.seq > seq:
        state = compact(shape.run_shape, state)
    return AdvanceResult(state, closed.sorted(), late, null_event_time)


def _minus(watermark: int, gap_us: int) -> int:
    return max(watermark - gap_us, BEGIN_OF_PANES)


def _with_rows_after(rows: EpochRows, lacks_us: int) -> EpochRows:
    """Without intervals that end then or before: what is chained to them begins within the gap."""
    kept = int64s(rows.table.column(LAST)) > lacks_us
    if kept.all() or lacks_us == BEGIN_OF_PANES:
        return rows
    columns = (rows.epochs[kept], rows.panes[kept], rows.counts[kept])
    return EpochRows(rows.table.filter(pa.array(kept)).combine_chunks(), *columns)


def _rows_of_epoch(rows: EpochRows | None, epoch: int) -> EpochRows | None:
    if rows is None:
        return None
    first, end = (int(np.searchsorted(rows.epochs, epoch, side)) for side in ("left", "right"))
    if first == end:
        return None
    columns = (column[first:end] for column in (rows.epochs, rows.panes, rows.counts))
    return EpochRows(rows.table.slice(first, end - first), *columns)


class _Epoch:
    """One epoch of one operator. `late`: how many rows of it were late."""

    def __init__(
        self,
        shape: GroupShape,
        gap_us: int,
        state: OperatorState,
        rows: EpochRows | None,
        cutoffs: _Cutoffs,
    ) -> None:
        self._shape = shape.run_shape
        self._gap_us = gap_us
        self._state = state
        self._cutoffs = cutoffs
        self.late = 0
        table = self._shape.schema.empty_table() if rows is None else rows.table
        self._passed = int64s(table.column(LAST)) <= cutoffs.after
        self._hashes = uint64s(table.column(HASH))
        self._counts = np.zeros(0, dtype=np.int64) if rows is None else rows.counts
        self._rows = self._with_panes_after_cutoff(table)

    def advanced(self, add: Callable[[pa.Table], None]) -> OperatorState:
        """The state after the epoch; passes sessions that close to `add`."""
        remaining = [self._rows.filter(pa.array(~self._passed))]
        for hashes in self._hashes_of_passed():
            remaining.append(self._join(hashes, add))
        rows = sort(concatenate(self._shape, remaining))
        state = self._state
        if rows.num_rows:
            digest = chained(state.digest, [(self._cutoffs.epoch, rows)])
            state = replace(append(state, rows), digest=digest)
        first_us = self._first_pane(self._cutoffs.after + 1)
        return drop(state, first_us) if self._cutoffs.after > BEGIN_OF_PANES else state

    def _first_pane(self, us: int) -> int:
        return us - us % self._gap_us

    def _with_panes_after_cutoff(self, rows: pa.Table) -> pa.Table:
        panes, after = int64s(rows.column(PANE)), self._cutoffs.after
        within = _most_even(after, int64s(rows.column(LAST)))
        panes = np.maximum(np.where(panes > after, panes, within), self._state.first_live_pane_us)
        return rows.set_column(0, PANE, pa.array(panes))

    def _hashes_of_passed(self) -> Sequence[Uint64s]:
        """The hashes of groups with an interval that the cutoff passes, in portions."""
        cutoffs, state = self._cutoffs, self._state
        hashes = self._hashes[self._passed]
        if cutoffs.after > cutoffs.before and not state.is_empty:
            panes = self._first_pane(cutoffs.before), min(cutoffs.after + 1, END_OF_PANES)
            of_state = hashes_between(state, *panes, LAST, cutoffs.before + 1, cutoffs.after)
            hashes = np.concatenate([hashes, of_state])
        return portions_of_groups(state, self._rows, hashes)

    def _join(self, hashes: Uint64s, add: Callable[[pa.Table], None]) -> pa.Table:
        """Joins the intervals of some groups. Gives rows to append: for each session that remains
        open what the cutoff has passed of it, in the pane of an interval that it has not passed."""
        cutoffs, gap_us = self._cutoffs, self._gap_us
        rows, counts = self._intervals(hashes)
        group = group_numbers(rows)
        order = np.lexsort((int64s(rows.column(FIRST)), group))
        rows, group, counts = rows.take(pa.array(order)), group[order], counts[order]
        last = int64s(rows.column(LAST))
        session = _sessions(group, int64s(rows.column(FIRST)), last, gap_us)
        starts = np.flatnonzero(np.diff(session, prepend=-1))
        last_of_session = np.maximum.reduceat(last, starts)
        end = last_of_session[session]
        self.late += int(counts[end <= cutoffs.before].sum())
        closes = (end > cutoffs.before) & (end <= cutoffs.after)
        add(self._folded(rows, session, closes))
        passed = (end > cutoffs.after) & (last <= cutoffs.after)
        joined = self._folded(rows, session, passed)
        remains = np.flatnonzero(last > cutoffs.after)
        of_session, at = np.unique(session[remains], return_index=True)
        panes = int64s(rows.column(PANE))[remains[at]]
        number = np.searchsorted(of_session, int64s(joined.column(PANE)))
        return joined.set_column(0, PANE, pa.array(panes[number]))

    def _intervals(self, hashes: Uint64s) -> tuple[pa.Table, Int64s]:
        """Of these groups, all that were open before the epoch, and those of the epoch; and of how
        many rows of the epoch each consists."""
        cutoffs, gap_us = self._cutoffs, self._gap_us
        first, end = self._first_pane(cutoffs.before), cutoffs.after + gap_us + 1
        kept = read_groups(self._shape, self._state, first, min(end, END_OF_PANES), hashes)
        kept = kept.filter(pa.array(int64s(kept.column(LAST)) > cutoffs.before))
        new = np.flatnonzero(np.isin(self._hashes, hashes))
        rows = concatenate(self._shape, [kept, self._rows.take(pa.array(new))])
        none = np.zeros(kept.num_rows, dtype=np.int64)
        return rows, np.concatenate([none, self._counts[new]])

    def _folded(self, rows: pa.Table, session: Int64s, chosen: npt.NDArray[np.bool_]) -> pa.Table:
        """One row for each session with chosen rows: their left fold; `__w` is its number."""
        of_session = rows.filter(pa.array(chosen))
        return fold(self._shape, [of_session.set_column(0, PANE, pa.array(session[chosen]))])


def _most_even(after: int, times: Int64s) -> Int64s:
    """Of the numbers after `after` and through each time, the one that ends with the most binary
    zeros. While the cutoff advances, most rows get the same one, so that they are merged."""
    differ = (times ^ np.int64(after)).view(np.uint64)
    for shift in (1, 2, 4, 8, 16, 32):
        differ = differ | (differ >> np.uint64(shift))
    return times & ~(differ >> np.uint64(1)).view(np.int64)


def _sessions(group: Int64s, first: Int64s, last: Int64s, gap_us: int) -> Int64s:
    """The number of each interval's session. They are ordered by group and first event time."""
    times, rank = np.unique(last, return_inverse=True)
    reach = times[np.maximum.accumulate(group * len(times) + rank) % len(times)]
    begins = np.ones(len(group), dtype=np.bool_)
    begins[1:] = (group[1:] != group[:-1]) | (first[1:] >= reach[:-1] + gap_us)
    numbers: Int64s = np.cumsum(begins) - 1
    return numbers
