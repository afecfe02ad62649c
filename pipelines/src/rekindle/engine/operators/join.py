"""The operator `join`: finds pairs by key and time; SQL filters them and computes the output. Pure.

Each side's rows are kept in a table of its own. A row that arrives looks for rows of the other side
that came before it. A pair is of the epoch of its later row, and is found once: rows of the first
input also look for those of the second in their own epoch, and not the reverse.

A join that is not an inner one also knows which rows of a side have matched
(`rekindle.engine.operators.matches`), for which it evaluates the condition itself. A row that has
not is written once no row that is not late can match it.

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

from rekindle.engine.epochs import EPOCH, Clock
from rekindle.engine.external_sort import RowBuffer
from rekindle.engine.model import DroppedRows
from rekindle.engine.operators.arrivals import arrivals, reachable_from
from rekindle.engine.operators.base import (
    LACKS,
    LACKS_SHAPE,
    Advanced,
    Aggregation,
    Analyze,
    Evaluate,
    lacks_us,
    view_name,
)
from rekindle.engine.operators.matches import MARKS, PLACE, Matched, is_marked, rows_of
from rekindle.engine.state.keeping import (
    epochs_of,
    forget,
    keep,
    numbers_of,
    rows_to_keep,
    slice_of,
)
from rekindle.engine.state.lookup import Probes, between, find
from rekindle.engine.state.operator import OperatorState
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
from rekindle.topology.model import Node, Topology
from rekindle.topology.operators.join import UNMATCHED, JoinOperatorKind
from rekindle.topology.spec import OperatorSpec
from rekindle.topology.sql.casts_without_date import time_without_date_as_null
from rekindle.topology.sql.tokens import quote

PAIRS, PAIR_BYTES = 1 << 17, 8 << 20
"""Limits of the pairs that are made at once; that of bytes is one of average rows."""
NUMBER_OF_PAIR = "__n"
_SIDES = ("left", "right")
_WRITES_NO_PAIRS = ("Semi", "Anti")
_MATCHED: Mapping[str, tuple[int, ...]] = {"Semi": (0,)}
"""By type, the sides of which rows that match are written."""


@dataclass(frozen=True, slots=True)
class Side:
    """One input. `columns`: those of its rows that are kept; the first ones are its keys. Rows of
    the other side match if their times are at most `early_us` before and `late_us` after."""

    input: str
    time: str
    columns: tuple[str, ...]  # in the table: keys first
    used: tuple[str, ...]  # the same once each, in the order of the input
    shape: RunShape
    early_us: int
    late_us: int

    @property
    def names(self) -> list[str]:
        """Of the columns in the table."""
        return [*self.shape.key_names, *(name for name, _ in self.shape.kept or ())]

    def rows(
        self, rows: pa.Table, slice_us: int, *, with_nulls: bool
    ) -> tuple[pa.Table, DroppedRows]:
        """The rows of a call, as they are kept, and how many others there are. A NULL in a key
        equals nothing; `with_nulls`: such rows are kept nevertheless."""
        numbers = numbers_of(int64s(rows.column(EPOCH)))
        found = arrivals(rows, self.time)
        times, kept = found.times, found.in_time
        keys = self.columns[: len(self.shape.keys)]
        for key in () if with_nulls else keys:
            kept = kept & rows.column(key).is_valid().to_numpy()
        if not kept.all():
            rows, times, numbers = rows.filter(pa.array(kept)), times[kept], numbers[kept]
        columns = [rows.column(name) for name in self.columns]
        of_keys, values = columns[: len(keys)], columns[len(keys) :]
        of_table = rows_to_keep(self.shape, slice_us, times, numbers, of_keys, values)
        return of_table, found.dropped

    def probes(self, rows: pa.Table) -> Probes:
        times = int64s(rows.column(TIME))
        hashes = uint64s(rows.column(HASH))
        return Probes(hashes, times - self.early_us, times + self.late_us)

    def matchable_from(self, watermark: int) -> int:
        """The event time from which on rows can be matched by rows that are not late."""
        return reachable_from(watermark, self.late_us)


@dataclass(frozen=True, slots=True)
class Pairs:
    """Rows of both inputs, pair by pair, and the epoch of each pair."""

    epochs: Int64s
    sides: tuple[pa.Table, pa.Table]

    def filter(self, matches: npt.NDArray[np.bool_]) -> Pairs:
        if matches.all():
            return self
        left, right = (side.filter(pa.array(matches)) for side in self.sides)
        return Pairs(self.epochs[matches], (left, right))


@dataclass(frozen=True)
class JoinOperator:
    """Implements `rekindle.engine.operators.base.Operator`. `condition`: what pairs with equal keys
    within the bounds of time have to fulfil, too."""

    node: Node
    type: str
    sides: tuple[Side, Side]
    columns: str
    condition: str | None
    slice_us: int
    delay_us: int

    hashes_groups = False

    @property
    def tables(self) -> Mapping[str, RunShape]:
        shapes = {name: side.shape for name, side in zip(_SIDES, self.sides, strict=True)}
        shapes |= {_marks(at): MARKS for at in self._marked}
        return shapes | ({LACKS: LACKS_SHAPE} if self.asserts_absence else {})

    @property
    def asserts_absence(self) -> bool:
        return self.type in UNMATCHED

    @property
    def _marked(self) -> list[int]:
        """The sides of which it is known which rows have matched."""
        return sorted({*UNMATCHED.get(self.type, ()), *_MATCHED.get(self.type, ())})

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
        evaluate: Evaluate,
    ) -> Advanced:
        kept, dropped = dict(tables), DroppedRows()
        arrived = [self._keep(at, of_side, kept, dropped) for at, of_side in enumerate(rows)]
        output = [RowBuffer(self._pairs, files) for _ in _SIDES]
        marked = {at: Matched() for at in self._marked}
        for at, of_side in enumerate(arrived):
            for pairs in self._pairs_of(at, of_side, kept[_SIDES[1 - at]], evaluate):
                if self.type not in _WRITES_NO_PAIRS:
                    output[at].add(self._rows_of(pairs))
                for number, matches in marked.items():
                    matches.add(pairs.sides[number], pairs.epochs)
        found = [buffer.table() for buffer in output]
        for at, matches in marked.items():
            table, places, epochs = matches.mark(kept[_marks(at)], self.slice_us)
            kept[_marks(at)] = table
            if at in _MATCHED.get(self.type, ()) and places.num_rows:
                first = rows_of(kept[_SIDES[at]], self.slice_us, places)
                found.append(self._alone(at, first, epochs))
        found += [self._unmatched(at, kept, clock) for at in UNMATCHED.get(self.type, ())]
        for at, side in enumerate(self.sides):
            before = side.matchable_from(clock[-1][2])
            for name in (_SIDES[at], *([_marks(at)] if at in marked else [])):
                kept[name] = forget(self.tables[name], kept[name], self.slice_us, before)
        return Advanced(kept, _by_epoch(found), dropped)

    def _keep(
        self, at: int, rows: pa.Table | None, kept: dict[str, OperatorState], dropped: DroppedRows
    ) -> pa.Table | None:
        """The rows of a side that can match, which are put into its table."""
        if rows is None:
            return None
        side, name = self.sides[at], _SIDES[at]
        with_nulls = at in UNMATCHED.get(self.type, ())
        found, missed = side.rows(rows, self.slice_us, with_nulls=with_nulls)
        dropped.late += missed.late
        dropped.null_event_time += missed.null_event_time
        kept[name] = keep(kept[name], found)
        for key in side.shape.key_names:
            if found.column(key).null_count:
                found = found.filter(found.column(key).is_valid())
        return found

    def _pairs_of(
        self, at: int, rows: pa.Table | None, table: OperatorState, evaluate: Evaluate
    ) -> Iterator[Pairs]:
        """The pairs of rows that have arrived at a side with rows of the other side's table, by
        row; of each by time and number of the other row."""
        if rows is None or not rows.num_rows:
            return
        found = find(table, self.slice_us, self.sides[at].probes(rows))
        of_own, of_other = (self._needed(side) for side in (self.sides[at], self.sides[1 - at]))
        rows = rows.select(of_own)
        most = found.rows_of_bytes(of_other, rows, PAIRS, PAIR_BYTES)
        for probe, chosen in found.portions(PAIRS):
            for begin in range(0, len(probe), most):
                part = slice(begin, begin + most)
                own = rows.take(pa.array(probe[part])).combine_chunks()
                pairs = self._matching(at, own, found.rows(chosen[part], of_other))
                if self.type != "Inner" and self.condition is not None:
                    pairs = self._evaluated(pairs, evaluate)
                yield pairs

    def _needed(self, side: Side) -> list[str]:
        """The columns of a pair's rows that are read: of a join that writes no pairs, and has no
        further condition, only those by which it finds them."""
        if self.type in _WRITES_NO_PAIRS and self.condition is None:
            return [*PLACE, *side.shape.key_names]
        return [*PLACE, *side.names]

    def _matching(self, at: int, own: pa.Table, other: pa.Table) -> Pairs:
        """The pairs with equal keys, of rows with equal hashes."""
        matches = self._came_before(at, own, other)
        for key in self.sides[0].shape.key_names:
            matches &= equal_values(_array(own.column(key)), _array(other.column(key)))
        epochs = epochs_of(int64s(own.column(NUMBER)))
        return Pairs(epochs, (own, other) if at == 0 else (other, own)).filter(matches)

    def _evaluated(self, pairs: Pairs, evaluate: Evaluate) -> Pairs:
        """The pairs for which the condition holds."""
        if not len(pairs.epochs):
            return pairs
        numbers = pa.array(np.arange(len(pairs.epochs)))
        view = self.view(self._rows_of(pairs)).add_column(0, NUMBER_OF_PAIR, numbers)
        found = evaluate(self.matching, {view_name(self): view}).column(NUMBER_OF_PAIR)
        matches = np.zeros(len(pairs.epochs), dtype=np.bool_)
        matches[found.to_numpy()] = True
        return pairs.filter(matches)

    def _rows_of(self, pairs: Pairs) -> pa.Table:
        columns = [
            table.column(name)
            for table, side in zip(pairs.sides, self.sides, strict=True)
            for name in side.names
        ]
        return pa.table([pa.array(pairs.epochs), *columns], schema=self._pairs)

    def _alone(self, at: int, rows: pa.Table, epochs: Int64s) -> pa.Table:
        """Rows of one side as pairs with NULLs."""
        other = self.sides[1 - at]
        nulls = {
            name: pa.nulls(rows.num_rows, other.shape.schema.field(name).type)
            for name in other.names
        }
        none = pa.table(nulls)
        return self._rows_of(Pairs(epochs, (rows, none) if at == 0 else (none, rows)))

    def _unmatched(self, at: int, kept: Mapping[str, OperatorState], clock: Clock) -> pa.Table:
        """The rows of a side that no row can match any more, and none has, also none that may be
        missing; by epoch, time and number."""
        side = self.sides[at]
        low, high = side.matchable_from(clock[0][1]), side.matchable_from(clock[-1][2]) - 1
        low = max(low, lacks_us(kept) + side.early_us + 1)
        if low > high:
            return self._pairs.empty_table()
        found, chosen = between(kept[_SIDES[at]], self.slice_us, low, high)
        if not len(chosen):
            return self._pairs.empty_table()
        places = found.rows(chosen, PLACE)
        rows = found.rows(chosen[~is_marked(kept[_marks(at)], self.slice_us, places)])
        times = int64s(rows.column(TIME))
        watermarks = np.array([after for _, _, after in clock], dtype=np.int64)
        at_epoch = np.searchsorted(watermarks, times + side.late_us, side="right")
        epochs = np.array([epoch for epoch, _, _ in clock], dtype=np.int64)[at_epoch]
        return self._alone(at, rows, epochs)

    def _came_before(self, at: int, own: pa.Table, other: pa.Table) -> npt.NDArray[np.bool_]:
        epoch, of_other = (epochs_of(int64s(table.column(NUMBER))) for table in (own, other))
        return of_other <= epoch if at == 0 else of_other < epoch

    def view(self, rows: pa.Table) -> pa.Table:
        return rows.drop_columns([EPOCH])

    def select(self, system: Sequence[str]) -> str:
        first = "".join(f"{name}, " for name in system)
        columns = f"{first}{time_without_date_as_null(self.columns)}"
        text = f"SELECT {columns} FROM ({self._structs(first)})"
        return text + (self._where() if self.type == "Inner" else "")

    @cached_property
    def matching(self) -> str:
        """SQL of the numbers of the pairs for which the condition holds."""
        pairs = self._structs(f"{NUMBER_OF_PAIR}, ")
        return f"SELECT {NUMBER_OF_PAIR} FROM ({pairs}){self._where()}"

    def _structs(self, first: str) -> str:
        """SQL of the view with a column for each input; `first`: columns before these."""
        structs = ", ".join(
            f"named_struct({_fields(name[0], side)}) AS {quote(side.input)}"
            for name, side in zip(_SIDES, self.sides, strict=True)
        )
        return f"SELECT {first}{structs} FROM {quote(view_name(self))}"

    def _where(self) -> str:
        if self.condition is None:
            return ""
        return f" WHERE {time_without_date_as_null(self.condition)}"


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
        used = tuple(name for name in schema.names if name in columns)
        sides.append(Side(of_input.name, of_input.event_time, columns, used, shape, early, late))
    left, right = sides
    _check_keys(node, left, right)
    time = kind.event_time(analysis, event_times)
    copied = analysis.copies[time] if time is not None else None
    # The end of a window is above the watermark, and other times at least at it: a window behind
    # takes away 1 us of an end (`rekindle.engine.operators.window`), which a pair may not have.
    delays = [
        side.late_us + of_input.at_window_end
        for side, of_input in zip(sides, of_inputs, strict=True)
    ]
    operator = JoinOperator(
        node,
        kind.spec.type,
        (left, right),
        kind.select,
        kind.spec.on if kind.condition.has_more else None,
        slice_of(bounds.before_us + bounds.after_us),
        delays[copied[0]] if copied is not None else max(delays),
    )
    if operator.type != "Inner" and operator.condition is not None:
        number = pa.field(NUMBER_OF_PAIR, pa.int64())
        analyze(operator.matching, {view_name(operator): pa.schema([number, *operator.output])})
    return operator


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
    texts = {name: name.replace("\\", "\\\\").replace("'", "\\'") for name in side.used}
    places = {name: side.columns.index(name) for name in side.used}
    return ", ".join(f"'{texts[name]}', __{prefix}{places[name]}" for name in side.used)


def _marks(at: int) -> str:
    """The table of the rows of a side that have matched."""
    return f"{_SIDES[at]}_marks"


def _array(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)


def _by_epoch(tables: Sequence[pa.Table]) -> pa.Table:
    """The rows of all tables, which are ordered by EPOCH, by epoch and then by table."""
    filled = [table for table in tables if table.num_rows]
    if len(filled) < 2:
        return filled[0] if filled else tables[0]
    epochs = [table.column(EPOCH).to_numpy() for table in filled]
    parts = []
    for epoch in np.unique(np.concatenate(epochs)).tolist():
        for table, of_table in zip(filled, epochs, strict=True):
            first, end = (np.searchsorted(of_table, epoch, side) for side in ("left", "right"))
            if first < end:
                parts.append(table.slice(int(first), int(end - first)))
    return pa.concat_tables(parts)
