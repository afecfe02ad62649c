"""The operator `join`: finds pairs by key and time; SQL filters them and computes the output. Pure.

Each side's rows are kept in a table of its own. A row that arrives looks for rows of the other side
that came before it. A pair is of the epoch of its later row, and is found once: rows of the first
input also look for those of the second in their own epoch, and not the reverse.

A row below the watermark before its epoch is late. Rows are kept for as long as a row that is not
late can match them, so which pairs are found does not depend on when rows are dropped.

Design: docs/design/engine.md#joins, docs/decisions/0056-operators-and-tables.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rekindle.engine.epochs import EPOCH, LATE_BEFORE, Clock
from rekindle.engine.external_sort import RowBuffer
from rekindle.engine.model import DroppedRows
from rekindle.engine.operators.base import Advanced, Aggregation, Analyze, view_name
from rekindle.engine.state.keeping import (
    epochs_of,
    forget,
    keep,
    numbers_of,
    rows_to_keep,
    slice_of,
)
from rekindle.engine.state.lookup import Found, Probes, find
from rekindle.engine.state.operator import BEGIN_OF_PANES, END_OF_PANES, OperatorState
from rekindle.engine.state.runs import (
    HASH,
    NUMBER,
    TIME,
    Int64s,
    RunShape,
    equal_values,
    int64s,
    uint64s,
)
from rekindle.engine.state.spill import RunFiles
from rekindle.errors import OperatorRefused
from rekindle.streams.epochs import END_OF_INPUT, NO_WATERMARK
from rekindle.topology.model import Node, Topology
from rekindle.topology.operators.join import JoinOperatorKind
from rekindle.topology.spec import OperatorSpec
from rekindle.topology.sql.casts_without_date import time_without_date_as_null
from rekindle.topology.sql.tokens import quote

PAIRS = 1 << 17
"""About how many pairs are made at once."""
MAX_TIME_US = 1 << 62
"""Rows with event times beyond this have none: a bound of the rows that match them could have more
than 64 bits."""
_SIDES = ("left", "right")


@dataclass(frozen=True, slots=True)
class Side:
    """One input. `columns`: those of its rows that are kept; the first ones are its keys. Rows of
    the other side match if their times are at most `early_us` before and `late_us` after."""

    input: str
    time: str
    columns: tuple[str, ...]
    shape: RunShape
    early_us: int
    late_us: int

    @property
    def names(self) -> list[str]:
        """Of the columns in the table."""
        return [*self.shape.key_names, *(name for name, _ in self.shape.kept or ())]

    def rows(self, rows: pa.Table, slice_us: int) -> tuple[pa.Table, DroppedRows]:
        """The rows of a call that can match, as they are kept, and how many others there are. A
        NULL in a key equals nothing."""
        numbers = numbers_of(int64s(rows.column(EPOCH)))
        times = rows.column(self.time).cast(pa.int64())
        timed = times.is_valid().to_numpy()
        microseconds = pc.fill_null(times, 0).to_numpy()
        timed &= np.abs(microseconds) < MAX_TIME_US
        late = timed & (microseconds < int64s(rows.column(LATE_BEFORE)))
        kept = timed & ~late
        keys = self.columns[: len(self.shape.keys)]
        for key in keys:
            kept &= rows.column(key).is_valid().to_numpy()
        dropped = DroppedRows(int(late.sum()), int((~timed).sum()))
        if not kept.all():
            mask = pa.array(kept)
            rows, microseconds, numbers = rows.filter(mask), microseconds[kept], numbers[kept]
        columns = [rows.column(name) for name in self.columns]
        of_keys, values = columns[: len(keys)], columns[len(keys) :]
        return rows_to_keep(self.shape, slice_us, microseconds, numbers, of_keys, values), dropped

    def probes(self, rows: pa.Table) -> Probes:
        times = int64s(rows.column(TIME))
        hashes = uint64s(rows.column(HASH))
        return Probes(hashes, times - self.early_us, times + self.late_us)

    def forgotten(self, table: OperatorState, slice_us: int, watermark: int) -> OperatorState:
        """Without rows that no later row can match."""
        before = max(BEGIN_OF_PANES, watermark - self.late_us)
        if watermark == END_OF_INPUT:
            before = END_OF_PANES
        elif watermark == NO_WATERMARK:
            before = BEGIN_OF_PANES
        return forget(self.shape, table, slice_us, before)


@dataclass(frozen=True)
class JoinOperator:
    """Implements `rekindle.engine.operators.base.Operator`. `condition`: what pairs with equal keys
    within the bounds of time have to fulfil, too."""

    node: Node
    sides: tuple[Side, Side]
    columns: str
    condition: str | None
    slice_us: int
    delay_us: int

    hashes_groups = False

    @property
    def tables(self) -> Mapping[str, RunShape]:
        return {name: side.shape for name, side in zip(_SIDES, self.sides, strict=True)}

    @cached_property
    def output(self) -> pa.Schema:
        return pa.schema([field for field in self._pairs if field.name != EPOCH])

    @cached_property
    def _pairs(self) -> pa.Schema:
        fields = [
            pa.field(f"__{name[0]}{at}", side.shape.schema.field(column).type)
            for name, side in zip(_SIDES, self.sides, strict=True)
            for at, column in enumerate(side.names)
        ]
        return pa.schema([pa.field(EPOCH, pa.int64()), *fields])

    def query(self, inputs: Sequence[str], method: Aggregation) -> None:
        return None

    def advance(
        self,
        tables: Mapping[str, OperatorState],
        rows: Sequence[pa.Table | None],
        clock: Clock,
        files: RunFiles | None,
    ) -> Advanced:
        kept = dict(tables)
        arrived: list[pa.Table | None] = []
        dropped = DroppedRows()
        for name, side, of_side in zip(_SIDES, self.sides, rows, strict=True):
            if of_side is None:
                arrived.append(None)
                continue
            found, missed = side.rows(of_side, self.slice_us)
            dropped.late += missed.late
            dropped.null_event_time += missed.null_event_time
            kept[name] = keep(kept[name], found)
            arrived.append(found)
        buffers = [RowBuffer(self._pairs, files) for _ in _SIDES]
        for at, found_rows in enumerate(arrived):
            if found_rows is not None and found_rows.num_rows:
                for pairs in self._pairs_of(at, found_rows, kept[_SIDES[1 - at]]):
                    buffers[at].add(pairs)
        last = clock[-1][2]
        for name, side in zip(_SIDES, self.sides, strict=True):
            kept[name] = side.forgotten(kept[name], self.slice_us, last)
        return Advanced(kept, _by_epoch([buffer.table() for buffer in buffers]), dropped)

    def _pairs_of(self, at: int, rows: pa.Table, table: OperatorState) -> Iterator[pa.Table]:
        """The pairs of rows that have arrived at a side with rows of the other side's table, by
        row; of each by time and number of the other row."""
        found = find(table, self.slice_us, self.sides[at].probes(rows))
        for probe, chosen in found.portions(PAIRS):
            for begin in range(0, len(probe), PAIRS):
                part = slice(begin, begin + PAIRS)
                yield self._matching(at, rows, probe[part], found, chosen[part])

    def _matching(
        self, at: int, rows: pa.Table, probe: Int64s, found: Found, chosen: Int64s
    ) -> pa.Table:
        """The pairs that match, of rows with equal hashes."""
        own, other = rows.take(pa.array(probe)).combine_chunks(), found.rows(chosen)
        matches = self._came_before(at, own, other)
        for key in self.sides[0].shape.key_names:
            matches &= equal_values(_array(own.column(key)), _array(other.column(key)))
        epochs = pa.array(epochs_of(int64s(own.column(NUMBER))))
        pair = (own, other) if at == 0 else (other, own)
        columns = [
            table.column(name)
            for table, side in zip(pair, self.sides, strict=True)
            for name in side.names
        ]
        pairs = pa.table([epochs, *columns], schema=self._pairs)
        return pairs if matches.all() else pairs.filter(pa.array(matches))

    def _came_before(self, at: int, own: pa.Table, other: pa.Table) -> npt.NDArray[np.bool_]:
        epoch, of_other = (epochs_of(int64s(table.column(NUMBER))) for table in (own, other))
        return of_other <= epoch if at == 0 else of_other < epoch

    def view(self, rows: pa.Table) -> pa.Table:
        return rows.drop_columns([EPOCH])

    def select(self, system: Sequence[str]) -> str:
        structs = ", ".join(
            f"named_struct({_fields(name[0], side)}) AS {quote(side.input)}"
            for name, side in zip(_SIDES, self.sides, strict=True)
        )
        first = "".join(f"{name}, " for name in system)
        pairs = f"SELECT {first}{structs} FROM {quote(view_name(self))}"
        text = f"SELECT {first}{time_without_date_as_null(self.columns)} FROM ({pairs})"
        if self.condition is None:
            return text
        return f"{text} WHERE {time_without_date_as_null(self.condition)}"


def open_join(
    node: Node, topology: Topology, inputs: Sequence[pa.Schema], analyze: Analyze
) -> JoinOperator:
    """Raises OperatorRefused."""
    assert isinstance(node.spec, OperatorSpec)
    kind, of_inputs = JoinOperatorKind(node.spec), [topology.nodes[name] for name in node.inputs]
    event_times = [of_input.event_time for of_input in of_inputs]
    bounds, analysis = kind.bounds(event_times), kind.analysis([n.schema for n in of_inputs])
    assert bounds is not None, f"{node.name}: validation requires bounds"
    sides = []
    for at, (of_input, schema) in enumerate(zip(of_inputs, inputs, strict=True)):
        assert of_input.event_time is not None, f"{node.name}: validation requires an event time"
        keys = kind.keys(at)
        columns = (*keys, *(name for name in analysis.used[at] if name not in keys))
        types = [schema.field(name).type for name in columns]
        values = zip(columns[len(keys) :], types[len(keys) :], strict=True)
        shape = RunShape(tuple(types[: len(keys)]), kept=tuple(values))
        early, late = (
            (bounds.before_us, bounds.after_us) if at == 0 else (bounds.after_us, bounds.before_us)
        )
        sides.append(Side(of_input.name, of_input.event_time, columns, shape, early, late))
    left, right = sides
    _check_keys(node, left, right)
    time = kind.event_time(analysis, event_times)
    copied = analysis.copies[time] if time is not None else None
    delays = (left.late_us, right.late_us)
    return JoinOperator(
        node,
        (left, right),
        kind.select,
        kind.spec.on if kind.condition.has_more else None,
        slice_of(bounds.before_us + bounds.after_us),
        delays[copied[0]] if copied is not None else max(delays),
    )


def _check_keys(node: Node, left: Side, right: Side) -> None:
    for at, (one, other) in enumerate(zip(left.shape.keys, right.shape.keys, strict=True)):
        names = f"{left.input}.{left.columns[at]} and {right.input}.{right.columns[at]}"
        if one != other:
            message = f"operator {node.name}: {names} have different types: {one} and {other}"
            raise OperatorRefused(f"{message}; cast one of them before the join", node.name)
        if pa.types.is_nested(one):
            raise OperatorRefused(f"operator {node.name}: {one} cannot be a key", node.name)


def _fields(prefix: str, side: Side) -> str:
    """Names and values of a struct of a side's columns."""
    names = (column.replace("\\", "\\\\").replace("'", "\\'") for column in side.columns)
    return ", ".join(f"'{name}', __{prefix}{at}" for at, name in enumerate(names))


def _array(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)


def _by_epoch(tables: Sequence[pa.Table]) -> pa.Table:
    """The rows of both tables, which are ordered by EPOCH, by epoch and then by table."""
    filled = [table for table in tables if table.num_rows]
    if len(filled) < 2:
        return filled[0] if filled else tables[0]
    epochs = [table.column(EPOCH).to_numpy() for table in filled]
    parts = []
    for epoch in np.unique(np.concatenate(epochs)).tolist():
        for table, of_table in zip(filled, epochs, strict=True):
            first, end = (np.searchsorted(of_table, epoch, side) for side in ("left", "right"))
            parts.append(table.slice(int(first), int(end - first)))
    return pa.concat_tables(parts)
