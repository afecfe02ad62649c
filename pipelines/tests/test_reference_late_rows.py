"""Late rows and windows over windows, from a generator, compared with counts by numpy."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from rekindle.connectors import compare_sinks, open_source, read_sink
from rekindle.engine.model import DroppedRows
from rekindle.reference import run_reference
from rekindle.streams.epochs import NO_WATERMARK
from rekindle.topology.compile import compile_topology
from rekindle.topology.load import load_topology

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("shared_jvm")]

SECOND = 1_000_000
MANIFEST = """
apiVersion: rekindle.dev/v1alpha1
kind: StreamTopology
metadata: {name: late}
spec:
  checkpoint: {store: "file:///checkpoints"}
  sources:
  - name: rows
    schema: "k STRING, x DOUBLE, t TIMESTAMP"
    eventTime: {column: t, lateness: 500ms}
    generator:
      rowsPerSecond: 1000
      rows: 6000
      seed: 3
      columns:
        k: key(k, 20)
        x: null(0.1, normal(0, 1))
        t: timestamp(2020-01-01, 2s)
  operators:
  - name: seconds
    inputs: [rows]
    keyBy: [k]
    partitions: 3
    window: {size: 1s, groupBy: [k], aggregate: "count(*) AS n, sum(x) AS s"}
  - name: minutes
    inputs: [seconds]
    window: {size: 1m, aggregate: "sum(n) AS n"}
  queries:
  - {name: by-key, from: seconds, sink: {files: {url: "file:///out/by-key"}}}
  - {name: total, from: minutes, sink: {files: {url: "file:///out/total"}}}
"""


def rows_in_time() -> dict[int, int]:
    """Rows by second, without late ones: their window was open when their epoch began."""
    name, spec = load_topology(MANIFEST)
    node = compile_topology(spec, name, skip_cluster_checks=True).nodes["rows"]
    source = open_source(spec.sources[0], node, SECOND, Path("/nonexistent"))
    counts: dict[int, int] = {}
    watermark = NO_WATERMARK
    for epoch in range((source.last_epoch or 0) + 1):
        cut = source.cut(epoch)
        ends = (cut.rows.column("t").cast(pa.int64()).to_numpy() // SECOND + 1) * SECOND
        for end, n in zip(*np.unique(ends[ends > watermark], return_counts=True), strict=True):
            counts[int(end)] = counts.get(int(end), 0) + int(n)
        watermark = cut.watermark
    return counts


def test_late_rows_do_not_depend_on_the_size_of_calls(tmp_path: Path) -> None:
    name, spec = load_topology(MANIFEST)
    large = run_reference(spec, name, output=tmp_path / "large")
    small = run_reference(spec, name, output=tmp_path / "small", epochs_per_call=2)
    for query in ("by-key", "total"):
        urls = [f"file://{tmp_path}/{run}/{query}" for run in ("large", "small")]
        difference = compare_sinks(*urls)
        assert not difference, str(difference)
    wanted = rows_in_time()
    assert 0 < sum(wanted.values()) < 6000
    none = DroppedRows()
    dropped = {"seconds": DroppedRows(late=6000 - sum(wanted.values())), "minutes": none}
    assert large.dropped == small.dropped == dropped
    by_key = read_sink(f"file://{tmp_path}/large/by-key").to_pandas()
    got = by_key.groupby(by_key["window_end"].astype("int64"))["n"].sum()
    # In which unit pandas has times depends on its version; `wanted` is in microseconds.
    unit = 10 ** (len(str(got.index[0])) - len(str(min(wanted))))
    assert {int(end) // unit: int(n) for end, n in got.items()} == wanted
    total = read_sink(f"file://{tmp_path}/large/total")
    assert sum(total.column("n").to_pylist()) == sum(wanted.values())


def test_rows_are_late_as_with_one_partition_of_the_source(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    (tmp_path / "in").mkdir()
    for n in range(7):
        times = np.sort(rng.integers(0, 30_000, 400)) + rng.integers(-3000, 1, 400)
        rows = (
            {"k": f"k{rng.integers(20)}", "x": rng.normal(), "t": f"{np.datetime64(int(t), 'ms')}Z"}
            for t in times
        )
        (tmp_path / f"in/{n}.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    generator = MANIFEST[MANIFEST.index("    generator:") : MANIFEST.index("  operators:")]

    def run(partitions: int) -> dict[str, DroppedRows]:
        options = f'url: "file://{tmp_path}/in/*.json", format: json, rowsPerSecond: 200'
        files = f"    partitions: {partitions}\n    files: {{{options}}}\n"
        name, spec = load_topology(MANIFEST.replace(generator, files))
        return run_reference(spec, name, output=tmp_path / f"{partitions}").dropped

    dropped = run(1)
    assert dropped["seconds"].late > 0
    assert run(3) == dropped
    for query in ("by-key", "total"):
        difference = compare_sinks(*(f"file://{tmp_path}/{n}/{query}" for n in (1, 3)))
        assert not difference, str(difference)
