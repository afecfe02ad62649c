"""The state of one operator: pages of a folded base, and deltas that are not folded yet. Pure.

The base is cut into pages by (pane, bucket): each page has all rows from its first bucket to the
first one of the next page, folded. A delta has the rows of the epochs of one call, or of several
calls, in the order of epochs. The value of a group and pane is the left fold of its row in the
base and its rows in all later deltas (`engine.state.reading`, `engine.state.compaction`).

An epoch appends one delta, without reading the base, so it does not wait for runs that are not
available yet (`engine.state.remote`); dropping panes may wait for some. All objects are immutable:
a copy, a fork and a checkpoint are references.

Design: docs/decisions/0044-window-state.md.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rekindle.engine.state.remote import prioritize
from rekindle.engine.state.runs import BUCKETS, Int64s, Run, RunShape
from rekindle.errors import StateMismatch
from rekindle.streams.digest import DIGEST_BYTES, digest_table

COMPACTION_RATIO = 1.6
"""How many rows may be compacted for each row that is appended."""
ROWS_PER_LIVE_ROW = 3
"""Limit of the rows of all deltas: this many for each live row, and some pages of rows."""
BEGIN_OF_PANES, END_OF_PANES = -(2**63), 2**63 - 1


@dataclass(frozen=True, slots=True)
class Page:
    """The rows of the base from this bucket of this pane on. `run` is None if there are none
    yet."""

    pane: int
    bucket: int
    run: Run | None

    @property
    def rows(self) -> int:
        return self.run.rows if self.run is not None else 0


@dataclass(frozen=True, slots=True)
class Delta:
    """`seq`: the number of the delta in the order of epochs; `level`: how often compaction has put
    its rows into a larger delta, which does not increase in that order. `has_values`: its rows are
    values (`engine.state.runs`). A delta with values comes before the one with the other rows of
    the same calls, which has the same `seq`."""

    seq: int
    run: Run
    level: int = 0
    has_values: bool = False


_EMPTY_PAGES = (Page(BEGIN_OF_PANES, 0, None),)


def _one_zero() -> Int64s:
    return np.zeros(1, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class OperatorState:
    """`folded_through`: for each page, the number of the newest delta that is folded into it;
    `pending`: how many rows of later deltas belong to it; `pending_at_restore`: how many of these
    there were when the state was restored. `first_live_pane_us`: rows of panes before it are dead,
    and windows that begin before it are not written.
    `panes`: the panes with rows, ascending. `credit`: how many rows compaction may process.
    `share_left`: of the rows that were joined last, how many were left.
    `tree_nodes`: folds of ranges of panes (`engine.state.panes`), not saved. `digest`: chained over
    the rows of all epochs, so equal for equal states with any layout. `complete`: all runs are
    available; False: perhaps not all."""

    pages: tuple[Page, ...] = _EMPTY_PAGES
    deltas: tuple[Delta, ...] = ()
    folded_through: Int64s = field(default_factory=_one_zero)
    pending: Int64s = field(default_factory=_one_zero)
    pending_at_restore: Int64s = field(default_factory=_one_zero)
    first_live_pane_us: int = BEGIN_OF_PANES
    panes: Int64s = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    seq: int = 0
    credit: int = 0
    share_left: float = 1.0
    tree_nodes: Mapping[tuple[int, int], Run] = field(default_factory=dict)
    digest: str = ""
    complete: bool = True

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

    @property
    def is_new(self) -> bool:
        """Whether it is as good as `EMPTY`. The state of an operator whose definition began later
        than the topology is not, even if it has had no rows yet."""
        has_runs = any(True for _ in self.runs())
        return not (self.digest or has_runs or self.first_live_pane_us > BEGIN_OF_PANES)

    @cached_property
    def page_starts(self) -> tuple[Int64s, Int64s]:
        """The panes in which pages begin, and for each page its first bucket as one number that
        orders pages: (rank of its pane, bucket)."""
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
        """The same state with some runs, also of tree nodes, replaced by runs of the same content;
        `runs`: by RunId."""
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
    """Appends a delta. `rows`: sorted as a run, of one or more epochs after all others, in live
    panes."""
    if not rows.num_rows:
        return state
    run = Run(rows)
    seq = state.seq + 1
    touched = np.unique(run.panes)
    state = _with_page_of_new_panes(state, int(touched[-1]))
    return replace(
        state,
        deltas=(*state.deltas, Delta(seq, run)),
        pending=state.pending + count_by_page(state, run.panes, run.buckets()),
        panes=touched if not len(state.panes) else np.union1d(state.panes, touched),
        seq=seq,
        credit=state.credit + int(COMPACTION_RATIO * state.share_left * run.rows),
    )


def chained(digest: str, epochs: Sequence[tuple[int, pa.Table]]) -> str:
    """The digest of a state after these epochs. Epochs without rows do not change it, because a
    call may leave them out."""
    for epoch, rows in epochs:
        text = f"{digest}/{epoch}/{digest_table(rows)}"
        digest = hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).hexdigest()
    return digest


def _with_page_of_new_panes(state: OperatorState, newest_us: int) -> OperatorState:
    """If the last page waits for unavailable runs, begins a new page for panes that are newer than
    all others, so that their rows can be compacted."""
    if state.complete or not len(state.panes) or newest_us <= state.panes[-1]:
        return state
    if _is_available(state.pages[-1]) and state.folded_through[-1] >= newest_unavailable(state):
        return state
    return replace(
        state,
        pages=(*state.pages, Page(int(state.panes[-1]) + 1, 0, None)),
        folded_through=np.append(state.folded_through, state.seq),
        pending=np.append(state.pending, 0),
        pending_at_restore=np.append(state.pending_at_restore, 0),
    )


def begins_after(state: OperatorState, us: int) -> OperatorState:
    """The table of an operator that lacks rows with event times through `us`, and no later ones:
    results that need such a row, as windows that begin then or before, are not written."""
    return replace(
        state, first_live_pane_us=max(state.first_live_pane_us, min(us, END_OF_PANES - 1) + 1)
    )


def match_columns(shape: RunShape, state: OperatorState, operator: str) -> OperatorState:
    """The saved state with its columns in the order of `shape`, matched by name. Raises
    StateMismatch if a column is missing, unknown or of another type."""
    names = shape.schema.names
    runs: dict[object, Run] = {}
    for run in state.runs():
        _check_columns(shape.schema, run.schema, operator)
        if run.schema.names != names:
            runs[run.id] = run.select(names)
    return state.with_runs(runs)


def _check_columns(wanted: pa.Schema, found: pa.Schema, operator: str) -> None:
    kept = {field.name: field.type for field in found}
    needed = {field.name: field.type for field in wanted}
    for name in [*needed, *kept]:
        if kept.get(name) == needed.get(name):
            continue
        have, need = (str(columns.get(name, "missing")) for columns in (kept, needed))
        raise StateMismatch(
            f"operator {operator}: its saved state is incompatible with this release: column "
            f"{name} is {have} in the state and {need} in this release; run the image that saved "
            "it, or rename the operator to start with empty state"
        )


def available_pages(state: OperatorState) -> npt.NDArray[np.bool_]:
    """For each page whether all runs that it is folded from are available."""
    if state.complete:
        return np.ones(len(state.pages), dtype=np.bool_)
    available = np.fromiter(map(_is_available, state.pages), np.bool_, len(state.pages))
    return available & (state.folded_through >= newest_unavailable(state))


def _is_available(page: Page) -> bool:
    return page.run is None or page.run.is_available


def newest_unavailable(state: OperatorState) -> int:
    """The number of the newest delta that is not available; −1 if all are."""
    if state.complete:
        return -1
    return max((d.seq for d in state.deltas if not d.run.is_available), default=-1)


def drop(state: OperatorState, first_us: int) -> OperatorState:
    """The state without the panes before `first_us`."""
    if first_us <= state.first_live_pane_us or not len(state.panes) or state.panes[0] >= first_us:
        return state
    panes = state.panes[np.searchsorted(state.panes, first_us) :]
    if not len(panes):
        return OperatorState(first_live_pane_us=first_us, seq=state.seq, digest=state.digest)
    dropped = page_at(state, first_us, 0)  # number of pages of which no row is live
    deltas = (_live_part(d, first_us) for d in state.deltas if d.run.pane_range[1] >= first_us)
    kept = replace(
        state,
        pages=state.pages[dropped:],
        folded_through=state.folded_through[dropped:],
        pending=state.pending[dropped:].copy(),
        pending_at_restore=state.pending_at_restore[dropped:],
        first_live_pane_us=first_us,
        panes=panes,
        deltas=tuple(deltas),
    )
    if not dropped or page_start(state, dropped) < (first_us, 0):  # the first page had dead rows
        end = page_start(kept, 1)[0] + 1 if len(kept.pages) > 1 else END_OF_PANES
        later = [d for d in kept.deltas if d.seq > kept.folded_through[0]]
        touched = [d for d in later if overlaps(d.run, first_us, end)]
        prioritize(delta.run for delta in touched)
        kept.pending[0] = sum(_length(kept, delta, 0) for delta in touched)
    return without_folded_deltas(kept)


def _live_part(delta: Delta, first_us: int) -> Delta:
    """The delta without its dead rows, if most are dead, to free their memory. A run that is not
    available takes no memory."""
    run = delta.run
    if run.pane_range[0] >= first_us or not run.is_available:
        return delta
    first, rows = run.position(first_us, 0), run.rows
    if (rows - first) * ROWS_PER_LIVE_ROW >= rows:
        return delta
    return replace(delta, run=Run(copy_rows(run.table, first, rows)))


def copy_rows(rows: pa.Table, first: int, end: int) -> pa.Table:
    """A copy of a range of rows. A slice would keep the memory of all rows."""
    if not first and end == rows.num_rows:
        return rows
    return rows.take(pa.array(np.arange(first, end)))


def without_folded_deltas(state: OperatorState) -> OperatorState:
    """The state without deltas of which no page needs rows any more."""
    through = state.folded_through[state.pending > 0]
    oldest = int(through.min()) if len(through) else state.seq
    if not state.deltas or state.deltas[0].seq > oldest:
        return state
    return replace(state, deltas=tuple(d for d in state.deltas if d.seq > oldest))


def page_start(state: OperatorState, at: int) -> tuple[int, int]:
    """The (pane, bucket) in which a page begins."""
    page = state.pages[at]
    return page.pane, page.bucket


def bounds(state: OperatorState, at: int) -> tuple[tuple[int, int], tuple[int, int] | None]:
    """The (pane, bucket) in which a page begins, and that in which the next one begins. The first
    page also has all rows before it."""
    low = page_start(state, at) if at else (BEGIN_OF_PANES, 0)
    return low, page_start(state, at + 1) if at + 1 < len(state.pages) else None


def overlaps(run: Run, first: int, end: int) -> bool:
    """Whether the run may have rows in the panes from `first` to before `end`."""
    low, high = run.pane_range
    return low < end and high >= first


def between(run: Run, low: tuple[int, int], high: tuple[int, int] | None) -> pa.Table:
    """The rows from the (pane, bucket) `low` to before `high`; None: to the end."""
    first = run.position(*low)
    end = run.rows if high is None else run.position(*high)
    return run.table.slice(first, max(0, end - first))


def _length(state: OperatorState, delta: Delta, at: int) -> int:
    """The number of live rows of a delta that belong to a page."""
    low, high = bounds(state, at)
    return int(between(delta.run, max(low, (state.first_live_pane_us, 0)), high).num_rows)


def page_at(state: OperatorState, pane: int, bucket: int) -> int:
    """The index of the page that has this bucket of this pane."""
    panes, buckets = np.array([pane], dtype=np.int64), np.array([bucket], dtype=np.int64)
    return int(pages_of(state, panes, buckets)[0])


def pages_of(state: OperatorState, panes: Int64s, buckets: Int64s) -> Int64s:
    """For each (pane, bucket) the index of its page."""
    if len(state.pages) == 1:
        return np.zeros(len(panes), dtype=np.int64)
    starts, first_buckets = state.page_starts
    rank = np.searchsorted(starts, panes, "right") - 1
    exact = starts[np.maximum(rank, 0)] == panes
    number = rank * BUCKETS + np.where(exact, buckets, BUCKETS - 1)
    return np.maximum(np.searchsorted(first_buckets, number, "right") - 1, 0)


def count_by_page(state: OperatorState, panes: Int64s, buckets: Int64s) -> Int64s:
    """How many of these rows belong to each page."""
    return np.bincount(pages_of(state, panes, buckets), minlength=len(state.pages))
