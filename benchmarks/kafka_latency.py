"""From a record's append to its windowed result in another topic.

.venv/bin/python benchmarks/kafka_latency.py [--rates N ...] [--epochs MS ...] [--seconds N]

Rows have the time at which they are sent as event time, and are counted in windows of 200 ms. A
window's result can be written once a row of each partition that lies behind the window was
appended; latency is from the last of these rows to the arrival of the result at a consumer of
committed records, in this process, by one clock. Topology: a Kafka source, a window on Spark, a
Kafka sink, one replica each, as processes on this machine.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, Producer, TopicPartition

from rekindle.directories import cache_root
from rekindle.engine.spark.archive_cache import ensure_archive
from rekindle_testing.embedded.kafka import KafkaBroker
from rekindle_testing.harness.kafka_topics import create_topic
from rekindle_testing.harness.report import Measurement, load_average, report
from rekindle_testing.harness.task_processes import task_processes

PARTITIONS = 3
INPUT, OUTPUT = "rows", "results"
WINDOW_MS = 200
TICK_S = 0.005
WARM_UP_S = 15.0
LIVE_S = 360.0
BEYOND_EPOCH_MS = 150  # of the bar


def spec_of(directory: Path, servers: str, epoch_ms: int) -> dict[str, Any]:
    window = {"size": f"{WINDOW_MS}ms", "aggregate": "count(*) AS n"}
    return {
        "epochInterval": f"{epoch_ms}ms",
        "checkpoint": {"interval": "10s", "store": f"file://{directory}/store", "volume": "v"},
        "sources": [
            {
                "name": "numbers",
                "schema": "id BIGINT, at TIMESTAMP",
                "eventTime": {"column": "at"},
                "kafka": {"bootstrapServers": servers, "topic": INPUT, "format": "json"},
            }
        ],
        "operators": [{"name": "counts", "inputs": ["numbers"], "window": window}],
        "queries": [
            {
                "name": "all",
                "from": "counts",
                "sink": {"kafka": {"bootstrapServers": servers, "topic": OUTPUT}},
            }
        ],
    }


class Sender:
    """`appended`: by the end of a window in ms, when the first row of each partition behind it was
    sent."""

    def __init__(self, servers: str, rate: int) -> None:
        settings = {"bootstrap.servers": servers, "linger.ms": 0, "enable.idempotence": True}
        self._producer = Producer(settings)
        self._rate = rate
        self._stop = threading.Event()
        self.sent = 0
        self.appended: dict[int, float] = {}

    def _run(self) -> None:
        began = time.time()
        passed = [0] * PARTITIONS  # the end of the newest window that each partition is behind
        while not self._stop.wait(TICK_S):
            due = int((time.time() - began) * self._rate)
            while self.sent < due:
                now, partition = time.time(), self.sent % PARTITIONS
                at = dt.datetime.fromtimestamp(now, dt.UTC).isoformat(timespec="microseconds")
                row = {"id": self.sent, "at": at}
                self._producer.produce(INPUT, json.dumps(row).encode(), partition=partition)
                self.sent += 1
                end = int(now * 1000) // WINDOW_MS * WINDOW_MS
                if end > passed[partition]:
                    passed[partition] = end
                    if min(passed) == end:
                        self.appended[end] = now
            self._producer.poll(0)

    @contextmanager
    def sending(self) -> Iterator[None]:
        thread = threading.Thread(target=self._run)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()
            self._producer.flush(60)


class Arrivals:
    """`at`: by the end of a window in ms, when its result arrived."""

    def __init__(self, servers: str) -> None:
        self._consumer = Consumer(
            {
                "bootstrap.servers": servers,
                "group.id": "latency",
                "isolation.level": "read_committed",
                "enable.auto.commit": False,
                "fetch.wait.max.ms": 10,
                "fetch.queue.backoff.ms": 5,
            }
        )
        self._consumer.assign([TopicPartition(OUTPUT, p, 0) for p in range(PARTITIONS)])
        self._stop = threading.Event()
        self.at: dict[int, float] = {}

    def _run(self) -> None:
        while not self._stop.is_set():
            message = self._consumer.poll(0.1)
            if message is None or message.error() is not None:
                continue
            row, now = json.loads(message.value() or b""), time.time()
            end = dt.datetime.fromisoformat(row["window_end"])
            self.at.setdefault(round(end.timestamp() * 1000), now)

    @contextmanager
    def arriving(self) -> Iterator[None]:
        thread = threading.Thread(target=self._run)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()
            self._consumer.close()


def measure(directory: Path, rate: int, epoch_ms: int, seconds: float) -> Measurement:
    archive = ensure_archive(cache_root(os.environ) / "appcds")
    with KafkaBroker(directory / "kafka") as broker:
        servers = broker.bootstrap_servers
        for topic in (INPUT, OUTPUT):
            create_topic(servers, topic, PARTITIONS)
        sender, arrivals = Sender(servers, rate), Arrivals(servers)
        spec = spec_of(directory, servers, epoch_ms)
        environment = {"REKINDLE_CDS_ARCHIVE": str(archive)}
        with task_processes(directory, spec, environment) as tasks, arrivals.arriving():
            tasks.poll_until(tasks.all_live, LIVE_S)
            with sender.sending():
                began = time.time() + WARM_UP_S
                end = began + seconds
                tasks.poll_until(lambda: time.time() > end, WARM_UP_S + seconds + 60)
            last = max(w for w, at in sender.appended.items() if at < end)
            tasks.poll_until(lambda: last in arrivals.at, 120)
    taken = sorted(
        (arrivals.at[window] - at) * 1000
        for window, at in sender.appended.items()
        if began <= at < end and window in arrivals.at
    )
    missing = sum(began <= at < end and w not in arrivals.at for w, at in sender.appended.items())
    p50, p99 = (taken[min(len(taken) - 1, int(len(taken) * share))] for share in (0.5, 0.99))
    target = epoch_ms + BEYOND_EPOCH_MS
    values = {"p50 ms": round(p50), "p99 ms": round(p99), "windows": len(taken)}
    what = f"{rate:,} rows/s, epochs of {epoch_ms} ms"
    return Measurement(what, {**values, "missing": missing}, target, p99 <= target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rates", type=int, nargs="*", default=[1_000, 10_000])
    parser.add_argument("--epochs", type=int, nargs="*", default=[100, 1_000], help="ms")
    parser.add_argument("--seconds", type=float, default=60.0, help="after a warm-up")
    given = parser.parse_args()
    found = list[Measurement]()
    for epoch_ms in given.epochs:
        for rate in given.rates:
            with tempfile.TemporaryDirectory() as temporary:
                found.append(measure(Path(temporary), rate, epoch_ms, given.seconds))
            print(found[-1], flush=True)
    report("kafka_latency", [*found, load_average()])


if __name__ == "__main__":
    main()
