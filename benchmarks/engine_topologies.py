"""Topologies and rows that the engine's benchmarks share."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import yaml

from rekindle.engine.model import EpochInput
from rekindle.topology.compile import compile_topology
from rekindle.topology.load import load_spec
from rekindle.topology.model import Topology

MINUTE = 60_000_000
GROUPS = 1_000
SCHEMA = "k STRING, v DOUBLE, n BIGINT, t TIMESTAMP"
SQL = "SELECT k, t, v * 1.5 AS v, upper(k) AS u, n % 7 AS m FROM rows WHERE v > -1"
AGGREGATE = "count(*) AS rows, sum(v) AS total, avg(v) AS mean, max(v) AS high"
WINDOW = f"{{size: 5m, groupBy: [k], aggregate: '{AGGREGATE}'}}"
OPERATORS = {
    "sql": f'- {{name: last, inputs: [rows], sql: "{SQL}"}}',
    "window": f"- {{name: last, inputs: [rows], window: {WINDOW}}}",
}


def topology(kind: str) -> Topology:
    text = f"""
checkpoint: {{store: "file:///tmp/store"}}
sources:
- name: rows
  schema: "{SCHEMA}"
  eventTime: {{column: t}}
  files: {{url: "file:///tmp/in", format: parquet, orderBy: t, rowsPerSecond: 1}}
operators:
{OPERATORS[kind]}
queries:
- {{name: q, from: last, sink: {{files: {{url: "file:///tmp/sink"}}}}}}
"""
    return compile_topology(load_spec(yaml.safe_load(text)), "bench", local=True)


def epoch(number: int, rows: int, rng: np.random.Generator) -> EpochInput:
    """A minute of event time; the watermark follows a minute behind."""
    start = number * MINUTE
    table = pa.table(
        {
            "k": pa.array(np.char.add("key-", rng.integers(0, GROUPS, rows).astype(str))),
            "v": rng.standard_normal(rows) * 1000,
            "n": rng.integers(0, 1_000_000, rows),
            "t": pa.array(start + rng.integers(0, MINUTE, rows)).cast(pa.timestamp("us", "UTC")),
        }
    )
    return EpochInput(number, start - 2 * MINUTE, start - MINUTE, (table,))
