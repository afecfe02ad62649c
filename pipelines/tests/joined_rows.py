"""Topologies with a join, histories of its inputs, and an oracle in plain Python."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import yaml
from hypothesis import strategies as st

from rekindle.arrow_types import arrow_schema
from rekindle.engine.epochs import concatenate_epochs
from rekindle.engine.operators.base import Advanced
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
    join: str = JOIN, operators: str = "", last: str = "both", queries: str = "both"
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
  schema: "{PAYMENTS}"
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


def operator(slice_us: int = 8) -> JoinOperator:
    """The join of JOIN, with slices that are small."""
    compiled = topology()
    node = compiled.nodes["both"]
    schemas = [arrow_schema(compiled.nodes[name].schema) for name in node.inputs]

    def analyze(text: str, views: Any) -> pa.Schema:
        raise AssertionError(text)

    return replace(open_join(node, compiled, schemas, analyze), slice_us=slice_us)


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
    join: JoinOperator, tables: dict[str, OperatorState], epochs: Sequence[EpochInput]
) -> Advanced:
    inputs: list[pa.Table | None] = []
    for at in range(2):
        schema = epochs[0].inputs[at].schema
        table = concatenate_epochs(schema, [(e, e.inputs[at]) for e in epochs])
        inputs.append(table if table.num_rows else None)
    clock = [(e.epoch, e.watermark_before, e.watermark) for e in epochs]
    states = {name: tables.get(name, EMPTY) for name in join.tables}
    return join.advance(states, inputs, clock, None)


def oracle(found: History) -> tuple[list[tuple[int, Row, Row]], int, int]:
    """The pairs with their epoch, in the order of the output; numbers of late rows, and of rows
    without event time."""
    live: tuple[list[tuple[int, int, Row]], ...] = ([], [])
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
    pairs = []
    for e, i, left in live[0]:
        for f, j, right in live[1]:
            assert left[2] is not None
            assert right[2] is not None
            if left[0] is None or left[0] != right[0]:
                continue
            if not left[2] - BEFORE <= right[2] <= left[2] + AFTER:
                continue
            place = (0, i, right[2], f, j) if f <= e else (1, j, left[2], e, i)
            pairs.append((max(e, f), place, left, right))
    in_order = sorted(pairs, key=lambda pair: pair[:2])
    return [(epoch, left, right) for epoch, _, left, right in in_order], late, untimed


def pairs_of(rows: pa.Table) -> list[tuple[int, Row, Row]]:
    """As the oracle gives them; the columns of `JoinOperator.output` for the join of JOIN."""
    found: list[tuple[int, Row, Row]] = []
    for row in rows.to_pylist():
        left = (row["__l0"], row["__l1"], _us(row["__l2"]))
        right = (row["__r0"], row["__r1"], _us(row["__r2"]))
        assert row["__l3"] == [left[1]] * (left[1] % 3)
        found.append((row["__e"], left, right))
    return found


def _us(time: Any) -> int:
    since: dt.timedelta = time - dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
    return since // dt.timedelta(microseconds=1)
