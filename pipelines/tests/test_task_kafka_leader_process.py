"""Real task processes that read and write topics of three brokers, of which the leader is killed
under load: of a partition of the output, then of one of the source. No row is lost or written
twice, and the problem of a task names topic and brokers until it goes on.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaException
from kafka_parts import Topic, new_topic
from kafka_sink_parts import Committed

from rekindle_testing.embedded.kafka import KafkaCluster
from rekindle_testing.harness.task_processes import TaskProcesses, task_processes

pytestmark = [pytest.mark.process, pytest.mark.long, pytest.mark.timeout(600)]
PARTITIONS = 2
BACK_S = 90.0


def make_spec(directory: Path, source: Topic, output: Topic) -> dict[str, Any]:
    servers = source.broker.bootstrap_servers
    kafka = {"bootstrapServers": servers, "topic": source.name, "format": "json"}
    sink = {"bootstrapServers": servers, "topic": output.name, "key": ["id"]}
    return {
        "epochInterval": "200ms",
        "checkpoint": {"interval": "2s", "store": f"file://{directory}/store", "volume": "v"},
        "replicas": 2,
        "sources": [
            {
                "name": "clicks",
                "schema": "id BIGINT, at TIMESTAMP",
                "eventTime": {"column": "at"},
                "kafka": kafka,
            }
        ],
        "queries": [{"name": "all", "from": "clicks", "sink": {"kafka": sink}}],
    }


class Load:
    """Sends ids to all partitions in turn."""

    def __init__(self, topic: Topic) -> None:
        self._topic = topic
        self._stop = threading.Event()
        self.sent = 0

    def _send(self) -> None:
        producer = self._topic.producer(**{"enable.idempotence": True})
        while not self._stop.wait(0.02):
            for _ in range(4):
                value = b'{"id":%d,"at":"2026-01-01T00:00:00Z"}' % self.sent
                producer.produce(self._topic.name, value, partition=self.sent % PARTITIONS)
                self.sent += 1
            producer.poll(0)
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


def problems(tasks: TaskProcesses) -> set[str]:
    responses = [replica.response for replica in tasks.replicas.values()]
    return {r.problem.message for r in responses if r is not None and r.problem is not None}


def lose_leader(
    cluster: KafkaCluster, topic: Topic, tasks: TaskProcesses, output: Committed
) -> tuple[float, set[str]]:
    """Kill the leader of a partition, and start it again once all goes on without it. Returns after
    how long it does so, and what tasks have reported meanwhile."""
    leader = topic.partitions()[0].leader.id
    said: set[str] = set()
    cluster.brokers[leader].kill()
    killed_at, before = time.monotonic(), output.count()

    def goes_on() -> bool:
        found = problems(tasks)
        said.update(found)
        return output.count() > before + 400 and not found

    tasks.poll_until(goes_on, BACK_S)
    took_s = time.monotonic() - killed_at
    assert leader != topic.partitions()[0].leader.id
    cluster.brokers[leader].start()

    def is_replicated() -> bool:
        try:
            return all(len(p.isr) == len(p.replicas) for p in topic.partitions())
        except KafkaException:
            return False

    tasks.poll_until(is_replicated, BACK_S)
    return took_s, said


def test_no_row_is_lost_or_repeated_when_leaders_are_killed(tmp_path: Path) -> None:
    with KafkaCluster(tmp_path / "kafka", on_progress=print) as cluster:
        source, target = (new_topic(cluster, PARTITIONS) for _ in range(2))
        load, output = Load(source), Committed(target, PARTITIONS)
        with task_processes(tmp_path, make_spec(tmp_path, source, target)) as tasks:
            tasks.poll_until(tasks.all_live, 120)
            with load.sending():
                tasks.poll_until(lambda: output.count() > 400, 90)
                for topic in (target, source):
                    took_s, said = lose_leader(cluster, topic, tasks, output)
                    print(f"{topic.name}: back after {took_s:.1f} s; {sorted(said)}")
                    names = f"topic {source.name} at 127", f"topic {target.name} at 127"
                    assert any(name in message for message in said for name in names), said
            tasks.poll_until(lambda: output.count() >= load.sent, 90)
            end = tasks.committed_epoch()
            tasks.poll_until(lambda: tasks.committed_epoch() > end, 90)
        sent = Committed(source, PARTITIONS)
        for what, records in (("sent", sent), ("written", output)):
            records.count()
            found = Counter(json.loads(value)["id"] for value in records.values)
            repeated = [id for id, times in found.items() if times > 1]
            missing = found.keys() ^ set(range(load.sent))
            assert (repeated, missing) == ([], set()), what
