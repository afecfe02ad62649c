"""The state of one operator: pages of a folded base, and deltas that are not folded yet. Pure.

The base is cut into pages by (pane, bucket): each page has all rows from its first bucket to the
first one of the next page, folded. A delta has the rows of the epochs of one call, or of several
calls, in the order of epochs. The value of a group and pane is the left fold of its row in the
base and its rows in all later deltas; `compact` replaces a page by that fold, oldest deltas first,
so it changes where rows are and never what they add up to.

An epoch appends one delta, without reading the base, and compacts pages with at most
COMPACTION_RATIO times as many rows as it appended: its cost does not depend on the size of the
state. All objects are immutable: a copy, a fork and a checkpoint are references.

Design: docs/decisions/0044-window-state.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
import pyarrow as pa

from rekindle.engine.state.runs import (
    BUCKETS,
    Int64s,
    Run,
    RunShape,
    bucket_of,
    concatenate,
    fold,
    int64s,
    rows_within,
    sort,
    uint64s,
)

PAGE_ROWS = 4096
"""Rows of a page when it is cut; one with twice as many is cut again."""
PAGE_BYTES = 512 << 10
"""Pages of wide rows have fewer: a page is folded in memory, and READ_PAGES of them are."""
COMPACTION_RATIO = 1.6
"""Rows that are compacted for each row that is appended."""
SINGLE_DELTAS, JOINED_DELTAS = 32, 512
"""Deltas of single calls, and of each level above; if there are more, the oldest are joined to ones
of the next level, so that reading does not search too many."""
JOIN_BYTES = 16 << 20
"""Deltas that are joined to one; larger ones are not copied."""
LIVE_ROWS = 3
"""Deltas have at most this many rows for each live one, and some pages."""
READ_PAGES = 16
"""Pages that are folded at once: bounds the memory of reading a whole base."""
PRUNED_PAGES = 64
"""Size of the deltas whose live rows are counted in one call, in pages."""
NO_PANE = -(2**63)
ALL_BUCKETS = (0, BUCKETS)


@dataclass(frozen=True, slots=True)
class Page:
    """From a bucket of a pane on. `run` is None if it has no rows yet."""

    pane: int
    bucket: int
    run: Run | None

    @property
    def rows(self) -> int:
        return self.run.rows if self.run is not None else 0


@dataclass(frozen=True, slots=True)
class Delta:
    """`seq`: its place in the order of deltas; `level`: how often its rows were joined."""

    seq: int
    run: Run
    level: int = 0


_FIRST = (Page(NO_PANE, 0, None),)


def _none() -> Int64s:
    return np.zeros(1, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class OperatorState:
    """`through`: for each page, the delta up to which it is folded; `pending`: how many rows of
    later deltas belong to it. `first_live_pane_us`: rows of panes before it are dead. `panes`:
    those with rows, ascending. `credit`: rows that may be compacted. `tree_nodes`: of
    `engine.state.panes`; derived. `digest`: chained over the rows of all epochs, so equal for equal
    states, however they are laid out."""

    pages: tuple[Page, ...] = _FIRST
    deltas: tuple[Delta, ...] = ()
    through: Int64s = field(default_factory=_none)
    pending: Int64s = field(default_factory=_none)
    first_live_pane_us: int = NO_PANE
    panes: Int64s = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    seq: int = 0
    credit: int = 0
    tree_nodes: Mapping[tuple[int, int], Run] = field(default_factory=dict)
    digest: str = ""

    @property
    def rows(self) -> int:
        """Rows of the base and of all deltas, also dead ones."""
        return sum(run.rows for run in self.runs())

    @property
    def nbytes(self) -> int:
        return sum(run.nbytes for run in self.runs())

    @property
    def is_empty(self) -> bool:
        return not len(self.panes)

    @cached_property
    def page_starts(self) -> tuple[Int64s, Int64s]:
        """The panes in which pages begin, and for each page the place of its first bucket: (rank
        of its pane, bucket) as one number."""
        low = np.array([(p.pane, p.bucket) for p in self.pages], dtype=np.int64)
        starts, ranks = np.unique(low[:, 0], return_inverse=True)
        return starts, ranks * BUCKETS + low[:, 1]

    def runs(self) -> Iterator[Run]:
        for page in self.pages:
            if page.run is not None:
                yield page.run
        for delta in self.deltas:
            yield delta.run

    def with_runs(self, runs: Mapping[object, Run]) -> OperatorState:
        """The same state, with other runs of the same content, also for tree nodes; by RunId."""
        if not runs:
            return self
        pages = tuple(
            replace(p, run=runs[p.run.id]) if p.run is not None and p.run.id in runs else p
            for p in self.pages
        )
        deltas = tuple(
            replace(d, run=runs[d.run.id]) if d.run.id in runs else d for d in self.deltas
        )
        tree_nodes = {node: runs.get(run.id, run) for node, run in self.tree_nodes.items()}
        return replace(self, pages=pages, deltas=deltas, tree_nodes=tree_nodes)


EMPTY = OperatorState()


def append(state: OperatorState, rows: pa.Table) -> OperatorState:
    """`rows` is sorted as a run, of one or more epochs that follow all others, in live panes."""
    if not rows.num_rows:
        return state
    run = Run(rows)
    seq = state.seq + 1
    touched = np.unique(run.panes)
    return replace(
        state,
        deltas=(*state.deltas, Delta(seq, run)),
        pending=state.pending + _count(state, run.panes, run.buckets()),
        panes=touched if not len(state.panes) else np.union1d(state.panes, touched),
        seq=seq,
        credit=state.credit + int(COMPACTION_RATIO * run.rows),
    )


def read(
    shape: RunShape,
    state: OperatorState,
    first: int,
    end: int,
    buckets: tuple[int, int] = ALL_BUCKETS,
) -> pa.Table:
    """The rows of all groups in the panes from `first` (inclusive) to `end`, folded, in the order
    of runs. `buckets`: only from one to another."""
    return concatenate(shape, list(portions(shape, state, first, end, buckets)))


def portions(
    shape: RunShape,
    state: OperatorState,
    first: int,
    end: int,
    buckets: tuple[int, int] = ALL_BUCKETS,
) -> Iterator[pa.Table]:
    """What `read` returns, one table for about READ_PAGES pages."""
    first = max(first, state.first_live_pane_us)
    if first >= end or not len(state.panes):
        return
    low, high = _page_at(state, first, 0), _page_at(state, end, 0)
    for at in range(low, high + 1, READ_PAGES):
        part = (at, min(at + READ_PAGES, high + 1))
        yield _read_pages(shape, state, part, first, end, buckets)


def _read_pages(
    shape: RunShape,
    state: OperatorState,
    part: tuple[int, int],
    first: int,
    end: int,
    buckets: tuple[int, int],
) -> pa.Table:
    """Part of `read`: the rows that belong to the pages from one to another."""
    low, high = part
    tables = []
    for page in state.pages[low:high]:
        if page.run is not None:
            tables.append(_between(page.run, (first, 0), (end, 0)))
    begin = max((first, 0), _page_start(state, low)) if low else (first, 0)
    until = min((end, 0), _page_start(state, high)) if high < len(state.pages) else (end, 0)
    through = state.through[low:high]
    for delta in state.deltas:
        if delta.seq <= through.min():
            continue
        rows = _between(delta.run, begin, until)
        if rows.num_rows and delta.seq <= through.max():
            panes = int64s(rows.column(0))
            at = _pages_of(state, panes, bucket_of(uint64s(rows.column(1))))
            rows = rows.filter(pa.array(state.through[at] < delta.seq))
        tables.append(rows)
    if buckets != ALL_BUCKETS:
        tables = [part for rows in tables for part in _in_buckets(rows, buckets)]
    return fold(shape, tables)


def _in_buckets(rows: pa.Table, buckets: tuple[int, int]) -> Iterator[pa.Table]:
    """Slices of the rows of a run: closing a window reads it once for each range of buckets."""
    run, first = Run(rows), 0
    while first < run.rows:
        pane = int(run.panes[first])
        low, high = (run.position(pane, bucket) for bucket in buckets)
        if low < high:
            yield rows.slice(low, high - low)
        first = run.position(pane, BUCKETS)


def drop(state: OperatorState, first_us: int) -> OperatorState:
    """Without the panes before `first_us`."""
    if first_us <= state.first_live_pane_us or not len(state.panes) or state.panes[0] >= first_us:
        return state
    panes = state.panes[np.searchsorted(state.panes, first_us) :]
    if not len(panes):
        return OperatorState(first_live_pane_us=first_us, seq=state.seq, digest=state.digest)
    dead = _page_at(state, first_us, 0)
    deltas = (_live_part(d, first_us) for d in state.deltas if d.run.panes[-1] >= first_us)
    kept = replace(
        state,
        pages=state.pages[dead:],
        through=state.through[dead:],
        pending=state.pending[dead:].copy(),
        first_live_pane_us=first_us,
        panes=panes,
        deltas=tuple(deltas),
    )
    later = (d for d in kept.deltas if d.seq > kept.through[0])
    kept.pending[0] = sum(_length(kept, delta, 0) for delta in later)
    return _trim(kept)


def _live_part(delta: Delta, first_us: int) -> Delta:
    """Without the memory of dead rows, if these are most."""
    first, rows = delta.run.position(first_us, 0), delta.run.rows
    if (rows - first) * LIVE_ROWS >= rows:
        return delta
    return replace(delta, run=Run(_copy(delta.run.table, first, rows)))


def compact(shape: RunShape, state: OperatorState) -> OperatorState:
    """Spend the credit on pages, those with the most to gain first; joins deltas if there are
    many."""
    while state.deltas:
        rows = np.array([page.rows for page in state.pages], dtype=np.int64)
        cost = rows + state.pending
        # As in log-structured file systems: what is gained, times its age, by what it costs.
        gain = state.pending * (state.seq - state.through) / np.maximum(cost, 1)
        page = int(np.argmax(gain))
        if not gain[page]:
            break
        if cost[page] > state.credit:
            return _join_if_many(state)  # the credit waits for it
        state = _compact_page(shape, replace(state, credit=state.credit - int(cost[page])), page)
    return replace(_join_if_many(state), credit=0)


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
    return _join(state, [d for d in state.deltas if not d.level])


def _join_if_many(state: OperatorState) -> OperatorState:
    for level in sorted({delta.level for delta in state.deltas}):
        deltas = [d for d in state.deltas if d.level == level]
        if not level and len(deltas) > SINGLE_DELTAS:
            state = _join(state, deltas)
        elif level and len(deltas) > JOINED_DELTAS:  # the oldest have the fewest live rows
            state = _join(state, deltas[: max(2, JOINED_DELTAS // 16)])
    return _prune(state)


def _join(state: OperatorState, chosen: Sequence[Delta]) -> OperatorState:
    """With deltas of one level, which follow one another, joined to ones of the next level. Rows
    are not folded: a sum of doubles must be added to the base one epoch after another."""
    if not chosen:
        return state
    before = (d for d in state.deltas if d.seq < chosen[0].seq)
    joined = (_joined(state, group) for group in _groups(chosen))
    after = (d for d in state.deltas if d.seq > chosen[-1].seq)
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
    if rows <= LIVE_ROWS * int(state.pending.sum()) + 4 * PAGE_ROWS:
        return state
    deltas: list[Delta | None] = list(state.deltas)
    first, seen = state.seq % len(deltas), 0
    for at in (*range(first, len(deltas)), *range(first)):
        delta = state.deltas[at]
        live = _live(state, delta)
        if live.num_rows * LIVE_ROWS < delta.run.rows:
            fresh = replace(delta, run=Run(live.combine_chunks()))
            deltas[at] = fresh if live.num_rows else None
        seen += delta.run.rows
        if seen > PRUNED_PAGES * PAGE_ROWS:
            break
    return replace(state, deltas=tuple(d for d in deltas if d is not None))


def _live(state: OperatorState, delta: Delta) -> pa.Table:
    rows = delta.run.table
    page = _pages_of(state, delta.run.panes, delta.run.buckets())
    live = (state.through[page] < delta.seq) & (delta.run.panes >= state.first_live_pane_us)
    return rows if live.all() else rows.filter(pa.array(live))


def _compact_page(shape: RunShape, state: OperatorState, at: int) -> OperatorState:
    page = state.pages[at]
    first_live = (state.first_live_pane_us, 0)
    tables = [_between(page.run, first_live, None)] if page.run is not None else []
    low, high = _bounds(state, at)
    through = state.through[at]
    for delta in state.deltas:
        if delta.seq > through:
            tables.append(_between(delta.run, max(low, first_live), high))
    pages = _cut(page, fold(shape, tables))
    state = replace(
        state,
        pages=(*state.pages[:at], *pages, *state.pages[at + 1 :]),
        through=_replaced(state.through, at, len(pages), state.seq),
        pending=_replaced(state.pending, at, len(pages), 0),
    )
    return _trim(state)


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
        pages.append(Page(*low, Run(_copy(rows, first, end))))
    return pages


def _next_cut(places: Int64s, first: int, end: int) -> int | None:
    """The first place that is at or after `first` and before `end`."""
    at = int(np.searchsorted(places, first))
    return int(places[at]) if at < len(places) and places[at] < end else None


def _copy(rows: pa.Table, first: int, end: int) -> pa.Table:
    """Rows that do not keep the memory of the others."""
    if not first and end == rows.num_rows:
        return rows
    return rows.take(pa.array(np.arange(first, end)))


def _trim(state: OperatorState) -> OperatorState:
    """Without deltas of which no row is live."""
    behind = state.through[state.pending > 0]
    oldest = int(behind.min()) if len(behind) else state.seq
    if not state.deltas or state.deltas[0].seq > oldest:
        return state
    return replace(state, deltas=tuple(d for d in state.deltas if d.seq > oldest))


def _replaced(values: Int64s, at: int, count: int, value: int) -> Int64s:
    return np.concatenate([values[:at], np.full(count, value, dtype=np.int64), values[at + 1 :]])


def _page_start(state: OperatorState, at: int) -> tuple[int, int]:
    page = state.pages[at]
    return page.pane, page.bucket


def _bounds(state: OperatorState, at: int) -> tuple[tuple[int, int], tuple[int, int] | None]:
    """The first bucket of a page and that of the next one. The first page has all before it."""
    low = _page_start(state, at) if at else (NO_PANE, 0)
    return low, _page_start(state, at + 1) if at + 1 < len(state.pages) else None


def _between(run: Run, low: tuple[int, int], high: tuple[int, int] | None) -> pa.Table:
    """The rows from a (pane, bucket) to another one."""
    first = run.position(*low)
    end = run.rows if high is None else run.position(*high)
    return run.table.slice(first, max(0, end - first))


def _length(state: OperatorState, delta: Delta, at: int) -> int:
    """Live rows of a delta that belong to a page."""
    low, high = _bounds(state, at)
    return int(_between(delta.run, max(low, (state.first_live_pane_us, 0)), high).num_rows)


def _page_at(state: OperatorState, pane: int, bucket: int) -> int:
    where = np.array([pane], dtype=np.int64), np.array([bucket], dtype=np.int64)
    return int(_pages_of(state, *where)[0])


def _pages_of(state: OperatorState, panes: Int64s, buckets: Int64s) -> Int64s:
    """For each (pane, bucket) the page that has it."""
    if len(state.pages) == 1:
        return np.zeros(len(panes), dtype=np.int64)
    starts, places = state.page_starts
    rank = np.searchsorted(starts, panes, "right") - 1
    exact = starts[np.maximum(rank, 0)] == panes
    place = rank * BUCKETS + np.where(exact, buckets, BUCKETS - 1)
    return np.maximum(np.searchsorted(places, place, "right") - 1, 0)


def _count(state: OperatorState, panes: Int64s, buckets: Int64s) -> Int64s:
    """How many of these rows belong to each page."""
    return np.bincount(_pages_of(state, panes, buckets), minlength=len(state.pages))
