"""Time of an epoch: Rekindle's engine beside Structured Streaming, same queries, interleaved.

python benchmarks/engine_epochs.py [--epochs 40] [--sink arrow|noop]

Rekindle's time is that of `Chain.process`, Arrow in and Arrow out. Structured Streaming reads
Parquet files, has one shuffle partition, RocksDB, no batches without data, and its own
`triggerExecution` instead of the clock, which leaves out its polling. With `--sink arrow` its rows
come to the same place as ours (foreachBatch, toArrow); with `noop` it drops them where they are.
Bar: at most half at p50 and p99.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
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


def compare(
    kind: str, rows: int, epochs: int, session: Any, directory: Path, sink: str
) -> dict[str, Any]:
    ours, theirs = Ours(kind, session), Streaming(kind, session, directory, sink)
    rng = np.random.default_rng(rows)
    times: dict[str, list[float]] = {"rekindle": [], "streaming": []}
    for number in range(100, 100 + WARM_UP + epochs):
        one = epoch(number, rows, rng)
        times["rekindle"].append(ours.step(one))
        times["streaming"].append(theirs.step(one))
    theirs.stop()
    return {name: series[WARM_UP:] for name, series in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--rows", type=int, nargs="*", default=[1_000, 10_000, 100_000])
    parser.add_argument("--queries", nargs="*", default=["sql", "window"])
    parser.add_argument("--sink", choices=["arrow", "noop"], default="arrow")
    parser.add_argument("--archive", type=Path)
    arguments = parser.parse_args()
    results = []
    print(f"{'query':7} {'rows':>7} {'':10} {'p50 ms':>8} {'p99 ms':>8}   ratio p50, p99")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        session = start_session(
            "bench", conf=STREAMING, data_dir=directory, cds_archive=arguments.archive
        )
        for kind in arguments.queries:
            for rows in arguments.rows:
                place = directory / f"{kind}-{rows}"
                series = compare(kind, rows, arguments.epochs, session, place, arguments.sink)
                results.append({"query": kind, "rows": rows, **summary(series)})
                report(results[-1])
        stop_session(session)
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
