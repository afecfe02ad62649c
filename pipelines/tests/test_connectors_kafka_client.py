"""The client and the source `kafka`, without a broker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from confluent_kafka import OFFSET_INVALID, KafkaError, KafkaException, TopicPartition, admin

from rekindle.connectors import kafka_client, kafka_markers
from rekindle.connectors.kafka_client import Ranges, Records, TopicClient, TopicUnavailable
from rekindle.connectors.kafka_markers import Markers
from rekindle.connectors.kafka_source import KafkaSource
from rekindle.connectors.source import SourceContext
from rekindle.topology.kinds.kafka import KafkaSourceSpec
from rekindle.topology.model import Node
from rekindle.topology.spec import EventTimeSpec, SourceSpec
from rekindle.topology.sql.ddl import ddl_to_schema


@dataclass(frozen=True)
class FakeMessage:
    at: tuple[int, int]
    size: int

    def error(self) -> None:
        return None

    def partition(self) -> int:
        return self.at[0]

    def offset(self) -> int:
        return self.at[1]

    def __len__(self) -> int:
        return self.size


class FakeConsumer:
    """Each call brings so many records of each partition that is assigned."""

    def __init__(self, at_once: Mapping[int, int], size: int) -> None:
        self._at_once, self._size = at_once, size
        self._positions: dict[int, int] = {}
        self._paused: set[int | None] = set()

    def assign(self, positions: Sequence[TopicPartition]) -> None:
        self._positions = {at.partition: at.offset for at in positions}

    def pause(self, partitions: Sequence[TopicPartition]) -> None:
        self._paused |= {at.partition for at in partitions}

    def resume(self, partitions: Sequence[TopicPartition]) -> None:
        self._paused -= {at.partition for at in partitions}

    def consume(self, most: int, timeout_s: float) -> list[FakeMessage]:
        found = []
        for partition in self._positions.keys() - self._paused:
            first = self._positions[partition]
            count = self._at_once[partition]
            found += [FakeMessage((partition, first + i), self._size) for i in range(count)]
            self._positions[partition] += count
        return found


def client(
    monkeypatch: pytest.MonkeyPatch, at_once: Mapping[int, int], size: int = 100
) -> TopicClient:
    def consumer(settings: Mapping[str, Any]) -> FakeConsumer:
        return FakeConsumer(at_once, size)

    monkeypatch.setattr(kafka_client, "Consumer", consumer)
    return TopicClient("127.0.0.1:1", "clicks")


def test_a_record_larger_than_the_limit_is_read_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    found = client(monkeypatch, {0: 1}, size=9 << 20).read({0: (0, 1)}, most_bytes=8 << 20)
    assert found[0].end == 1
    assert len(found[0].messages) == 1


def test_a_partition_waits_for_a_slower_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka_client, "_AHEAD_BYTES", 100_000)
    reader = client(monkeypatch, {0: 1, 1: 100})
    reader.read({0: (0, 500), 1: (0, 100)})
    assert len(reader._held[1].messages) < 1000
    found = reader.read({0: (500, 501), 1: (100, 2000)})
    assert [message.offset() for message in found[1].messages] == list(range(100, 2000))


class RepeatingConsumer(FakeConsumer):
    """Gives the last two records of each call again."""

    def consume(self, most: int, timeout_s: float) -> list[FakeMessage]:
        found = super().consume(most, timeout_s)
        for partition in self._positions:
            self._positions[partition] -= 2
        return found


def test_a_record_that_is_given_twice_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka_client, "Consumer", lambda _: RepeatingConsumer({0: 5}, 100))
    reader = TopicClient("127.0.0.1:1", "clicks")
    for start, end in ((0, 7), (7, 12)):
        found = reader.read({0: (start, end)})[0]
        assert [message.offset() for message in found.messages] == list(range(start, end))


class FakeRecord(FakeMessage):
    def value(self) -> bytes:
        return b"{}"

    def timestamp(self) -> tuple[int, int]:
        return 1, (2**63 // 1000 + 1 if self.at[1] == 1 else 5)

    def headers(self) -> list[tuple[str, bytes]]:
        return [((b"\xff" if self.at[1] == 2 else b"a").decode(), b"1")]


class FakeClient:
    def __init__(self, count: int) -> None:
        self._messages = tuple(FakeRecord((0, offset), 10) for offset in range(count))

    def read(self, ranges: Ranges, most_bytes: int | None = None) -> dict[int, Any]:
        return {0: Records(len(self._messages), self._messages)}  # type: ignore[arg-type]


def test_a_record_whose_columns_have_no_value_is_bad() -> None:
    options = KafkaSourceSpec.model_validate(
        {
            "bootstrapServers": "b:9092",
            "topic": "clicks",
            "format": "json",
            "timestampColumn": "t",
            "headersColumn": "h",
            "onBadRecord": "Drop",
        }
    )
    spec = SourceSpec.model_validate({"name": "clicks", "schema": "id BIGINT", "generator": None})
    spec = spec.model_copy(update={"kafka": options, "event_time": EventTimeSpec(column="t")})
    columns = ddl_to_schema("id BIGINT")
    for field in options.added_columns.values():
        columns = columns.append(field)
    context = SourceContext(spec, Node("clicks", "op", spec, (), columns, "t", 1), 1, Path("/none"))
    source = KafkaSource(options, context, lambda servers, topic, security: FakeClient(4))  # type: ignore
    found = source.read({"0": 0}, {"0": 4})
    assert (found.table.num_rows, found.dropped, found.newest_us) == (2, 2, {"0": 5000})
    assert "offset 1: column t: the record's time" in found.example


def test_after_a_failure_the_client_asks_for_the_present_brokers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else it waits for minutes for a controller, or a leader, that is gone."""
    asked = list[str]()

    class Admin:
        def __init__(self, settings: Mapping[str, Any]) -> None: ...

        def describe_topics(self, topics: Any, **_: Any) -> dict[str, Future[Any]]:
            failed: Future[Any] = Future()
            timed_out = KafkaError(KafkaError._TIMED_OUT, "waiting for controller")
            failed.set_exception(KafkaException(timed_out))
            return {"clicks": failed}

        def list_topics(self, topic: str, timeout_s: float) -> None:
            asked.append(topic)
            raise KafkaException(KafkaError(KafkaError._TRANSPORT))

    monkeypatch.setattr(admin, "AdminClient", Admin)
    with pytest.raises(TopicUnavailable, match="waiting for controller"):
        client(monkeypatch, {}).describe()
    assert asked == ["clicks"]


def test_a_partition_without_a_leader_has_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would be read to its end, and idle."""

    class Admin:
        def __init__(self, settings: Mapping[str, Any]) -> None: ...

        def list_offsets(self, wanted: Mapping[Any, Any], **_: Any) -> dict[Any, Future[Any]]:
            found = {at: Future[Any]() for at in wanted}
            for at, future in found.items():
                future.set_result(Mock(offset=(5, OFFSET_INVALID)[at.partition]))
            return found

        def list_topics(self, topic: str, timeout_s: float) -> None: ...

    monkeypatch.setattr(admin, "AdminClient", Admin)
    reader = client(monkeypatch, {})
    assert reader.ends([0]) == {0: 5}
    with pytest.raises(TopicUnavailable, match="partition 1 has no leader"):
        reader.ends([0, 1])


@pytest.mark.parametrize(
    ("topic_id", "problem"), [("a", "has not caught up"), ("b", "deleted and created again")]
)
def test_markers_that_end_before_what_was_read_are_of_a_new_topic_if_its_id_is(
    monkeypatch: pytest.MonkeyPatch, topic_id: str, problem: str
) -> None:
    """A leader that is new may not know the newest end yet."""
    topic = Mock(spec=TopicClient)
    monkeypatch.setattr(kafka_markers, "TopicClient", lambda *_: topic)
    markers = Markers("b:1", "out", "writer", None)
    markers._topic_id, markers._position = "a", 7
    topic.ends.return_value, topic.describe.return_value = {0: 5}, (topic_id, 1)
    with pytest.raises(TopicUnavailable, match=problem):
        markers.look()
