"""Folds deltas into pages of the base, and joins deltas. Pure.

Compaction changes where rows are and never what they add up to: a page is replaced by the left fold
of its rows and of *all* its rows in later deltas. It spends what `append` has credited, in rows, so
that its cost does not depend on the size of the state. It reads no run that is not here yet (see
`engine.state.remote`): their pages are compacted once they are, or once too much waits for that.
`OperatorState` says what `through`, `pending` and `restored` are.

Design: docs/decisions/0044-window-state.md, docs/decisions/0048-lazy-restore.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rekindle.engine.state.operator import (
    COMPACTION_RATIO,
    ROWS_PER_LIVE_ROW,
    Delta,
    OperatorState,
    Page,
    between,
    bounds,
    copy_rows,
    newest_remote,
    pages_of,
    pages_that_are_here,
    trim,
)
from rekindle.engine.state.remote import prefer
from rekindle.engine.state.runs import (
    Int64s,
    Run,
    RunShape,
    bucket_of,
    fold,
    int64s,
    rows_within,
    sort,
    uint64s,
)

PAGE_ROWS = 4096
"""Rows of a page when it is cut; one with twice as many is cut again."""
PAGE_BYTES = 512 << 10
"""Pages of wide rows have fewer: a page is folded in memory, and several are when they are read."""
EXTRA_PAGES = 16
"""Pages that a call compacts, at most, beyond twice what it has to: credit may have waited for runs
that were not here."""
WAITING_BYTES = 64 << 20
"""Rows that were appended since the restore to pages that wait for runs which are not here. If
there are more, compaction reads these runs: the call waits, rather than that the state grows with
its input for as long as the store is away."""
SINGLE_DELTAS, JOINED_DELTAS = 32, 512
"""Deltas of single calls, and of each level above; if there are more, the oldest are joined to ones
of the next level, so that reading does not search too many."""
JOIN_BYTES = 16 << 20
"""Deltas that are joined to one; larger ones are not copied."""
PRUNE_SCAN_PAGES = 64
"""Size of the deltas whose live rows are counted in one call, in pages."""


def compact(shape: RunShape, state: OperatorState) -> OperatorState:
    """Spend the credit on pages, those with the most to gain first; joins deltas if there are
    many. Pages that need runs which are not here wait, and with them their credit."""
    if not state.deltas:
        return replace(state, credit=0)
    if not state.complete:
        state = replace(state, complete=all(run.is_here for run in state.runs()))
    most, spent = _most_credit(state), 0
    while state.deltas:
        rows = np.array([page.rows for page in state.pages], dtype=np.int64)
        cost = rows + state.pending
        # As in log-structured file systems: what is gained, times its age, by what it costs.
        gain = state.pending * (state.seq - state.through) / np.maximum(cost, 1)
        here = _can_be_compacted(state)
        page = int(np.argmax(np.where(here, gain, 0.0)))
        if not gain[page] or not here[page]:
            if here.all():
                break
            return _join_if_many(state)
        # The first one is only bound by the credit: otherwise a page that has become larger than
        # a call may spend would keep all others waiting.
        if cost[page] > state.credit or (spent and spent + cost[page] > most):
            return _join_if_many(state)  # the credit waits for it
        spent += int(cost[page])
        state = _compact_page(shape, replace(state, credit=state.credit - int(cost[page])), page)
    return replace(_join_if_many(state), credit=0)


def _most_credit(state: OperatorState) -> int:
    """What one call may spend on more than one page."""
    newest = state.deltas[-1].run.rows
    return 2 * int(COMPACTION_RATIO * newest) + EXTRA_PAGES * 2 * PAGE_ROWS


def _can_be_compacted(state: OperatorState) -> npt.NDArray[np.bool_]:
    """For each page whether it may be folded: all that it needs is here, or too much waits."""
    here = pages_that_are_here(state)
    appended = int(np.maximum(state.pending - state.restored, 0)[~here].sum())
    newest = state.deltas[-1].run
    waiting = appended * newest.nbytes // max(1, newest.rows)
    return np.ones_like(here) if waiting > WAITING_BYTES else here


def compact_all(shape: RunShape, state: OperatorState) -> OperatorState:
    """All pages: no deltas are left."""
    at = len(state.pages) - 1
    while at >= 0:
        if state.pending[at]:
            state = _compact_page(shape, state, at)
        at -= 1
    return replace(state, credit=0)


def join_single_deltas(state: OperatorState) -> OperatorState:
    """Without deltas of single calls: they are joined. Before a checkpoint, so that each row is
    uploaded in one delta at most."""
    newest = newest_remote(state)  # what is not here was uploaded
    return _join(state, [d for d in state.deltas if not d.level and d.seq > newest])


def _join_if_many(state: OperatorState) -> OperatorState:
    for level in sorted({delta.level for delta in state.deltas}):
        deltas = [d for d in state.deltas if d.level == level]
        if not level and len(deltas) > SINGLE_DELTAS:
            state = join_single_deltas(state)
        elif level and len(deltas) > JOINED_DELTAS:  # the oldest have the fewest live rows
            oldest = deltas[: max(2, JOINED_DELTAS // 16)]
            state = _join(state, oldest) if all(d.run.is_here for d in oldest) else state
    return _prune(state)


def _join(state: OperatorState, chosen: Sequence[Delta]) -> OperatorState:
    """With deltas of one level, which follow one another, joined to ones of the next level. Rows
    are not folded: a sum of doubles must be added to the base one epoch after another."""
    if not chosen:
        return state
    before = (d for d in state.deltas if d.seq < chosen[0].seq)
    joined = (_joined(state, group) for group in _groups(chosen))
    after = (d for d in state.deltas if d.seq > chosen[-1].seq)
    between_them = sum(chosen[0].seq <= d.seq <= chosen[-1].seq for d in state.deltas)
    assert between_them == len(chosen), "deltas of one level follow one another"
    return replace(state, deltas=(*before, *(d for d in joined if d is not None), *after))


def _groups(deltas: Sequence[Delta]) -> Iterator[list[Delta]]:
    """Consecutive deltas of at most JOIN_BYTES, or single ones."""
    group: list[Delta] = []
    size = 0
    for delta in deltas:
        if group and size + delta.run.nbytes > JOIN_BYTES:
            yield group
            group, size = [], 0
        group.append(delta)
        size += delta.run.nbytes
    yield group


def _joined(state: OperatorState, group: Sequence[Delta]) -> Delta | None:
    """None if no row is live."""
    last, level = group[-1], group[-1].level + 1
    if len(group) == 1 and last.level:
        return replace(last, level=level)
    rows = pa.concat_tables([_live(state, delta) for delta in group]).combine_chunks()
    if not rows.num_rows:
        return None
    same = len(group) == 1 and rows.num_rows == last.run.rows
    return Delta(last.seq, last.run if same else Run(sort(rows)), level)


def _prune(state: OperatorState) -> OperatorState:
    """Without dead rows, if they are most: of deltas that are needed for a few rows of pages which
    are hardly worth a compaction. A part of the deltas in each call."""
    rows = sum(delta.run.rows for delta in state.deltas)
    if rows <= ROWS_PER_LIVE_ROW * int(state.pending.sum()) + 4 * PAGE_ROWS:
        return state
    deltas: list[Delta | None] = list(state.deltas)
    first, seen = state.seq % len(deltas), 0
    for at in (*range(first, len(deltas)), *range(first)):
        delta = state.deltas[at]
        if not delta.run.is_here:
            continue
        live = _live(state, delta)
        if live.num_rows * ROWS_PER_LIVE_ROW < delta.run.rows:
            fresh = replace(delta, run=Run(live.combine_chunks()))
            deltas[at] = fresh if live.num_rows else None
        seen += delta.run.rows
        if seen > PRUNE_SCAN_PAGES * PAGE_ROWS:
            break
    return replace(state, deltas=tuple(d for d in deltas if d is not None))


def _live(state: OperatorState, delta: Delta) -> pa.Table:
    rows = delta.run.table
    page = pages_of(state, delta.run.panes, delta.run.buckets())
    live = (state.through[page] < delta.seq) & (delta.run.panes >= state.first_live_pane_us)
    return rows if live.all() else rows.filter(pa.array(live))


def _compact_page(shape: RunShape, state: OperatorState, at: int) -> OperatorState:
    page, through = state.pages[at], state.through[at]
    later = (delta.run for delta in state.deltas if delta.seq > through)
    prefer(run for run in (page.run, *later) if run is not None)
    first_live = (state.first_live_pane_us, 0)
    tables = [between(page.run, first_live, None)] if page.run is not None else []
    low, high = bounds(state, at)
    for delta in state.deltas:
        if delta.seq > through:
            tables.append(between(delta.run, max(low, first_live), high))
    pages = _cut(page, fold(shape, tables))
    state = replace(
        state,
        pages=(*state.pages[:at], *pages, *state.pages[at + 1 :]),
        through=_replaced(state.through, at, len(pages), state.seq),
        pending=_replaced(state.pending, at, len(pages), 0),
        restored=_replaced(state.restored, at, len(pages), 0),
    )
    return trim(state)


def _cut(page: Page, rows: pa.Table) -> list[Page]:
    """Pages of some PAGE_ROWS or PAGE_BYTES, cut between buckets; between panes where there is a
    choice, so that what closes together lies together."""
    count = rows.num_rows
    if not count:
        return [replace(page, run=None)]
    size = rows_within(PAGE_ROWS, PAGE_BYTES, count, rows.nbytes)
    if count <= 2 * size:
        return [replace(page, run=Run(rows))]
    panes = int64s(rows.column(0))
    buckets = bucket_of(uint64s(rows.column(1)))
    new_pane = np.flatnonzero(np.diff(panes)) + 1
    new_bucket = np.union1d(np.flatnonzero(np.diff(buckets)) + 1, new_pane)
    cuts, last = [0], 0
    while count - last > size + size // 2:
        at = _next_cut(new_pane, last + max(1, size // 2), last + size + size // 2)
        at = at or _next_cut(new_bucket, last + size, count)
        if at is None:
            break
        cuts.append(at)
        last = at
    pages = []
    for first, end in pairwise([*cuts, count]):
        low = (int(panes[first]), int(buckets[first])) if first else (page.pane, page.bucket)
        pages.append(Page(*low, Run(copy_rows(rows, first, end))))
    return pages


def _next_cut(places: Int64s, first: int, end: int) -> int | None:
    """The first place that is at or after `first` and before `end`."""
    at = int(np.searchsorted(places, first))
    return int(places[at]) if at < len(places) and places[at] < end else None


def _replaced(values: Int64s, at: int, count: int, value: int) -> Int64s:
    return np.concatenate([values[:at], np.full(count, value, dtype=np.int64), values[at + 1 :]])
