"""Segments with an operator with state, without Spark: real operators and tables, and in place of
Spark what the SQL before and after them computes in the topologies of simulations.

These have one operator a segment. The rows of sources have the columns of SOURCE_SCHEMA; a join's
condition beside its equality is `<one>.n <= <other>.n`, its `select` renames columns, and windows
are sessions of rows that are counted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from rekindle.arrow_types import TIMESTAMP
from rekindle.checkpoints.codec import LENT, CheckpointName
from rekindle.checkpoints.lent import LentState
from rekindle.checkpoints.state import StateStore
from rekindle.engine.epochs import EPOCH, Clock, concatenate_epochs, split_by_epoch
from rekindle.engine.model import State
from rekindle.engine.operators import running
from rekindle.engine.operators.base import Operator
from rekindle.engine.operators.join import NUMBER_OF_PAIR, JoinOperator
from rekindle.engine.operators.registry import has_state, open_operator
from rekindle.engine.operators.window import WindowOperator
from rekindle.engine.session_state import FIRST, LAST
from rekindle.engine.state.runs import PANE
from rekindle.engine.window_state import ROW_COUNT
from rekindle.errors import StoreError
from rekindle.streams.epochs import EpochInput
from rekindle.topology.model import Node, Segment, Topology
from rekindle.topology.spec import OperatorSpec
from rekindle.topology.windows.kind import END, START

SOURCE_SCHEMA = pa.schema(
    [("id", pa.int64()), ("k", pa.int64()), ("n", pa.int64()), ("t", TIMESTAMP)]
)
_ITEM = re.compile(r"(\w+)\.(\w+) AS (\w+)")
_CONDITION = re.compile(r"\w+\.k = \w+\.k AND (\w+)\.n <= (\w+)\.n")
_UID = "simulated"


@dataclass(frozen=True, slots=True)
class ChainOutput:
    """Of an epoch. `watermark`: the one that is passed on."""

    watermark: int
    rows: pa.Table


class OperatorChain:
    """The chain of a segment. `schema`: of its output."""

    def __init__(self, segment: Segment, topology: Topology) -> None:
        (name,) = segment.nodes
        node = topology.nodes[name]
        self._inputs = [schema_of(entry.name, topology) for entry in segment.inputs]
        self.schema = schema_of(name, topology)
        self.operator = _opened(node, topology)

    def process(
        self, state: State, epochs: Sequence[EpochInput]
    ) -> tuple[list[ChainOutput], State]:
        """As `rekindle.engine.model.Chain.process`; `epochs`: with the rows of this partition."""
        clock: Clock = [(e.epoch, e.watermark_before, e.watermark) for e in epochs]
        inputs = [
            concatenate_epochs(schema, [(e, e.inputs[at]) for e in epochs])
            for at, schema in enumerate(self._inputs)
        ]
        rows = [self._queried(table) if table.num_rows else None for table in inputs]
        states, found, _ = running.run_operator(
            self.operator,
            state.operators,
            rows,
            clock,
            None,
            partial(_matching, self.operator),
            complete=all(epoch.complete for epoch in epochs),
        )
        clock = running.delayed(clock, self.operator.delay_us)
        result = _selected(self.operator, running.view_of(self.operator, found, clock))
        tables = split_by_epoch(self.schema, result, [epoch for epoch, _, _ in clock])
        outputs = [ChainOutput(w, t) for (_, _, w), t in zip(clock, tables, strict=True)]
        return outputs, State(states)

    def _queried(self, rows: pa.Table) -> pa.Table:
        return _intervals(self.operator, rows) if _is_window(self.operator) else rows

    def absences(self, rows: pa.Table) -> list[tuple[Any, ...]]:
        """The rows that say that another one has not come."""
        if not self.operator.asserts_absence:
            return []
        if isinstance(self.operator, JoinOperator) and self.operator.type == "Left":
            rows = rows.filter(pc.is_null(rows.column("other")))
        return as_tuples(rows)


def as_tuples(rows: pa.Table) -> list[tuple[Any, ...]]:
    """Times in microseconds."""
    columns = [c.cast(pa.int64()).to_pylist() for c in rows.columns]
    return list(zip(*columns, strict=True))


def has_operators(topology: Topology) -> bool:
    return any(map(has_state, topology.nodes.values()))


def schema_of(name: str, topology: Topology) -> pa.Schema:
    """The columns of a stream."""
    node = topology.nodes[name]
    spec = node.spec
    if not isinstance(spec, OperatorSpec) or spec.distinct is not None:
        return SOURCE_SCHEMA if not node.inputs else schema_of(node.inputs[0], topology)
    if spec.join is not None and spec.join.select is not None:
        streams = {of_input: schema_of(of_input, topology) for of_input in node.inputs}
        items = _ITEM.findall(spec.join.select)
        return pa.schema([(alias, streams[s].field(column).type) for s, column, alias in items])
    assert spec.window is not None, f"{name}: simulations do not have its kind"
    return pa.schema([(START, TIMESTAMP), (END, TIMESTAMP), ("k", pa.int64()), ("n", pa.int64())])


def _opened(node: Node, topology: Topology) -> Operator:
    def analyze(text: str, views: Mapping[str, pa.Schema]) -> pa.Schema:
        """The columns of the partials of a session."""
        names = [FIRST, LAST, ROW_COUNT, *re.findall(r"AS (\w+)", text)]
        return pa.schema([(name, pa.int64()) for name in dict.fromkeys(names)])

    return open_operator(node, topology, [schema_of(n, topology) for n in node.inputs], analyze)


# -- what Spark computes -------------------------------------------------------------------------


def _is_window(operator: Operator) -> bool:
    return isinstance(operator, WindowOperator)


def _intervals(operator: Operator, rows: pa.Table) -> pa.Table:
    """`query` of a session: counts by group, pane and epoch, with the first and last time."""
    assert isinstance(operator, WindowOperator)
    gap_us = operator.node.spec.window.session  # type: ignore[union-attr]  # it is a window's
    times = rows.column("t").cast(pa.int64()).to_numpy()
    marked = rows.append_column(PANE, pa.array(times - times % gap_us))
    marked = marked.append_column("time", pa.array(times))
    groups = marked.group_by(["k", PANE, EPOCH], use_threads=False).aggregate(
        [("time", "min"), ("time", "max"), ("time", "count")]
    )
    counts = groups.column("time_count")
    columns = {"__k0": groups.column("k"), PANE: groups.column(PANE), EPOCH: groups.column(EPOCH)}
    columns[ROW_COUNT] = counts
    of_bounds = {FIRST: groups.column("time_min"), LAST: groups.column("time_max")}
    for name, _, _ in operator.shape.partials:
        columns[name] = of_bounds.get(name, counts)
    return pa.table(columns)


def _matching(operator: Operator, text: str, views: Mapping[str, pa.Table]) -> pa.Table:
    """The pairs for which the condition of a join holds."""
    assert isinstance(operator, JoinOperator)
    (view,) = views.values()
    return pa.table({NUMBER_OF_PAIR: view.column(NUMBER_OF_PAIR).filter(_holds(operator, view))})


def _holds(operator: JoinOperator, view: pa.Table) -> pa.ChunkedArray:
    assert operator.condition is not None
    found = _CONDITION.fullmatch(operator.condition)
    assert found is not None, f"simulations do not evaluate {operator.condition}"
    less, more = (view.column(_column(operator, stream, "n")) for stream in found.groups())
    return pc.fill_null(pc.less_equal(less, more), False)


def _column(operator: JoinOperator, stream: str, column: str) -> str:
    """The column of the view that has this one of an input."""
    at = next(at for at, side in enumerate(operator.sides) if side.input == stream)
    return f"__{'lr'[at]}{operator.sides[at].columns.index(column)}"


def _selected(operator: Operator, view: pa.Table) -> pa.Table:
    epochs = view.column(EPOCH)
    if isinstance(operator, JoinOperator):
        if operator.type == "Inner":
            view = view.filter(_holds(operator, view))
            epochs = view.column(EPOCH)
        columns = {
            alias: view.column(_column(operator, stream, column))
            for stream, column, alias in _ITEM.findall(operator.columns)
        }
    elif isinstance(operator, WindowOperator):
        count = next(n for n, _, _ in operator.shape.partials if n not in (FIRST, LAST))
        names = {START: START, END: END, "k": "__k0", "n": count}
        columns = {alias: view.column(name) for alias, name in names.items()}
    else:
        columns = {name: view.column(name) for name in operator.output.names}
    return pa.table({EPOCH: epochs, **columns})


# -- checkpoints ---------------------------------------------------------------------------------


class _ObjectsOfState:
    """The entry and the objects of one state."""

    url = "memory"

    def __init__(self, lent: LentState) -> None:
        self._lent = lent

    def put(self, name: str, data: bytes) -> bool:
        raise StoreError(f"{name}: nothing is saved in a state")

    def get(self, name: str) -> bytes:
        return self.read(name)

    def read(self, name: str) -> bytes:
        return self._lent.read(name.removeprefix(f"{_UID}/"))


def restored(state: State, epoch: int) -> State:
    """The state from its entry and objects, which are fetched when they are read."""
    name = f"{LENT}state"
    at = CheckpointName("segment", 0, epoch, "")
    lent = LentState(name, _UID, at, 0, list(state.operators), state, "")
    _, found, _ = StateStore(_ObjectsOfState(lent), _UID).open(name)
    return found


def epochs_with(
    epochs: Sequence[EpochInput], inputs: Sequence[Sequence[pa.Table]]
) -> list[EpochInput]:
    """The epochs with these rows. `inputs`: of each epoch."""
    return [
        EpochInput(e.epoch, e.watermark_before, e.watermark, tuple(tables), e.complete)
        for e, tables in zip(epochs, inputs, strict=True)
    ]


def digests_of(state: State) -> dict[str, str]:
    """By table, what stands for all rows that it has had (`OperatorState.digest`)."""
    return {name: table.digest for name, table in state.operators.items() if table.digest}
