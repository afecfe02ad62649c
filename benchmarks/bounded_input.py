"""A bounded input in one process: `rekindle run`, plain PySpark and DuckDB, the same aggregation.

.venv/bin/python benchmarks/bounded_input.py [--rows 5000000] [--groups 1000 100000] [--rounds 3]

A day of rows in the order of their event time, in one file, is aggregated in tumbling windows of an
hour by key and written as Parquet. `rekindle run` cuts the day into 144 epochs, and writes one file
for each epoch in which windows close; each of its files is flushed to disk. PySpark is a batch job
on DataFrames.

Each engine is a process, from its start to its end; they take turns. They have one task thread
(`local[1]`, `threads=1`) and a gigabyte of memory: PySpark's JVM all of it, `rekindle run` divided
as in a task's pod (docs/design/engine.md#memory), DuckDB as its limit. `start s` is the same
process with 1,000 rows in that day: the start of the JVM, Spark's plans and their compilation;
"started" is without it. CPU is of a whole process tree; memory is the largest sum of its resident
memory, sampled. Times are the best of the rounds, which other work on the machine delayed least.

The results have to be equal, sums of doubles up to a relative error of 1e-9. Target: at least the
speed of PySpark, with and without `start s`; a start that took longer than a whole run, on a busy
machine, misses it. DuckDB has no target: it shows what one core can do.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from rekindle.engine.spark.jvm import find_java
from rekindle_testing.harness.report import Measurement, format_row, load_average, report

TARGET_RATIO = 1.0
"""The least speed, as a multiple of PySpark's."""
TOLERANCE = 1e-9
FIRST_US = 1_704_067_200_000_000
"""2024-01-01."""
DAY_US = 86_400_000_000
EPOCHS = 144
START_ROWS = 1_000
WRITTEN_ROWS = 100_000
"""Rows that are generated and written at once: a row group."""
SAMPLE_S = 0.05
SEED = 7
SUBJECT, BASELINE = "rekindle", "pyspark"
FORMATS = ("parquet", "csv")
TIMES, SUMS = ("window_start", "window_end"), ("total", "mean")
RESULT = (*TIMES, "k", "rows", *SUMS, "high")

TOPOLOGY = """
apiVersion: rekindle.dev/v1alpha1
kind: StreamTopology
metadata: {{name: bounded}}
spec:
  epochInterval: 1s
  checkpoint: {{store: "file://{directory}/store"}}
  sources:
  - name: rows
    schema: "t TIMESTAMP, k STRING, v DOUBLE, n BIGINT"
    eventTime: {{column: t}}
    files: {{url: "file://{input}", format: {format}, orderBy: t, speedup: {speedup}}}
  operators:
  - name: hourly
    inputs: [rows]
    window:
      size: 1h
      groupBy: [k]
      aggregate: "count(*) AS rows, sum(v) AS total, avg(v) AS mean, max(n) AS high"
  queries:
  - {{name: q, from: hourly, sink: {{files: {{url: "file://{directory}/unused"}}}}}}
"""

PYSPARK = """
import sys
from pyspark.sql import SparkSession, functions as F

source, format, out = sys.argv[1:]
spark = (
    SparkSession.builder.master("local[1]")
    .config("spark.driver.memory", "1g")
    .config("spark.sql.session.timeZone", "UTC")
    .config("spark.ui.enabled", "false")
    .getOrCreate()
)
reader = spark.read.schema("t TIMESTAMP, k STRING, v DOUBLE, n BIGINT")
rows = reader.csv(source, header=True) if format == "csv" else reader.parquet(source)
result = rows.groupBy(F.window("t", "1 hour"), "k").agg(
    F.count("*").alias("rows"),
    F.sum("v").alias("total"),
    F.avg("v").alias("mean"),
    F.max("n").alias("high"),
)
result.select("window.start", "window.end", "k", "rows", "total", "mean", "high").toDF(
    "window_start", "window_end", "k", "rows", "total", "mean", "high"
).write.parquet(out)
spark.stop()
"""

DUCKDB = """
import sys
from pathlib import Path
import duckdb

source, format, out = sys.argv[1:]
Path(out).mkdir()
database = duckdb.connect(
    config={"threads": 1, "memory_limit": "1GiB", "temp_directory": out + ".tmp"}
)
columns = "{t: 'TIMESTAMP', k: 'VARCHAR', v: 'DOUBLE', n: 'BIGINT'}"
read = {
    "csv": f"read_csv('{source}', header = true, columns = {columns})",
    "parquet": f"read_parquet('{source}')",
}[format]
database.execute(f'''
    COPY (
        SELECT make_timestamp(hour * 3600000000) AS window_start,
               make_timestamp((hour + 1) * 3600000000) AS window_end,
               k, count(*) AS rows, sum(v) AS total, avg(v) AS mean, max(n) AS high
        FROM (SELECT epoch_us(t) // 3600000000 AS hour, k, v, n FROM {read})
        GROUP BY hour, k
    ) TO '{out}/0.parquet' (FORMAT parquet)
''')
"""


@dataclass(frozen=True, slots=True)
class Case:
    """An input: the format of its file, and the numbers of its groups and rows."""

    format: str
    groups: int
    rows: int

    @property
    def name(self) -> str:
        return f"{self.format}, {self.groups:,} groups"


@dataclass(frozen=True, slots=True)
class Run:
    seconds: float
    cpu_s: float
    memory_mb: float


Runs = dict[str, list[Run]]
"""By engine."""
Command = Callable[[Path, Case, Path], Sequence[str]]
"""Of an engine: the command that aggregates an input into a directory that does not exist."""


def rekindle(source: Path, case: Case, out: Path) -> Sequence[str]:
    topology = out.with_suffix(".yaml")
    speedup = DAY_US // 1_000_000 // EPOCHS
    text = TOPOLOGY.format(directory=out.parent, input=source, format=case.format, speedup=speedup)
    topology.write_text(text)
    command = [str(Path(sys.executable).with_name("rekindle")), "run", str(topology)]
    log = str(out.with_suffix(".log"))
    return [*command, "--output", str(out), "--master", "local[1]", "--spark-log", log]


def _program(text: str) -> Command:
    def command(source: Path, case: Case, out: Path) -> Sequence[str]:
        return [sys.executable, "-c", text, str(source), case.format, str(out)]

    return command


ENGINES: Mapping[str, Command] = {
    "rekindle": rekindle,
    "pyspark": _program(PYSPARK),
    "duckdb": _program(DUCKDB),
}


def batches(rows: int, groups: int) -> Iterator[pa.Table]:
    """The input, in portions: event times spread evenly over the day, in order."""
    rng = np.random.default_rng([SEED, groups])
    keys = pa.array([f"key-{n}" for n in range(groups)])
    for first in range(0, rows, WRITTEN_ROWS):
        count = min(WRITTEN_ROWS, rows - first)
        times = FIRST_US + np.arange(first, first + count) * DAY_US // rows
        yield pa.table(
            {
                "t": pa.array(times).cast(pa.timestamp("us", "UTC")),
                "k": keys.take(pa.array(rng.integers(0, groups, count))),
                "v": rng.random(count) * 1000,
                "n": rng.integers(0, 1_000_000, count),
            }
        )


def write_inputs(directory: Path, rows: int, groups: int, formats: Sequence[str]) -> None:
    """The same rows in each format. Times in CSV have no zone: all engines read them as UTC."""
    directory.mkdir(exist_ok=True)
    parquet, csv = None, None
    for table in batches(rows, groups):
        if "parquet" in formats:
            parquet = parquet or pq.ParquetWriter(directory / "rows.parquet", table.schema)
            parquet.write_table(table)
        if "csv" in formats:
            texts = pc.strftime(table.column("t"), "%Y-%m-%d %H:%M:%S")
            table = table.set_column(0, "t", texts)
            csv = csv or pa_csv.CSVWriter(directory / "rows.csv", table.schema)
            csv.write_table(table)
    for writer in (parquet, csv):
        if writer is not None:
            writer.close()


def run(command: Sequence[str], log: Path) -> Run:
    """Raises RuntimeError with the last lines of its output if it fails."""
    environment = {**os.environ, "JAVA_HOME": str(find_java().parent.parent)}
    with log.open("wb") as output:
        begin = time.perf_counter()
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=log.parent
        )
        cpu_s, most_bytes = _watch(process)
        seconds = time.perf_counter() - begin
    if process.returncode:
        raise RuntimeError(f"{command[0]} failed: {log.read_text()[-2000:]}")
    return Run(seconds, cpu_s, most_bytes / 1e6)


def _watch(process: subprocess.Popen[bytes]) -> tuple[float, int]:
    """CPU seconds and the most resident bytes of a process with its children, until it ends."""
    cpu_s: dict[int, float] = {}
    most = 0
    while True:
        resident = 0
        for one in _tree(process.pid):
            with contextlib.suppress(psutil.Error), one.oneshot():
                used = one.cpu_times()
                cpu_s[one.pid] = used.user + used.system
                resident += one.memory_info().rss
        most = max(most, resident)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(SAMPLE_S)
            return sum(cpu_s.values()), most


def _tree(pid: int) -> list[psutil.Process]:
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.Error:
        return []


def read_result(out: Path) -> pa.Table:
    """All rows of an output, in one order."""
    files = [p for p in sorted(out.rglob("*.parquet")) if not p.name.startswith((".", "_"))]
    table = pa.concat_tables([pq.read_table(file) for file in files], promote_options="permissive")
    times = {name: table.column(name).cast(pa.timestamp("us")) for name in TIMES}
    columns = {name: times.get(name, table.column(name)) for name in RESULT}
    return pa.table(columns).sort_by([("window_start", "ascending"), ("k", "ascending")])


def require_equal(one: pa.Table, other: pa.Table, what: str) -> None:
    if one.num_rows != other.num_rows:
        raise RuntimeError(f"{what}: {one.num_rows:,} rows and {other.num_rows:,}")
    for name in RESULT:
        left, right = one.column(name), other.column(name)
        if name in SUMS:
            same = np.allclose(left.to_numpy(), right.to_numpy(), rtol=TOLERANCE, atol=0)
        else:
            same = left.cast(right.type).equals(right)
        if not same:
            raise RuntimeError(f"{what}: column {name} differs")


def compare(directory: Path, case: Case, engines: Sequence[str], rounds: int) -> list[Measurement]:
    """The rows of the report. Raises RuntimeError if an engine fails, or results differ."""
    source, small = (directory / kind / f"rows.{case.format}" for kind in ("all", "start"))
    runs: Runs = {name: [] for name in engines}
    starts: Runs = {name: [] for name in engines}
    for n in range(rounds):
        results: dict[str, pa.Table] = {}
        for name in engines:
            with tempfile.TemporaryDirectory(dir=directory) as place:
                out, log = Path(place) / "out", Path(place) / "output.txt"
                starts[name].append(run(ENGINES[name](small, case, out), log))
            with tempfile.TemporaryDirectory(dir=directory) as place:
                out, log = Path(place) / "out", Path(place) / "output.txt"
                runs[name].append(run(ENGINES[name](source, case, out), log))
                if not n:
                    results[name] = read_result(out)
        for name in [name for name in results if name != engines[0]]:
            what = f"{case.name}: results of {engines[0]} and {name}"
            require_equal(results[engines[0]], results[name], what)
    return [summary(case, name, runs, starts) for name in engines]


def summary(case: Case, name: str, runs: Runs, starts: Runs) -> Measurement:
    def whole(engine: str) -> float:
        return min(run.seconds for run in runs[engine])

    def started(engine: str) -> float | None:
        """Seconds without the start; None if it took longer than a whole run: a busy machine."""
        seconds = whole(engine) - min(run.seconds for run in starts[engine])
        return seconds if seconds > 0 else None

    values = {
        "s": round(whole(name), 1),
        "start s": round(min(run.seconds for run in starts[name]), 1),
        "1000 rows/s": round(case.rows / whole(name) / 1000),
        "CPU s": round(min(run.cpu_s for run in runs[name]), 1),
        "start CPU s": round(min(run.cpu_s for run in starts[name]), 1),
        "MB": round(max(run.memory_mb for run in runs[name])),
    }
    what, ours = f"{case.name}, {name}", started(name)
    if ours is not None:
        values["1000 rows/s started"] = round(case.rows / ours / 1000)
    if BASELINE not in runs or name == BASELINE:
        return Measurement(what, values)
    theirs = started(BASELINE)
    values["x PySpark"] = round(whole(BASELINE) / whole(name), 2)
    if ours is not None and theirs is not None:
        values["x PySpark without start"] = round(theirs / ours, 2)
    if name != SUBJECT:
        return Measurement(what, values)
    ratios = [values["x PySpark"], values.get("x PySpark without start", 0.0)]
    return Measurement(what, values, TARGET_RATIO, min(ratios) >= TARGET_RATIO)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=5_000_000)
    parser.add_argument("--groups", type=int, nargs="*", default=[1_000, 100_000])
    parser.add_argument("--formats", nargs="*", choices=FORMATS, default=FORMATS)
    parser.add_argument("--engines", nargs="*", choices=list(ENGINES), default=list(ENGINES))
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    results: list[Measurement] = []
    for groups in arguments.groups:
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            write_inputs(directory / "all", arguments.rows, groups, arguments.formats)
            write_inputs(directory / "start", START_ROWS, groups, arguments.formats)
            for format in arguments.formats:
                case = Case(format, groups, arguments.rows)
                found = compare(directory, case, arguments.engines, arguments.rounds)
                print("\n".join(map(format_row, found)), flush=True)
                results += found
    report("bounded_input", [*results, load_average()])


if __name__ == "__main__":
    main()
