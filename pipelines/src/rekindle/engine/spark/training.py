"""Creates an AppCDS archive: `python -m rekindle.engine.spark.training OUT.jsa`.

This is what the JDK calls a training run: it runs a small topology in a session, as a task does in
its first seconds, and archives the classes that were loaded.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import yaml
from pyspark.sql import SparkSession

from rekindle.engine.model import State
from rekindle.engine.spark import cds, session
from rekindle.engine.spark.chain import SparkChain
from rekindle.engine.spark.jvm import JvmSpec, launch
from rekindle.streams.epochs import EpochInput
from rekindle.topology.compile import compile_topology
from rekindle.topology.load import load_spec

DUMP_TIMEOUT_S = 1800.0
"""Writing the archive takes 15 s on a quiet machine, at the JVM's exit; where others use the cores,
minutes. A JVM that is killed earlier has done all of it in vain."""

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


def make_archive(archive: Path) -> None:
    """Run the training topology in a separate JVM, and write the archive and its key, which
    identifies the JVM, flags and jars that it is for (`engine.spark.cds`). No other process may
    make the same archive meanwhile."""
    archive = archive.resolve()
    cds.key_file(archive).unlink(missing_ok=True)  # of an older one, which does not match any more
    directory = cds.training_directory(archive)
    shutil.rmtree(directory, ignore_errors=True)  # of a training run that was killed
    directory.mkdir(parents=True)
    made = directory / archive.name
    spec = session.jvm_spec()
    prepared = cds.with_unsigned_jars(spec, archive)
    dumping_spec = replace(
        prepared, archive_flags=(f"-XX:ArchiveClassesAtExit={made}", "-Xlog:cds=error")
    )
    session.use_jvm(
        launch(
            dumping_spec,
            directory=directory,
            environment={"SPARK_LOCAL_IP": "127.0.0.1"},
            ends_with_thread=True,
        )
    )
    spark = session.start_session("training", data_dir=directory)
    run_training_topology(spark)
    session.stop_session(spark, timeout_s=DUMP_TIMEOUT_S)
    if not made.exists():
        raise SystemExit(f"the JVM wrote no archive to {made} within {DUMP_TIMEOUT_S:.0f} s")
    _check_usable(prepared, made)
    made.replace(archive)
    cds.write_key(spec, prepared, archive)
    shutil.rmtree(directory, ignore_errors=True)


def run_training_topology(spark: SparkSession) -> None:
    topology = compile_topology(
        load_spec(yaml.safe_load(_TOPOLOGY)), "training", skip_cluster_checks=True
    )
    chain = SparkChain(topology.segments[0], topology, spark)
    state = State()
    for epoch in range(4):
        before, after = ((epoch + i) * 3_600_000_000 for i in (0, 1))
        rows = _rows(after)
        state = chain.process(state, [EpochInput(epoch, before, after, (rows,))]).state
    # A separate frame and a shuffle, as for queries that Spark plans again for each epoch, and for
    # many rows.
    spark.createDataFrame(_rows(0)).createOrReplaceTempView("rows")
    spark.sql("SELECT k, sum(v) AS s FROM rows GROUP BY k").toArrow()


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


def _check_usable(spec: JvmSpec, archive: Path) -> None:
    """With `-Xshare:on` a JVM refuses to start if the archive does not match."""
    flags = (*spec.flags, "-Xshare:on", f"-XX:SharedArchiveFile={archive}")
    command = [str(spec.java), *flags, "-cp", spec.class_path, "-version"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the JVM refuses the archive {archive}: {done.stderr or done.stdout}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("archive", type=Path, help="e.g. /opt/rekindle/spark.jsa")
    make_archive(parser.parse_args(arguments).archive)
    return 0


if __name__ == "__main__":
    sys.exit(main())
