"""The training run of the AppCDS archive: what a task does in its first seconds."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal

import pyarrow as pa
import yaml
from pyspark.sql import SparkSession

from rekindle.engine.model import EpochInput, State
from rekindle.engine.spark.chain import SparkChain
from rekindle.topology.compile import compile_topology
from rekindle.topology.load import load_spec

_TOPOLOGY = """
checkpoint: {store: "file:///tmp/x"}
sources:
- name: rows
  schema: "k STRING, v DOUBLE, n BIGINT, d DATE, c DECIMAL(10,2), a ARRAY<STRING>, t TIMESTAMP"
  eventTime: {column: t}
  files: {url: "file:///tmp/in", format: parquet, orderBy: t, rowsPerSecond: 1}
operators:
- name: clean
  inputs: [rows]
  sql: "SELECT *, upper(k) AS u, v * 2 AS w FROM rows WHERE v > 0 AND k LIKE '%'"
- name: hourly
  inputs: [clean]
  window:
    size: 1h
    slide: 30m
    groupBy: [k]
    aggregate: "count(*) AS n, avg(v) AS m, max(v) AS x, sum(c) AS s"
- name: alarms
  inputs: [hourly]
  sql: "SELECT k, window_end, round(m, 2) AS m FROM hourly WHERE n > 0"
queries:
- {name: q, from: alarms, sink: {files: {url: "file:///tmp/y"}}}
"""


def train(session: SparkSession) -> None:
    topology = compile_topology(load_spec(yaml.safe_load(_TOPOLOGY)), "training", local=True)
    chain = SparkChain(topology.segments[0], topology, session)
    state = State()
    for epoch in range(4):
        before, after = ((epoch + i) * 3_600_000_000 for i in (0, 1))
        rows = _rows(after)
        state = chain.process(state, [EpochInput(epoch, before, after, (rows,))]).state


def _rows(time: int) -> pa.Table:
    columns = {
        "k": ["a", "b"],
        "v": [1.0, 2.0],
        "n": [1, 2],
        "d": [datetime(2020, 1, 1, tzinfo=UTC).date()] * 2,
        "c": pa.array([Decimal("1.00"), Decimal("2.50")], pa.decimal128(10, 2)),
        "a": [["x"], []],
        "t": pa.array([time, time], pa.timestamp("us", "UTC")),
    }
    return pa.table(columns)
