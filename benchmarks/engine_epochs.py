"""Time of an epoch: a task of Rekindle and Structured Streaming, same queries, interleaved.

.venv/bin/python benchmarks/engine_epochs.py [--epochs 120] [--sink arrow|noop]

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
from engine_parts import AGGREGATE, SCHEMA, SQL, BenchTask, make_epoch_input, topology

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
    def __init__(self, kind: str, session: Any, directory: Path) -> None:
        compiled = topology(kind, directory)
        chain = SparkChain(compiled.segments[0], compiled, session)
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
    def __init__(self, kind: str, session: Any, directory: Path, sink: str) -> None:
        self._in = directory / "in"
        self._in.mkdir(parents=True)
        options = {"maxFilesPerTrigger": "1"}
        rows = session.readStream.schema(SCHEMA).options(**options).parquet(str(self._in))
        if kind == "sql":
            rows.createOrReplaceTempView("rows")
            frame = session.sql(SQL)
        else:
            rows.withWatermark("t", "1 minute").createOrReplaceTempView("rows")
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
        hidden = self._in / f"_{one.epoch}.parquet"
        pq.write_table(one.inputs[0], hidden)
        hidden.rename(self._in / f"{one.epoch:06d}.parquet")
        self._query.processAllAvailable()
        progress = [p for p in self._query.recentProgress if p["numInputRows"]][-1]
        return {"streaming": float(progress["durationMs"]["triggerExecution"])}

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

    def begin(self, kind: str, rows: int) -> None:
        self._pipe.send((kind, rows))
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
        kind, rows = request
        place = directory / f"{kind}-{rows}"
        ours = name == "rekindle"
        engine = Rekindle(kind, session, place) if ours else Streaming(kind, session, place, sink)
        rng = np.random.default_rng(rows)  # both engines draw the same rows
        pipe.send("ready")
        while (number := pipe.recv()) is not None:
            pipe.send(engine.step(make_epoch_input(number, rows, rng)))
        engine.stop()
    stop_session(session)


def compare(engines: dict[str, Engine], kind: str, rows: int, epochs: int) -> Series:
    for engine in engines.values():
        engine.begin(kind, rows)
    times: Series = {name: [] for name in TIMED}
    for number in range(FIRST_EPOCH, FIRST_EPOCH + WARM_UP_EPOCHS + epochs):
        for engine in engines.values():
            for name, ms in engine.step(number).items():
                times[name].append(ms)
    for engine in engines.values():
        engine.end()
    return {name: series[WARM_UP_EPOCHS:] for name, series in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=120)
    parser.add_argument("--rows", type=int, nargs="*", default=[1_000, 10_000, 100_000])
    parser.add_argument("--queries", nargs="*", default=["sql", "window", "session"])
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
                series = compare(engines, kind, rows, arguments.epochs)
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
