"""Topologies with a join, histories of its inputs, and an oracle in plain Python."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import yaml
from hypothesis import strategies as st

from rekindle.arrow_types import arrow_schema
from rekindle.engine.epochs import concatenate_epochs
from rekindle.engine.operators.base import Advanced, without_all_rows
from rekindle.engine.operators.join import JoinOperator, open_join
from rekindle.engine.state.operator import EMPTY, OperatorState
from rekindle.streams.epochs import NO_WATERMARK, EpochInput
from rekindle.topology.compile import compile_topology
from rekindle.topology.load import load_spec
from rekindle.topology.model import Topology

BEFORE, AFTER = 5, 20
JOIN = '{"on": "orders.k = payments.ok", before: 5us, after: 20us}'
ORDERS = "k STRING, n BIGINT, t TIMESTAMP, tags ARRAY<BIGINT>"
PAYMENTS = "ok STRING, m BIGINT, u TIMESTAMP"
Row = tuple[str | None, int, int | None]
"""Key, value, event time."""
Epoch = tuple[Sequence[Row], Sequence[Row]]
"""Rows of the first and of the second input."""


def topology(
    join: str = JOIN,
    operators: str = "",
    last: str = "both",
    queries: str = "both",
    payments: str = PAYMENTS,
) -> Topology:
    """`queries`: the operator that a further query reads."""
    text = f"""
checkpoint: {{store: 'file:///tmp/store'}}
sources:
- name: orders
  schema: "{ORDERS}"
  eventTime: {{column: t}}
  files: {{url: "file:///tmp/in", format: parquet, orderBy: t, rowsPerSecond: 1}}
- name: payments
  schema: "{payments}"
  eventTime: {{column: u}}
  files: {{url: "file:///tmp/in", format: parquet, orderBy: u, rowsPerSecond: 1}}
operators:
- {{name: both, inputs: [orders, payments], join: {join}}}
{operators}
queries:
- {{name: pairs, from: {queries}, sink: {{files: {{url: "file:///tmp/pairs"}}}}}}
- {{name: q, from: {last}, sink: {{files: {{url: "file:///tmp/sink"}}}}}}
"""
    return compile_topology(load_spec(yaml.safe_load(text)), "test", skip_cluster_checks=True)


def operator(type: str = "Inner", slice_us: int = 8) -> JoinOperator:
    """The join of JOIN, with slices that are small. Of another type than Inner it has a condition,
    too: the value of the first row is above that of the second."""
    compiled = topology()
    node = compiled.nodes["both"]
    schemas = [arrow_schema(compiled.nodes[name].schema) for name in node.inputs]

    def analyze(text: str, views: Any) -> pa.Schema:
        raise AssertionError(text)

    condition = None if type == "Inner" else "orders.n > payments.m"
    join = open_join(node, compiled, schemas, analyze)
    return replace(join, type=type, condition=condition, slice_us=slice_us)


def evaluate(text: str, views: Mapping[str, pa.Table]) -> pa.Table:
    """What Spark gives for the condition of `operator`."""
    assert text.endswith("WHERE orders.n > payments.m")
    (view,) = views.values()
    columns = (view.column(name).to_pylist() for name in ("__n", "__l1", "__r1"))
    numbers = [number for number, n, m in zip(*columns, strict=True) if n > m]
    return pa.table({"__n": pa.array(numbers, pa.int64())})


rows = st.lists(
    st.tuples(
        st.sampled_from(["a", "a", "b", "c", None]),
        st.integers(0, 9),
        st.one_of(st.none(), st.integers(-10, 80), st.integers(-10, 80)),
    ),
    max_size=6,
)
histories = st.lists(st.tuples(rows, rows, st.integers(0, 15)), min_size=1, max_size=7)


@dataclass(frozen=True)
class History:
    """Epochs with the watermarks before and after them."""

    epochs: tuple[tuple[Epoch, tuple[int, int, int]], ...]


def history(drawn: Sequence[tuple[Sequence[Row], Sequence[Row], int]]) -> History:
    before, epochs = NO_WATERMARK, []
    after = -20
    for number, (left, right, step) in enumerate(drawn):
        after += step
        epochs.append(((left, right), (number, before, after)))
        before = after
    return History(tuple(epochs))


def tables_of(epoch: Epoch) -> tuple[pa.Table, pa.Table]:
    left, right = epoch
    time = pa.timestamp("us", "UTC")
    orders = {
        "k": pa.array([k for k, _, _ in left], pa.string()),
        "n": pa.array([n for _, n, _ in left], pa.int64()),
        "t": pa.array([t for _, _, t in left], pa.int64()).cast(time),
        "tags": pa.array([[n] * (n % 3) for _, n, _ in left], pa.list_(pa.int64())),
    }
    payments = {
        "ok": pa.array([k for k, _, _ in right], pa.string()),
        "m": pa.array([n for _, n, _ in right], pa.int64()),
        "u": pa.array([t for _, _, t in right], pa.int64()).cast(time),
    }
    return pa.table(orders), pa.table(payments)


def inputs_of(found: History) -> list[EpochInput]:
    return [
        EpochInput(number, before, after, tables_of(epoch))
        for epoch, (number, before, after) in found.epochs
    ]


def call(
    join: JoinOperator, tables: Mapping[str, OperatorState], epochs: Sequence[EpochInput]
) -> Advanced:
    inputs: list[pa.Table | None] = []
    for at in range(2):
        schema = epochs[0].inputs[at].schema
        table = concatenate_epochs(schema, [(e, e.inputs[at]) for e in epochs])
        inputs.append(table if table.num_rows else None)
    clock = [(e.epoch, e.watermark_before, e.watermark) for e in epochs]
    states: Mapping[str, OperatorState] = {n: tables.get(n, EMPTY) for n in join.tables}
    if not all(epoch.complete for epoch in epochs):
        states = without_all_rows(join, states)
    return join.advance(states, inputs, clock, None, evaluate)


_Numbered = tuple[int, int, Row]
"""Epoch of a row, its place in it, and the row."""


def _live(found: History) -> tuple[tuple[int, int], tuple[list[_Numbered], list[_Numbered]]]:
    """Numbers of late rows and of rows without event time, and the other rows of each input."""
    live: tuple[list[_Numbered], list[_Numbered]] = ([], [])
    late = untimed = 0
    for epoch, (number, before, _) in found.epochs:
        for at, of_side in enumerate(epoch):
            for index, row in enumerate(of_side):
                if row[2] is None:
                    untimed += 1
                elif row[2] < before:
                    late += 1
                else:
                    live[at].append((number, index, row))
    return (late, untimed), live


def _numbered_pairs(
    live: tuple[list[_Numbered], list[_Numbered]],
) -> list[tuple[int, _Numbered, _Numbered]]:
    """Pairs with equal keys in time, in the order in which an inner join writes them."""
    pairs = []
    for left in live[0]:
        for right in live[1]:
            (e, i, (key, _, t)), (f, j, (other, _, u)) = left, right
            assert t is not None
            assert u is not None
            if key is None or key != other or not t - BEFORE <= u <= t + AFTER:
                continue
            place = (0, i, u, f, j) if f <= e else (1, j, t, e, i)
            pairs.append((max(e, f), place, left, right))
    in_order = sorted(pairs, key=lambda pair: pair[:2])
    return [(epoch, left, right) for epoch, _, left, right in in_order]


def oracle(found: History) -> tuple[list[tuple[int, Row, Row]], int, int]:
    """The pairs of an inner join with their epoch, in the order of the output; numbers of late
    rows, and of rows without event time."""
    (late, untimed), live = _live(found)
    pairs = [(epoch, left[2], right[2]) for epoch, left, right in _numbered_pairs(live)]
    return pairs, late, untimed


Written = tuple[int, Row | None, Row | None]
"""Epoch, and the rows of both inputs."""


def written(found: History, type: str) -> list[Written]:
    """What a join of `operator` writes, in any order."""
    _, live = _live(found)
    pairs = [
        (epoch, left, right)
        for epoch, left, right in _numbered_pairs(live)
        if type == "Inner" or left[2][1] > right[2][1]
    ]
    if type == "Inner":
        return [(epoch, left[2], right[2]) for epoch, left, right in pairs]
    rows: list[Written] = []
    if type in ("Left", "Right", "Full"):
        rows = [(epoch, left[2], right[2]) for epoch, left, right in pairs]
    sides = {"Left": [0], "Anti": [0], "Right": [1], "Full": [0, 1], "Semi": []}[type]
    for at in sides:
        matched = {(left, right)[at][:2] for _, left, right in pairs}
        for row in live[at]:
            if row[:2] not in matched and (epoch := _expires(found, row[2], at)) is not None:
                rows.append((epoch, row[2], None) if at == 0 else (epoch, None, row[2]))
    if type == "Semi":
        first: dict[tuple[int, int], tuple[int, Row]] = {}
        for epoch, left, _ in pairs:
            known = first.get(left[:2])
            if known is None or epoch < known[0]:
                first[left[:2]] = (epoch, left[2])
        rows = [(epoch, row, None) for epoch, row in first.values()]
    return rows


def _expires(found: History, row: Row, at: int) -> int | None:
    """The epoch after which nothing can match a row; None: after all of these."""
    assert row[2] is not None
    late = AFTER if at == 0 else BEFORE
    return next((e for _, (e, _, after) in found.epochs if after > row[2] + late), None)


def rows_of(rows: pa.Table) -> list[Written]:
    """The rows of `JoinOperator.advance`, for the columns of JOIN."""
    found: list[Written] = []
    for row in rows.to_pylist():
        left = (row["__l0"], row["__l1"], _us(row["__l2"])) if row["__l2"] is not None else None
        right = (row["__r0"], row["__r1"], _us(row["__r2"])) if row["__r2"] is not None else None
        assert left is None or row["__l3"] == [left[1]] * (left[1] % 3)
        found.append((row["__e"], left, right))
    return found


def pairs_of(rows: pa.Table) -> list[tuple[int, Row, Row]]:
    """As the oracle gives them; the columns of `JoinOperator.output` for the join of JOIN."""
    found = []
    for epoch, left, right in rows_of(rows):
        assert left is not None
        assert right is not None
        found.append((epoch, left, right))
    return found


def _us(time: Any) -> int:
    since: dt.timedelta = time - dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
    return since // dt.timedelta(microseconds=1)
