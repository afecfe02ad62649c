"""Time of an epoch: a task of Rekindle and Structured Streaming, same queries, interleaved.

.venv/bin/python benchmarks/engine_epochs.py [--epochs 120] [--sink arrow|noop] [--retained 1000000]

Each engine has its own process and JVM, like a task, so that neither collects the other's garbage;
they take turns, epoch by epoch, and one waits while the other works. Rows are created before the
clock starts, in memory for Rekindle and as a Parquet file for Structured Streaming.

Measured for Rekindle: one iteration of the task's loop: rows from memory through Spark, Arrow in
and Arrow out, the digest of the result, its append to the output log on disk, and at every tenth
epoch the start of saving the state, after which a task continues. The state is then written to a
store on the same disk while both engines wait; `saved` includes that. The log is truncated between
iterations.

Measured for Structured Streaming: `triggerExecution`: finding and reading the file, the offset log,
planning, the job with its state in RocksDB and the state's checkpoint, the sink, the commit log. It
has one shuffle partition, no batches without data, and a trigger when there is a file instead of
the clock, which excludes its polling. With `--sink arrow` its rows get into the Python process as
with Rekindle (foreachBatch, toArrow), and are not written; with `noop` it drops them.

Joins have two inputs with half of the rows each; `retained` rows are in the tables, or in RocksDB,
before the clock starts. About one row of the other input matches each.

Not measured: external sinks, the network. Target: at most 0.35 of Structured Streaming's time, at
p50 and at p99, without `saved`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from engine_parts import (
    AGGREGATE,
    JOIN,
    JOINED,
    JOINS,
    SCHEMA,
    SQL,
    BenchTask,
    JoinInputs,
    join_operator,
    make_epoch_input,
    topology,
)

from rekindle.engine.spark.chain import SparkChain
from rekindle.engine.spark.session import start_session, stop_session
from rekindle.streams.epochs import EpochInput
from rekindle_testing.harness.report import Measurement, format_row, load_average, report

TARGET_RATIO = 0.35
TIMED = ("rekindle", "saved", "streaming")
WARM_UP_EPOCHS = 12
FIRST_EPOCH = 100
"""The first epoch of both engines."""
STREAMING = {
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    "spark.sql.streaming.noDataMicroBatches.enabled": "false",
    "spark.sql.streaming.pollingDelay": "300ms",
    "spark.sql.streaming.metricsEnabled": "false",
    "spark.sql.shuffle.partitions": "1",
}

WINDOWS = {"window": ("window", "5 minutes"), "session": ("session_window", "30 seconds")}
"""Function and length of windows, by query."""

Series = dict[str, list[float]]
"""Milliseconds of each epoch, by what is timed."""


class Rekindle:
    def __init__(self, kind: str, minutes: int, session: Any, directory: Path) -> None:
        if kind in JOINS:
            compiled = topology(kind, directory, join_operator(kind, minutes), ("a", "b"))
        else:
            compiled = topology(kind, directory)
        chain = SparkChain(compiled.segments[-1], compiled, session)
        self._task = BenchTask(compiled, chain, directory, FIRST_EPOCH)

    def step(self, one: EpochInput) -> dict[str, float]:
        self._task.offer([one])
        begin = time.perf_counter()
        self._task.run_next()
        done = time.perf_counter()
        self._task.wait_saved()
        saved = time.perf_counter()
        self._task.commit_saved_checkpoint()
        return {"rekindle": (done - begin) * 1000, "saved": (saved - begin) * 1000}

    def stop(self) -> None:
        self._task.stop()


class Streaming:
    def __init__(self, kind: str, minutes: int, session: Any, directory: Path, sink: str) -> None:
        names = ("a", "b") if kind in JOINS else ("rows",)
        self._in = [directory / name for name in names]
        self._batch = -1  # the newest one that is counted
        for name, place in zip(names, self._in, strict=True):
            place.mkdir(parents=True)
            options = {"maxFilesPerTrigger": "1"}
            rows = session.readStream.schema(SCHEMA).options(**options).parquet(str(place))
            if kind != "sql":
                rows = rows.withWatermark("t", "1 minute")
            rows.createOrReplaceTempView(name)
        if kind == "sql":
            frame = session.sql(SQL)
        elif kind in JOINS:
            apart = f"INTERVAL {minutes} MINUTES"
            frame = session.sql(
                f"SELECT {JOINED} FROM a {JOINS[kind]} JOIN b"
                f" ON {JOIN} AND b.t BETWEEN a.t - {apart} AND a.t + {apart}"
            )
        else:
            window, length = WINDOWS[kind]
            frame = session.sql(
                f"SELECT {window}.start, {window}.end, k, {AGGREGATE} FROM rows"
                f" GROUP BY {window}(t, '{length}'), k"
            )
        writer = frame.writeStream.outputMode("append")
        if sink == "arrow":
            writer = writer.foreachBatch(lambda batch, _: batch.toArrow() and None)
        else:
            writer = writer.format("noop")
        self._query = writer.option("checkpointLocation", str(directory / "checkpoint")).start()

    def step(self, one: EpochInput) -> dict[str, float]:
        hidden = [place / f"_{one.epoch}.parquet" for place in self._in]
        for rows, file in zip(one.inputs, hidden, strict=True):
            pq.write_table(rows, file)
        for file in hidden:
            file.rename(file.with_name(f"{one.epoch:06d}.parquet"))
        self._query.processAllAvailable()
        # A trigger may come between the files of two inputs.
        new = [
            p
            for p in self._query.recentProgress
            if p["numInputRows"] and p["batchId"] > self._batch
        ]
        self._batch = new[-1]["batchId"]
        return {"streaming": float(sum(p["durationMs"]["triggerExecution"] for p in new))}

    def stop(self) -> None:
        self._query.stop()


class Engine:
    """An engine in a process of its own."""

    def __init__(self, name: str, directory: Path, archive: Path | None, sink: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, process_end = context.Pipe()
        arguments = (process_end, name, directory, archive, sink)
        # A daemon: it ends with this process, also when the other one failed.
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        process_end.close()

    def begin(self, kind: str, rows: int, retained: int) -> None:
        self._pipe.send((kind, rows, retained))
        self._pipe.recv()

    def step(self, number: int) -> dict[str, float]:
        """Milliseconds of an epoch, by what is timed."""
        self._pipe.send(number)
        return dict(self._pipe.recv())

    def end(self) -> None:
        """End the query, or, if none has begun, the process."""
        self._pipe.send(None)

    def join(self) -> None:
        self.end()
        self._process.join()


def _serve(pipe: Connection, name: str, directory: Path, archive: Path | None, sink: str) -> None:
    session = start_session("bench", conf=STREAMING, data_dir=directory, cds_archive=archive)
    session.sparkContext.setLogLevel("ERROR")  # the table is read on the same screen
    while (request := pipe.recv()) is not None:
        kind, rows, retained = request
        place = directory / f"{kind}-{rows}"
        # Both engines draw the same rows.
        joined, rng = JoinInputs(rows, retained, FIRST_EPOCH), np.random.default_rng(rows)
        engine: Rekindle | Streaming
        if name == "rekindle":
            engine = Rekindle(kind, joined.minutes, session, place)
        else:
            engine = Streaming(kind, joined.minutes, session, place, sink)
        pipe.send("ready")
        while (number := pipe.recv()) is not None:
            is_join = kind in JOINS
            pipe.send(
                engine.step(
                    joined.epoch(number) if is_join else make_epoch_input(number, rows, rng)
                )
            )
        engine.stop()
    stop_session(session)


def compare(engines: dict[str, Engine], kind: str, rows: int, epochs: int, retained: int) -> Series:
    for engine in engines.values():
        engine.begin(kind, rows, retained)
    times: Series = {name: [] for name in TIMED}
    not_timed = WARM_UP_EPOCHS + (JoinInputs.FILL_EPOCHS if kind in JOINS else 0)
    for number in range(FIRST_EPOCH, FIRST_EPOCH + not_timed + epochs):
        for engine in engines.values():
            for name, ms in engine.step(number).items():
                times[name].append(ms)
    for engine in engines.values():
        engine.end()
    return {name: series[not_timed:] for name, series in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=120)
    parser.add_argument("--rows", type=int, nargs="*", default=[1_000, 10_000, 100_000])
    queries = ["sql", "window", "session", *JOINS]
    parser.add_argument("--queries", nargs="*", choices=queries, default=queries)
    parser.add_argument("--retained", type=int, default=1_000_000, help="rows, by joins")
    parser.add_argument("--sink", choices=["arrow", "noop"], default="arrow")
    parser.add_argument("--archive", type=Path)
    arguments = parser.parse_args()
    results: list[Measurement] = []
    with tempfile.TemporaryDirectory() as name:
        engines = {
            engine: Engine(engine, Path(name) / engine, arguments.archive, arguments.sink)
            for engine in ("rekindle", "streaming")
        }
        for kind in arguments.queries:
            for rows in arguments.rows:
                series = compare(engines, kind, rows, arguments.epochs, arguments.retained)
                found = (milliseconds(kind, rows, series), ratios(kind, rows, series))
                print("\n".join(map(format_row, found)), flush=True)
                results += found
        for engine in engines.values():
            engine.join()
    name = "engine_epochs" if arguments.sink == "arrow" else f"engine_epochs_{arguments.sink}"
    report(name, [*results, load_average()])


def milliseconds(kind: str, rows: int, series: Series) -> Measurement:
    values = {
        f"{name} {point}": round(ms)
        for name in TIMED
        for point, ms in percentiles(series[name]).items()
    }
    return Measurement(f"{kind}, {rows} rows, ms", values)


def ratios(kind: str, rows: int, series: Series) -> Measurement:
    """Rekindle's times divided by Structured Streaming's. The target is without `saved`."""
    theirs = percentiles(series["streaming"])
    ours, saved = (
        {point: ms / theirs[point] for point, ms in percentiles(series[name]).items()}
        for name in ("rekindle", "saved")
    )
    values = {**ours, **{f"saved {point}": ratio for point, ratio in saved.items()}}
    rounded = {what: round(ratio, 3) for what, ratio in values.items()}
    return Measurement(
        f"{kind}, {rows} rows, ratio", rounded, TARGET_RATIO, max(ours.values()) <= TARGET_RATIO
    )


def percentiles(series: list[float]) -> dict[str, float]:
    return {f"p{p}": float(np.percentile(series, p)) for p in (50, 99)}


if __name__ == "__main__":
    main()
