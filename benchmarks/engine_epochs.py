"""Time of an epoch: Rekindle's engine beside Structured Streaming, same queries, interleaved.

python benchmarks/engine_epochs.py [--epochs 120] [--sink arrow|noop]

Each engine has a process and a JVM of its own, as a task has, so that neither collects the other's
garbage; they take turns, epoch by epoch, and one waits while the other works.

Rekindle's time is that of `Chain.process`, Arrow in and Arrow out. Structured Streaming reads
Parquet files, has one shuffle partition, RocksDB, no batches without data, and its own
`triggerExecution` instead of the clock, which leaves out its polling. With `--sink arrow` its rows
come to the same place as ours (foreachBatch, toArrow); with `noop` it drops them where they are.
Bar: at most half at p50 and p99.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from engine_topologies import AGGREGATE, SCHEMA, SQL, epoch, topology

from rekindle.engine.model import EpochInput, State
from rekindle.engine.spark.chain import SparkChain
from rekindle.engine.spark.session import start_session, stop_session

OUT = Path("build/bench")
WARM_UP = 12
STREAMING = {
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    "spark.sql.streaming.noDataMicroBatches.enabled": "false",
    "spark.sql.streaming.pollingDelay": "300ms",
    "spark.sql.streaming.metricsEnabled": "false",
    "spark.sql.shuffle.partitions": "1",
}


class Ours:
    def __init__(self, kind: str, session: Any) -> None:
        compiled = topology(kind)
        self._chain = SparkChain(compiled.segments[0], compiled, session)
        self._state = State()

    def step(self, one: EpochInput) -> float:
        begin = time.perf_counter()
        self._state = self._chain.process(self._state, [one]).state
        return (time.perf_counter() - begin) * 1000

    def stop(self) -> None:
        pass


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
            frame = session.sql(
                f"SELECT window.start, window.end, k, {AGGREGATE} FROM rows"
                " GROUP BY window(t, '5 minutes'), k"
            )
        writer = frame.writeStream.outputMode("append")
        if sink == "arrow":
            writer = writer.foreachBatch(lambda batch, _: batch.toArrow() and None)
        else:
            writer = writer.format("noop")
        self._query = writer.option("checkpointLocation", str(directory / "checkpoint")).start()

    def step(self, one: EpochInput) -> float:
        hidden = self._in / f"_{one.epoch}.parquet"
        pq.write_table(one.inputs[0], hidden)
        hidden.rename(self._in / f"{one.epoch:06d}.parquet")
        self._query.processAllAvailable()
        progress = [p for p in self._query.recentProgress if p["numInputRows"]][-1]
        return float(progress["durationMs"]["triggerExecution"])

    def stop(self) -> None:
        self._query.stop()


class Engine:
    """An engine in a process of its own."""

    def __init__(self, name: str, directory: Path, archive: Path | None, sink: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        arguments = (theirs, name, directory, archive, sink)
        # A daemon: it ends with us, also when the other one failed.
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()

    def begin(self, kind: str, rows: int) -> None:
        self._pipe.send((kind, rows))
        self._pipe.recv()

    def step(self, number: int) -> float:
        """Milliseconds of an epoch."""
        self._pipe.send(number)
        return float(self._pipe.recv())

    def end(self) -> None:
        """Of the query, or, when none has begun, of the process."""
        self._pipe.send(None)

    def join(self) -> None:
        self.end()
        self._process.join()


def _serve(pipe: Connection, name: str, directory: Path, archive: Path | None, sink: str) -> None:
    session = start_session("bench", conf=STREAMING, data_dir=directory, cds_archive=archive)
    while (task := pipe.recv()) is not None:
        kind, rows = task
        place = directory / f"{kind}-{rows}"
        ours = name == "rekindle"
        engine = Ours(kind, session) if ours else Streaming(kind, session, place, sink)
        rng = np.random.default_rng(rows)  # both engines draw the same rows
        pipe.send("ready")
        while (number := pipe.recv()) is not None:
            pipe.send(engine.step(epoch(number, rows, rng)))
        engine.stop()
    stop_session(session)


def compare(engines: dict[str, Engine], kind: str, rows: int, epochs: int) -> dict[str, Any]:
    for engine in engines.values():
        engine.begin(kind, rows)
    times: dict[str, list[float]] = {name: [] for name in engines}
    for number in range(100, 100 + WARM_UP + epochs):
        for name, engine in engines.items():
            times[name].append(engine.step(number))
    for engine in engines.values():
        engine.end()
    return {name: series[WARM_UP:] for name, series in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=120)
    parser.add_argument("--rows", type=int, nargs="*", default=[1_000, 10_000, 100_000])
    parser.add_argument("--queries", nargs="*", default=["sql", "window"])
    parser.add_argument("--sink", choices=["arrow", "noop"], default="arrow")
    parser.add_argument("--archive", type=Path)
    arguments = parser.parse_args()
    results = []
    print(f"{'query':7} {'rows':>7} {'':10} {'p50 ms':>8} {'p99 ms':>8}   ratio p50, p99")
    with tempfile.TemporaryDirectory() as name:
        engines = {
            engine: Engine(engine, Path(name) / engine, arguments.archive, arguments.sink)
            for engine in ("rekindle", "streaming")
        }
        for kind in arguments.queries:
            for rows in arguments.rows:
                series = compare(engines, kind, rows, arguments.epochs)
                results.append({"query": kind, "rows": rows, **summary(series)})
                report(results[-1])
        for engine in engines.values():
            engine.join()
    OUT.mkdir(parents=True, exist_ok=True)
    name = "engine_epochs" if arguments.sink == "arrow" else f"engine_epochs_{arguments.sink}"
    (OUT / f"{name}.json").write_text(
        json.dumps({"load": os.getloadavg(), "results": results}, indent=1)
    )


def summary(series: dict[str, list[float]]) -> dict[str, Any]:
    points = {n: [float(np.percentile(s, p)) for p in (50, 99)] for n, s in series.items()}
    ratio = [a / b for a, b in zip(points["rekindle"], points["streaming"], strict=True)]
    return {**points, "ratio": ratio}


def report(result: dict[str, Any]) -> None:
    for name in ("rekindle", "streaming"):
        p50, p99 = result[name]
        tail = "   " + "  ".join(f"{r:.2f}" for r in result["ratio"]) if name == "rekindle" else ""
        head = f"{result['query']:7} {result['rows']:7}" if name == "rekindle" else f"{'':15}"
        print(f"{head} {name:10} {p50:8.0f} {p99:8.0f}{tail}", flush=True)


if __name__ == "__main__":
    main()
