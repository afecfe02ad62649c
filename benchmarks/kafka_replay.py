"""A topic of many partitions replayed from its beginning: rows/s, and whether memory grows.

.venv/bin/python benchmarks/kafka_replay.py [--count N] [--partitions N] [--operator]

The topic is filled first, as fast as this machine can. Then one task reads it to its end; without
`--operator` the rows go to a `stream` sink, with it a window on Spark counts them, to files. Memory
is that of the source's process, resident, at each tenth of the rows: it should not grow after the
first few.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from confluent_kafka import Producer

from rekindle.directories import cache_root
from rekindle.engine.spark.archive_cache import ensure_archive
from rekindle_testing.embedded.kafka import KafkaBroker
from rekindle_testing.harness.kafka_topics import create_topic
from rekindle_testing.harness.report import Measurement, load_average, report
from rekindle_testing.harness.task_processes import TaskProcesses, task_processes

TOPIC = "rows"
ROWS_PER_EPOCH = 100_000
LIVE_S, LONGEST_S = 360.0, 7200.0
MOST_GROWTH = 1.1
"""Of memory, from the third tenth of the rows to the last."""


def spec_of(directory: Path, servers: str, has_operator: bool) -> dict[str, Any]:
    kafka = {
        "bootstrapServers": servers,
        "topic": TOPIC,
        "format": "json",
        "maxRowsPerEpoch": ROWS_PER_EPOCH,
    }
    window = {"size": "1h", "groupBy": ["k"], "aggregate": "count(*) AS n, sum(id) AS total"}
    counts = {"name": "counts", "inputs": ["numbers"], "keyBy": ["k"], "window": window}
    files = {"files": {"url": f"file://{directory}/out", "format": "json"}}
    return {
        "epochInterval": "200ms",
        "checkpoint": {"interval": "10s", "store": f"file://{directory}/store", "volume": "v"},
        "sources": [
            {
                "name": "numbers",
                "schema": "id BIGINT, k BIGINT, at TIMESTAMP",
                "eventTime": {"column": "at"},
                "kafka": kafka,
            }
        ],
        "operators": [counts] if has_operator else [],
        "queries": [
            {
                "name": "all",
                "from": "counts" if has_operator else "numbers",
                "sink": files if has_operator else {"stream": {"retain": "16Mi"}},
            }
        ],
    }


def fill(servers: str, count: int, partitions: int) -> float:
    """Returns the seconds that it took."""
    settings = {"linger.ms": 50, "batch.size": 1_000_000, "queue.buffering.max.messages": 500_000}
    producer = Producer({"bootstrap.servers": servers, "log_level": 0, **settings})
    began = time.monotonic()
    for n in range(count):
        at = f"2026-01-01T{n // 3_600_000 % 24:02d}:{n // 60_000 % 60:02d}:{n // 1000 % 60:02d}Z"
        value = b'{"id":%d,"k":%d,"at":"%s"}' % (n, n % 97, at.encode())
        while True:
            try:
                producer.produce(TOPIC, value, partition=n % partitions)
                break
            except BufferError:
                producer.poll(0.1)
        if n % 10_000 == 0:
            producer.poll(0)
    if producer.flush(600):
        raise RuntimeError("the broker did not take all rows")
    return time.monotonic() - began


def resident_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0


def replay(tasks: TaskProcesses, count: int) -> tuple[float, list[float]]:
    """Rows/s from the first to the last tenth, and memory at each tenth."""
    source = next(iter(tasks.replicas.values()))  # sources are the first segments
    times, memory = list[float](), list[float]()

    def read() -> int:
        progress = source.response.source if source.response is not None else None
        return count - progress.behind if progress and progress.behind is not None else 0

    def is_done() -> bool:
        # How far it is behind is not known until the first record is planned.
        if source.response is None or source.response.stable_epoch < 0:
            return False
        while len(times) < 10 and read() >= count * (len(times) + 1) / 10:
            times.append(time.monotonic())
            memory.append(resident_mib(source.process.pid))
            print(f"{10 * len(times)} %: {memory[-1]:.0f} MiB", flush=True)
        return len(times) == 10

    began = time.monotonic()
    tasks.poll_until(is_done, LONGEST_S)
    return count / (times[-1] - began), memory


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20_000_000)
    parser.add_argument("--partitions", type=int, default=100)
    parser.add_argument("--operator", action="store_true", help="count rows in windows, on Spark")
    given = parser.parse_args()
    environment = dict[str, str]()
    if given.operator:
        archive = ensure_archive(cache_root(os.environ) / "appcds")
        environment = {"REKINDLE_CDS_ARCHIVE": str(archive)}
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        with KafkaBroker(directory / "kafka") as broker:
            servers = broker.bootstrap_servers
            create_topic(servers, TOPIC, given.partitions)
            filled_s = fill(servers, given.count, given.partitions)
            print(f"{given.count:,} rows are there after {filled_s:.0f} s", flush=True)
            spec = spec_of(directory, servers, given.operator)
            with task_processes(directory, spec, environment) as tasks:
                rate, memory = replay(tasks, given.count)
    growth = memory[-1] / memory[2]
    values = {"rows/s": round(rate), "MiB at 30 %": memory[2], "MiB at the end": memory[-1]}
    what = f"{given.count:,} rows of {given.partitions} partitions"
    found = Measurement(what, {**values, "growth": growth}, MOST_GROWTH, growth <= MOST_GROWTH)
    report("kafka_replay", [found, load_average()])
    return 0 if found.met else 1


if __name__ == "__main__":
    sys.exit(main())
