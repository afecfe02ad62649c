"""Divides a segment's chain into steps and generates the SQL of each. Pure, no pyspark.

A step is one Spark query. It begins at the segment's inputs or at closed windows, goes through
`sql` nodes, and ends in the segment's output or in the partial aggregates of the next window. Its
text is constant: all that differs between epochs is in the rows (`rekindle.engine.spark.rewrite`).

Design: docs/design/engine.md#windows.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import assert_never

from rekindle.engine.epochs import EPOCH, LATE_BEFORE
from rekindle.engine.spark.rewrite import quote, with_system_columns
from rekindle.engine.state.runs import PANE
from rekindle.engine.window_assigners import WindowAssigner, assigner_of
from rekindle.engine.window_state import LATE, NULL_EVENT_TIME, ROW_COUNT
from rekindle.topology.model import Node, Segment, Topology
from rekindle.topology.spec import OperatorSpec, WindowSpec
from rekindle.topology.sql.aggregates import Decomposition, decompose
from rekindle.topology.sql.casts_without_date import time_without_date_as_null
from rekindle.topology.windows.kind import END, START
from rekindle.topology.windows.registry import windows_of

ORDER = "__r"
"""Column of a row's position in the input's order."""
TIME_OFFSET = "__time_offset"
"""Column of the microseconds to subtract from event time, if inputs differ in them: 1 where event
time is the end of a window, which is exclusive, so that the row is in the panes of that window and
not in the next ones; 0 elsewhere."""
_SELECT = re.compile(r"\bselect\b", re.IGNORECASE)


class Aggregation(Enum):
    """Three methods with bit-identical results: rows of a (group, pane, epoch) are added in order.

    Hash aggregation adds rows in order until its map is full, and then merges in another order:
    such a result is not used (`rekindle.engine.spark.plans`).
    """

    HASHED = "one Spark task, hash aggregation"
    SORTED = "one Spark task, rows sorted by key and order, sort-based aggregation"
    PARTITIONED = "the same in eight hash partitions"


@dataclass(frozen=True, slots=True)
class WindowNode:
    """A window operator with what the steps before and after it need."""

    node: Node
    assigner: WindowAssigner
    keys: tuple[str, ...]
    decomposition: Decomposition
    time: str  # SQL of a row's event time in microseconds
    time_offsets: tuple[int, ...] = ()
    """The value of TIME_OFFSET for each input, if these differ; `time` then subtracts it."""

    @property
    def closed_view(self) -> str:
        return f"__closed_{self.node.name}"


@dataclass(frozen=True, slots=True)
class Step:
    """`begin` is None for the segment's inputs; `end` is None for its output.

    `has_epoch_column`: whether rows have a column with their epoch. If a call has only one epoch,
    the last step leaves it out: this saves a tenth of the time of an epoch of 100,000 rows.
    """

    begin: WindowNode | None
    sql_nodes: tuple[Node, ...]
    end: WindowNode | None
    has_epoch_column: bool = True

    @property
    def system_columns(self) -> tuple[str, ...]:
        """The system columns of the step's input views; the watermark only if it ends in a
        window."""
        if not self.has_epoch_column:
            return ()
        return (EPOCH,) if self.end is None else (EPOCH, LATE_BEFORE)

    @property
    def operators(self) -> str:
        """The names of the operators whose expressions this step's query evaluates, for
        messages."""
        names = [n.node.name for n in (self.begin,) if n] + [n.name for n in self.sql_nodes]
        return ", ".join(names + [n.node.name for n in (self.end,) if n])


def operators_of(segment: Segment, topology: Topology) -> tuple[Node, ...]:
    """The operators of a segment: all nodes except the source."""
    return tuple(topology.nodes[n] for n in segment.nodes[1 if segment.is_source else 0 :])


def plan_steps(segment: Segment, topology: Topology) -> tuple[Step, ...]:
    steps: list[Step] = []
    begin: WindowNode | None = None
    sql_nodes: list[Node] = []
    for node in operators_of(segment, topology):
        match _operator(node).definition:
            case str():
                sql_nodes.append(node)
            case WindowSpec() as window:
                end = window_node(node, window, topology)
                steps.append(Step(begin, tuple(sql_nodes), end))
                begin, sql_nodes = end, []
            case unknown:
                assert_never(unknown)
    return (*steps, Step(begin, tuple(sql_nodes), None))


def window_node(node: Node, window: WindowSpec, topology: Topology) -> WindowNode:
    column = topology.nodes[node.inputs[0]].event_time
    assert column is not None, f"{node.name}: validation requires an event time"
    time = f"unix_micros(CAST({quote(column)} AS TIMESTAMP))"
    offsets = tuple(int(_is_window_end(topology, name)) for name in node.inputs)
    same = len(set(offsets)) == 1
    if not same:
        time = f"{time} - {TIME_OFFSET}"
    elif offsets[0]:
        time = f"{time} - {offsets[0]}L"
    decomposition = decompose(window.aggregate)
    windows = assigner_of(windows_of(window))
    keys = window.group_by
    return WindowNode(node, windows, keys, decomposition, time, () if same else offsets)


def _is_window_end(topology: Topology, name: str) -> bool:
    """Whether a stream's event time is the (exclusive) end of a window, directly or through
    `sql`. Validation allows no mix of ends and other times in one input."""
    spec = topology.nodes[name].spec
    if not isinstance(spec, OperatorSpec):
        return False
    match spec.definition:
        case str():
            return any(_is_window_end(topology, name) for name in spec.inputs)
        case WindowSpec():
            return True
        case unknown:
            assert_never(unknown)


def _operator(node: Node) -> OperatorSpec:
    assert isinstance(node.spec, OperatorSpec)
    return node.spec


def step_sql(
    step: Step, sources: Sequence[str], method: Aggregation, float_keys: frozenset[str]
) -> str:
    """One query for a step. `sources` are the views of the segment's inputs.

    It has as few query blocks as possible: a task can only start after Spark has planned them.
    """
    blocks: list[tuple[str, str]] = []
    if step.begin is not None:
        blocks.append((step.begin.node.name, output_sql(step.begin, step.system_columns)))
    for node in step.sql_nodes:
        sql = time_without_date_as_null(_operator(node).sql or "")
        blocks.append((node.name, with_system_columns(sql, step.system_columns)))
    if step.end is not None:
        inputs = [blocks[-1][0]] if blocks else sources
        blocks.append(("", _partials_sql(step.end, inputs, method, float_keys)))
    *before, (_, last) = blocks
    if not before:
        return last
    return f"WITH {', '.join(f'{quote(name)} AS ({text})' for name, text in before)} {last}"


def is_divisible(step: Step, sources: Sequence[str]) -> bool:
    """Whether a step may be run on consecutive parts of its rows. A window aggregates all rows of
    an epoch together; a UNION ALL outputs all rows of one branch before those of the next."""
    if step.end is not None or (step.begin is None and len(sources) > 1):
        return False
    return all(len(_SELECT.findall(_operator(node).sql or "")) == 1 for node in step.sql_nodes)


def output_sql(window: WindowNode, system: Sequence[str]) -> str:
    """SQL that computes the window operator's rows from closed windows."""
    keys = [f"__k{i} AS {quote(name)}" for i, name in enumerate(window.keys)]
    outputs = [
        f"{time_without_date_as_null(sql)} AS {quote(a)}" for a, sql in window.decomposition.outputs
    ]
    columns = ", ".join([*system, START, END, *keys, *outputs])
    return f"SELECT {columns} FROM {quote(window.closed_view)}"


def _partials_sql(
    window: WindowNode, inputs: Sequence[str], method: Aggregation, float_keys: frozenset[str]
) -> str:
    """SQL that aggregates each (group, pane, epoch) in row order, in a single Spark task,
    or in eight if PARTITIONED."""
    keys = [f"__k{i}" for i in range(len(window.keys))]
    group = ", ".join([*keys, PANE, EPOCH])
    columns = [(time_without_date_as_null(p.sql), p.name) for p in window.decomposition.partials]
    partials = "".join(f", {sql} AS {name}" for sql, name in columns)
    hint = (
        f"REPARTITION(8, {', '.join([*keys, PANE])})"
        if method is Aggregation.PARTITIONED
        else "COALESCE(1)"
    )
    sort = "" if method is Aggregation.HASHED else f" SORT BY {group}, {ORDER}"
    rows = _rows_with_panes_sql(
        window, inputs, hint, float_keys, ordered=method is not Aggregation.HASHED
    )
    return f"SELECT {group}, count(1) AS {ROW_COUNT}{partials} FROM ({rows}{sort}) GROUP BY {group}"


def _rows_with_panes_sql(
    window: WindowNode,
    inputs: Sequence[str],
    hint: str,
    float_keys: frozenset[str],
    *,
    ordered: bool,
) -> str:
    """SQL that adds columns to the rows: pane, canonical keys, position in the input's order.

    A window consists of panes of one slide each (`rekindle.engine.window_state`). A row gets LATE
    if it is late for the newest window of its pane. An end beyond 64 bits wraps to before the pane:
    such a row is not late, and `rekindle.engine.window_state` counts it as untimed.

    Row-wise SQL keeps the input's order on any number of cores, so `monotonically_increasing_id`,
    which grows with partition and row, is that order; unlike a row number it also distinguishes
    the rows that `explode` outputs for one row.
    """
    pane = window.assigner.pane_sql(window.time)
    last_end = window.assigner.last_end_sql(pane)
    pane_column = (
        f"CASE WHEN {window.time} IS NULL THEN {NULL_EVENT_TIME}L"
        f" WHEN {last_end} BETWEEN {pane} AND {LATE_BEFORE} THEN {LATE}L ELSE {pane} END AS {PANE}"
    )
    keys = [_canonical(n, n in float_keys) + f" AS __k{i}" for i, n in enumerate(window.keys)]
    order = [f"monotonically_increasing_id() AS {ORDER}"] if ordered else []
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
