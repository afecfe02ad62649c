"""Ranges of a topic, read from a consumer that is a fake."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from confluent_kafka import TopicPartition

from rekindle.connectors import kafka_client
from rekindle.connectors.kafka_client import TopicClient


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

    def assign(self, positions: Sequence[TopicPartition]) -> None:
        self._positions = {at.partition: at.offset for at in positions}

    def consume(self, most: int, timeout_s: float) -> list[FakeMessage]:
        found = []
        for partition, first in self._positions.items():
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
