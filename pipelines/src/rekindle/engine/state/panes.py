"""Combines the panes of an operator's state into windows. Pure, but for the files of tree nodes.

A window of many panes is combined from the nodes of a tree: tree node (0, i) is pane i, and tree
node (level, i) has the FAN_OUT^level panes from i * FAN_OUT^level on. A tree node is the left fold
of its FAN_OUT children, a window the left fold of the largest tree nodes that it consists of. Panes
are numbered from the Unix epoch, so the tree nodes are always the same ranges, and the bits of a
window depend only on its panes, not on the windows that were closed before it. A window needs at
most 2 * FAN_OUT tree nodes of each level, however many panes it has; a window of fewer than FAN_OUT
panes is the left fold of its panes.

Tree nodes of level 1 and above are kept until a row arrives for one of their panes. They can be
computed again, so checkpoints do not contain them.

Design: docs/decisions/0044-window-state.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pyarrow as pa

from rekindle.engine.state.operator import OperatorState
from rekindle.engine.state.reading import portions, read
from rekindle.engine.state.runs import (
    BUCKETS,
    PANE,
    Int64s,
    Run,
    RunShape,
    concatenate,
    fold,
    int64s,
    numbers_of_ranges,
    rows_within,
    sort,
)
from rekindle.engine.state.spill import RunFiles

FAN_OUT_BITS = 4
FAN_OUT = 1 << FAN_OUT_BITS
WINDOW_ROWS, WINDOW_BYTES = 1 << 18, 16 << 20
"""Limit on rows that are folded to windows at once, if that is more than one window."""
MAX_WINDOWS = 1024
"""Maximum number of windows that are folded from tree nodes at once: each needs a list of some
dozens of nodes."""
TREE_NODE_ROWS, TREE_NODE_BYTES = 1 << 19, 32 << 20
"""Limit on rows of a tree node's children that are folded at once."""

TreeNode = tuple[int, int]
"""(level, number)."""


def closing_windows(panes: Int64s, pane_us: int, count: int, before: int, after: int) -> Int64s:
    """The windows of `count` panes that contain one of `panes` (their starts, ascending), and end
    after `before` and not after `after` (microseconds); each as the number of its first pane."""
    newest = after - pane_us
    if not len(panes) or newest < int(panes[0]):
        return np.zeros(0, dtype=np.int64)
    numbers = panes[: np.searchsorted(panes, newest, "right")] // pane_us
    lowest, highest = int(numbers[0]) - count + 1, int(numbers[-1])
    first = min(max(before // pane_us - count + 1, lowest), highest + 1)
    last = min(max(after // pane_us - count, lowest - 1), highest)
    low, high = np.maximum(numbers - count + 1, first), np.minimum(numbers, last)
    low[1:] = np.maximum(low[1:], high[:-1] + 1)  # windows of several panes only once
    return numbers_of_ranges(low, np.maximum(high - low + 1, 0))


def closing_cumulative_windows(
    panes: Int64s, pane_us: int, count: int, before: int, after: int
) -> tuple[Int64s, Int64s]:
    """As `closing_windows`, of windows of 1 to `count` panes that begin at multiples of `count`
    panes. Each as the number of its first pane, and of how many panes it has; ordered by end."""
    numbers = panes // pane_us
    first_panes, at = np.unique(numbers - numbers % count, return_index=True)
    low = np.maximum(numbers[at], before // pane_us)
    high = np.minimum(first_panes + count - 1, after // pane_us - 1)
    lengths = np.maximum(high - low + 1, 0)
    last_panes = numbers_of_ranges(low, lengths)
    begins = np.repeat(first_panes, lengths)
    return begins, last_panes - begins + 1


def windows(
    shape: RunShape, state: OperatorState, pane_us: int, count: int, first_panes: Int64s
) -> tuple[OperatorState, pa.Table]:
    """The state, which keeps new tree nodes, and the windows of `count` panes that begin with the
    panes of these numbers (ascending): one row for each group, in the order of runs; `__w` is the
    window's start."""
    found: list[pa.Table] = []
    state = each_window(shape, state, pane_us, count, first_panes, found.append)
    rows = concatenate(shape, found)
    return state, sort(rows) if len(found) > 1 else rows


def each_window(
    shape: RunShape,
    state: OperatorState,
    pane_us: int,
    count: int,
    first_panes: Int64s,
    add: Callable[[pa.Table], None],
    files: RunFiles | None = None,
    counts: Int64s | None = None,
) -> OperatorState:
    """As `windows`, but passes the rows to `add` in portions of a bounded size, in any order.
    `files`: for tree nodes, since the first window after a restore computes all of its nodes.
    `counts`: how many panes each window has, if not all have `count`; then `__w` is the start of
    its last pane. Raises DiskFull."""
    if not len(first_panes):
        return state
    first, last = int(first_panes[0]), int(first_panes[-1])
    if count == 1:
        for rows in portions(shape, state, first * pane_us, (last + 1) * pane_us):
            wanted = np.isin(int64s(rows.column(PANE)), first_panes * pane_us)
            add(rows if wanted.all() else rows.filter(pa.array(wanted)))
        return state
    if counts is None:
        counts, starts = np.full(len(first_panes), count), first_panes * pane_us
    else:
        starts = (first_panes + counts - 1) * pane_us
    chosen = _Windows(first_panes, counts, starts)
    if count < FAN_OUT:
        for buckets in _bucket_ranges(state.rows, state.nbytes):
            panes = read(shape, state, first * pane_us, (last + count) * pane_us, buckets)
            _fold_panes(shape, panes, pane_us, chosen, add)
        return state
    return _from_tree_nodes(shape, state, pane_us, chosen, add, files)


@dataclass(frozen=True, slots=True)
class _Windows:
    """Windows that are combined at once: for each its first pane, how many panes it has, and what
    its rows get as `__w`."""

    first_panes: Int64s
    counts: Int64s
    starts: Int64s

    def part(self, begin: int, end: int) -> _Windows:
        columns = (self.first_panes, self.counts, self.starts)
        return _Windows(*(column[begin:end] for column in columns))


def without_stale_tree_nodes(state: OperatorState, touched: Int64s, pane_us: int) -> OperatorState:
    """The state without tree nodes that contain one of these panes, or that begin with a pane whose
    windows are all closed."""
    if not state.tree_nodes:
        return state
    numbers = touched // pane_us
    levels = {level for level, _ in state.tree_nodes}
    stale = {
        (level, n) for level in levels for n in np.unique(numbers // _panes_of_node(level)).tolist()
    }
    kept = {
        (level, n): rows
        for (level, n), rows in state.tree_nodes.items()
        if (level, n) not in stale
        and n * _panes_of_node(level) * pane_us >= state.first_live_pane_us
    }
    return replace(state, tree_nodes=kept)


def tree_nodes_of(first: int, count: int) -> list[TreeNode]:
    """The largest tree nodes that `count` panes from `first` on consist of, in order."""
    nodes: list[TreeNode] = []
    end = first + count
    while first < end:
        level = 0
        while first % _panes_of_node(level + 1) == 0 and first + _panes_of_node(level + 1) <= end:
            level += 1
        nodes.append((level, first // _panes_of_node(level)))
        first += _panes_of_node(level)
    return nodes


def _panes_of_node(level: int) -> int:
    """How many panes a tree node of this level has."""
    return 1 << level * FAN_OUT_BITS


def _bucket_ranges(rows: int, nbytes: int) -> list[tuple[int, int]]:
    """Divides all buckets into ranges, of about TREE_NODE_ROWS rows or TREE_NODE_BYTES each if
    `rows` rows, of `nbytes`, are in all buckets."""
    size = rows_within(TREE_NODE_ROWS, TREE_NODE_BYTES, rows, nbytes)
    count = max(1, min(-(-rows // size), BUCKETS))
    return list(pairwise(BUCKETS * at // count for at in range(count + 1)))


def _fold_panes(
    shape: RunShape,
    panes: pa.Table,
    pane_us: int,
    chosen: _Windows,
    add: Callable[[pa.Table], None],
) -> None:
    """Passes windows of fewer than FAN_OUT panes, which are the left fold of their panes, to
    `add`."""
    column = int64s(panes.column(PANE))
    low = np.searchsorted(column, chosen.first_panes * pane_us)
    high = np.searchsorted(column, (chosen.first_panes + chosen.counts) * pane_us)
    lengths = high - low
    for begin, end in _portions(lengths, panes.num_rows, panes.nbytes):
        part = lengths[begin:end]
        rows = panes.take(pa.array(numbers_of_ranges(low[begin:end], part)))
        add(_fold_as(shape, rows, np.repeat(chosen.starts[begin:end], part)))


def _portions(lengths: Int64s, rows: int, nbytes: int) -> list[tuple[int, int]]:
    """Ranges of consecutive windows with about WINDOW_ROWS rows or WINDOW_BYTES together.
    `lengths`: rows of each window; `nbytes`: size of `rows` rows."""
    total = np.cumsum(lengths)
    size = rows_within(WINDOW_ROWS, WINDOW_BYTES, rows, nbytes)
    cuts = np.searchsorted(total, np.arange(size, total[-1], size))
    return list(pairwise(sorted({0, *cuts.tolist(), len(lengths)})))


def _from_tree_nodes(
    shape: RunShape,
    state: OperatorState,
    pane_us: int,
    chosen: _Windows,
    add: Callable[[pa.Table], None],
    files: RunFiles | None,
) -> OperatorState:
    cache = _TreeNodes(shape, state, pane_us, files)
    at_once = _windows_at_once(state)
    for at in range(0, len(chosen.first_panes), at_once):
        portion = chosen.part(at, at + at_once)
        ranges = zip(portion.first_panes.tolist(), portion.counts.tolist(), strict=True)
        parts = [tree_nodes_of(first, count) for first, count in ranges]
        wanted = sorted({node for nodes in parts for node in nodes})
        for buckets in cache.bucket_ranges:
            found = cache.tables(wanted, buckets)
            lengths = np.array([sum(found[n].num_rows for n in nodes) for nodes in parts])
            for begin, end in _portions(lengths, state.rows, state.nbytes):
                rows = _rows_of_windows(shape, found, parts[begin:end])
                start = np.repeat(portion.starts[begin:end], lengths[begin:end])
                add(_fold_as(shape, rows, start))
    return replace(state, tree_nodes=cache.kept)


def _windows_at_once(state: OperatorState) -> int:
    """How many windows are combined at once: so many that their first panes have about WINDOW_ROWS
    rows or WINDOW_BYTES together. At least FAN_OUT, since tree nodes that windows share are read
    again for the next windows; at most MAX_WINDOWS."""
    size = rows_within(WINDOW_ROWS, WINDOW_BYTES, state.rows, state.nbytes)
    return min(MAX_WINDOWS, max(FAN_OUT, size * len(state.panes) // max(1, state.rows)))


def _rows_of_windows(
    shape: RunShape, found: Mapping[TreeNode, pa.Table], windows: Sequence[Sequence[TreeNode]]
) -> pa.Table:
    """The rows of the tree nodes of each window, one after another."""
    if len(windows) == 1:
        return concatenate(shape, [found[node] for node in windows[0]])
    nodes = list(dict.fromkeys(node for of_window in windows for node in of_window))
    rows = concatenate(shape, [found[node] for node in nodes])
    lengths = np.array([found[node].num_rows for node in nodes], dtype=np.int64)
    numbers = {node: number for number, node in enumerate(nodes)}
    order = np.array([numbers[node] for of_window in windows for node in of_window])
    return rows.take(
        pa.array(numbers_of_ranges(np.cumsum(lengths)[order] - lengths[order], lengths[order]))
    )


class _TreeNodes:
    """Computes tree nodes, and keeps those above level 0: new nodes in memory, and in files once
    they exceed a portion. In their runs `__w` is the number of the node, not a pane's start."""

    def __init__(
        self, shape: RunShape, state: OperatorState, pane_us: int, files: RunFiles | None
    ) -> None:
        self._shape = shape
        self._state = state
        self._pane_us = pane_us
        self._files = files
        self._in_memory: dict[TreeNode, Run] = {}
        self.kept = dict(state.tree_nodes)
        panes = max(1, len(state.panes))
        self.bucket_ranges = _bucket_ranges(
            FAN_OUT * state.rows // panes, FAN_OUT * state.nbytes // panes
        )
        """Ranges of buckets so small that the rows of all children of a tree node fit into
        memory."""

    def tables(
        self, wanted: Sequence[TreeNode], buckets: tuple[int, int]
    ) -> Mapping[TreeNode, pa.Table]:
        found: dict[TreeNode, pa.Table] = {}
        for level, numbers in _consecutive(wanted):
            if level == 0:
                found.update(self._leaves(numbers[0], numbers[-1] + 1, buckets))
                continue
            for n in numbers:
                run = self._tree_node(level, n)
                low, high = (run.position(n, bucket) for bucket in buckets)
                found[level, n] = run.table.slice(low, high - low)
        return found

    def _leaves(
        self, first: int, end: int, buckets: tuple[int, int]
    ) -> Mapping[TreeNode, pa.Table]:
        """The tree nodes of level 0 from `first` to before `end`, read at once."""
        low, high = first * self._pane_us, end * self._pane_us
        rows = read(self._shape, self._state, low, high, buckets)
        bounds = np.arange(first, end + 1) * self._pane_us
        cuts = np.searchsorted(int64s(rows.column(PANE)), bounds).tolist() if len(rows) else None
        if cuts is None:
            return {(0, n): rows for n in range(first, end)}
        pairs = zip(range(first, end), pairwise(cuts), strict=True)
        return {(0, n): rows.slice(a, b - a) for n, (a, b) in pairs}

    def _tree_node(self, level: int, number: int) -> Run:
        known = self.kept.get((level, number))
        if known is None:
            known = self.kept[level, number] = Run(self._combined(level, number))
            self._in_memory[level, number] = known
            self._spill()
        return known

    def _spill(self) -> None:
        size = sum(run.nbytes for run in self._in_memory.values())
        if self._files is None or size <= self._files.buffer_bytes:
            return
        runs = list(self._in_memory.values())
        written = self._files.write(runs[0].table.schema, runs)
        self.kept.update(zip(self._in_memory, written, strict=True))
        self._in_memory.clear()

    def _combined(self, level: int, number: int) -> pa.Table:
        first = number * FAN_OUT
        low, high = first * self._pane_us, (first + FAN_OUT) * self._pane_us
        found = []
        for buckets in self.bucket_ranges:
            if level == 1:
                rows = read(self._shape, self._state, low, high, buckets)
            else:
                children = [(level - 1, first + at) for at in range(FAN_OUT)]
                rows = concatenate(self._shape, list(self.tables(children, buckets).values()))
            group = np.full(rows.num_rows, number, dtype=np.int64)
            found.append(_fold_as(self._shape, rows, group))
        return concatenate(self._shape, found)


def _consecutive(nodes: Sequence[TreeNode]) -> list[tuple[int, list[int]]]:
    """Groups sorted tree nodes into (level, consecutive numbers)."""
    groups: list[tuple[int, list[int]]] = []
    for level, number in nodes:
        if groups and groups[-1][0] == level and groups[-1][1][-1] == number - 1:
            groups[-1][1].append(number)
        else:
            groups.append((level, [number]))
    return groups


def _fold_as(shape: RunShape, rows: pa.Table, group: Int64s) -> pa.Table:
    """The left fold of the rows, with their `__w` replaced by `group`."""
    return fold(shape, [rows.set_column(0, PANE, pa.array(group))])
