"""Finds rows of a table that keeps its rows: by hash and time, or by time alone. Pure.

Finding costs a binary search in each run for each row that asks, not the rows of the table. It
gives ranges of rows, so that many matches of one row take no memory until they are read.

Design: docs/decisions/0056-operators-and-tables.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rekindle.engine.state.operator import BEGIN_OF_PANES, OperatorState, overlaps, pages_of
from rekindle.engine.state.remote import prioritize
from rekindle.engine.state.runs import (
    Int64s,
    Run,
    Uint64s,
    bucket_of,
    rows_within,
    take_rows,
)

SHORT_ROWS = 8
"""Rows of one hash, up to which their times are compared one by one."""


@dataclass(frozen=True, slots=True)
class Probes:
    """What is looked for: rows of a hash, with times from `low` to `high`, both included."""

    hashes: Uint64s
    low: Int64s
    high: Int64s


@dataclass(frozen=True)
class Found:
    """Ranges of rows: for probe `probe[i]` the `lengths[i]` rows of `runs[run[i]]` from `first[i]`
    on; ordered by probe. A short range may have rows of other times."""

    probes: Probes
    runs: Sequence[Run]
    probe: Int64s
    run: Int64s
    first: Int64s
    lengths: Int64s

    @cached_property
    def ends(self) -> Int64s:
        """How many rows there are in all ranges through each."""
        return np.cumsum(self.lengths)

    def with_numbers(self, numbers: Int64s) -> Found:
        """Without rows of long ranges that have not the number of their probe. All rows of a range
        have the same time: `low` is `high`."""
        first, lengths = self.first.copy(), self.lengths.copy()
        long = np.flatnonzero(lengths > SHORT_ROWS)
        for at in np.unique(self.run[long]).tolist():
            of_run = long[self.run[long] == at]
            of_rows, wanted = self.runs[at].numbers, numbers[self.probe[of_run]]
            end = first[of_run] + lengths[of_run]
            begin = _bisect(of_rows, first[of_run], end, wanted, or_equal=False)
            lengths[of_run] = _bisect(of_rows, begin, end, wanted, or_equal=True) - begin
            first[of_run] = begin
        kept = lengths > 0
        columns = (column[kept] for column in (self.probe, self.run, first, lengths))
        return Found(self.probes, self.runs, *columns)

    def portions(self, most: int) -> Iterator[tuple[Int64s, Int64s]]:
        """Each row that was found: its probe, and its number in the concatenation of `runs`;
        ordered by (probe, time, number of the row). In portions of about `most` rows, with all
        rows of each probe."""
        begin = 0
        while begin < len(self.probe):
            done = self.ends[begin - 1] if begin else 0
            end = max(begin + 1, int(np.searchsorted(self.ends, done + most, "right")))
            end = int(np.searchsorted(self.probe, self.probe[end - 1], "right"))
            yield self._expanded(begin, end)
            begin = end

    def _expanded(self, begin: int, end: int) -> tuple[Int64s, Int64s]:
        lengths = self.lengths[begin:end]
        offsets = np.cumsum(lengths) - lengths
        within = np.arange(int(lengths.sum())) - np.repeat(offsets, lengths)
        probe = np.repeat(self.probe[begin:end], lengths)
        run = np.repeat(self.run[begin:end], lengths)
        row = np.repeat(self.first[begin:end], lengths) + within
        times, numbers = np.empty_like(row), np.empty_like(row)
        by_run = np.argsort(run, kind="stable")
        bounds = np.searchsorted(run[by_run], np.arange(len(self.runs) + 1))
        for at in np.flatnonzero(np.diff(bounds)).tolist():
            of_run = by_run[bounds[at] : bounds[at + 1]]
            times[of_run] = self.runs[at].times[row[of_run]]
            numbers[of_run] = self.runs[at].numbers[row[of_run]]
        starts = np.cumsum([0, *(r.rows for r in self.runs)])
        in_time = (times >= self.probes.low[probe]) & (times <= self.probes.high[probe])
        order = np.lexsort((numbers, times, probe))
        order = order[in_time[order]]
        return probe[order], (starts[run] + row)[order]

    def rows(self, chosen: Int64s, columns: Sequence[str] | None = None) -> pa.Table:
        """The rows with these numbers (`portions`); without `columns`, with all of theirs."""
        tables = [run.table for run in self.runs]
        return take_rows([t.select(columns) for t in tables] if columns else tables, chosen)

    def rows_of_bytes(
        self, columns: Sequence[str], further: pa.Table, most_rows: int, most_bytes: int
    ) -> int:
        """How many rows with these columns, each with one of `further`, are within both limits if
        they are average ones."""
        rows = sum(run.rows for run in self.runs)
        size = sum(run.table.select(columns).nbytes for run in self.runs)
        size += further.nbytes * rows // max(1, further.num_rows)
        return rows_within(most_rows, most_bytes, rows, size)


def find(state: OperatorState, slice_us: int, probes: Probes) -> Found:
    """The rows that are looked for. Waits for runs that are not available, if they may have any."""
    if not len(probes.low):
        return _concatenated(probes, (), [])
    order = np.argsort(probes.hashes, kind="stable")
    ordered = _OrderedProbes(probes.hashes[order], probes.low[order], probes.high[order])
    low, high = int(probes.low.min()), int(probes.high.max())
    runs: list[Run] = []
    parts: list[tuple[Int64s, Int64s, Int64s, Int64s]] = []
    for run, seq in _touched(state, slice_us, low, high):
        by_pane = _find_in_run(run, slice_us, ordered, state.first_live_pane_us)
        found = [
            part if seq is None else _not_folded(state, seq, pane, ordered.hashes, part)
            for pane, part in by_pane
        ]
        found = [part for part in found if len(part[0])]
        parts += [
            (order[p], np.full(len(p), len(runs)), first, length) for p, first, length in found
        ]
        runs += [run] if found else []
    return _concatenated(probes, runs, parts)


def between(state: OperatorState, slice_us: int, low: int, high: int) -> tuple[Found, Int64s]:
    """The rows with times from `low` to `high`, both included, and their numbers in the order of
    time and number: a caller that needs few of them does not read the columns of all."""
    bounds = np.array([low], dtype=np.int64), np.array([high], dtype=np.int64)
    runs: list[Run] = []
    parts: list[tuple[Int64s, Int64s, Int64s, Int64s]] = []
    for run, seq in _touched(state, slice_us, low, high):
        pane = max(low - slice_us + 1, state.first_live_pane_us)
        first = int(np.searchsorted(run.panes, pane))
        times = run.times[first : int(np.searchsorted(run.panes, high, "right"))]
        chosen = np.flatnonzero((times >= low) & (times <= high)) + first
        if seq is not None and len(chosen):
            page = pages_of(state, run.panes[chosen], bucket_of(run.hashes[chosen]))
            chosen = chosen[state.folded_through[page] < seq]
        if len(chosen):
            none, ones = np.zeros_like(chosen), np.ones_like(chosen)
            parts.append((none, np.full_like(chosen, len(runs)), chosen, ones))
            runs.append(run)
    found = _concatenated(Probes(np.zeros(1, dtype=np.uint64), *bounds), runs, parts)
    numbers = [chosen for _, chosen in found.portions(1)]  # one portion: they are of one probe
    return found, numbers[0] if numbers else np.zeros(0, dtype=np.int64)


def _concatenated(
    probes: Probes, runs: Sequence[Run], parts: Sequence[tuple[Int64s, Int64s, Int64s, Int64s]]
) -> Found:
    """`parts`: ranges of rows, by the fields of Found."""
    if not parts:
        none = np.zeros(0, dtype=np.int64)
        return Found(probes, (), none, none, none, none)
    probe, at, first, lengths = (np.concatenate(column) for column in zip(*parts, strict=True))
    by_probe = np.argsort(probe, kind="stable")
    return Found(probes, runs, probe[by_probe], at[by_probe], first[by_probe], lengths[by_probe])


def _touched(
    state: OperatorState, slice_us: int, low: int, high: int
) -> list[tuple[Run, int | None]]:
    """The runs that may have rows of these times; of a delta also its number."""
    first = max(low - slice_us + 1, state.first_live_pane_us)
    runs: list[tuple[Run, int | None]] = [
        *((page.run, None) for page in state.pages if page.run is not None),
        *((delta.run, delta.seq) for delta in state.deltas),
    ]
    touched = [(run, seq) for run, seq in runs if overlaps(run, first, high + 1)]
    prioritize(run for run, _ in touched if not run.is_available)
    return touched


@dataclass(frozen=True)
class _OrderedProbes:
    """Probes, ordered by hash."""

    hashes: Uint64s
    low: Int64s
    high: Int64s

    @cached_property
    def by_low(self) -> Int64s:
        return np.argsort(self.low, kind="stable")

    def near(self, panes: Int64s, slice_us: int) -> tuple[Int64s, Int64s]:
        """For each pane a range of `by_low` that has all probes of times in it."""
        longest, low = max(0, int((self.high - self.low).max())), self.low[self.by_low]
        from_us = np.maximum(panes, BEGIN_OF_PANES + longest) - longest
        return np.searchsorted(low, from_us), np.searchsorted(low, panes + slice_us)


_Part = tuple[Int64s, Int64s, Int64s]
"""Probes, the first row of each, and how many rows it has."""


def _find_in_run(
    run: Run, slice_us: int, probes: _OrderedProbes, first_live: int
) -> list[tuple[int, _Part]]:
    """By pane that is live. In each it looks for the probes of its times alone, so that many panes
    cost no more than their rows."""
    found = []
    hashes = run.hashes
    near_from, near_to = probes.near(np.array([p for p, _, _ in run.panes_at]), slice_us)
    for number in np.flatnonzero(near_from < near_to).tolist():
        pane, first, end = run.panes_at[number]
        if pane < first_live:
            continue
        low = int(np.searchsorted(probes.hashes, hashes[first]))
        high = int(np.searchsorted(probes.hashes, hashes[end - 1], "right"))
        near = probes.by_low[near_from[number] : near_to[number]]
        if high - low <= len(near):
            near = np.arange(low, high)
        else:
            near = np.sort(near[(near >= low) & (near < high)])
        found_in_pane = _find_in_pane(run, number, probes, near, slice_us)
        if found_in_pane is not None:
            found.append((pane, found_in_pane))
    return found


def _find_in_pane(
    run: Run, number: int, probes: _OrderedProbes, near: Int64s, slice_us: int
) -> _Part | None:
    """`near`: the probes that are looked for, ascending. None if there are no rows."""
    pane, first, end = run.panes_at[number]
    rows, wanted = run.hashes[first:end], probes.hashes[near]
    begin = np.searchsorted(rows, wanted)
    after = np.searchsorted(rows, wanted, "right")
    touched = (probes.low[near] < pane + slice_us) & (probes.high[near] >= pane)
    chosen = np.flatnonzero((begin < after) & touched)
    if not len(chosen):
        return None
    begin, lengths, at = begin[chosen] + first, (after - begin)[chosen], near[chosen]
    if int(lengths.max()) > SHORT_ROWS:
        times, after = run.times, begin + lengths
        begin = _bisect(times, begin, after, probes.low[at], or_equal=False)
        lengths = _bisect(times, begin, after, probes.high[at], or_equal=True) - begin
    return at, begin, lengths


def _bisect(
    values: Int64s, begin: Int64s, end: Int64s, bounds: Int64s, *, or_equal: bool
) -> Int64s:
    """For each range of `values`, in which they ascend, the first index of a value above its bound,
    or with `or_equal=False` at it or above."""
    begin, end = begin.copy(), end.copy()
    while len(left := np.flatnonzero(begin < end)):
        middle = (begin[left] + end[left]) // 2
        found = values[middle]
        before = found <= bounds[left] if or_equal else found < bounds[left]
        begin[left] = np.where(before, middle + 1, begin[left])
        end[left] = np.where(before, end[left], middle)
    return begin


def _not_folded(state: OperatorState, seq: int, pane: int, hashes: Uint64s, part: _Part) -> _Part:
    """Without ranges of rows of a delta that are folded into a page."""
    probe, first, lengths = part
    page = pages_of(state, np.full(len(probe), pane), bucket_of(hashes[probe]))
    kept: npt.NDArray[np.bool_] = state.folded_through[page] < seq
    return part if kept.all() else (probe[kept], first[kept], lengths[kept])
