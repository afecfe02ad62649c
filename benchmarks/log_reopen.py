"""The output log: appends, reads in order, and opening the log of a query without rows for a week.

.venv/bin/python benchmarks/log_reopen.py [--epochs 600000]

An idle query's log has an epoch a second, all empty; their watermark stays, or advances in each.
Memory is what the opened log holds, after a read (tracemalloc, in another opening than the one
whose time is taken). Rates are in epochs a second of this process's CPU. Targets: reopened in 1 s,
less than 1 MB of memory."""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa

from rekindle.streams.digest import digest_table
from rekindle.streams.epochs import EpochBatch
from rekindle.streams.log import OutputLog
from rekindle_testing.harness.report import Measurement, load_average, report

REOPEN_S = 1.0
MEMORY_BYTES = 1e6
READ_BYTES = 8 << 20
SCHEMA = pa.schema([("k", pa.string()), ("v", pa.float64()), ("t", pa.timestamp("us", "UTC"))])


def table(rows: int) -> pa.Table:
    rng = np.random.default_rng(1)
    times = pa.array(rng.integers(0, 10**9, rows)).cast(pa.timestamp("us", "UTC"))
    keys = [f"key-{i % 50}" for i in range(rows)]
    return pa.table({"k": keys, "v": rng.standard_normal(rows), "t": times}, schema=SCHEMA)


def timed(action: Callable[[], object]) -> float:
    begin = time.process_time()
    action()
    return time.process_time() - begin


def append(log: OutputLog, rows: pa.Table, epochs: int, watermark_step_us: int) -> None:
    digest = digest_table(rows)
    for epoch in range(epochs):
        log.append(EpochBatch("s", 0, epoch, epoch * watermark_step_us, rows, digest))


def read(log: OutputLog, max_bytes: int) -> None:
    epoch = log.base
    while batches := log.read(epoch, max_bytes):
        epoch += len(batches)


def read_random(log: OutputLog, reads: int) -> None:
    for epoch in np.random.default_rng(2).integers(0, log.last + 1, reads).tolist():
        log.read(epoch, 0)


def open_log(directory: Path) -> OutputLog:
    return OutputLog(directory, "s", 0, SCHEMA)


def rates(rows: int, epochs: int) -> Measurement:
    reads = min(epochs, 2000)
    with tempfile.TemporaryDirectory() as directory:
        log = open_log(Path(directory))
        made = table(rows)
        values = {
            "appended/s": epochs / timed(lambda: append(log, made, epochs, 1000)),
            "read/s": epochs / timed(lambda: read(log, READ_BYTES)),
            "read one by one/s": epochs / timed(lambda: read(log, 0)),
            "random reads/s": reads / timed(lambda: read_random(log, reads)),
        }
        log.close()
    return Measurement(f"{epochs} epochs of {rows} rows", {k: round(v) for k, v in values.items()})


def idle_query_rows(what: str, epochs: int, watermark_step_us: int) -> list[Measurement]:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        log = open_log(path)
        append(log, table(0), epochs, watermark_step_us)
        log.close()
        disk = sum(file.stat().st_size for file in path.iterdir())
        begin = time.perf_counter()
        open_log(path).close()
        seconds = time.perf_counter() - begin
        memory = memory_of(path, epochs)
    reopened = {"s": round(seconds, 3), "disk MB": round(disk / 1e6, 2)}
    return [
        Measurement(f"{what}: reopened", reopened, REOPEN_S, seconds < REOPEN_S),
        Measurement(f"{what}: memory", {"B": memory}, MEMORY_BYTES, memory < MEMORY_BYTES),
    ]


def memory_of(path: Path, epochs: int) -> int:
    gc.collect()
    tracemalloc.start()
    log = open_log(path)
    assert (log.base, log.last) == (0, epochs - 1)
    assert len(log.read(epochs // 2, READ_BYTES)) > 1
    gc.collect()
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    log.close()
    return held


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=600_000)
    arguments = parser.parse_args()
    rows = [rates(0, 20_000), rates(3, 10_000), rates(100, 5_000), rates(10_000, 400)]
    rows += idle_query_rows("watermark stays", arguments.epochs, 0)
    rows += idle_query_rows("watermark advances", arguments.epochs, 1_000_000)
    report("log_reopen", [*rows, load_average()])


if __name__ == "__main__":
    main()
