"""Runs in an image, from standard input: `python - IMAGE`. Prints what it finds as a line of JSON.

Imports only what the image has, nothing of the test platform.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_DIRECTORIES = ("/", "/etc", "/opt/rekindle", "/var/lib/rekindle-task", "/var/lib/rekindle", "/tmp")
_DATA = Path("/var/lib/rekindle-task")
_SPEC: dict[str, Any] = {
    "checkpoint": {"store": "file:///tmp/checkpoints"},
    "sources": [
        {
            "name": "rows",
            "schema": "k STRING, v DOUBLE, t TIMESTAMP",
            "eventTime": {"column": "t"},
            "generator": {
                "rowsPerSecond": 10,
                "columns": {"k": "key(k, 2)", "v": "uniform(-1, 1)", "t": "timestamp"},
            },
        }
    ],
    "operators": [
        {"name": "clean", "inputs": ["rows"], "sql": "SELECT * FROM rows WHERE v > 0"},
        {
            "name": "sums",
            "inputs": ["clean"],
            "window": {"size": "1h", "groupBy": ["k"], "aggregate": "sum(v) AS s"},
        },
    ],
    "queries": [{"name": "q", "from": "sums", "sink": {"files": {"url": "file:///tmp/out"}}}],
}


def operator() -> dict[str, Any]:
    """Import the operator and the watchdog, read the packaged CRD, and compile a topology."""
    began = time.monotonic()
    for module in ("rekindle_operator.__main__", "rekindle_operator.watchdog.__main__"):
        importlib.import_module(module)
    from rekindle.topology.compile import compile_topology
    from rekindle.topology.load import load_spec
    from rekindle_operator.crd_check import packaged_schema

    import_s = time.monotonic() - began
    compile_topology(load_spec(_SPEC), "image", skip_cluster_checks=True)
    packaged_schema()
    return {"import_s": import_s, "version": version("rekindle-operator")}


def pipelines() -> dict[str, Any]:
    """Compute an epoch with Spark, started from the image's AppCDS archive as a task starts it."""
    began = time.monotonic()
    archive = Path(os.environ["REKINDLE_CDS_ARCHIVE"])
    from rekindle.engine.spark.session import current_jvm, start_session, stop_session

    spark = start_session("image", cds_archive=archive, data_dir=_DATA)
    session_s = time.monotonic() - began
    rows = _epoch(spark)
    epoch_s = time.monotonic() - began
    jvm = current_jvm()
    # A JVM that cannot use the archive starts without it, and prints no warning.
    mapped = jvm is not None and str(archive) in Path(f"/proc/{jvm.process.pid}/maps").read_text()
    stop_session(spark)
    for module in (
        "s3fs",
        "gcsfs",
        "pyarrow.parquet",
        "rekindle.cli",
        "rekindle.connectors.kafka_source",
        "rekindle.task.runtime",
    ):
        importlib.import_module(module)
    return {
        "session_s": session_s,
        "epoch_s": epoch_s,
        "rows": rows,
        "archive_mapped": mapped,
        "archive_bytes": archive.stat().st_size,
        "version": version("rekindle"),
    }


def _epoch(spark: Any) -> list[list[Any]]:
    """Process one epoch whose watermark closes the window of its rows; returns the result."""
    import pyarrow as pa

    from rekindle.engine.model import State
    from rekindle.engine.spark.chain import SparkChain
    from rekindle.streams.epochs import EpochInput
    from rekindle.topology.compile import compile_topology
    from rekindle.topology.load import load_spec

    topology = compile_topology(load_spec(_SPEC), "image", skip_cluster_checks=True)
    chain = SparkChain(topology.segments[-1], topology, spark)
    hour = 3_600_000_000
    times = pa.array([1, 2, 3, 4, 5], pa.timestamp("us", "UTC"))
    columns = {"k": ["a", "a", "b", "b", "b"], "v": [1.0, 2.0, 3.0, 4.0, -9.0], "t": times}
    rows = pa.table(columns)
    epoch = EpochInput(epoch=0, watermark_before=0, watermark=hour, inputs=(rows,))
    (output,) = chain.process(State(), [epoch]).outputs
    return sorted([row["k"], row["s"]] for row in output.rows.to_pylist())


def common(file_sizes: Iterable[int]) -> dict[str, Any]:
    spark = find_spec("pyspark")
    return {
        "user": os.getuid(),
        "read_only": bool(os.statvfs("/").f_flag & os.ST_RDONLY),
        "writable": sorted(d for d in _DIRECTORIES if os.access(d, os.W_OK)),
        "process_1": Path("/proc/1/comm").read_text().strip(),
        "java": shutil.which("java"),
        "pyspark": spark and spark.origin,
        "bytes": sum(file_sizes),
    }


def _sizes() -> Iterator[int]:
    """Of all files of the image: those on the root's file system."""
    device = Path("/").stat().st_dev
    seen: set[int] = set()
    for directory, below, files in os.walk("/"):
        below[:] = [d for d in below if os.lstat(f"{directory}/{d}").st_dev == device]
        for name in files:
            stat = os.lstat(f"{directory}/{name}")
            if stat.st_dev == device and stat.st_ino not in seen:
                seen.add(stat.st_ino)
                yield stat.st_size


def main() -> int:
    of_image = {"operator": operator, "pipelines": pipelines}[sys.argv[1]]()
    print("FINDINGS " + json.dumps({**of_image, **common(_sizes())}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
