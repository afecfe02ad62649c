"""Edges between tasks: one process serves N stream partitions, another one reads all of them.

.venv/bin/python benchmarks/stream_edges.py [--edges 1 8 64] [--mb 512] [--epoch-kb 1024 16 1]

Forward edges read a partition each; keyed ones a share each of one partition, which has the bytes
of all. Throughput: logs that are full are read from the beginning, in epochs of each size; CPU of
both processes. Latency: from the append of an epoch of one row to its delivery, with an epoch of
each partition every 100 ms; the watermark is the time of the append. Threads are those that the
edges add to the process. Target: at most 2 for readers, 3 for the server."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rekindle.exchange.routing import Share
from rekindle.protocol import Endpoint
from rekindle.streams.digest import digest_table
from rekindle.streams.epochs import EpochBatch
from rekindle.streams.io_thread import IoThread
from rekindle.streams.log import OutputLog
from rekindle.streams.reader import PartitionReader
from rekindle.streams.reader_core import Subscription
from rekindle.streams.server import StreamServer
from rekindle_testing.harness.report import Measurement, load_average, report

ADDRESS = "127.0.43.1"
SCHEMA = pa.schema([("k", pa.int64()), ("v", pa.float64())])
LATENCY_EPOCHS = 100
INTERVAL_S = 0.1
MAX_EPOCHS = 4096
"""Of each partition."""
READER_THREADS = 2
SERVER_THREADS = 3


def threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def table(size: int) -> pa.Table:
    """Rows of 16 bytes, `size` bytes of them."""
    rows = max(1, size // 16)
    values = np.random.default_rng(1).standard_normal(rows)
    return pa.table({"k": np.arange(rows), "v": values}, schema=SCHEMA)


def append(log: OutputLog, epoch: int, rows: pa.Table, digest: str) -> None:
    now_us = time.monotonic_ns() // 1000
    log.append(EpochBatch(log.stream, log.partition, epoch, now_us, rows, digest))


# -- the two processes ---------------------------------------------------------------------------


def serve(partitions: int, epochs: int, size: int) -> None:
    """Serves full logs; after a line on stdin, appends epochs of one row to each."""
    with tempfile.TemporaryDirectory() as directory:
        rows, one = table(size), table(16)
        logs = [OutputLog(Path(directory) / str(n), "s", n, SCHEMA) for n in range(partitions)]
        digest = digest_table(rows)
        for log in logs:
            for epoch in range(epochs):
                append(log, epoch, rows, digest)
        before = threads()
        server = StreamServer(ADDRESS, 0)
        for log in logs:
            server.serve_log(log)
        print(server.port, flush=True)
        began = time.process_time()
        sys.stdin.readline()
        throughput = {"cpu": time.process_time() - began, "threads": threads() - before}
        print(json.dumps(throughput), flush=True)
        began, digest = time.process_time(), digest_table(one)
        for epoch in range(epochs, epochs + LATENCY_EPOCHS):
            due = time.monotonic() + INTERVAL_S
            for log in logs:
                append(log, epoch, one, digest)
            time.sleep(max(0.0, due - time.monotonic()))
        print(json.dumps({"cpu": time.process_time() - began}), flush=True)
        sys.stdin.readline()
        server.stop()


class Readers:
    """Readers of all partitions, or of all shares of one."""

    def __init__(self, port: int, edges: int, keyed: bool) -> None:
        self.took: list[float] = []
        self._received = [0] * edges
        self._changed = threading.Condition()
        self._io = IoThread("pulls")
        self._io.start()
        self._readers = [
            PartitionReader(
                self._io,
                Subscription("s", 0, from_epoch=0, share=Share(("k",), edges, n))
                if keyed
                else Subscription("s", n, from_epoch=0),
                partial(self._deliver, n),
                has_buffer_space=lambda: True,
            )
            for n in range(edges)
        ]
        endpoint = Endpoint(address=f"{ADDRESS}:{port}", replica=0, incarnation=1)
        for reader in self._readers:
            reader.route((endpoint,))

    def _deliver(self, edge: int, batch: EpochBatch) -> None:
        self.took.append(time.monotonic() - batch.watermark / 1e6)
        with self._changed:
            self._received[edge] += 1
            self._changed.notify_all()

    def wait(self, epochs: int) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: min(self._received) >= epochs, 600):
                raise SystemExit("the epochs did not arrive")

    def close(self) -> None:
        for reader in self._readers:
            reader.close()
        self._io.stop()


def read(port: int, edges: int, epochs: int, keyed: int) -> None:
    before, cpu, began = threads(), time.process_time(), time.perf_counter()
    readers = Readers(port, edges, bool(keyed))
    readers.wait(epochs)
    took, most = time.perf_counter() - began, threads() - before
    values: dict[str, float] = {"s": took, "cpu": time.process_time() - cpu, "threads": most}
    print(json.dumps(values), flush=True)
    readers.took.clear()
    cpu = time.process_time()
    readers.wait(epochs + LATENCY_EPOCHS)
    # Without the first deliveries, one for each edge: they may be slower.
    p50, p99 = np.percentile(readers.took[edges:], [50, 99])
    values = {"p50": p50, "p99": p99, "cpu": time.process_time() - cpu}
    print(json.dumps(values), flush=True)
    readers.close()


# -- measuring -----------------------------------------------------------------------------------


def start(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def line(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


def send_line(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def measure(edges: int, mb: int, epoch_kb: int, keyed: bool) -> list[Measurement]:
    partitions = 1 if keyed else edges
    epochs = min(MAX_EPOCHS, max(1, mb * 1024 // epoch_kb // partitions))
    server = start("--serve", partitions, epochs, epoch_kb << 10)
    try:
        reader = start("--read", line(server), edges, epochs, int(keyed))
        try:
            read_all = line(reader)
            send_line(server)
            served, waited, appended = line(server), line(reader), line(server)
        finally:
            reader.communicate()
        send_line(server)
    finally:
        server.communicate()
    gb = epochs * partitions * epoch_kb / (1 << 20)
    throughput = {
        "MB/s": round(gb * 1024 / read_all["s"]),
        "CPU s/GB reader": round(read_all["cpu"] / gb, 2),
        "CPU s/GB server": round(served["cpu"] / gb, 2),
        "threads reader": read_all["threads"],
        "threads server": served["threads"],
    }
    seconds = LATENCY_EPOCHS * INTERVAL_S
    latency = {
        "p50 ms": round(1000 * waited["p50"], 2),
        "p99 ms": round(1000 * waited["p99"], 2),
        "CPU reader": round(waited["cpu"] / seconds, 3),
        "CPU server with appends": round(appended["cpu"] / seconds, 3),
    }
    few = read_all["threads"] <= READER_THREADS and served["threads"] <= SERVER_THREADS
    name = f"{edges} {'keyed' if keyed else 'forward'} edges, epochs of {epoch_kb} KiB"
    return [
        Measurement(f"{name}: throughput", throughput, READER_THREADS + SERVER_THREADS, few),
        Measurement(f"{name}, then of one row: latency", latency),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--edges", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--mb", type=int, default=512)
    parser.add_argument("--epoch-kb", type=int, nargs="+", default=[1024, 16, 1])
    parser.add_argument("--serve", type=int, nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--read", type=int, nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        return serve(*arguments.serve)
    if arguments.read:
        return read(*arguments.read)
    rows: list[Measurement] = []
    for epoch_kb in arguments.epoch_kb:
        for edges in arguments.edges:
            for keyed in (False, True):
                if edges > 1 or not keyed:
                    rows += measure(edges, arguments.mb, epoch_kb, keyed)
    report("stream_edges", [*rows, load_average()])
    return None


if __name__ == "__main__":
    main()
