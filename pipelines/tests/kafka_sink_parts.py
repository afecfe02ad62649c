"""Sinks that write a topic on the broker of the tests, and what readers of the topic see."""

from __future__ import annotations

import datetime as dt
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
from confluent_kafka import Message
from kafka_parts import Topic

from rekindle.connectors.epoch_ranges import Definition
from rekindle.connectors.kafka_client import TopicClient, TopicUnavailable
from rekindle.connectors.kafka_sink import KafkaSink
from rekindle.connectors.sink import SinkContext
from rekindle.streams.epochs import EpochBatch
from rekindle.topology.kinds.kafka_sink import KafkaSinkSpec

SCHEMA = pa.schema(
    [("id", pa.int64()), ("name", pa.string()), ("at", pa.timestamp("us", tz="UTC"))]
)
START = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)


def spec_of_sink(topic: Topic, **options: Any) -> KafkaSinkSpec:
    """`options`: of `sink.kafka`."""
    servers = topic.broker.bootstrap_servers
    return KafkaSinkSpec.model_validate(
        {"bootstrapServers": servers, "topic": topic.name, "key": ["name"], **options}
    )


def open_kafka_sink(
    topic: Topic, directory: Path, generation: int = 1, partition: int = 0, **options: Any
) -> KafkaSink:
    store = directory / "store"
    store.mkdir(exist_ok=True)
    definition = Definition(f"d{generation}", generation, 0, 10)
    return KafkaSink(
        spec_of_sink(topic, **options),
        SinkContext("q", partition, "uid", SCHEMA, definition, "at", 1_000_000, f"file://{store}"),
    )


def epoch_batch(epoch: int, rows: int = 2, name: str | None = None) -> EpochBatch:
    """Rows whose ids tell the epoch: 100 * epoch + n."""
    ids = [100 * epoch + n for n in range(rows)]
    names = [name or f"n{n}" for n in range(rows)]
    times = [START + dt.timedelta(seconds=id) for id in ids]
    return EpochBatch("s", 0, epoch, 0, pa.table([ids, names, times], schema=SCHEMA), "")


def write(sink: KafkaSink, *epochs: int) -> None:
    """Each is a group of its own."""
    for epoch in epochs:
        sink.write(epoch_batch(epoch))
        sink.commit(epoch)


def committed(topic: Topic) -> list[Message]:
    """What readers of committed records see once all transactions have ended, in the order of
    partitions and offsets."""
    servers = topic.broker.bootstrap_servers
    client = TopicClient(servers, topic.name)
    _, count = client.describe()
    ends, begins = client.uncommitted_ends(range(count)), client.beginnings(range(count))
    found = client.read({p: (begins[p], ends[p]) for p in range(count)})
    client.close()
    return [message for p in range(count) for message in found[p].messages]


class Committed:
    """The values that readers of committed records have, in the order of each partition."""

    def __init__(self, topic: Topic, partitions: int) -> None:
        self._client = TopicClient(topic.broker.bootstrap_servers, topic.name)
        self._at = dict.fromkeys(range(partitions), 0)
        self.values: list[bytes] = []

    def count(self) -> int:
        """As before while brokers do not respond."""
        try:
            ends = self._client.ends(self._at)
            found = self._client.read({p: (self._at[p], ends[p]) for p in ends})
        except TopicUnavailable:
            return len(self.values)
        for partition, records in found.items():
            self.values += [message.value() or b"" for message in records.messages]
            self._at[partition] = records.end
        return len(self.values)


def ids(topic: Topic) -> list[int]:
    return sorted(json.loads(message.value() or b"")["id"] for message in committed(topic))


def expected(*epochs: int) -> list[int]:
    return [id for epoch in epochs for id in epoch_batch(epoch).rows.column("id").to_pylist()]
