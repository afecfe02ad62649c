"""The sink `kafka`, on a real broker."""

from __future__ import annotations

import base64
import contextlib
import datetime as dt
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import admin
from google.protobuf import descriptor_pb2, timestamp_pb2
from kafka_parts import Topic, new_topic, open_kafka
from kafka_sink_parts import (
    SCHEMA,
    START,
    committed,
    epoch_batch,
    expected,
    ids,
    open_kafka_sink,
    spec_of_sink,
    write,
)
from schema_server import SchemaServer

from rekindle.connectors.avro_values import AvroValues
from rekindle.connectors.kafka_markers import markers_topic
from rekindle.connectors.kafka_sink import KafkaSink, open_sink
from rekindle.connectors.record_values import ValueDecoder
from rekindle.connectors.schema_registry import SchemaRegistry
from rekindle.connectors.sink import SinkContext
from rekindle.errors import SinkRefused
from rekindle.streams.epochs import EpochBatch
from rekindle.topology.kinds.kafka_security import SchemaRegistrySpec
from rekindle_testing.embedded.kafka import KafkaBroker
from rekindle_testing.waiting import eventually

pytestmark = pytest.mark.process


@pytest.fixture
def topic(kafka_broker: KafkaBroker) -> Topic:
    return new_topic(kafka_broker, 3)


@contextmanager
def sinks(topic: Topic, directory: Path, count: int = 1, **options: Any) -> Iterator[Any]:
    """One, or a list of replicas."""
    opened = [open_kafka_sink(topic, directory, **options) for _ in range(count)]
    for sink in opened:
        last_epoch(sink)
    try:
        yield opened[0] if count == 1 else opened
    finally:
        for sink in opened:
            sink.close()


def last_epoch(sink: KafkaSink) -> int:
    """A new topic of markers has no leader at once."""
    found: list[int] = []

    def read() -> bool:
        try:
            found.append(sink.last_epoch())
        except SinkRefused:
            return False
        return True

    eventually(read, 30)
    return found[-1]


def click_descriptors() -> str:
    times, made = descriptor_pb2.FileDescriptorProto(), descriptor_pb2.FileDescriptorProto()
    timestamp_pb2.DESCRIPTOR.CopyToProto(times)
    made.name, made.package, made.syntax = "click.proto", "p", "proto3"
    made.dependency.append(times.name)
    made.message_type.add(name="Other")
    fields = made.message_type.add(name="Click").field
    kind = descriptor_pb2.FieldDescriptorProto
    fields.add(name="id", number=1, type=kind.TYPE_INT64, label=kind.LABEL_OPTIONAL)
    fields.add(name="name", number=2, type=kind.TYPE_STRING, label=kind.LABEL_OPTIONAL)
    at = fields.add(name="at", number=3, type=kind.TYPE_MESSAGE, label=kind.LABEL_OPTIONAL)
    at.type_name = ".google.protobuf.Timestamp"
    files = descriptor_pb2.FileDescriptorSet(file=[times, made])
    return base64.b64encode(files.SerializeToString()).decode()


class TestFormats:
    """Of which `test_connectors_value_writers.py` tests the values."""

    def test_avro_has_the_number_of_its_schema(self, topic: Topic, tmp_path: Path) -> None:
        with SchemaServer({}) as server:
            registry_spec = {"url": server.url}
            with sinks(topic, tmp_path, format="avro", schemaRegistry=registry_spec) as sink:
                write(sink, 1, 2)
            values = [message.value() for message in committed(topic)]
            registry = SchemaRegistry(SchemaRegistrySpec(url=server.url))
            decoder = ValueDecoder(AvroValues(SCHEMA, None, registry), SCHEMA)
            decoded = decoder.decode(values)
        assert decoded.bad == {}
        assert sorted(decoded.rows.column("id").to_pylist()) == expected(1, 2)

    @pytest.mark.parametrize("with_registry", [False, True])
    def test_a_source_reads_the_protobuf_of_a_sink(
        self, topic: Topic, tmp_path: Path, with_registry: bool
    ) -> None:
        format: dict[str, Any] = {
            "format": "protobuf",
            "protobufDescriptors": click_descriptors(),
            "protobufMessage": "p.Click",
        }
        with SchemaServer({}) as server:
            if with_registry:
                format["schemaRegistry"] = {"url": server.url}
            with sinks(topic, tmp_path, **format) as sink:
                write(sink, 1, 2)
            source = open_kafka(topic, schema="id BIGINT, name STRING, at TIMESTAMP", **format)
            reach = source.ends(None)
            found = source.read(reach.start, reach.end)
            source.close()
        assert found.dropped == 0
        written = pa.concat_tables(epoch_batch(epoch).rows for epoch in (1, 2))
        assert found.table.sort_by("id").equals(written)

    def test_columns_that_are_no_field_are_refused(self, topic: Topic, tmp_path: Path) -> None:
        descriptors: dict[str, Any] = {
            "protobufDescriptors": click_descriptors(),
            "protobufMessage": "p.Other",
        }
        with pytest.raises(SinkRefused, match=r"query q: topic .*: column id: p\.Other has"):
            open_kafka_sink(topic, tmp_path, format="protobuf", **descriptors)

    def test_a_registry_that_is_away_delays_the_group(self, topic: Topic, tmp_path: Path) -> None:
        away = {"url": "http://127.0.0.1:1"}
        with sinks(topic, tmp_path, format="avro", schemaRegistry=away) as sink:
            for _ in range(2):
                with pytest.raises(SinkRefused, match="epoch 1: schema registry http"):
                    sink.write(epoch_batch(1))
        assert committed(topic) == []
        with sinks(topic, tmp_path) as sink:
            write(sink, 1)
        assert ids(topic) == expected(1)

    def test_null_in_a_raw_column_is_a_tombstone(self, topic: Topic, tmp_path: Path) -> None:
        with sinks(topic, tmp_path, format="raw", valueColumn="name", key=["id"]) as sink:
            rows = pa.table([[1, 2], ["a", None], [START] * 2], schema=SCHEMA)
            sink.write(EpochBatch("s", 0, 1, 0, rows, ""))
            sink.commit(1)
        assert {m.key(): m.value() for m in committed(topic)} == {b"1": b"a", b"2": None}


class TestRecords:
    def test_a_row_is_a_record_with_key_and_event_time(
        self, kafka_broker: KafkaBroker, tmp_path: Path
    ) -> None:
        topic = new_topic(kafka_broker, 3, **{"retention.ms": "-1"})
        with sinks(topic, tmp_path) as sink:
            write(sink, 1)
        first, second = sorted(committed(topic), key=lambda m: m.value() or b"")
        assert first.key() == b"n0"
        assert second.key() == b"n1"
        assert json.loads(first.value() or b"") == {
            "id": 100,
            "name": "n0",
            "at": "2026-01-01T00:01:40Z",
        }
        assert first.timestamp()[1] == 1_767_225_700_000

    def test_rows_older_than_the_topic_keeps_have_the_time_of_writing(
        self, topic: Topic, tmp_path: Path
    ) -> None:
        """The topic would remove them at once."""
        with sinks(topic, tmp_path) as sink:
            write(sink, 1)
        assert all(m.timestamp()[1] > (time.time() - 600) * 1000 for m in committed(topic))

    def test_rows_whose_time_the_topic_refuses_have_that_of_writing(
        self, kafka_broker: KafkaBroker, tmp_path: Path
    ) -> None:
        """One row of a wrong clock would stop the query."""
        hour = {"message.timestamp.before.max.ms": "3600000"}
        topic = new_topic(kafka_broker, 1, **{"retention.ms": "-1", **hour})
        now = dt.datetime.now(dt.UTC)
        hours = [-(10**6), -2, 0, 2, 10**6]
        times = [now + dt.timedelta(hours=h) for h in hours]
        rows = pa.table([hours, ["n"] * 5, times], schema=SCHEMA)
        with sinks(topic, tmp_path) as sink:
            sink.write(EpochBatch("s", 0, 0, 0, rows, ""))
            sink.commit(0)
        found = [m.timestamp()[1] / 1000 - now.timestamp() for m in committed(topic)]
        assert len(found) == 5
        assert all(abs(seconds) < 60 for seconds in found)

    def test_equal_keys_are_in_one_partition(self, topic: Topic, tmp_path: Path) -> None:
        with sinks(topic, tmp_path) as sink:
            write(sink, *range(6))
        partitions = {(m.key(), m.partition()) for m in committed(topic)}
        assert len(partitions) == 2

    def test_rows_without_a_key_are_spread_by_epochs(self, topic: Topic, tmp_path: Path) -> None:
        with sinks(topic, tmp_path, key=[]) as sink:
            write(sink, *range(6))
        assert {m.partition() for m in committed(topic)} == {0, 1, 2}
        assert ids(topic) == expected(*range(6))


class TestExactlyOnce:
    def test_a_restart_goes_on_after_the_marker(self, topic: Topic, tmp_path: Path) -> None:
        with sinks(topic, tmp_path) as sink:
            write(sink, 0, 1)
        with sinks(topic, tmp_path) as sink:
            assert last_epoch(sink) == 1
            write(sink, 0, 1, 2)
        assert ids(topic) == expected(0, 1, 2)

    def test_partitions_of_a_query_have_their_own_markers(
        self, topic: Topic, tmp_path: Path
    ) -> None:
        with sinks(topic, tmp_path) as sink, sinks(topic, tmp_path, partition=1) as other:
            write(sink, 0)
            assert last_epoch(other) == -1

    def test_a_frozen_writer_writes_nothing_once_it_goes_on(
        self, topic: Topic, tmp_path: Path
    ) -> None:
        with sinks(topic, tmp_path, count=2) as (zombie, successor):
            write(zombie, 0)
            zombie.write(epoch_batch(1))
            write(successor, 1, 2)
            with pytest.raises(SinkRefused, match="another replica of this task has taken over"):
                zombie.commit(1)
            write(zombie, 1, 2)  # they are there
        assert ids(topic) == expected(0, 1, 2)

    def test_a_crash_before_the_commit_leaves_nothing(self, topic: Topic, tmp_path: Path) -> None:
        crashed = open_kafka_sink(topic, tmp_path)
        assert last_epoch(crashed) == -1
        crashed.write(epoch_batch(0))
        with sinks(topic, tmp_path) as sink:
            assert last_epoch(sink) == -1
            write(sink, 0)
            assert ids(topic) == expected(0)

    def test_a_group_is_there_as_a_whole_or_not(self, topic: Topic, tmp_path: Path) -> None:
        with sinks(topic, tmp_path, commitInterval=3_000_000) as sink:
            assert sink.epochs_per_commit == 3
            for epoch in (0, 1):
                sink.write(epoch_batch(epoch))
            sink.discard()
            assert committed(topic) == []
            for epoch in (0, 1, 2):
                sink.write(epoch_batch(epoch))
            sink.commit(2)
            assert ids(topic) == expected(0, 1, 2)

    def test_a_group_that_is_repeated_within_its_transaction_is_there_once(
        self, topic: Topic, tmp_path: Path
    ) -> None:
        """As after an error that is not the broker's."""
        with sinks(topic, tmp_path, commitInterval=3_000_000) as sink:
            for epoch in (0, 1, 0, 1, 2):
                sink.write(epoch_batch(epoch))
            sink.commit(2)
            assert ids(topic) == expected(0, 1, 2)

    def test_a_group_without_rows_is_no_transaction(self, topic: Topic, tmp_path: Path) -> None:
        with sinks(topic, tmp_path) as sink:
            sink.write(epoch_batch(0, rows=0))
            sink.commit(0)
            assert last_epoch(sink) == -1

    @pytest.mark.long
    def test_markers_behind_an_open_transaction_count(
        self, topic: Topic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Readers of committed records do not see what is after another's open transaction."""
        monkeypatch.setattr("rekindle.connectors.kafka_client.READ_S", 1.0)
        with sinks(topic, tmp_path) as sink:
            write(sink, 0)
            other = topic.producer(**{"transactional.id": f"other-{topic.name}"})
            other.init_transactions(30)
            other.begin_transaction()
            other.produce(markers_topic(topic.name), b"x", b"other")
            other.flush(30)
            write(sink, 1)
        with sinks(topic, tmp_path) as sink:
            assert last_epoch(sink) == 0
            with pytest.raises(SinkRefused, match="another producer is open"):
                sink.write(epoch_batch(1))
            other.commit_transaction(30)
            eventually(lambda: not sink.write(epoch_batch(1)), 30)  # it is there
            write(sink, 2)
        assert ids(topic) == expected(0, 1, 2)

    def test_replicas_with_other_commit_intervals_write_each_row_once(
        self, topic: Topic, tmp_path: Path
    ) -> None:
        """As while an edit of it reaches one of them later."""
        with (
            sinks(topic, tmp_path, commitInterval=5_000_000) as behind,
            sinks(topic, tmp_path, commitInterval=1_000_000) as ahead,
        ):
            write(ahead, 0, 1)
            for epoch in range(5):
                behind.write(epoch_batch(epoch))
            behind.commit(4)
        assert ids(topic) == expected(*range(5))

    def test_markers_of_a_new_topic_are_read(self, topic: Topic, tmp_path: Path) -> None:
        """It may have fewer than a replica has read of the former one."""
        with sinks(topic, tmp_path) as follower:
            with sinks(topic, tmp_path) as sink:
                write(sink, 0, 1, 2)
            eventually(lambda: last_epoch(follower) == 2, 30)  # the commit is there a little later
            topic.administer(lambda client: client.delete_topics([markers_topic(topic.name)]))
            with sinks(topic, tmp_path) as sink:
                sink.write(epoch_batch(3))
                sink.commit(3)
            assert last_epoch(follower) == 3
            write(follower, 3, 4)
        assert ids(topic) == expected(*range(5))

    @pytest.mark.long
    def test_a_group_takes_longer_than_a_transaction_may(
        self, topic: Topic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The brokers end it; the next one may take longer."""
        monkeypatch.setattr("rekindle.connectors.kafka_transactions.TRANSACTION_S", 1.0)

        def write_slowly(sink: KafkaSink) -> None:
            for epoch in (0, 1, 2):
                sink.write(epoch_batch(epoch))
                time.sleep(0.8)
            sink.commit(2)

        with sinks(topic, tmp_path, commitInterval=3_000_000) as sink:
            with pytest.raises(SinkRefused, match=r"longer than 1 s.*commitInterval"):
                write_slowly(sink)
            longest = "rekindle.connectors.kafka_transactions.LONGEST_TRANSACTION_S"
            monkeypatch.setattr(longest, 60.0)

            def written() -> bool:
                with contextlib.suppress(SinkRefused):
                    write_slowly(sink)
                    return True
                return False

            eventually(written, 60)
        assert ids(topic) == expected(0, 1, 2)

    def test_a_newer_definition_stops_the_older_one(self, topic: Topic, tmp_path: Path) -> None:
        with sinks(topic, tmp_path) as old:
            write(old, 0)
            with sinks(topic, tmp_path, generation=2) as new:
                assert new.first_epoch() == 10
                write(new, 10)
                with pytest.raises(SinkRefused, match="another replica"):
                    write(old, 1)
                with pytest.raises(SinkRefused, match="generation 2"):
                    write(old, *range(1, 12))
        assert ids(topic) == expected(0, 10)


class TestRefusals:
    """Each names the topic and the broker."""

    def test_of_a_topic_that_is_missing(self, kafka_broker: KafkaBroker, tmp_path: Path) -> None:
        sink = open_kafka_sink(Topic(kafka_broker, "missing"), tmp_path)
        servers = kafka_broker.bootstrap_servers
        with pytest.raises(SinkRefused, match=rf"topic missing at {servers}.*create it"):
            sink.last_epoch()

    @pytest.mark.long
    def test_of_a_broker_that_is_away(self, tmp_path: Path, kafka_broker: KafkaBroker) -> None:
        sink = open_kafka_sink(Topic(kafka_broker, "t"), tmp_path, bootstrapServers="127.0.0.1:1")
        began = time.monotonic()
        with pytest.raises(SinkRefused, match=r"topic t at 127\.0\.0\.1:1"):
            sink.last_epoch()
        assert time.monotonic() - began < 20.0

    def test_of_a_record_that_is_too_large(self, kafka_broker: KafkaBroker, tmp_path: Path) -> None:
        topic = new_topic(kafka_broker, 1, **{"max.message.bytes": "10000"})
        with sinks(topic, tmp_path) as sink:
            sink.write(epoch_batch(0, name="x" * 20_000))
            with pytest.raises(SinkRefused, match=r"too large.*max\.message\.bytes of"):
                sink.commit(0)
            write(sink, 0)
        assert ids(topic) == expected(0)

    def test_of_markers_that_are_not_kept(self, topic: Topic, tmp_path: Path) -> None:
        Topic(topic.broker, markers_topic(topic.name)).create(1)
        sink = open_kafka_sink(topic, tmp_path)
        with pytest.raises(SinkRefused, match=r"set cleanup\.policy=compact"):
            sink.last_epoch()

    def test_markers_are_acknowledged_by_as_many_brokers_as_rows(
        self, kafka_broker: KafkaBroker, tmp_path: Path
    ) -> None:
        topic = new_topic(kafka_broker, 1, **{"min.insync.replicas": "2"})
        sink = open_kafka_sink(topic, tmp_path)
        last_epoch(sink)
        sink.close()
        client = admin.AdminClient({"bootstrap.servers": kafka_broker.bootstrap_servers})
        markers = admin.ConfigResource(admin.ConfigResource.Type.TOPIC, markers_topic(topic.name))
        found = client.describe_configs([markers])[markers].result()
        assert found["min.insync.replicas"].value == "2"

    @pytest.mark.long
    def test_of_a_user_who_may_not_write(self, topic: Topic, tmp_path: Path) -> None:
        with sinks(topic, tmp_path) as sink:
            write(sink, 0)
            others = admin.AclBinding(
                admin.ResourceType.TOPIC,
                topic.name,
                admin.ResourcePatternType.LITERAL,
                "User:other",
                "*",
                admin.AclOperation.WRITE,
                admin.AclPermissionType.ALLOW,
            )
            topic.administer(lambda client: client.create_acls([others]))

            def refused() -> bool:
                try:
                    write(sink, 1)
                except SinkRefused as error:
                    return "uthorization failed" in str(error) and topic.name in str(error)
                return False

            eventually(refused, 30)

    def test_of_a_run_on_one_machine(self, topic: Topic) -> None:
        with pytest.raises(SinkRefused, match="give --output"):
            open_sink(spec_of_sink(topic), SinkContext("q", 0, "uid", epoch_batch(0).rows.schema))
