"""Which rows of a side of a join have matched. Pure.

A table keeps the place of each row that has matched (its slice, hash, time and number), once: with
the epoch of its first match. So a row that leaves the time in which others can match it is known to
have matched or not, without a change of the row.

Design: docs/decisions/0056-operators-and-tables.md.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rekindle.engine.state.keeping import keep
from rekindle.engine.state.lookup import Found, Probes, find
from rekindle.engine.state.operator import OperatorState
from rekindle.engine.state.runs import HASH, NUMBER, PANE, TIME, Int64s, RunShape, int64s, uint64s

MARKS = RunShape((), kept=())
"""The columns of the table."""
PLACE = [PANE, HASH, TIME, NUMBER]
PORTION = 1 << 17
"""About how many rows are compared at once."""


class Matched:
    """Collects the rows of one side that match in a call."""

    def __init__(self) -> None:
        self._rows = MARKS.schema.empty_table()
        self._epochs = np.zeros(0, dtype=np.int64)
        self._once = 0  # of how many of the rows, the first ones, each is there once

    def add(self, rows: pa.Table, epochs: Int64s) -> None:
        """`epochs`: of each match."""
        self._rows = pa.concat_tables([self._rows, rows.select(PLACE)])
        self._epochs = np.concatenate([self._epochs, epochs])
        if len(self._epochs) > PORTION + 2 * self._once:
            self._keep_once()

    def _keep_once(self) -> None:
        numbers = int64s(self._rows.column(NUMBER))
        order = np.lexsort((self._epochs, numbers))
        _, first = np.unique(numbers[order], return_index=True)
        chosen = order[first]
        self._rows = self._rows.combine_chunks().take(pa.array(chosen))
        self._epochs, self._once = self._epochs[chosen], len(chosen)

    def mark(self, marks: OperatorState, slice_us: int) -> tuple[OperatorState, pa.Table, Int64s]:
        """The table with the rows that it did not have; these, and the epoch in which each has
        matched for the first time, in the order of epoch and number."""
        self._keep_once()
        new = ~is_marked(marks, slice_us, self._rows)
        rows, epochs = self._rows.filter(pa.array(new)), self._epochs[new]
        order = np.lexsort((int64s(rows.column(NUMBER)), epochs))
        rows, epochs = rows.take(pa.array(order)), epochs[order]
        return keep(marks, rows, epochs), rows, epochs


def is_marked(marks: OperatorState, slice_us: int, rows: pa.Table) -> npt.NDArray[np.bool_]:
    """For each row whether it has matched."""
    marked = np.zeros(rows.num_rows, dtype=np.bool_)
    for probe, _, _ in _of_places(marks, slice_us, rows):
        marked[probe] = True
    return marked


def rows_of(table: OperatorState, slice_us: int, places: pa.Table) -> pa.Table:
    """The rows of a table that have these places, in their order. It has all of them."""
    parts = [found.rows(chosen) for _, found, chosen in _of_places(table, slice_us, places)]
    return pa.concat_tables(parts)


def _of_places(
    table: OperatorState, slice_us: int, places: pa.Table
) -> list[tuple[Int64s, Found, Int64s]]:
    """Indices of places that the table has; and where the row of each is."""
    if not places.num_rows:
        return []
    times, numbers = int64s(places.column(TIME)), int64s(places.column(NUMBER))
    found = find(table, slice_us, Probes(uint64s(places.column(HASH)), times, times))
    found = found.with_numbers(numbers)
    parts = []
    for probe, chosen in found.portions(PORTION):
        of_rows = int64s(found.rows(chosen).column(NUMBER))
        same = of_rows == numbers[probe]
        parts.append((probe[same], found, chosen[same]))
    return parts
