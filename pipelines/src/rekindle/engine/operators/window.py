"""The operator `window`: SQL before and after its state. What differs between kinds of windows is
in `rekindle.engine.operators.window_kinds`. Pure.

Design: docs/design/engine.md#windows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import pyarrow as pa

from rekindle.arrow_types import TIMESTAMP, topology_type
from rekindle.engine.epochs import EPOCH, SYSTEM_COLUMNS, Clock
from rekindle.engine.exact_sums import combine_all_sums, combined_partials, is_wide, split_sum
from rekindle.engine.model import DroppedRows
from rekindle.engine.operators.base import (
    ONLY_TABLE,
    Advanced,
    Aggregation,
    Analyze,
    Evaluate,
    view_name,
)
from rekindle.engine.operators.window_kinds import ROW_TIME, WindowComputation, computation_of
from rekindle.engine.state.operator import OperatorState
from rekindle.engine.state.runs import PANE, RunShape
from rekindle.engine.state.spill import RunFiles
from rekindle.engine.window_state import ROW_COUNT, ROW_ORDER, GroupShape
from rekindle.errors import OperatorRefused
from rekindle.topology.model import Node, Topology
from rekindle.topology.schema import is_number
from rekindle.topology.spec import OperatorSpec
from rekindle.topology.sql.aggregates import (
    Decomposition,
    decompose,
    not_a_number,
    summed_arguments,
)
from rekindle.topology.sql.casts_without_date import time_without_date_as_null
from rekindle.topology.sql.tokens import quote
from rekindle.topology.windows.kind import END, START
from rekindle.topology.windows.registry import windows_of

TIME_OFFSET = "__time_offset"
"""Column of the microseconds to subtract from event time, if inputs differ in them: 1 where event
time is the end of a window, which is exclusive, so that the row is in the panes of that window and
not in the next ones; 0 elsewhere."""


@dataclass(frozen=True, slots=True)
class WindowSql:
    """What the SQL of a window needs; `decomposition` as in its aggregates and with the partials of
    its kind, or also with sums of wide decimals divided into two."""

    node: Node
    computation: WindowComputation
    keys: tuple[str, ...]
    decomposition: Decomposition
    time: str  # SQL of a row's event time in microseconds
    time_offsets: tuple[int, ...] = ()
    """The value of TIME_OFFSET for each input, if these differ; `time` then subtracts it."""
    float_keys: frozenset[str] = frozenset()
    """Keys that Spark groups by as strings."""


@dataclass(frozen=True)
class WindowOperator:
    """Implements `rekindle.engine.operators.base.Operator`."""

    sql: WindowSql
    shape: GroupShape

    delay_us = 0
    asserts_absence = False

    @property
    def node(self) -> Node:
        return self.sql.node

    @property
    def tables(self) -> Mapping[str, RunShape]:
        return self.sql.computation.tables(self.shape)

    @cached_property
    def output(self) -> pa.Schema:
        keys = zip(self.shape.key_names, self.shape.keys, strict=True)
        bounds = [(START, TIMESTAMP), (END, TIMESTAMP)]
        return pa.schema([*bounds, *keys, *combined_partials(self.shape)])

    @cached_property
    def hashes_groups(self) -> bool:
        return all(_can_hash(data_type) for _, data_type, _ in self.shape.partials)

    def query(self, inputs: Sequence[str], method: Aggregation) -> str:
        return _partials_sql(self.sql, inputs, method)

    def advance(
        self,
        tables: Mapping[str, OperatorState],
        rows: Sequence[pa.Table | None],
        clock: Clock,
        files: RunFiles | None,
        evaluate: Evaluate,
    ) -> Advanced:
        (partials,) = rows
        kind = self.sql.computation
        done, further = kind.advance(self.shape, tables, partials, clock, files)
        dropped = DroppedRows(done.late, done.null_event_time)
        return Advanced({**further, ONLY_TABLE: done.state}, done.closed, dropped)

    def view(self, rows: pa.Table) -> pa.Table:
        """The bounds, keys and partials of closed windows."""
        times = self.sql.computation.bounds(rows)
        bounds = [pa.array(column).cast(TIMESTAMP) for column in times]
        rest = combine_all_sums(rows, self.shape).select(self.output.names[len(bounds) :])
        table = pa.table([*bounds, *rest.columns], names=self.output.names)
        return table.cast(self.output, safe=False)

    def select(self, system: Sequence[str]) -> str:
        """Computes the rows of closed windows."""
        keys = [f"__k{i} AS {quote(name)}" for i, name in enumerate(self.sql.keys)]
        outputs = [
            f"{time_without_date_as_null(sql)} AS {quote(alias)}"
            for alias, sql in self.sql.decomposition.outputs
        ]
        columns = ", ".join([*system, START, END, *keys, *outputs])
        return f"SELECT {columns} FROM {quote(view_name(self))}"


def open_window(
    node: Node, topology: Topology, inputs: Sequence[pa.Schema], analyze: Analyze
) -> WindowOperator:
    """Raises OperatorRefused."""
    sql, first = window_sql(node, topology), inputs[0]
    _check_sums(node, first, analyze)
    key_types = tuple(_type(first, key, node) for key in sql.keys)
    floats = (k for k, t in zip(sql.keys, key_types, strict=True) if pa.types.is_floating(t))
    sql = replace(sql, float_keys=frozenset(floats))
    views = {
        name: pa.schema([*SYSTEM_COLUMNS, *schema])
        for name, schema in zip(node.inputs, inputs, strict=True)
    }
    sql, found, wide_sums = _partials(sql, views, analyze)
    partials = tuple(
        (p.name, found.field(p.name).type, p.merge) for p in sql.decomposition.partials
    )
    for data_type in key_types + tuple(t for _, t, _ in partials):
        if pa.types.is_nested(data_type):
            message = f"operator {node.name}: {data_type} can be neither a key nor an aggregate"
            raise OperatorRefused(message, node.name)
    assert found.get_field_index(ROW_COUNT) >= 0
    return WindowOperator(sql, GroupShape(key_types, partials, wide_sums))


def window_sql(node: Node, topology: Topology) -> WindowSql:
    column = topology.nodes[node.inputs[0]].event_time
    assert column is not None, f"{node.name}: validation requires an event time"
    time = f"unix_micros(CAST({quote(column)} AS TIMESTAMP))"
    assert isinstance(node.spec, OperatorSpec)
    window = node.spec.window
    assert window is not None
    decomposition, kind = decompose(window.aggregate), computation_of(windows_of(window))
    offsets = tuple(
        int(topology.nodes[name].at_window_end and not kind.partials) for name in node.inputs
    )
    same = len(set(offsets)) == 1
    if not same:
        time = f"{time} - {TIME_OFFSET}"
    elif offsets[0]:
        time = f"{time} - {offsets[0]}L"
    partials = (*decomposition.partials, *kind.partials)
    decomposition = replace(decomposition, partials=partials)
    return WindowSql(node, kind, window.group_by, decomposition, time, () if same else offsets)


def _partials(
    sql: WindowSql, views: Mapping[str, pa.Schema], analyze: Analyze
) -> tuple[WindowSql, pa.Schema, tuple[tuple[str, int], ...]]:
    """The window with sums of wide decimals divided into two; the schema of its partials; and name
    and scale of each sum that was divided."""
    inputs = list(views)
    found = analyze(_partials_sql(sql, inputs, Aggregation.SORTED), views)
    partials = sql.decomposition.partials
    wide_sums = {
        p.name: found.field(p.name).type.scale
        for p in partials
        if is_wide(found.field(p.name).type, p.merge)
    }
    if not wide_sums:
        return sql, found, ()
    pairs = [split_sum(p, wide_sums[p.name]) if p.name in wide_sums else (p,) for p in partials]
    separate = tuple(p for pair in pairs for p in pair)
    sql = replace(sql, decomposition=replace(sql.decomposition, partials=separate))
    found = analyze(_partials_sql(sql, inputs, Aggregation.SORTED), views)
    return sql, found, tuple(wide_sums.items())


def _check_sums(node: Node, input_schema: pa.Schema, analyze: Analyze) -> None:
    """Refuse sums of times, which Spark adds as seconds without an error."""
    assert isinstance(node.spec, OperatorSpec)
    assert node.spec.window is not None
    summed = dict(summed_arguments(node.spec.window.aggregate))
    if not summed:
        return
    name, source = node.name, node.inputs[0]
    columns = ", ".join(
        f"{time_without_date_as_null(sql)} AS a{i}" for i, sql in enumerate(summed.values())
    )
    arguments = analyze(f"SELECT {columns} FROM {quote(source)}", {source: input_schema})
    for call, data_type in zip(summed, arguments.types, strict=True):
        if not is_number(topology_type(data_type)):
            problem = not_a_number(call, str(data_type))
            raise OperatorRefused(f"operator {name}: {problem.message}; {problem.hint}", name)


def _type(schema: pa.Schema, name: str, node: Node) -> pa.DataType:
    at = next((i for i, n in enumerate(schema.names) if n.lower() == name.lower()), None)
    if at is None:
        message = f"operator {node.name}: groupBy column {name} does not exist"
        raise OperatorRefused(message, node.name)
    return schema.field(at).type


def _can_hash(data_type: pa.DataType) -> bool:
    """Whether Spark can use hash aggregation for a partial of this type."""
    return not (
        pa.types.is_string(data_type)
        or pa.types.is_binary(data_type)
        or pa.types.is_null(data_type)
    )


def _partials_sql(window: WindowSql, inputs: Sequence[str], method: Aggregation) -> str:
    """SQL that aggregates each (group, pane, epoch), or each row, in row order, in a single Spark
    task, or in eight if PARTITIONED."""
    keys = [f"__k{i}" for i in range(len(window.keys))]
    by_row = window.computation.is_by_row
    group = ", ".join([*keys, PANE, EPOCH, *([ROW_ORDER] if by_row else [])])
    columns = [(time_without_date_as_null(p.sql), p.name) for p in window.decomposition.partials]
    partials = "".join(f", {sql} AS {name}" for sql, name in columns)
    hint = (
        f"REPARTITION(8, {', '.join([*keys, PANE])})"
        if method is Aggregation.PARTITIONED
        else "COALESCE(1)"
    )
    sort = "" if method is Aggregation.HASHED else f" SORT BY {group}, {ROW_ORDER}"
    ordered = by_row or method is not Aggregation.HASHED
    rows = _rows_with_panes_sql(window, inputs, hint, ordered=ordered)
    return f"SELECT {group}, count(1) AS {ROW_COUNT}{partials} FROM ({rows}{sort}) GROUP BY {group}"


def _rows_with_panes_sql(
    window: WindowSql,
    inputs: Sequence[str],
    hint: str,
    *,
    ordered: bool,
) -> str:
    """SQL that adds columns to the rows: pane, canonical keys, position in the input's order, and
    event time, if the kind has partials of it.

    Row-wise SQL keeps the input's order on any number of cores, so `monotonically_increasing_id`,
    which grows with partition and row, is that order; unlike a row number it also distinguishes
    the rows that `explode` outputs for one row.
    """
    pane_column = f"{window.computation.pane_sql(window.time)} AS {PANE}"
    keys = [
        _canonical(n, n in window.float_keys) + f" AS __k{i}" for i, n in enumerate(window.keys)
    ]
    order = [f"monotonically_increasing_id() AS {ROW_ORDER}"] if ordered else []
    if window.computation.partials:
        order.append(f"{window.time} AS {ROW_TIME}")
    if len(inputs) == 1:
        rows = quote(inputs[0])
    else:
        offsets = [f", {offset}L AS {TIME_OFFSET}" for offset in window.time_offsets]
        parts = zip(offsets or [""] * len(inputs), inputs, strict=True)
        rows = f"({' UNION ALL '.join(f'SELECT *{offset} FROM {quote(n)}' for offset, n in parts)})"
    return f"SELECT /*+ {hint} */ *, {', '.join([*keys, pane_column, *order])} FROM {rows}"


def _canonical(key: str, is_float: bool) -> str:
    """A grouping key in canonical form. Spark would sort floats by its own normal form of them, so
    they become strings: `+ 0.0` changes −0.0 to 0.0, and the shortest decimal form is exact."""
    return f"CAST({quote(key)} + 0.0D AS STRING)" if is_float else quote(key)
