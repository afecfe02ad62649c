"""The source `kafka`, on a real broker."""

from __future__ import annotations

import base64
import datetime as dt
import io
import json
import random
import time
from pathlib import Path
from typing import Any

import fastavro
import pytest
from google.protobuf import descriptor_pb2, timestamp_pb2
from kafka_parts import Topic, new_topic, open_kafka
from schema_server import SchemaServer

from rekindle.connectors.avro_values import PREFIX
from rekindle.connectors.kafka_client import CONSUMER_SETTINGS
from rekindle.connectors.kafka_source import KafkaSource
from rekindle.connectors.live_source import Reach
from rekindle.errors import SchemaMismatch, SourceFailed
from rekindle_testing.embedded.kafka import KafkaBroker
from rekindle_testing.waiting import eventually

pytestmark = pytest.mark.process
AT = "2026-01-01T00:00:0{}Z"
AVRO: dict[str, Any] = {
    "type": "record",
    "name": "Click",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
    ],
}


@pytest.fixture
def topic(kafka_broker: KafkaBroker) -> Topic:
    return new_topic(kafka_broker)


def rows(first: int, count: int) -> list[dict[str, Any]]:
    return [{"id": i, "at": AT.format(i % 10)} for i in range(first, first + count)]


def avro_row(id: int, second: int) -> bytes:
    data = io.BytesIO()
    row = {"id": id, "at": 1_767_225_600_000_000 + second * 1_000_000}
    fastavro.schemaless_writer(data, fastavro.parse_schema(AVRO), row)
    return data.getvalue()


def ids(source: KafkaSource, reach: Reach) -> list[int]:
    return list(source.read(reach.start, reach.end).table.column("id").to_pylist())


class TestRanges:
    def test_each_range_has_its_rows_any_number_of_times(self, topic: Topic) -> None:
        topic.send(rows(0, 50))
        source = open_kafka(topic)
        for start, end in [(0, 50), (10, 20), (20, 50), (0, 7), (7, 9), (9, 9), (49, 50)]:
            found = source.read({"0": start}, {"0": end}).table.column("id").to_pylist()
            assert found == list(range(start, end))
        source.close()

    @pytest.mark.parametrize("ahead", [1, 16 << 20])  # with the first, partitions pause
    def test_back_and_forth_in_any_order(
        self, kafka_broker: KafkaBroker, monkeypatch: pytest.MonkeyPatch, ahead: int
    ) -> None:
        monkeypatch.setattr("rekindle.connectors.kafka_client._AHEAD_BYTES", ahead)
        topic = new_topic(kafka_broker, 2)
        for partition in (0, 1):
            topic.send(rows(1000 * partition, 1000), partition)
        source, draw = open_kafka(topic), random.Random(7)
        for _ in range(25):
            spans = [sorted(draw.sample(range(1001), 2)) for _ in range(2)]
            start, end = ({str(p): spans[p][at] for p in (0, 1)} for at in (0, 1))
            found = source.read(start, end).table.column("id").to_pylist()
            expected = [1000 * p + i for p in (0, 1) for i in range(*spans[p])]
            assert found == expected
        source.close()

    def test_ends_are_found_and_new_rows_wait_for_the_next(self, topic: Topic) -> None:
        source = open_kafka(topic)
        assert source.ends(None) == Reach({"0": 0}, {"0": 0}, frozenset({"0"}), source.identity)
        topic.send(rows(0, 3))
        reach = source.ends({"0": 0})
        assert reach == Reach({"0": 0}, {"0": 3}, frozenset({"0"}), source.identity)
        topic.send(rows(3, 3))
        assert ids(source, reach) == [0, 1, 2]
        assert ids(source, source.ends(reach.end)) == [3, 4, 5]
        source.close()

    def test_an_epoch_takes_a_limited_part(self, kafka_broker: KafkaBroker) -> None:
        topic = new_topic(kafka_broker, 2)
        topic.send(rows(0, 3), 0)
        topic.send(rows(0, 50), 1)
        source = open_kafka(topic, maxRowsPerEpoch=10)
        reach = source.ends(None)
        assert reach.end == {"0": 3, "1": 7}
        assert reach.caught_up == {"0"}
        source.close()

    def test_an_epoch_takes_no_more_bytes_than_fit(
        self, kafka_broker: KafkaBroker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        topic = new_topic(kafka_broker, 3)
        for partition, count in ((0, 2), (1, 300), (2, 300)):
            topic.send(rows(0, count), partition)
        source = open_kafka(topic)
        reach = source.ends(None)
        for most, expected in ((30_000, {"0": 2, "1": 62, "2": 62}), (1, {"0": 0, "1": 0, "2": 1})):
            monkeypatch.setattr(source, "_epoch_bytes", most)
            found = source.read_some(reach.start, reach.end)
            assert found.end == pytest.approx(expected, abs=3)
            assert found.table.num_rows == sum(found.end.values())
            assert source.read(reach.start, found.end).table == found.table
        source.close()

    def test_a_range_ends_by_position_where_transactions_ended(self, topic: Topic) -> None:
        producer = topic.producer(**{"transactional.id": f"t-{topic.name}"})
        producer.init_transactions(30)
        for first, commits in ((0, True), (10, False), (20, True)):
            producer.begin_transaction()
            for row in rows(first, 3):
                producer.produce(topic.name, str(row).replace("'", '"').encode(), partition=0)
            if commits:
                producer.commit_transaction(30)
            else:
                producer.flush(30)
                producer.abort_transaction(30)
        source = open_kafka(topic)
        reach = source.ends(None)
        assert reach.end == {"0": 12}  # 9 records, 3 markers
        began = time.monotonic()
        assert ids(source, reach) == [0, 1, 2, 20, 21, 22]
        for start, end, found in [(3, 7, []), (4, 8, []), (4, 9, [20]), (11, 12, []), (2, 4, [2])]:
            reach = Reach({"0": start}, {"0": end}, frozenset())
            assert ids(source, reach) == found
        assert time.monotonic() - began < 8.0  # no range waited for its timeout
        source.close()

    def test_an_open_transaction_is_not_read(self, topic: Topic) -> None:
        topic.send(rows(0, 2))
        producer = topic.producer(**{"transactional.id": f"t-{topic.name}"})
        producer.init_transactions(30)
        producer.begin_transaction()
        producer.produce(topic.name, b'{"id":2}', partition=0)
        producer.flush(30)
        source = open_kafka(topic)
        assert source.ends(None).end == {"0": 2}
        assert source.ends({"0": 2}).pending == {"0"}
        producer.commit_transaction(30)
        # The broker writes the marker of the commit a little later.
        eventually(lambda: not source.ends({"0": 2}).pending, 30)
        reach = source.ends({"0": 2})
        assert ids(source, reach) == [2]
        assert source.ends(reach.end).pending == frozenset()
        source.close()

    def test_many_records_do_not_stop_the_fetch(self, topic: Topic) -> None:
        """With the default of fetch.queue.backoff.ms each full queue would cost a second."""
        assert CONSUMER_SETTINGS["fetch.queue.backoff.ms"] == 5
        topic.send(b'{"id":1,"at":"2026-01-01T00:00:00Z"}' for _ in range(100_000))
        source = open_kafka(topic, maxRowsPerEpoch=10_000)
        at, slowest = source.ends(None), 0.0
        for _ in range(10):
            began = time.monotonic()
            assert source.read(at.start, at.end).table.num_rows == 10_000
            slowest = max(slowest, time.monotonic() - began)
            at = source.ends(at.end)
        assert at.start == {"0": 100_000}
        source.close()


class TestColumns:
    def test_what_a_record_has_besides_its_value(self, topic: Topic) -> None:
        source = open_kafka(
            topic,
            keyColumn="key",
            headersColumn="headers",
            partitionColumn="partition",
            offsetColumn="offset",
            timestampColumn="time",
        )
        headers = [("a", b"1"), ("a", None)]
        topic.send([{"id": 1}], key=b"k\xff", headers=headers, timestamp=1767225600123)
        topic.send([{"id": 2}, None])
        reach = source.ends(None)
        first, second, third = source.read(reach.start, reach.end).table.to_pylist()
        assert first.pop("time") == dt.datetime(2026, 1, 1, 0, 0, 0, 123_000, dt.UTC)
        assert first == {
            "id": 1,
            "at": None,
            "key": b"k\xff",
            "headers": [{"key": "a", "value": b"1"}, {"key": "a", "value": None}],
            "partition": 0,
            "offset": 0,
        }
        assert (second["key"], second["headers"], second["offset"]) == (None, None, 1)
        assert (third["id"], third["offset"]) == (None, 2)  # a tombstone
        source.close()

    def test_the_newest_event_time_of_each_partition(self, kafka_broker: KafkaBroker) -> None:
        topic = new_topic(kafka_broker, 3)
        topic.send([{"at": AT.format(7)}, {"at": AT.format(3)}], 0)
        topic.send([{"at": None}], 1)
        source = open_kafka(topic)
        reach = source.ends(None)
        newest = source.read(reach.start, reach.end).newest_us
        assert newest == {"0": 1_767_225_607_000_000}
        source.close()

    def test_the_time_of_the_record_can_be_event_time(self, topic: Topic) -> None:
        topic.send([{"id": 1}], timestamp=1767225600123)
        source = open_kafka(topic, schema="id BIGINT", event_time="t", timestampColumn="t")
        reach = source.ends(None)
        assert source.read(reach.start, reach.end).newest_us == {"0": 1_767_225_600_123_000}
        source.close()

    def test_event_time_is_computed_from_the_value(self, topic: Topic) -> None:
        topic.send([{"ms": 1767225600123}])
        source = open_kafka(
            topic, schema="ms BIGINT", expression="timestamp_millis(ms)", offsetColumn="o"
        )
        reach = source.ends(None)
        assert source.read(reach.start, reach.end).newest_us == {"0": 1_767_225_600_123_000}
        source.close()


class TestBadRecords:
    def test_the_source_stops_at_one_and_names_it(self, topic: Topic) -> None:
        topic.send([*rows(0, 2), b'{"id":"x"}'])
        source = open_kafka(topic)
        reach = source.ends(None)
        with pytest.raises(SchemaMismatch, match=r"partition 0, offset 2: .*onBadRecord: Drop"):
            source.read(reach.start, reach.end)
        source.close()

    def test_they_are_dropped_and_counted(self, topic: Topic) -> None:
        topic.send([*rows(0, 2), b'{"id":"x"}', b"", *rows(5, 1)])
        source = open_kafka(topic, onBadRecord="Drop")
        reach = source.ends(None)
        found = source.read(reach.start, reach.end)
        assert found.table.column("id").to_pylist() == [0, 1, 5]
        assert found.dropped == 2
        assert "offset 2" in found.example
        source.close()

    def test_they_can_be_kept(self, topic: Topic, tmp_path: Path) -> None:
        topic.send([*rows(0, 1), b'{"id":"x"}'], key=b"k", timestamp=1767225600123)
        source = open_kafka(topic, onBadRecord="DeadLetter", deadLetters=f"file://{tmp_path}")
        reach = source.ends(None)
        found = source.read(reach.start, reach.end)
        assert (found.table.num_rows, found.dropped) == (1, 1)
        letter = json.loads(found.dead_letters[0].line())
        assert "id" in letter.pop("error")
        assert letter == {
            "topic": topic.name,
            "partition": 0,
            "offset": 1,
            "timestampMs": 1767225600123,
            "key": "aw==",
            "value": "eyJpZCI6IngifQ==",
        }
        source.close()


class TestStart:
    def test_at_the_end(self, topic: Topic) -> None:
        topic.send(rows(0, 5))
        source = open_kafka(topic, startingOffsets="Latest")
        assert source.ends(None).start == {"0": 5}
        source.close()

    def test_at_a_time(self, kafka_broker: KafkaBroker) -> None:
        topic = new_topic(kafka_broker, 2)
        for second in range(3):
            topic.send([{"id": second}], timestamp=1767225600000 + 1000 * second)
        source = open_kafka(topic, startingOffsets="2026-01-01T00:00:01Z")
        assert source.ends(None).start == {"0": 1, "1": 0}  # partition 1 has no record so late
        source.close()

    def test_partitions_are_dealt_to_tasks(self, kafka_broker: KafkaBroker) -> None:
        topic = new_topic(kafka_broker, 5)
        sources = [open_kafka(topic, partition, 2) for partition in (0, 1)]
        assert [list(s.ends(None).end) for s in sources] == [["0", "2", "4"], ["1", "3"]]
        for source in sources:
            source.close()

    def test_a_task_without_partitions_is_refused(self, topic: Topic) -> None:
        source = open_kafka(topic, partition=1, partitions=2)
        with pytest.raises(SourceFailed, match="has 1 partitions"):
            source.ends(None)
        source.close()

    def test_added_partitions_begin_at_their_beginning(
        self, topic: Topic, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("rekindle.connectors.kafka_source.PARTITIONS_S", 0.0)
        source = open_kafka(topic, startingOffsets="Latest")
        reach = source.ends(None)
        topic.add_partitions(2)
        topic.send(rows(0, 3), 1)
        deadline = time.monotonic() + 30
        while len((reach := source.ends(reach.end)).end) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert reach.start["1"] == 0
        assert ids(source, source.ends({"0": 0, "1": 0})) == [0, 1, 2]
        source.close()


class TestFaults:
    def test_an_unknown_topic_is_named(self, kafka_broker: KafkaBroker) -> None:
        source = open_kafka(Topic(kafka_broker, "no-such-topic"))
        with pytest.raises(SourceFailed, match=r"source clicks: topic no-such-topic at 127.0.0.1"):
            source.ends(None)
        source.close()

    def test_a_compacted_topic_is_refused(self, kafka_broker: KafkaBroker) -> None:
        topic = new_topic(kafka_broker, 1, **{"cleanup.policy": "compact,delete"})
        source = open_kafka(topic)
        with pytest.raises(SourceFailed, match="=compact,delete: records"):
            source.ends(None)
        source.close()

    def test_another_topic_of_the_same_name_is_refused(
        self, topic: Topic, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        source = open_kafka(topic)
        topic.send(rows(0, 5))
        reach = source.ends(None)
        topic.delete()
        deadline = time.monotonic() + 30
        while True:
            try:
                topic.create(1)
                break
            except Exception:
                assert time.monotonic() < deadline
                time.sleep(0.1)
        monkeypatch.setattr("rekindle.connectors.kafka_source.PARTITIONS_S", 0.0)
        with pytest.raises(SourceFailed, match="deleted and created again"):
            source.ends(reach.end)
        source.close()

    @pytest.mark.parametrize("on_data_loss", ["Fail", "Skip"])
    def test_removed_records_are_noticed(self, topic: Topic, on_data_loss: str) -> None:
        from confluent_kafka import TopicPartition

        topic.send(rows(0, 20))
        source = open_kafka(topic, onDataLoss=on_data_loss)
        before = [TopicPartition(topic.name, 0, 12)]
        topic.administer(lambda client: client.delete_records(before))
        with pytest.raises(SourceFailed, match="partition 0 has no offset 5 any more"):
            source.read({"0": 5}, {"0": 15})
        reach = source.ends({"0": 5})
        if on_data_loss == "Skip":
            assert reach.start == {"0": 12}
            assert ids(source, reach) == list(range(12, 20))
        else:
            assert reach.start == {"0": 5}
        source.close()

    def test_large_records_are_read(self, kafka_broker: KafkaBroker) -> None:
        topic = new_topic(kafka_broker, 1, **{"max.message.bytes": str(12 << 20)})
        producer = topic.producer(**{"message.max.bytes": 12 << 20})
        for i in range(2):
            producer.produce(topic.name, b'{"id":%d,"at":null,"x":"%s"}' % (i, b"x" * (10 << 20)))
        assert producer.flush(60) == 0
        source = open_kafka(topic)
        assert ids(source, source.ends(None)) == [0, 1]
        source.close()


def test_a_broker_that_is_away_is_named_and_found_again(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rekindle.connectors.kafka_client.READ_S", 1.0)
    monkeypatch.setattr("rekindle.connectors.kafka_client.REQUEST_S", 1.0)
    with KafkaBroker(tmp_path_factory.mktemp("kafka")) as broker:
        topic = new_topic(broker)
        topic.send(rows(0, 3))
        source = open_kafka(topic)
        reach = source.ends(None)
        where = f"topic {topic.name} at {broker.bootstrap_servers}"
        broker.freeze()
        with pytest.raises(SourceFailed, match=where):
            source.ends(reach.end)
        broker.resume()
        broker.kill()
        with pytest.raises(SourceFailed, match=where):
            source.ends(reach.end)
        with pytest.raises(SourceFailed, match=where):
            source.read(reach.start, reach.end)
        broker.start()
        deadline = time.monotonic() + 60
        while True:
            try:
                assert ids(source, reach) == [0, 1, 2]
                break
            except SourceFailed:
                assert time.monotonic() < deadline
        source.close()


def test_the_client_commits_nothing() -> None:
    assert CONSUMER_SETTINGS["enable.auto.commit"] is False
    assert CONSUMER_SETTINGS["auto.offset.reset"] == "error"


class TestFormats:
    def test_csv(self, topic: Topic) -> None:
        topic.send([b"1;2026-01-01T00:00:03Z", b"x", b"2;NA"])
        source = open_kafka(topic, format="csv", delimiter=";", onBadRecord="Drop")
        reach = source.ends(None)
        found = source.read(reach.start, reach.end)
        assert found.table.column("id").to_pylist() == [1, 2]
        assert found.newest_us == {"0": 1_767_225_603_000_000}
        assert "offset 1: 'x': 1 values for 2 columns" in found.example
        source.close()

    def test_raw(self, topic: Topic) -> None:
        topic.send([b"at 1767225600", b"no time"])
        source = open_kafka(
            topic, schema="line STRING", format="raw", event_time="t", timestampColumn="t"
        )
        reach = source.ends(None)
        assert source.read(reach.start, reach.end).table.column("line").to_pylist() == [
            "at 1767225600",
            "no time",
        ]
        source.close()

    def test_avro_of_one_schema(self, topic: Topic) -> None:
        topic.send([avro_row(1, 3), avro_row(2, 4)[:-1], avro_row(3, 5)])
        source = open_kafka(topic, format="avro", avroSchema=json.dumps(AVRO))
        reach = source.ends(None)
        with pytest.raises(SchemaMismatch, match=r"partition 0, offset 1: .*truncated"):
            source.read(reach.start, reach.end)
        found = source.read({"0": 2}, reach.end)
        assert found.table.column("id").to_pylist() == [3]
        assert found.newest_us == {"0": 1_767_225_605_000_000}
        source.close()

    def test_avro_of_a_registry(self, topic: Topic) -> None:
        added = {"name": "page", "type": "string"}
        newer = {**AVRO, "fields": [added, *AVRO["fields"]]}
        with SchemaServer({4: {"schema": json.dumps(AVRO)}}) as server:
            topic.send([PREFIX.pack(0, 4) + avro_row(1, 3)])
            topic.send([PREFIX.pack(0, 5) + b"\x06abc" + avro_row(2, 4)])
            source = open_kafka(
                topic,
                schema="id BIGINT, at TIMESTAMP, page STRING",
                format="avro",
                schemaRegistry={"url": server.url},
            )
            reach = source.ends(None)
            with pytest.raises(SourceFailed, match="does not have /schemas/ids/5"):
                source.read(reach.start, reach.end)
            server.schemas[5] = {"schema": json.dumps(newer)}
            for _ in range(2):
                found = source.read(reach.start, reach.end)
                assert found.table.column("page").to_pylist() == [None, "abc"]
            assert server.requests == ["/schemas/ids/4", "/schemas/ids/5", "/schemas/ids/5"]
        source.close()

    def test_protobuf(self, topic: Topic) -> None:
        times = timestamp_pb2.DESCRIPTOR
        made = descriptor_pb2.FileDescriptorProto()
        times.CopyToProto(made)
        files = descriptor_pb2.FileDescriptorSet(file=[made])
        at = timestamp_pb2.Timestamp(seconds=5, nanos=7)
        topic.send([at.SerializeToString(), b"\xff"])
        source = open_kafka(
            topic,
            schema="seconds BIGINT, nanos INT",
            expression="timestamp_seconds(seconds)",
            format="protobuf",
            protobufDescriptors=base64.b64encode(files.SerializeToString()).decode(),
            protobufMessage="google.protobuf.Timestamp",
            onBadRecord="Drop",
        )
        reach = source.ends(None)
        found = source.read(reach.start, reach.end)
        assert found.table.column("nanos").to_pylist() == [7]
        assert (found.newest_us, found.dropped) == ({"0": 5_000_000}, 1)
        source.close()


class TestOffsetsThatAreGiven:
    def test_each_partition_begins_there(self, kafka_broker: KafkaBroker) -> None:
        topic = new_topic(kafka_broker, 3)
        for partition in range(3):
            topic.send(rows(0, 5), partition)
        source = open_kafka(topic, startingOffsets="0=3, 2=5")
        assert source.ends(None).start == {"0": 3, "1": 0, "2": 5}
        assert source.ends({"0": 4, "1": 4}).start == {"0": 4, "1": 4, "2": 0}
        source.close()

    @pytest.mark.parametrize(
        ("given", "message"),
        [("1=0", "names partition 1"), ("0=6", "begins partition 0 at 6, and it ends at 5")],
    )
    def test_what_the_topic_does_not_have_is_named(
        self, topic: Topic, given: str, message: str
    ) -> None:
        topic.send(rows(0, 5))
        source = open_kafka(topic, startingOffsets=given)
        with pytest.raises(SourceFailed, match=message):
            source.ends(None)
        source.close()
