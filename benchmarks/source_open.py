"""Opening a `files` source of input that is in order, and cutting all of its epochs.

.venv/bin/python benchmarks/source_open.py [--rows N]

Input that is in order stays where it is; "copy" is what is done with input that is not in order.
CPU, because input and output of a machine under load say little.

Targets for Parquet: a million rows a second, and no rows on the task's disk.
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
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from rekindle.connectors import files_preparation
from rekindle.connectors.registry import open_source
from rekindle.connectors.source import ReplayableSource
from rekindle.topology.compile import compile_topology
from rekindle.topology.load import load_spec
from rekindle.topology.model import Node
from rekindle.topology.spec import SourceSpec
from rekindle_testing.harness.report import Measurement, load_average, report

T = TypeVar("T")

FILES = 4
FORMATS = ("parquet", "csv", "json")
SECOND_US = 1_000_000
TARGET = 1_000_000


def make_source(directory: Path, rows: int, format: str) -> Node:
    rng = np.random.default_rng(7)
    for n in range(FILES):
        times = np.arange(n * rows, (n + 1) * rows, FILES) * 1000
        columns = {
            "t": pa.array(times).cast(pa.timestamp("us", "UTC")),
            "v": pa.array(rng.standard_normal(len(times))),
            "k": pa.array(np.char.add("key-", rng.integers(0, 9999, len(times)).astype(str))),
        }
        write_file(pa.table(columns), directory / f"{n}.{format}")
    document = {
        "checkpoint": {"store": f"file://{directory}/store"},
        "sources": [
            {
                "name": "rows",
                "schema": "t TIMESTAMP, v DOUBLE, k STRING",
                "eventTime": {"column": "t"},
                "files": {
                    "url": f"file://{directory}/*.{format}",
                    "format": format,
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


def write_file(table: pa.Table, path: Path) -> None:
    match path.suffix:
        case ".parquet":
            pq.write_table(table, path, row_group_size=100_000)
        case ".csv":
            pa_csv.write_csv(table, path, pa_csv.WriteOptions(quoting_style="none"))
        case _:
            times = np.datetime_as_string(table.column("t").cast(pa.timestamp("us")).to_numpy())
            values = zip(
                times, table.column("v").to_pylist(), table.column("k").to_pylist(), strict=True
            )
            with path.open("w") as file:
                file.writelines(f'{{"t": "{t}Z", "v": {v!r}, "k": "{k}"}}\n' for t, v, k in values)


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
    rows: list[Measurement] = []
    for format in FORMATS:
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            node = make_source(directory, arguments.rows, format)
            # None: it cannot be read in place, so it is copied to the work directory.
            with mock.patch.object(files_preparation, "_index_in_place", return_value=None):
                copied = measure(node, directory / "work-copy")
            in_place = measure(node, directory / "work")
        rows.append(Measurement(f"{format}, copy", copied, None, None))
        if format == "parquet":
            fast = arguments.rows / in_place["open s"] >= TARGET
            met = fast and in_place["disk MB"] < 1
            rows.append(Measurement("parquet, in place", in_place, TARGET, met))
        else:
            rows.append(Measurement(f"{format}, in place", in_place, None, None))
    report("source_open", [*rows, load_average()])


if __name__ == "__main__":
    main()
