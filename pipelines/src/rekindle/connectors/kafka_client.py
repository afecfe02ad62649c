"""Reads ranges of offsets of a Kafka topic, with librdkafka.

A range ends by position: offsets have gaps, where transactions ended or aborted, and where a topic
was compacted. So a partition is read to its end when a record or the end of the partition is seen
at that offset or later, or when the position has passed it; never when so many records have come.
Records beyond the end are kept for the next range. Nothing is committed to Kafka, and no group is
joined.

Design: docs/decisions/0090-planned-cuts.md.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from confluent_kafka import (
    Consumer,
    IsolationLevel,
    KafkaError,
    KafkaException,
    Message,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, OffsetSpec

REQUEST_S = 5.0
READ_S = 10.0
"""How long a range may bring nothing before it is an error."""
_POLL_S = 0.05
_MOST_AT_ONCE = 10_000
CONSUMER_SETTINGS: Mapping[str, Any] = {
    "group.id": "rekindle",  # must be set, and is not used: partitions are assigned
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "auto.offset.reset": "error",  # the only sign of records that retention has removed
    "isolation.level": "read_committed",
    "enable.partition.eof": True,
    "fetch.queue.backoff.ms": 5,  # 1,000 by default: so long a full queue would stop a partition
    "queued.min.messages": 100_000,
    "queued.max.messages.kbytes": 16_384,
    "fetch.max.bytes": 8 << 20,
    "fetch.message.max.bytes": 1 << 20,
    "log.connection.close": False,
}
_log = logging.getLogger(__name__)


class TopicUnavailable(Exception):
    """Brokers do not respond, or refuse; says why."""


class RecordsRemoved(Exception):
    """Records of a range have been removed from the topic. `partition`: of the topic."""

    def __init__(self, partition: int, offset: int) -> None:
        super().__init__(f"partition {partition} has no offset {offset} any more")
        self.partition, self.offset = partition, offset


class TopicClient:
    """One topic; used by one thread."""

    def __init__(self, bootstrap_servers: str, topic: str) -> None:
        common = {
            "bootstrap.servers": bootstrap_servers,
            "logger": _log,
            "error_cb": self._observe,
            "reconnect.backoff.max.ms": 1_000,
        }
        self._topic = topic
        self._last_error: str | None = None
        self._admin = AdminClient({**common, "log.connection.close": False})
        self._consumer = Consumer({**CONSUMER_SETTINGS, **common})
        self._held: dict[int, list[Message]] = {}
        # By partition: `_held` has all records from one offset to the other. Not the consumer's own
        # position, which after a change is the former one until a record arrives.
        self._from: dict[int, int] = {}
        self._next: dict[int, int] = {}

    def _observe(self, error: KafkaError) -> None:
        self._last_error = error.str()

    def describe(self) -> tuple[str, int]:
        """Id and number of partitions of the topic. Raises TopicUnavailable."""
        try:
            topics = TopicCollection([self._topic])
            found = self._admin.describe_topics(topics, request_timeout=REQUEST_S)
            description = found[self._topic].result()
        except KafkaException as error:
            raise self._unavailable(error) from error
        return str(description.topic_id), len(description.partitions)

    def offsets(self, wanted: Mapping[int, OffsetSpec]) -> dict[int, int]:
        """One offset of each of these partitions; that of a time is -1 if no record is so late.
        Raises TopicUnavailable."""
        if not wanted:
            return {}
        specs = {TopicPartition(self._topic, p): spec for p, spec in wanted.items()}
        try:
            found = self._admin.list_offsets(
                specs,
                isolation_level=IsolationLevel.READ_COMMITTED,  # not the default
                request_timeout=REQUEST_S,
            )
            return {at.partition: future.result().offset for at, future in found.items()}
        except KafkaException as error:
            raise self._unavailable(error) from error

    def ends(self, partitions: Iterable[int]) -> dict[int, int]:
        return self.offsets({partition: OffsetSpec.latest() for partition in partitions})

    def read(self, ranges: Mapping[int, tuple[int, int]]) -> dict[int, Sequence[Message]]:
        """The records of [start, end) of each partition, by offset. Raises TopicUnavailable,
        RecordsRemoved."""
        ranges = {p: span for p, span in ranges.items() if span[0] < span[1]}
        self._begin_at({p: start for p, (start, _) in ranges.items()})
        missing, deadline = self._missing(ranges), time.monotonic() + READ_S
        while missing:
            messages = self._consume(min(missing, _MOST_AT_ONCE))
            for message in messages:
                self._take(message)
            if messages:
                deadline = time.monotonic() + READ_S
            elif time.monotonic() > deadline:
                raise TopicUnavailable(self._last_error or f"no response for {READ_S:.0f} s")
            missing = self._missing(ranges)
        self._last_error = None
        return {p: self._between(p, start, end) for p, (start, end) in ranges.items()}

    def close(self) -> None:
        self._consumer.close()

    def _begin_at(self, starts: Mapping[int, int]) -> None:
        """Drops what lies before; begins again where it has not all that lies after."""
        again = dict[int, int]()
        for partition, start in starts.items():
            if self._from.get(partition, start + 1) <= start <= self._next[partition]:
                held = self._held[partition]
                del held[: bisect_left(held, start, key=Message.offset)]
                self._from[partition] = start
            else:
                again[partition] = start
        if not again:
            return
        for partition, start in again.items():
            self._held[partition], self._next[partition] = [], start
        positions = [TopicPartition(self._topic, p, offset) for p, offset in self._next.items()]
        try:
            self._consumer.assign(positions)
        except KafkaException as error:
            raise self._unavailable(error) from error
        self._from |= again

    def _missing(self, ranges: Mapping[int, tuple[int, int]]) -> int:
        """Offsets that are still to be passed."""
        return sum(max(0, end - self._next[p]) for p, (_, end) in ranges.items())

    def _consume(self, most: int) -> list[Message]:
        try:
            return self._consumer.consume(most, _POLL_S)
        except KafkaException as error:
            raise self._unavailable(error) from error

    def _take(self, message: Message) -> None:
        error, partition = message.error(), message.partition()
        if error is None:
            self._held[partition].append(message)
            self._next[partition] = message.offset() + 1
        elif error.code() == KafkaError._PARTITION_EOF:
            self._next[partition] = max(message.offset(), self._next[partition])
        elif error.code() == KafkaError._AUTO_OFFSET_RESET:
            self._from.clear()  # what came with it is lost: the next range begins anew
            raise RecordsRemoved(partition, self._next[partition])
        else:
            self._from.clear()
            raise TopicUnavailable(error.str())

    def _between(self, partition: int, start: int, end: int) -> Sequence[Message]:
        held = self._held[partition]
        first = bisect_left(held, start, key=Message.offset)
        return held[first : bisect_left(held, end, key=Message.offset)]

    def _unavailable(self, error: KafkaException) -> TopicUnavailable:
        cause = error.args[0]
        return TopicUnavailable(cause.str() if isinstance(cause, KafkaError) else str(error))
