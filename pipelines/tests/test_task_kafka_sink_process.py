"""Real task processes that write to a topic: two replicas of which one writes, are killed with and
without their disks, are frozen and go on after their successor, and lose the broker. Readers of
committed records have each row of the reference execution once.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kafka_parts import Topic, new_topic
from kafka_sink_parts import Committed

from rekindle.connectors.group_writer import PATIENCE
from rekindle.reference import run_reference
from rekindle.topology.load import load_spec
from rekindle_testing.embedded.kafka import KafkaBroker
from rekindle_testing.harness.task_processes import ReplicaProcess, TaskProcesses, task_processes

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]
PARTITIONS = 3
ROWS_PER_S = 300


def make_spec(directory: Path, topic: Topic, rows: int, **options: Any) -> dict[str, Any]:
    kafka = {
        "bootstrapServers": topic.broker.bootstrap_servers,
        "topic": topic.name,
        "key": ["id"],
        **options,
    }
    columns = {"id": "sequence", "at": "timestamp(2026-01-01 00:00:00, 0s)"}
    generator = {"rowsPerSecond": ROWS_PER_S, "seed": 7, "rows": rows, "columns": columns}
    return {
        "epochInterval": "200ms",
        "checkpoint": {"interval": "2s", "store": f"file://{directory}/store", "volume": "v"},
        "replicas": 2,
        "sources": [
            {
                "name": "numbers",
                "schema": "id BIGINT, at TIMESTAMP",
                "eventTime": {"column": "at"},
                "generator": generator,
            }
        ],
        "queries": [{"name": "all", "from": "numbers", "sink": {"kafka": kafka}}],
    }


def write_all(
    directory: Path,
    rows: int,
    faults: Callable[[TaskProcesses, KafkaBroker, Callable[[], None]], None],
    **options: Any,
) -> None:
    """Run a topology to the end of its input; `faults` is called with what waits until more rows
    are committed."""
    with KafkaBroker(directory / "kafka") as broker:
        topic = new_topic(broker, PARTITIONS)
        spec, output = make_spec(directory, topic, rows, **options), Committed(topic, PARTITIONS)
        with task_processes(directory, spec) as tasks:

            def progress() -> None:
                now = output.count()
                tasks.poll_until(lambda: output.count() > min(now + 100, rows - 1), 90)

            tasks.poll_until(tasks.all_live, 120)
            progress()
            faults(tasks, broker, progress)
            tasks.poll_until(lambda: output.count() >= rows, 120)
            committed = tasks.committed_epoch()
            tasks.poll_until(lambda: tasks.committed_epoch() > committed, 60)
        assert output.count() == rows
        run_reference(load_spec(spec), "test", output=directory / "reference")
        files = (directory / "reference" / "all").glob("*.jsonl")
        lines = [line for file in files for line in file.read_bytes().splitlines()]
        assert sorted(output.values) == sorted(lines)


def freeze(replica: ReplicaProcess, tasks: TaskProcesses, progress: Callable[[], None]) -> None:
    """Until another one has taken over."""
    replica.process.send_signal(signal.SIGSTOP)
    until = time.monotonic() + PATIENCE.first_s
    try:
        tasks.poll_until(lambda: time.monotonic() > until, 30)
        progress()
    finally:
        replica.process.send_signal(signal.SIGCONT)


def test_a_killed_writer_is_replaced(tmp_path: Path) -> None:
    def faults(tasks: TaskProcesses, broker: KafkaBroker, progress: Callable[[], None]) -> None:
        for replica in list(tasks.replicas.values()):
            replica.crash()
            progress()

    write_all(tmp_path, 2_000, faults)


@pytest.mark.long
def test_each_row_is_there_once_whatever_fails(tmp_path: Path) -> None:
    def faults(tasks: TaskProcesses, broker: KafkaBroker, progress: Callable[[], None]) -> None:
        for replica in list(tasks.replicas.values()):
            freeze(replica, tasks, progress)
        for slot, replica in list(tasks.replicas.items()):
            replica.kill()
            tasks.start(slot)
            progress()
        broker.kill()
        time.sleep(30.0)
        broker.start()
        progress()
        for replica in list(tasks.replicas.values()):
            replica.crash()
        progress()

    write_all(tmp_path, 20_000, faults, commitInterval="400ms")
