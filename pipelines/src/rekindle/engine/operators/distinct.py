"""The operator `distinct`: one row for each key within a time. Pure.

`First`: a row is written in its epoch, unless one of its key has been written whose event time is
less than `within` before or after. Rows come in the order of epochs, and in one of their input. The
table has the keys of rows that were written.

`Last`: a row is written unless a later one of its key comes: one with an event time less than
`within` after it, or with the same one and after it in that order. It is written once no such row
can come, so it depends on no order of rows with different times. The table has, of the rows of each
epoch and key, the first and the last one in each piece of time that is `within` long. One between
them is not written, and of an earlier row that it takes the place of, one of the two does so, too.

A row below the watermark before its epoch is late. Rows are kept for as long as one that is not
late can be less than `within` away from them, so nothing depends on when they are dropped.

Design: docs/design/engine.md#distinct.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rekindle.engine.epochs import EPOCH, Clock
from rekindle.engine.model import DroppedRows
from rekindle.engine.operators.arrivals import arrivals, reachable_from
from rekindle.engine.operators.base import (
    LACKS,
    LACKS_SHAPE,
    ONLY_TABLE,
    Advanced,
    Aggregation,
    Analyze,
    Evaluate,
    lacks_us,
    view_name,
)
from rekindle.engine.state.keeping import (
    epochs_of,
    forget,
    keep,
    numbers_of,
    rows_to_keep,
    slice_of,
)
from rekindle.engine.state.lookup import Found, Probes, between, find
from rekindle.engine.state.operator import OperatorState
from rekindle.engine.state.runs import (
    HASH,
    NUMBER,
    TIME,
    Int64s,
    RunShape,
    equal_values,
    group_numbers,
    int64s,
    uint64s,
)
from rekindle.engine.state.spill import RunFiles
from rekindle.errors import OperatorRefused
from rekindle.topology.model import Node, Topology
from rekindle.topology.operators.distinct import DistinctOperatorKind
from rekindle.topology.spec import OperatorSpec
from rekindle.topology.sql.tokens import quote

PORTION = 1 << 17
"""About how many rows are compared at once."""
LAST_ROWS = 16
"""Of how many rows of each range that a look-up finds keys are compared first: rows of other keys
have the same hash by chance only. At least `lookup.SHORT_ROWS`, so that a range with more rows has
those of the time that is looked for alone."""


@dataclass(frozen=True)
class DistinctOperator:
    """Implements `rekindle.engine.operators.base.Operator`. `columns`: those of the input, which
    the output has, too; `keys`: some of them; `time`: their event time."""

    node: Node
    columns: pa.Schema
    keys: tuple[str, ...]
    time: str
    within_us: int
    slice_us: int
    keeps_last: bool

    hashes_groups = False
    asserts_absence = False

    @cached_property
    def _rows(self) -> RunShape:
        """A whole row, in the columns of a table."""
        keys = tuple(self.columns.field(name).type for name in self.keys)
        values = ((field.name, field.type) for field in self.columns if field.name not in self.keys)
        return RunShape(keys, kept=tuple(values))

    @cached_property
    def _shape(self) -> RunShape:
        return self._rows if self.keeps_last else replace(self._rows, kept=())

    @property
    def tables(self) -> Mapping[str, RunShape]:
        return {ONLY_TABLE: self._shape} | ({LACKS: LACKS_SHAPE} if self.keeps_last else {})

    @property
    def output(self) -> pa.Schema:
        return self.columns

    @property
    def delay_us(self) -> int:
        return self.within_us if self.keeps_last else 0

    def query(self, inputs: Sequence[str], method: Aggregation) -> None:
        return None

    def advance(
        self,
        tables: Mapping[str, OperatorState],
        rows: Sequence[pa.Table | None],
        clock: Clock,
        files: RunFiles | None,
        evaluate: Evaluate,
    ) -> Advanced:
        arrived, dropped = self._arrived(rows[0])
        before, after = (self._open_from(watermark) for watermark in (clock[0][1], clock[-1][2]))
        state = tables[ONLY_TABLE]
        if self.keeps_last:
            state = keep(state, arrived.filter(pa.array(self._outermost(arrived))))
            written = self._closed(state, before, after - 1, lacks_us(tables))
            watermarks = np.array([watermark for _, _, watermark in clock], dtype=np.int64)
            closes = np.searchsorted(watermarks, int64s(written.column(TIME)) + self.within_us)
            epochs = np.array([epoch for epoch, _, _ in clock], dtype=np.int64)[closes]
        else:
            written = arrived.filter(pa.array(self._first(state, arrived)))
            state = keep(state, written.select(self._shape.schema.names))
            epochs = epochs_of(int64s(written.column(NUMBER)))
        state = forget(self._shape, state, self.slice_us, after)
        written = written.append_column(EPOCH, pa.array(epochs))
        return Advanced({**tables, ONLY_TABLE: state}, written, dropped)

    def _open_from(self, watermark: int) -> int:
        """The event time from which on rows can be less than `within_us` before one in time."""
        return reachable_from(watermark, self.within_us - 1)

    def _arrived(self, rows: pa.Table | None) -> tuple[pa.Table, DroppedRows]:
        """The rows of a call that are in time, in the order of epochs."""
        if rows is None:
            return self._rows.schema.empty_table(), DroppedRows()
        epochs = int64s(rows.column(EPOCH))
        if (np.diff(epochs) < 0).any():  # a UNION ALL: each input has all epochs
            order = np.argsort(epochs, kind="stable")
            rows, epochs = rows.take(pa.array(order)), epochs[order]
        found, numbers = arrivals(rows, self.time), numbers_of(epochs)
        times, in_time = found.times, found.in_time
        if not in_time.all():
            rows, times, numbers = rows.filter(pa.array(in_time)), times[in_time], numbers[in_time]
        rows = rows.select(self.columns.names).cast(self.columns)
        keys = [rows.column(name) for name in self.keys]
        values = [rows.column(name) for name, _ in self._rows.kept or ()]
        kept = rows_to_keep(self._rows, self.slice_us, times, numbers, keys, values)
        return kept.combine_chunks(), found.dropped

    def _first(self, state: OperatorState, rows: pa.Table) -> npt.NDArray[np.bool_]:
        """Which of the rows that have arrived are written."""
        times = int64s(rows.column(TIME))
        reach = self.within_us - 1
        found = find(
            state, self.slice_us, Probes(uint64s(rows.column(HASH)), times - reach, times + reach)
        )
        new = np.ones(len(times), dtype=np.bool_)
        for probe, _ in self._of_equal_keys(found, rows):
            new[probe] = False
        at = np.flatnonzero(new)
        group = _groups(rows.take(pa.array(at)))
        repeated = np.bincount(group)[group] > 1
        written: dict[int, list[int]] = {}
        several = at[repeated]
        for row, of, time in zip(
            several.tolist(), group[repeated].tolist(), times[several].tolist(), strict=True
        ):
            of_key = written.setdefault(of, [])
            place = bisect_right(of_key, time - self.within_us)
            new[row] = place == len(of_key) or of_key[place] >= time + self.within_us
            if new[row]:
                of_key.insert(place, time)
        return new

    def _outermost(self, rows: pa.Table) -> npt.NDArray[np.bool_]:
        """Which of the rows that have arrived are the first or the last one of their key and epoch
        in a piece of time."""
        times, numbers = int64s(rows.column(TIME)), int64s(rows.column(NUMBER))
        pieces = (epochs_of(numbers), _groups(rows), times // self.within_us)
        order = np.lexsort((numbers, times, *pieces))
        differs = np.zeros(max(0, len(order) - 1), dtype=np.bool_)
        for column in pieces:
            differs |= column[order[1:]] != column[order[:-1]]
        outermost = np.ones(len(order), dtype=np.bool_)
        outermost[order[1:-1]] = differs[1:] | differs[:-1]
        return outermost

    def _closed(self, state: OperatorState, low: int, high: int, lacks_us: int) -> pa.Table:
        """The rows with times from `low` to `high` that no other row takes the place of, and of
        which this is known; by time and number."""
        low = max(low, lacks_us + 1)
        if low > high:
            return self._rows.schema.empty_table()
        rows = between(self._shape, state, self.slice_us, low, high)
        rows = rows.filter(pa.array(~self._replaced(state, rows)))
        order = np.lexsort((int64s(rows.column(NUMBER)), int64s(rows.column(TIME))))
        return rows.take(pa.array(order)).combine_chunks()

    def _replaced(self, state: OperatorState, rows: pa.Table) -> npt.NDArray[np.bool_]:
        """Which rows of the table another one takes the place of. A key may have many rows, of
        which any later one will do: of each range the last ones are read, and all of it if their
        keys are others."""
        times, numbers = int64s(rows.column(TIME)), int64s(rows.column(NUMBER))
        probes = Probes(uint64s(rows.column(HASH)), times, times + self.within_us - 1)
        found = find(state, self.slice_us, probes)
        replaced = np.zeros(len(times), dtype=np.bool_)

        def compare(ranges: Found) -> None:
            for probe, others in self._of_equal_keys(ranges, rows):
                same_time = int64s(others.column(TIME)) == times[probe]
                later = ~same_time | (int64s(others.column(NUMBER)) > numbers[probe])
                replaced[probe[later]] = True

        left_out = np.maximum(found.lengths - LAST_ROWS, 0)
        compare(replace(found, first=found.first + left_out, lengths=found.lengths - left_out))
        rest = (left_out > 0) & ~replaced[found.probe]
        probe, run, first = found.probe[rest], found.run[rest], found.first[rest]
        compare(Found(probes, found.runs, probe, run, first, left_out[rest]))
        return replaced

    def _of_equal_keys(self, found: Found, rows: pa.Table) -> Iterator[tuple[Int64s, pa.Table]]:
        """What was found for rows: indices of these, and a row with the same key for each."""
        for probe, chosen in found.portions(PORTION):
            own, others = rows.take(pa.array(probe)).combine_chunks(), found.rows(chosen)
            equal = np.ones(len(probe), dtype=np.bool_)
            for key in self._rows.key_names:
                equal &= equal_values(_array(own.column(key)), _array(others.column(key)))
            yield probe[equal], others.filter(pa.array(equal)).combine_chunks()

    def view(self, rows: pa.Table) -> pa.Table:
        names = dict(zip(self.keys, self._rows.key_names, strict=True))
        columns = [rows.column(names.get(name, name)) for name in self.columns.names]
        return pa.table(columns, schema=self.columns)

    def select(self, system: Sequence[str]) -> str:
        columns = ", ".join([*system, *map(quote, self.columns.names)])
        return f"SELECT {columns} FROM {quote(view_name(self))}"


def open_distinct(
    node: Node, topology: Topology, inputs: Sequence[pa.Schema], analyze: Analyze
) -> DistinctOperator:
    """Raises OperatorRefused."""
    assert isinstance(node.spec, OperatorSpec)
    spec, (columns,) = DistinctOperatorKind(node.spec).spec, inputs
    time = topology.nodes[node.inputs[0]].event_time
    assert time is not None, f"{node.name}: validation requires an event time"
    for key in spec.keys:
        if pa.types.is_nested(columns.field(key).type):
            message = f"operator {node.name}: {columns.field(key).type} cannot be a key"
            raise OperatorRefused(message, node.name)
    keys, slice_us = tuple(dict.fromkeys(spec.keys)), slice_of(spec.within)
    return DistinctOperator(node, columns, keys, time, spec.within, slice_us, spec.keep == "Last")


def _groups(rows: pa.Table) -> Int64s:
    """The number of each row's key."""
    return group_numbers(rows) if rows.num_rows else np.zeros(0, dtype=np.int64)


def _array(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)
