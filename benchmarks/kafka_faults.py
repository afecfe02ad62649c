"""Kafka to Kafka under kill -9: source tasks, sink tasks, replicas of both, and the broker.

.venv/bin/python benchmarks/kafka_faults.py [--runs N] [--faults N] [--seed N] [--only FAULT ...]
    [--without-operator]

Each run starts a broker and task processes with two replicas of each segment, sends rows all the
time, and does random faults, each after the output topic has grown. Afterwards the committed
records of the output topic are compared with the reference execution over the same cuts. The exit
status is 1 if a record is lost, or there twice, in any run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from confluent_kafka import Producer

from rekindle.connectors.cut_records import decode_cut_record
from rekindle.directories import cache_root
from rekindle.engine.spark.archive_cache import ensure_archive
from rekindle.reference import run_reference
from rekindle.topology.load import load_spec
from rekindle_testing.embedded.kafka import KafkaBroker
from rekindle_testing.harness.kafka_topics import CommittedRecords, create_topic
from rekindle_testing.harness.report import Measurement, load_average, report
from rekindle_testing.harness.task_processes import UID, TaskProcesses, task_processes

PARTITIONS = 3
ROWS_PER_S = 300
INPUT, OUTPUT = "rows", "results"
FAULTS = ("crash-source", "lose-source", "crash-sink", "lose-sink", "lose-all", "freeze", "broker")
FROZEN_S = 5.0  # longer than a replica waits for another one to write
LIVE_S, PROGRESS_S = 360.0, 180.0


def spec_of(directory: Path, servers: str, has_operator: bool) -> dict[str, Any]:
    kafka = {"bootstrapServers": servers, "topic": INPUT, "format": "json"}
    window = {"size": "2s", "groupBy": ["k"], "aggregate": "count(*) AS n, sum(id) AS total"}
    counts = {"name": "counts", "inputs": ["numbers"], "keyBy": ["k"], "window": window}
    return {
        "epochInterval": "200ms",
        "checkpoint": {"interval": "2s", "store": f"file://{directory}/store", "volume": "v"},
        "replicas": 2,
        "sources": [
            {
                "name": "numbers",
                "schema": "id BIGINT, k BIGINT, at TIMESTAMP",
                "eventTime": {"column": "at", "lateness": "1s"},
                "kafka": kafka,
            }
        ],
        "operators": [counts] if has_operator else [],
        "queries": [
            {
                "name": "all",
                "from": "counts" if has_operator else "numbers",
                "sink": {"kafka": {"bootstrapServers": servers, "topic": OUTPUT, "key": ["k"]}},
            }
        ],
    }


class Sender:
    """Sends rows to all partitions in turn; at the end one an hour later to each, so that all
    windows end."""

    def __init__(self, servers: str) -> None:
        settings = {"enable.idempotence": True, "log_level": 0}  # it would log each lost broker
        self._producer = Producer({"bootstrap.servers": servers, **settings})
        self._stop = threading.Event()
        self.sent = 0

    def _send(self, at_s: float) -> None:
        row = {"id": self.sent, "k": self.sent % 7, "at": _time(at_s)}
        self._producer.produce(INPUT, json.dumps(row).encode(), partition=self.sent % PARTITIONS)
        self.sent += 1

    def _run(self) -> None:
        while not self._stop.wait(0.05):
            for _ in range(int(ROWS_PER_S * 0.05)):
                self._send(self.sent / ROWS_PER_S)
            self._producer.poll(0)
        last_s = self.sent / ROWS_PER_S + 3600
        for _ in range(PARTITIONS):
            self._send(last_s)

    @contextmanager
    def sending(self) -> Iterator[None]:
        thread = threading.Thread(target=self._run)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()
            if self._producer.flush(120):
                raise RuntimeError("the broker did not take all rows")


def _time(at_s: float) -> str:
    minutes, seconds = divmod(at_s, 60)
    hours, minutes = divmod(int(minutes), 60)
    return f"2026-01-01T{hours:02d}:{minutes:02d}:{seconds:06.3f}Z"


@dataclass(frozen=True)
class Outcome:
    faults: tuple[str, ...]
    records: int
    lost: int
    repeated: int


def run(
    directory: Path,
    seed: int,
    faults: tuple[str, ...],
    has_operator: bool,
    environment: Mapping[str, str],
) -> Outcome:
    """`environment`: of the tasks."""
    draw = random.Random(seed)
    with KafkaBroker(directory / "kafka") as broker:
        servers = broker.bootstrap_servers
        for topic in (INPUT, OUTPUT):
            create_topic(servers, topic, PARTITIONS)
        spec, sender = spec_of(directory, servers, has_operator), Sender(servers)
        output = CommittedRecords(servers, OUTPUT, PARTITIONS)
        with task_processes(directory, spec, environment) as tasks:
            tasks.poll_until(tasks.all_live, LIVE_S)
            with sender.sending():
                progress(tasks, output)
                for fault in faults:
                    print(f"  {fault}", flush=True)
                    inject(fault, tasks, broker, draw)
                    progress(tasks, output)
            tasks.poll_until(lambda: is_read(sender.sent, directory), PROGRESS_S)
            expected = reference(directory, spec)
            tasks.poll_until(lambda: output.count() >= expected.total(), PROGRESS_S)
            until = time.monotonic() + 3.0  # in which nothing more may come
            tasks.poll_until(lambda: time.monotonic() > until, 30)
        output.count()
        found = Counter(output.values)
        output.close()
    lost, repeated = expected - found, found - expected
    return Outcome(faults, expected.total(), lost.total(), repeated.total())


def progress(tasks: TaskProcesses, output: CommittedRecords) -> None:
    before = output.count()
    tasks.poll_until(lambda: output.count() > before + 10, PROGRESS_S)


def is_read(rows: int, directory: Path) -> bool:
    """Whether the newest cut record has all rows."""
    newest = max((directory / "store" / UID / "cuts").rglob("*.json"), key=lambda path: path.name)
    return sum(decode_cut_record(newest.read_bytes()).end.values()) >= rows


def reference(directory: Path, spec: Mapping[str, Any]) -> Counter[bytes]:
    output = directory / "reference"
    cuts = f"file://{directory}/store/{UID}"
    run_reference(load_spec(dict(spec)), "test", output=output, cuts=cuts)
    files = (output / "all").glob("*.jsonl")
    return Counter(line for file in files for line in file.read_bytes().splitlines())


def inject(fault: str, tasks: TaskProcesses, broker: KafkaBroker, draw: random.Random) -> None:
    segments = list(dict.fromkeys(slot.segment for slot in tasks.replicas))
    chosen = segments[0] if fault.endswith("source") else segments[-1]
    slot = draw.choice([slot for slot in tasks.replicas if slot.segment == chosen])
    match fault:
        case "crash-source" | "crash-sink":
            tasks.replicas[slot].crash()
        case "lose-source" | "lose-sink":
            tasks.replicas[slot].kill()
            tasks.start(slot)
        case "lose-all":
            slots = [s for s in tasks.replicas if s.segment == chosen]
            for each in slots:
                tasks.replicas[each].kill()
            for each in slots:
                tasks.start(each)
        case "freeze":
            process = tasks.replicas[slot].process
            process.send_signal(signal.SIGSTOP)
            until = time.monotonic() + FROZEN_S
            tasks.poll_until(lambda: time.monotonic() > until, 60)
            process.send_signal(signal.SIGCONT)
        case "broker":
            broker.kill()
            time.sleep(draw.uniform(0.5, 5.0))
            broker.start()
        case _:
            raise ValueError(fault)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--faults", type=int, default=6, help="of each run")
    parser.add_argument("--seed", type=int, default=1, help="of the first run")
    parser.add_argument("--only", nargs="*", choices=FAULTS, default=FAULTS)
    parser.add_argument("--without-operator", action="store_true", help="no window, no Spark")
    given = parser.parse_args()
    has_operator = not given.without_operator
    environment = dict[str, str]()
    if has_operator:
        archive = ensure_archive(cache_root(os.environ) / "appcds")
        environment = {"REKINDLE_CDS_ARCHIVE": str(archive)}
    found = list[Measurement]()
    wrong = 0
    for seed in range(given.seed, given.seed + given.runs):
        faults = tuple(random.Random(seed).choices(given.only, k=given.faults))
        print(f"run {seed}", flush=True)
        with tempfile.TemporaryDirectory() as temporary:
            got = run(Path(temporary), seed, faults, has_operator, environment)
        values = {"records": got.records, "lost": got.lost, "repeated": got.repeated}
        print(f"run {seed}: {values}", flush=True)
        found.append(Measurement(f"{seed}: {', '.join(faults)}", values))
        wrong += got.lost + got.repeated
    report("kafka_faults", [*found, load_average()])
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
