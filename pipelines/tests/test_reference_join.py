"""A join with a condition, in two partitions, and a window behind it: compared with every row
against every row in plain Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rekindle.connectors import compare_sinks, open_source, read_sink
from rekindle.reference import run_reference
from rekindle.streams.epochs import NO_WATERMARK
from rekindle.topology.compile import compile_topology
from rekindle.topology.load import load_topology

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("shared_jvm")]

SECOND = 1_000_000
MANIFEST = """
apiVersion: rekindle.dev/v1alpha1
kind: StreamTopology
metadata: {name: payments}
spec:
  checkpoint: {store: "file:///checkpoints"}
  sources:
  - name: orders
    schema: "id BIGINT, amount DOUBLE, at TIMESTAMP"
    eventTime: {column: at, lateness: 500ms}
    generator:
      rowsPerSecond: 300
      rows: 2400
      seed: 3
      columns: {id: "integer(1, 200)", amount: "uniform(0, 10)", at: "timestamp(2020-01-01, 2s)"}
  - name: paid
    schema: "orderId BIGINT, amount DOUBLE, time TIMESTAMP"
    eventTime: {column: time, lateness: 500ms}
    generator:
      rowsPerSecond: 200
      rows: 1600
      seed: 4
      columns:
        orderId: "integer(1, 200)"
        amount: "uniform(0, 10)"
        time: "timestamp(2020-01-01, 1s)"
  operators:
  - name: pairs
    inputs: [orders, paid]
    partitions: 2
    join:
      "on": "orders.id = paid.orderId AND paid.amount > orders.amount"
      before: 300ms
      after: 2s
      select: "orders.id, orders.at, paid.amount - orders.amount AS more, paid.time AS time"
  - name: seconds
    inputs: [pairs]
    window: {size: 1s, aggregate: "count(*) AS n"}
  queries:
  - {name: found, from: pairs, sink: {files: {url: "file:///out/found"}}}
  - {name: counted, from: seconds, sink: {files: {url: "file:///out/counted"}}}
"""


def expected_pairs() -> list[tuple[int, int, int, float]]:
    """Order, both times, and the difference of the amounts."""
    name, spec = load_topology(MANIFEST)
    compiled = compile_topology(spec, name, skip_cluster_checks=True)
    sources = [
        open_source(source, compiled.nodes[source.name], SECOND, Path("/nonexistent"))
        for source in spec.sources
    ]
    live: tuple[list[Any], list[Any]] = ([], [])
    before = NO_WATERMARK
    for epoch in range(max(source.last_epoch or 0 for source in sources) + 2):
        cuts = [source.cut(epoch) for source in sources]
        for rows, cut, time in zip(live, cuts, ("at", "time"), strict=True):
            times = cut.rows.column(time).cast(pa.int64()).to_pylist()
            found = zip(times, cut.rows.to_pylist(), strict=True)
            rows += [(t, *row.values()) for t, row in found if t >= before]
        before = max(before, min(cut.watermark for cut in cuts))
    return sorted(
        (order, t, u, paid - amount)
        for t, order, amount, _ in live[0]
        for u, of_order, paid, _ in live[1]
        if order == of_order and t - 300_000 <= u <= t + 2 * SECOND and paid > amount
    )


def test_a_join_equals_every_row_against_every_row(tmp_path: Path) -> None:
    name, spec = load_topology(MANIFEST)
    large = run_reference(spec, name, output=tmp_path / "large")
    run_reference(spec, name, output=tmp_path / "small", epochs_per_call=2)
    for query in ("found", "counted"):
        urls = [f"file://{tmp_path}/{run}/{query}" for run in ("large", "small")]
        difference = compare_sinks(*urls)
        assert not difference, str(difference)
    rows = read_sink(f"file://{tmp_path}/large/found")
    times = (rows.column(time).cast(pa.int64()).to_pylist() for time in ("at", "time"))
    columns = (rows["id"].to_pylist(), *times, rows["more"].to_pylist())
    found = sorted(zip(*columns, strict=True))
    expected = expected_pairs()
    assert found == expected
    assert len(expected) > 1000
    assert large.dropped["pairs"].late > 0
    counted = read_sink(f"file://{tmp_path}/large/counted")
    assert sum(counted["n"].to_pylist()) == len(expected)
    assert large.dropped["seconds"].late == 0
