"""Start time of Spark, with and without AppCDS, and with PySpark's own launcher.

.venv/bin/python benchmarks/spark_start.py [--runs 3]

Variants: `pyspark` (PySpark's launcher), `direct` (Rekindle's `start_session` without an archive of
AppCDS) and `appcds` (with one), interleaved. Ready: the session has started and a first query has
returned. CPU seconds are of the JVM (user and system), which other work on the machine inflates
less than the clock. Target: ready in 4 s with AppCDS (median), alone on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rekindle_testing.harness.report import Measurement, load_average, report

TARGET_S = 4.0


def measure_here(variant: str, archive: str, directory: str) -> None:
    """In a process of its own: print seconds as JSON."""
    begin = time.monotonic()
    times = {}
    if variant == "pyspark":
        spark = _pyspark_session(directory)
    else:
        from rekindle.engine.spark.session import start_session

        cds_archive = Path(archive) if variant == "appcds" else None
        spark = start_session("start", cds_archive=cds_archive, data_dir=Path(directory))
    times["session"] = time.monotonic() - begin
    import pyarrow as pa

    rows = pa.table({"k": ["a", "b"], "v": [1.0, 2.0]})
    spark.createDataFrame(rows).createOrReplaceTempView("v")
    spark.sql("SELECT k, sum(v) AS s FROM v GROUP BY k").toArrow()
    times["ready"] = time.monotonic() - begin
    times["cpu"] = _jvm_cpu_s()
    print("RESULT", json.dumps(times), flush=True)
    os._exit(0)  # the JVM ends with us


def _pyspark_session(directory: str) -> Any:
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
    builder = builder.config("spark.driver.memory", "512m").config("spark.local.dir", directory)
    return builder.getOrCreate()


def _jvm_cpu_s() -> float:
    import psutil

    processes = psutil.Process().children(recursive=True)
    return sum(sum(p.cpu_times()[:4]) for p in processes)  # user and system, also of children


def measure(variant: str, archive: Path) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, __file__, "--measure-here", variant, str(archive), directory]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    line = next(x for x in done.stdout.splitlines() if x.startswith("RESULT"))
    return dict(json.loads(line.removeprefix("RESULT")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--archive", type=Path, default=Path("build/spark.jsa"))
    parser.add_argument("--measure-here", nargs=3, metavar=("VARIANT", "ARCHIVE", "DIRECTORY"))
    arguments = parser.parse_args()
    if arguments.measure_here:
        measure_here(*arguments.measure_here)
    if not arguments.archive.exists():
        make = [sys.executable, "-m", "rekindle.engine.spark.training", str(arguments.archive)]
        subprocess.run(make, check=True, capture_output=True)
    variants = ("pyspark", "direct", "appcds")
    results: dict[str, list[dict[str, float]]] = {v: [] for v in variants}
    for _ in range(arguments.runs):
        for variant in variants:
            results[variant].append(measure(variant, arguments.archive.resolve()))
    report("spark_start", [*(summary(v, runs) for v, runs in results.items()), load_average()])


def summary(variant: str, runs: list[dict[str, float]]) -> Measurement:
    """Medians, and the best of the runs, which other work on the machine delayed least."""
    middle = {k: statistics.median(r[k] for r in runs) for k in runs[0]}
    values = {
        "session s": middle["session"],
        "ready s": middle["ready"],
        "best s": min(r["ready"] for r in runs),
        "JVM CPU s": middle["cpu"],
    }
    rounded = {what: round(s, 2) for what, s in values.items()}
    has_target = variant == "appcds"
    met = middle["ready"] <= TARGET_S if has_target else None
    return Measurement(variant, rounded, TARGET_S if has_target else None, met)


if __name__ == "__main__":
    main()
