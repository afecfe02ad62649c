"""Real task processes that read a topic: two replicas race for the cuts of each epoch, are killed
with and without their disks, and lose the broker. The files hold each record once, the topic of
dead letters each bad one, and the files are those of the reference execution over the same cuts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from kafka_parts import Topic, new_topic
from kafka_sink_parts import committed as committed_messages

from rekindle.connectors.compare import compare_sinks, read_sink
from rekindle.reference import run_reference
from rekindle.topology.load import load_spec
from rekindle_testing.embedded.kafka import KafkaBroker
from rekindle_testing.harness.task_processes import UID, task_processes

PARTITIONS = 3
AT = "2026-01-01T00:{:02d}:{:02d}Z"


def make_spec(
    directory: Path, topic: Topic, replicas: int = 2, dead: Topic | None = None
) -> dict[str, Any]:
    """`dead`: what has the bad records; None: they are dropped."""
    bad = {"onBadRecord": "Drop"}
    if dead is not None:
        bad = {"onBadRecord": "DeadLetter", "deadLetterTopic": dead.name}
    return {
        "epochInterval": "200ms",
        "checkpoint": {"interval": "2s", "store": f"file://{directory}/store", "volume": "v"},
        "replicas": replicas,
        "sources": [
            {
                "name": "clicks",
                "schema": "id BIGINT, at TIMESTAMP",
                "eventTime": {"column": "at"},
                "kafka": {
                    "bootstrapServers": topic.broker.bootstrap_servers,
                    "topic": topic.name,
                    "format": "json",
                    "offsetColumn": "o",
                    "maxRowsPerEpoch": 300,
                    **bad,
                },
            }
        ],
        "queries": [
            {
                "name": "all",
                "from": "clicks",
                "sink": {"files": {"url": f"file://{directory}/out", "format": "json"}},
            }
        ],
    }


class Clicks:
    """Sends rows to all partitions in turn until the block ends."""

    def __init__(self, topic: Topic) -> None:
        self._topic = topic
        self._stop = threading.Event()
        self.sent = 0
        self.bad: list[bytes] = []

    def _send(self) -> None:
        producer = self._topic.producer(**{"enable.idempotence": True})
        while not self._stop.wait(0.02):
            for _ in range(4):
                i = self.sent
                value = b'{"id":%d,"at":"%s"}' % (i, AT.format(i // 60 % 60, i % 60).encode())
                producer.produce(self._topic.name, value, partition=i % PARTITIONS)
                self.sent += 1
                if i % 500 == 0:
                    self.bad.append(b'{"id":"bad-%d"}' % i)
                    producer.produce(self._topic.name, self.bad[-1], partition=i % PARTITIONS)
        assert producer.flush(60) == 0

    @contextmanager
    def sending(self) -> Iterator[None]:
        thread = threading.Thread(target=self._send)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join(90)


class Output:
    """The number of rows that the sink has; files never change."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lines: dict[str, int] = {}

    def rows(self) -> int:
        for path in self._directory.glob("*.jsonl"):
            if path.name not in self._lines:
                self._lines[path.name] = path.read_bytes().count(b"\n")
        return sum(self._lines.values())


def windowed(spec: dict[str, Any]) -> dict[str, Any]:
    """The same topic, counted in windows of 10 s, with two partitions of the source."""
    spec["sources"][0]["partitions"] = 2
    spec["sources"][0]["eventTime"] = {"column": "at", "lateness": "1s", "idleAfter": "3s"}
    window = {"size": "10s", "aggregate": "count(*) AS n, sum(id) AS total, min(o) AS first"}
    spec["operators"] = [{"name": "counts", "inputs": ["clicks"], "window": window, "replicas": 1}]
    spec["queries"][0]["from"] = "counts"
    return spec


@pytest.mark.spark
@pytest.mark.timeout(600)
def test_windows_are_those_of_the_reference(tmp_path: Path, cds_archive: Path) -> None:
    with KafkaBroker(tmp_path / "kafka") as broker:
        topic = new_topic(broker, PARTITIONS)
        spec, clicks = windowed(make_spec(tmp_path, topic)), Clicks(topic)
        output = Output(tmp_path / "out")
        environment = {"REKINDLE_CDS_ARCHIVE": str(cds_archive)}
        with task_processes(tmp_path, spec, environment) as tasks:
            tasks.poll_until(tasks.all_live, 240)
            with clicks.sending():
                tasks.poll_until(lambda: output.rows() > 3, 120)
                killed = next(r for r in tasks.replicas.values() if r.slot.partition == 1)
                killed.kill()
                tasks.start(killed.slot)
                tasks.poll_until(tasks.all_live, 120)
            committed = tasks.committed_epoch()
            tasks.poll_until(lambda: tasks.committed_epoch() > committed + 20, 90)
        result = run_reference(
            load_spec(spec),
            "test",
            output=tmp_path / "reference",
            cuts=f"file://{tmp_path}/store/{UID}",
        )
        assert result.rows["all"] > 3
        found = compare_sinks(
            f"file://{tmp_path}/reference/all",
            f"file://{tmp_path}/out",
            "json",
            until_epoch=committed,
        )
        assert str(found).startswith("identical"), found


@pytest.mark.process
@pytest.mark.timeout(600)
def test_each_record_is_written_once_whatever_is_killed(tmp_path: Path) -> None:
    with KafkaBroker(tmp_path / "kafka") as broker:
        topic, dead = new_topic(broker, PARTITIONS), new_topic(broker, 2)
        spec, clicks = make_spec(tmp_path, topic, dead=dead), Clicks(topic)
        output = Output(tmp_path / "out")
        with task_processes(tmp_path, spec) as tasks:
            tasks.poll_until(tasks.all_live, 120)
            with clicks.sending():
                tasks.poll_until(lambda: output.rows() > 300, 90)
                first, second = tasks.replicas.values()
                first.kill()
                replaced = tasks.start(first.slot)
                now = output.rows()
                tasks.poll_until(lambda: output.rows() > now + 300, 90)
                tasks.poll_until(tasks.all_live, 120)
                second.crash()
                now = output.rows()
                tasks.poll_until(lambda: output.rows() > now + 300, 90)
                for replica in (replaced, second):  # all replicas at once
                    replica.kill()
                for replica in (replaced, second):
                    tasks.start(replica.slot)
                now = output.rows()
                tasks.poll_until(lambda: output.rows() > now + 300, 120)
                broker.kill()
                time.sleep(2.0)
                broker.start()
                now = output.rows()
                tasks.poll_until(lambda: output.rows() > now + 300, 120)
            tasks.poll_until(lambda: output.rows() >= clicks.sent, 120)
            committed = tasks.committed_epoch()
            tasks.poll_until(lambda: tasks.committed_epoch() > committed + 10, 60)
        letters = sorted(message.value() or b"" for message in committed_messages(dead))
        assert letters == sorted(clicks.bad)
        rows = read_sink(f"file://{tmp_path}/out", "json")
        assert sorted(rows.column("id").to_pylist()) == list(range(clicks.sent))
        result = run_reference(
            load_spec(spec),
            "test",
            output=tmp_path / "reference",
            cuts=f"file://{tmp_path}/store/{UID}",
        )
        assert result.rows == {"all": clicks.sent}
        found = compare_sinks(f"file://{tmp_path}/reference/all", f"file://{tmp_path}/out", "json")
        assert str(found).startswith("identical"), found
