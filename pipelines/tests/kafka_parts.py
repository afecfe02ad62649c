"""A topic on the broker of the tests, and sources that read it."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from confluent_kafka import Producer, TopicCollection, admin

from rekindle.connectors.kafka_client import TopicClient, TopicUnavailable
from rekindle.connectors.kafka_source import KafkaSource
from rekindle.connectors.source import SourceContext
from rekindle.topology.kinds.kafka import KafkaSourceSpec
from rekindle.topology.model import Node
from rekindle.topology.schema import Field, Scalar
from rekindle.topology.spec import EventTimeSpec, SourceSpec
from rekindle.topology.sql.ddl import ddl_to_schema
from rekindle_testing.embedded.kafka import KafkaBroker, KafkaCluster

SCHEMA = "id BIGINT, at TIMESTAMP"
_START_S = 60.0
_numbers = itertools.count(1)


@dataclass(frozen=True)
class Topic:
    broker: KafkaBroker | KafkaCluster
    name: str

    def administer(self, action: Callable[[admin.AdminClient], Mapping[Any, Future[Any]]]) -> None:
        client = admin.AdminClient({"bootstrap.servers": self.broker.bootstrap_servers})
        for future in action(client).values():
            future.result()

    def create(self, partitions: int, **config: str) -> Topic:
        replicas = 3 if isinstance(self.broker, KafkaCluster) else 1
        topic = admin.NewTopic(self.name, partitions, replicas, config=config)
        self.administer(lambda client: client.create_topics([topic]))
        self._wait_for_leaders(partitions)
        return self

    def _wait_for_leaders(self, partitions: int) -> None:
        """They are not known at once after a topic is created."""
        client, deadline = (
            TopicClient(self.broker.bootstrap_servers, self.name),
            time.monotonic() + _START_S,
        )
        while True:
            try:
                client.ends(range(partitions))
                break
            except TopicUnavailable:
                assert time.monotonic() < deadline
                time.sleep(0.05)
        client.close()

    def partitions(self) -> list[Any]:
        """Their descriptions, in order."""
        client = admin.AdminClient({"bootstrap.servers": self.broker.bootstrap_servers})
        topics = TopicCollection([self.name])
        found = client.describe_topics(topics, request_timeout=5.0)[self.name].result()
        return list(found.partitions)

    def delete(self) -> None:
        self.administer(lambda client: client.delete_topics([self.name]))

    def add_partitions(self, total: int) -> None:
        self.administer(
            lambda client: client.create_partitions([admin.NewPartitions(self.name, total)])
        )

    def producer(self, **settings: Any) -> Producer:
        return Producer({"bootstrap.servers": self.broker.bootstrap_servers, **settings})

    def send(self, values: Iterable[Any], partition: int = 0, **more: Any) -> None:
        """Values are objects, or bytes as they are."""
        producer = self.producer()
        for value in values:
            data = value if isinstance(value, bytes | None) else json.dumps(value).encode()
            producer.produce(self.name, data, partition=partition, **more)
        assert producer.flush(30) == 0


def new_topic(broker: KafkaBroker | KafkaCluster, partitions: int = 1, **config: str) -> Topic:
    return Topic(broker, f"topic-{next(_numbers)}").create(partitions, **config)


def spec_of(topic: Topic, schema: str = SCHEMA, **options: Any) -> SourceSpec:
    """`options`: of `sources[].kafka`; `event_time` is its column."""
    event_time = EventTimeSpec(column=options.pop("event_time", "at"))
    given = {
        "bootstrapServers": topic.broker.bootstrap_servers,
        "topic": topic.name,
        "format": "json",
        **options,
    }
    spec = SourceSpec.model_validate({"name": "clicks", "schema": schema, "generator": None})
    kafka = KafkaSourceSpec.model_validate(given)
    return spec.model_copy(update={"kafka": kafka, "event_time": event_time})


def open_kafka(
    topic: Topic,
    partition: int = 0,
    partitions: int = 1,
    schema: str = SCHEMA,
    expression: str | None = None,
    **options: Any,
) -> KafkaSource:
    spec = spec_of(topic, schema, **options)
    assert spec.kafka is not None
    columns = ddl_to_schema(schema)
    for field in spec.kafka.added_columns.values():
        columns = columns.append(field)
    assert spec.event_time is not None
    event_time = spec.event_time.column
    if expression is not None:
        columns = columns.append(Field(event_time, Scalar.TIMESTAMP))
        event = spec.event_time.model_copy(update={"expression": expression})
        spec = spec.model_copy(update={"event_time": event})
    assert spec.kafka is not None
    node = Node("clicks", "op", spec, (), columns, event_time, partitions)
    context = SourceContext(spec, node, 1_000_000, Path("/nonexistent"), partition=partition)
    return KafkaSource(spec.kafka, replace(context))
