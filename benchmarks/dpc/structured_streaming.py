"""Structured Streaming in a process of its own: how old rows are when results contain them.

Spark's `rate` source makes rows with the time at which they exist; a count by key with RocksDB
state, in update mode, is written by foreachBatch, which brings the rows into the Python process. A
checkpoint is written with each trigger, so the interval of checkpoints is that of triggers. A
result has arrived when foreachBatch has its rows, before the batch is committed.

Rows come evenly, so the times of a batch's rows are spread evenly between the newest row of the
batch before and its own newest row.
"""

from __future__ import annotations

import multiprocessing
import time
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from dpc.topologies import GROUPS
from rekindle.engine.spark.session import start_session, stop_session

_CONF = {
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    "spark.sql.streaming.metricsEnabled": "false",
    "spark.sql.shuffle.partitions": "1",
}
_WARM_UP_S = 10.0
_START_S = 180.0
Batch = tuple[float, float]
"""Unix times: when the rows of a batch had arrived, and the time of its newest row."""


class StructuredStreaming:
    """`begin` and `result` measure one interval."""

    def __init__(self, rows_per_second: int, directory: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, end = context.Pipe()
        # A daemon: it ends with this process, also when that fails.
        self._process = context.Process(
            target=_serve, args=(end, rows_per_second, directory), daemon=True
        )

    def __enter__(self) -> Self:
        self._process.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._pipe.send(None)
        self._process.join(30)

    def begin(self, trigger_s: float, seconds: float) -> None:
        """Returns when a query with this trigger interval is warm; it then measures."""
        self._pipe.send((trigger_s, seconds))
        self._received(_START_S + 2 * trigger_s)

    def result(self, timeout_s: float) -> tuple[float, float]:
        """Mean and maximum of the ages of rows, in seconds."""
        mean_s, max_s = self._received(timeout_s + _START_S)
        return float(mean_s), float(max_s)

    def _received(self, timeout_s: float) -> Any:
        if not self._pipe.poll(timeout_s):
            raise TimeoutError(f"Structured Streaming: nothing in {timeout_s:g} s")
        return self._pipe.recv()


def ages_s(batches: list[Batch]) -> tuple[float, float]:
    """The mean (weighted by rows) and the maximum age of rows when their batch arrived. Needs at
    least two batches."""
    spans = [(newest - before, at - newest) for (_, before), (at, newest) in pairwise(batches)]
    rows = sum(span for span, _ in spans)
    mean = sum(span * (delay + span / 2) for span, delay in spans) / rows
    return mean, max(span + delay for span, delay in spans)


def _serve(pipe: Connection, rows_per_second: int, directory: Path) -> None:
    session = start_session("bench", conf=_CONF, data_dir=directory)
    session.sparkContext.setLogLevel("ERROR")
    while (request := pipe.recv()) is not None:
        trigger_s, seconds = request
        batches: list[Batch] = []
        query = _start(session, rows_per_second, directory, trigger_s, batches)
        time.sleep(max(_WARM_UP_S, 1.2 * trigger_s))
        pipe.send("warm")
        since_s = time.time()
        # A batch that begins within the time ends after it.
        time.sleep(seconds)
        until_s = time.time()
        query.stop()
        within = [b for b in batches if since_s <= b[0] <= until_s]
        pipe.send(ages_s(within))
    stop_session(session)


def _start(
    session: Any, rows_per_second: int, directory: Path, trigger_s: float, batches: list[Batch]
) -> Any:
    rows = session.readStream.format("rate").option("rowsPerSecond", rows_per_second).load()
    keyed = rows.selectExpr(f"value % {GROUPS} AS k", "timestamp")
    counts = keyed.groupBy("k").agg({"*": "count", "timestamp": "max"})

    def note(batch: Any, _: int) -> None:
        times = batch.toArrow().column("max(timestamp)").to_pylist()
        if times:
            batches.append((time.time(), max(times).timestamp()))

    place = str(directory / f"checkpoint-{trigger_s:g}")
    writer = counts.writeStream.outputMode("update").foreachBatch(note)
    every = writer.trigger(processingTime=f"{round(trigger_s * 1000)} milliseconds")
    return every.option("checkpointLocation", place).start()
