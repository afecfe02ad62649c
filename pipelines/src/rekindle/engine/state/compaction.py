"""Folds deltas (appended rows) into pages (folded rows, by pane and bucket); joins deltas. Pure.

Compaction changes where rows are and never what they add up to: a page is replaced by the left fold
of its rows and of *all* its rows in later deltas. It may process as many rows as `append` has added
to `credit`, so that its cost does not depend on the size of the state. It does not read runs that
are not available yet (see `engine.state.remote`): pages that need them are compacted once the runs
are available, or once too many rows wait for that. Of each page, `folded_through` is its newest
folded delta, `pending` the number of rows of later ones, and `pending_at_restore` how many of these
a restore brought.

A group that changes in many epochs has a row for each of them. When deltas of single calls are
joined, which is before each checkpoint, such groups get one row instead, with their value: the left
fold of all that there is of them. Rows of sums of doubles could not be merged with one another
otherwise.

Design: docs/decisions/0044-window-state.md, docs/decisions/0048-lazy-restore.md,
docs/decisions/0064-rare-checkpoints.md.
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
    available_pages,
    between,
    bounds,
    copy_rows,
    count_by_page,
    newest_unavailable,
    pages_of,
    without_folded_deltas,
)
from rekindle.engine.state.reading import read_groups
from rekindle.engine.state.remote import prioritize
from rekindle.engine.state.runs import (
    HASH,
    PANE,
    Int64s,
    Run,
    RunShape,
    are_in,
    bucket_of,
    fold,
    group_sizes,
    int64s,
    of_rows,
    rows_within,
    sort,
    uint64s,
    without_replaced,
)

PAGE_ROWS = 4096
"""Rows of a page when it is cut; a page with more than twice as many is cut again."""
PAGE_BYTES = 512 << 10
"""Limit of a page in bytes, so that pages of wide rows have fewer rows: a page is folded in memory,
and reads fold several pages at once."""
KEPT_PAGES = 4
"""How many times as large a page of a table that keeps its rows is: a look-up searches all pages,
and nothing folds several of them."""
EXTRA_PAGES = 16
"""Maximum number of pages that a call compacts beyond twice what its own rows require: credit may
have accumulated while runs were not available."""
WAITING_BYTES = 64 << 20
"""Limit on rows that were appended, since the restore, to pages that wait for runs which are not
available. Above it compaction reads these runs, and the call waits for them: otherwise the state
would grow with the input for as long as the store cannot be reached."""
MAX_SINGLE_DELTAS, MAX_JOINED_DELTAS = 32, 512
"""Maximum number of deltas of level 0 (each of one call), and of each higher level. If there are
more, the oldest are joined to deltas of the next level, so that reads do not have to search too
many."""
FREQUENT_ROWS = 4
"""A group with so many rows in deltas of single calls gets its value instead."""
MIN_FREQUENT_SHARE = 0.5
"""Share of the rows that must be of such groups, or reading their values is not worth it."""
MAX_VALUE_DELTAS = 8
"""Maximum number of deltas with values; the oldest is put into the newest."""
JOIN_BYTES = 16 << 20
"""Limit on deltas that are joined to one; larger deltas are not copied."""
PRUNE_PAGES_PER_CALL = 64
"""Size, in pages, of the deltas that one call examines for dead rows."""


def compact(shape: RunShape, state: OperatorState) -> OperatorState:
    """Compacts pages, those with the highest benefit first, as long as the credit suffices; joins
    deltas if there are many. Pages that need runs which are not available wait; the credit for them
    is kept."""
    if not state.deltas:
        return replace(state, credit=0)
    if not state.complete:
        state = replace(state, complete=all(run.is_available for run in state.runs()))
    most, spent = _most_credit(state), 0
    while state.deltas:
        rows = np.array([page.rows for page in state.pages], dtype=np.int64)
        cost = rows + state.pending
        # As in log-structured file systems: benefit * age / cost.
        benefit = state.pending * (state.seq - state.folded_through) / np.maximum(cost, 1)
        compactable = _can_be_compacted(state)
        page = int(np.argmax(np.where(compactable, benefit, 0.0)))
        if not benefit[page] or not compactable[page]:
            if compactable.all():
                break
            return _join_if_many(shape, state)
        # The first page is limited by the credit only: otherwise a page that has become larger
        # than `most` would block all others.
        if cost[page] > state.credit or (spent and spent + cost[page] > most):
            return _join_if_many(shape, state)  # the credit is kept for this page
        spent += int(cost[page])
        state = _compact_page(shape, replace(state, credit=state.credit - int(cost[page])), page)
    return replace(_join_if_many(shape, state), credit=0)


def _most_credit(state: OperatorState) -> int:
    """Credit that one call may spend if it compacts more than one page."""
    newest = state.deltas[-1].run.rows
    return 2 * int(COMPACTION_RATIO * newest) + EXTRA_PAGES * 2 * PAGE_ROWS


def _can_be_compacted(state: OperatorState) -> npt.NDArray[np.bool_]:
    """For each page whether it may be folded: all runs that it needs are available, or too many
    rows wait."""
    available = available_pages(state)
    appended = int(np.maximum(state.pending - state.pending_at_restore, 0)[~available].sum())
    newest = state.deltas[-1].run
    waiting_bytes = appended * newest.nbytes // max(1, newest.rows)
    return np.ones_like(available) if waiting_bytes > WAITING_BYTES else available


def compact_all(shape: RunShape, state: OperatorState) -> OperatorState:
    """Compacts all pages, so that no deltas are left."""
    at = len(state.pages) - 1
    while at >= 0:
        if state.pending[at]:
            state = _compact_page(shape, state, at)
        at -= 1
    return replace(state, credit=0)


def join_single_deltas(shape: RunShape, state: OperatorState) -> OperatorState:
    """The state with its deltas of single calls joined to deltas of the next level, in which groups
    with many rows have their value instead. Done before a checkpoint, so that each row is uploaded
    in at most one delta."""
    newest = newest_unavailable(state)  # unavailable runs are in the store already
    single = (at for at, d in enumerate(state.deltas) if not d.level and d.seq > newest)
    first = next(single, None)
    if first is None:
        return state
    appended = int(state.pending.sum())
    rows = sum(_live(state, delta).num_rows for delta in state.deltas[first:])
    state = _with_values(shape, _join(state, first, len(state.deltas)))
    left = max(0, rows - (appended - int(state.pending.sum())))
    return replace(state, share_left=min(1.0, left / max(1, rows)))


def _with_values(shape: RunShape, state: OperatorState) -> OperatorState:
    """The state in which the frequent groups of the newest delta have one row, with their value. If
    most rows of an earlier delta with values are of these groups, its other groups get theirs
    too, and it is dropped."""
    if shape.kept is not None or not state.deltas or not state.complete:
        return state
    newest = state.deltas[-1]
    rows = newest.run.table
    frequent = group_sizes(rows) >= FREQUENT_ROWS
    if newest.has_values or frequent.sum() < max(1.0, MIN_FREQUENT_SHARE * len(frequent)):
        return state
    groups = rows.filter(pa.array(frequent))
    others = [d for d in state.deltas[:-1] if d.has_values]
    replaced = {
        delta.run.id
        for number, delta in enumerate(others, 1)
        if delta.run.nbytes <= JOIN_BYTES
        and (
            number + MAX_VALUE_DELTAS <= len(others)
            or 2 * are_in(delta.run.table, groups).sum() >= delta.run.rows
        )
    }
    removed = [d for d in others if d.run.id in replaced]
    groups = pa.concat_tables([groups, *(_live(state, delta) for delta in removed)])
    hashes = np.unique(uint64s(groups.column(HASH)))
    panes = int64s(groups.column(PANE))
    found = read_groups(shape, state, int(panes.min()), int(panes.max()) + 1, hashes)
    values = found.filter(pa.array(are_in(found, groups)))
    rest = rows.filter(pa.array(~are_in(rows, groups))).combine_chunks()
    split = [
        Delta(newest.seq, Run(part), newest.level, has_values)
        for part, has_values in ((values.combine_chunks(), True), (rest, False))
        if part.num_rows
    ]
    kept = [d for d in state.deltas[:-1] if d.run.id not in replaced]
    return _with_deltas(state, [*kept, *split], removed=[*removed, newest], added=split)


def _with_deltas(
    state: OperatorState,
    deltas: Sequence[Delta],
    removed: Sequence[Delta],
    added: Sequence[Delta],
) -> OperatorState:
    pending = state.pending.copy()
    for each, sign in ((removed, -1), (added, 1)):
        for delta in each:
            live = Run(_live(state, delta))
            if live.rows:
                pending += sign * count_by_page(state, live.panes, live.buckets())
    return replace(state, deltas=tuple(deltas), pending=pending)


def _join_if_many(shape: RunShape, state: OperatorState) -> OperatorState:
    for level in sorted({delta.level for delta in state.deltas}):
        at = [at for at, delta in enumerate(state.deltas) if delta.level == level]
        if not level and len(at) > MAX_SINGLE_DELTAS:
            state = join_single_deltas(shape, state)
        elif level and len(at) > MAX_JOINED_DELTAS:  # the oldest have the fewest live rows
            first, end = at[0], at[0] + max(2, MAX_JOINED_DELTAS // 16)
            end += state.deltas[end].seq == state.deltas[end - 1].seq  # beside its values
            available = all(d.run.is_available for d in state.deltas[first:end])
            state = _join(state, first, end) if available else state
    return _prune(state)


def _join(state: OperatorState, first: int, end: int) -> OperatorState:
    """The state with the deltas from index `first` to before `end`, which are of one level, joined
    to deltas of the next level. Their rows are not folded: sums of doubles must be added to the
    base one epoch after another."""
    chosen = state.deltas[first:end]
    assert len({delta.level for delta in chosen}) == 1, "deltas of one level are consecutive"
    joined = [delta for group in _groups(chosen) for delta in _joined(state, group)]
    deltas = (*state.deltas[:first], *joined, *state.deltas[end:])
    if not any(delta.has_values for delta in chosen):  # all live rows are kept
        return replace(state, deltas=deltas)
    return _with_deltas(state, deltas, removed=chosen, added=joined)


def _groups(deltas: Sequence[Delta]) -> Iterator[list[Delta]]:
    """Groups of consecutive deltas of at most JOIN_BYTES together; a larger delta is alone."""
    group: list[Delta] = []
    size = 0
    for delta in deltas:
        is_of_last = bool(group) and delta.seq == group[-1].seq  # beside its values
        if group and size + delta.run.nbytes > JOIN_BYTES and not is_of_last:
            yield group
            group, size = [], 0
        group.append(delta)
        size += delta.run.nbytes
    yield group


def _joined(state: OperatorState, group: Sequence[Delta]) -> list[Delta]:
    """The group's live rows: values, then other rows, each in one delta if there are any."""
    last, level = group[-1], group[-1].level + 1
    if len(group) == 1 and last.level:
        return [replace(last, level=level)]
    live = [_live(state, delta) for delta in group]
    rows = pa.concat_tables(live).combine_chunks()
    if not rows.num_rows:
        return []
    if not any(delta.has_values for delta in group):
        unchanged = len(group) == 1 and rows.num_rows == last.run.rows
        return [Delta(last.seq, last.run if unchanged else Run(sort(rows)), level)]
    is_value = of_rows(live, [delta.has_values for delta in group])
    kept = without_replaced(rows, is_value)
    parts = ((kept[is_value[kept]], True), (kept[~is_value[kept]], False))
    return [
        Delta(last.seq, Run(sort(rows.take(pa.array(chosen)))), level, has_values)
        for chosen, has_values in parts
        if len(chosen)
    ]


def _prune(state: OperatorState) -> OperatorState:
    """If most rows of the deltas are dead, removes dead rows from some deltas in each call. Such
    deltas are still needed for a few rows of pages whose compaction has little benefit."""
    rows = sum(delta.run.rows for delta in state.deltas)
    if rows <= ROWS_PER_LIVE_ROW * int(state.pending.sum()) + 4 * PAGE_ROWS:
        return state
    deltas: list[Delta | None] = list(state.deltas)
    first, seen = state.seq % len(deltas), 0
    for at in (*range(first, len(deltas)), *range(first)):
        delta = state.deltas[at]
        if not delta.run.is_available:
            continue
        live = _live(state, delta)
        if live.num_rows * ROWS_PER_LIVE_ROW < delta.run.rows:
            pruned = replace(delta, run=Run(live.combine_chunks()))
            deltas[at] = pruned if live.num_rows else None
        seen += delta.run.rows
        if seen > PRUNE_PAGES_PER_CALL * PAGE_ROWS:
            break
    return replace(state, deltas=tuple(d for d in deltas if d is not None))


def _live(state: OperatorState, delta: Delta) -> pa.Table:
    """The rows of a delta that are not folded into a page, and not of dropped panes."""
    rows = delta.run.table
    page = pages_of(state, delta.run.panes, delta.run.buckets())
    live = (state.folded_through[page] < delta.seq) & (delta.run.panes >= state.first_live_pane_us)
    return rows if live.all() else rows.filter(pa.array(live))


def _compact_page(shape: RunShape, state: OperatorState, at: int) -> OperatorState:
    page, through = state.pages[at], state.folded_through[at]
    later = (delta.run for delta in state.deltas if delta.seq > through)
    prioritize(run for run in (page.run, *later) if run is not None)
    first_live = (state.first_live_pane_us, 0)
    tables = [between(page.run, first_live, None)] if page.run is not None else []
    are_values = [False] * len(tables)
    low, high = bounds(state, at)
    for delta in state.deltas:
        if delta.seq > through:
            tables.append(between(delta.run, max(low, first_live), high))
            are_values.append(delta.has_values)
    folded = fold(shape, tables, are_values)
    pages = _cut(page, folded, KEPT_PAGES if shape.kept is not None else 1)
    state = replace(
        state,
        pages=(*state.pages[:at], *pages, *state.pages[at + 1 :]),
        folded_through=_replaced(state.folded_through, at, len(pages), state.seq),
        pending=_replaced(state.pending, at, len(pages), 0),
        pending_at_restore=_replaced(state.pending_at_restore, at, len(pages), 0),
    )
    return without_folded_deltas(state)


def _cut(page: Page, rows: pa.Table, times: int) -> list[Page]:
    """Cuts rows into pages of about `times` PAGE_ROWS or PAGE_BYTES, between buckets, and between
    panes where that is possible, so that a page has rows of windows that close together."""
    count = rows.num_rows
    if not count:
        return [replace(page, run=None)]
    size = rows_within(times * PAGE_ROWS, times * PAGE_BYTES, count, rows.nbytes)
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


def _next_cut(rows: Int64s, first: int, end: int) -> int | None:
    """The first of these row numbers that is at or after `first` and before `end`."""
    at = int(np.searchsorted(rows, first))
    return int(rows[at]) if at < len(rows) and rows[at] < end else None


def _replaced(values: Int64s, at: int, count: int, value: int) -> Int64s:
    """The array with the element `at` replaced by `count` elements `value`."""
    return np.concatenate([values[:at], np.full(count, value, dtype=np.int64), values[at + 1 :]])
