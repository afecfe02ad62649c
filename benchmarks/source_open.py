"""Opening a `files` source of Parquet that is in order, and cutting all of its epochs.

.venv/bin/python benchmarks/source_open.py [--rows N]

Parquet stays where it is; "copy" is what is done with input that is not in order. CPU, because
input and output of a machine under load say little.

Targets: a million rows a second, and no rows on the task's disk.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rekindle.connectors import files_preparation
from rekindle.connectors.registry import open_source
from rekindle.connectors.source import ReplayableSource
from rekindle.topology.compile import compile_topology
from rekindle.topology.load import load_spec
from rekindle.topology.model import Node
from rekindle.topology.spec import SourceSpec
from rekindle_testing.harness.report import Row, load_average, report

T = TypeVar("T")

FILES = 4
SECOND_US = 1_000_000
TARGET = 1_000_000


def write(directory: Path, rows: int) -> Node:
    rng = np.random.default_rng(7)
    for n in range(FILES):
        times = np.arange(n * rows, (n + 1) * rows, FILES) * 1000
        columns = {
            "t": pa.array(times).cast(pa.timestamp("us", "UTC")),
            "v": pa.array(rng.standard_normal(len(times))),
            "k": pa.array(np.char.add("key-", rng.integers(0, 9999, len(times)).astype(str))),
        }
        pq.write_table(pa.table(columns), directory / f"{n}.parquet", row_group_size=100_000)
    document = {
        "checkpoint": {"store": f"file://{directory}/store"},
        "sources": [
            {
                "name": "rows",
                "schema": "t TIMESTAMP, v DOUBLE, k STRING",
                "eventTime": {"column": "t"},
                "files": {
                    "url": f"file://{directory}/*.parquet",
                    "format": "parquet",
                    "orderBy": "t",
                    "speedup": 1,
                },
            }
        ],
        "queries": [
            {"name": "q", "from": "rows", "sink": {"files": {"url": f"file://{directory}/out"}}}
        ],
    }
    return compile_topology(load_spec(document), "bench", skip_cluster_checks=True).nodes["rows"]


def measure(node: Node, work: Path) -> dict[str, float]:
    assert isinstance(node.spec, SourceSpec)
    spec = node.spec

    def opened() -> ReplayableSource:
        return open_source(spec, node, SECOND_US, work)

    def cut_all() -> None:
        assert source.last_epoch is not None
        for epoch in range(source.last_epoch + 1):
            source.cut(epoch)

    first_s, source = _timed(opened)
    again_s, source = _timed(opened)
    cuts_s, _ = _timed(cut_all)
    on_disk = sum(path.stat().st_size for path in work.iterdir())
    source.close()
    return {
        "open s": round(first_s, 2),
        "open again s": round(again_s, 3),
        "cuts s": round(cuts_s, 2),
        "disk MB": round(on_disk / 1e6, 1),
    }


def _timed(action: Callable[[], T]) -> tuple[float, T]:
    begin = time.process_time()
    result = action()
    return time.process_time() - begin, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=2_000_000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        node = write(directory, arguments.rows)
        with mock.patch.object(files_preparation, "_index_in_place", return_value=None):
            copied = measure(node, directory / "work-copy")
        in_place = measure(node, directory / "work")
    fast = arguments.rows / in_place["open s"] >= TARGET
    report(
        "source_open",
        [
            Row("copy", copied, None, None),
            Row("in place", in_place, TARGET, fast and in_place["disk MB"] < 1),
            load_average(),
        ],
    )


if __name__ == "__main__":
    main()
