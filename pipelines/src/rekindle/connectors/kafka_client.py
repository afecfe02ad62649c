"""Reads ranges of offsets of a Kafka topic, with librdkafka.

A range ends by position: offsets have gaps, where transactions ended or aborted. So a partition is
read to its end when a record or the end of the partition is seen at that offset or later, or when
the position has passed it; never when so many records have come.
Records beyond the end are kept for the next range. Nothing is committed to Kafka, and no group is
joined.

Design: docs/decisions/0058-planned-cuts.md.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, TypeVar

from confluent_kafka import (
    OFFSET_INVALID,
    Consumer,
    IsolationLevel,
    KafkaError,
    KafkaException,
    Message,
    TopicCollection,
    TopicPartition,
    admin,
)

from rekindle.connectors.kafka_settings import client_settings, refusal
from rekindle.secret_files import SecretIncomplete
from rekindle.topology.kinds.kafka_security import KafkaSecuritySpec

REQUEST_S = 5.0
_REFRESH_S = 1.0
READ_S = 10.0
"""How long a range may bring nothing before it is an error."""
_POLL_S = 0.05
_MOST_AT_ONCE = 10_000
_END, _REMOVED = KafkaError._PARTITION_EOF, KafkaError._AUTO_OFFSET_RESET
_AHEAD_BYTES = 16 << 20
"""Partitions that have been read to the end of their range pause while they have so much beyond."""
_RECORD_BYTES = 200
"""About what a record takes in memory beside its value."""
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
}
_log = logging.getLogger(__name__)
_T = TypeVar("_T")


def connection_settings(on_error: Callable[[KafkaError], None]) -> dict[str, Any]:
    """How all clients report errors, and connect again."""
    return {
        "logger": _log,
        "error_cb": on_error,
        "reconnect.backoff.max.ms": 1_000,
        "log.connection.close": False,
    }


Ranges = Mapping[int, tuple[int, int]]
"""By partition: the first offset, and the one after the last."""


class TopicUnavailable(Exception):
    """Brokers do not respond, or refuse; says why."""


class TopicRefused(TopicUnavailable):
    """Brokers do not accept the client, or what it would sign in with is missing."""


class RecordsRemoved(Exception):
    """Records of a range have been removed from the topic. `partition`: of the topic."""

    def __init__(self, partition: int, offset: int) -> None:
        super().__init__(f"partition {partition} has no offset {offset} any more")
        self.partition, self.offset = partition, offset


@dataclass(frozen=True, slots=True)
class Records:
    """Of one partition, before the offset `end`."""

    end: int
    messages: Sequence[Message]


@dataclass(slots=True)
class _Held:
    """Records that have been taken: all of [`first`, `next`). `end`: of the range that is read;
    `within`, `ahead`: the bytes before it, and from it on."""

    first: int
    next: int
    end: int = 0
    within: int = 0
    ahead: int = 0
    offsets: list[int] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    def drop_before(self, offset: int) -> None:
        at = bisect_left(self.offsets, offset)
        del self.offsets[:at], self.messages[:at], self.sizes[:at]
        self.first = offset

    def read_to(self, end: int) -> None:
        self.end, self.within = end, sum(self.sizes_before(end))
        self.ahead = sum(self.sizes) - self.within

    def add(self, offset: int, message: Message) -> None:
        size = len(message) + _RECORD_BYTES
        self.offsets.append(offset)
        self.messages.append(message)
        self.sizes.append(size)
        if offset < self.end:
            self.within += size
        else:
            self.ahead += size
        self.next = offset + 1

    def before(self, offset: int) -> list[Message]:
        return self.messages[: bisect_left(self.offsets, offset)]

    def sizes_before(self, offset: int) -> list[int]:
        return self.sizes[: bisect_left(self.offsets, offset)]


class TopicClient:
    """One topic; used by one thread."""

    def __init__(
        self, bootstrap_servers: str, topic: str, security: KafkaSecuritySpec | None = None
    ) -> None:
        """Raises TopicRefused."""
        self._settings = _settings(bootstrap_servers, security)
        self._given = bootstrap_servers, security
        common = {**self._settings, **connection_settings(self._observe)}
        self._topic = topic
        self._last_error: str | None = None
        self._refusal: str | None = None  # during the call
        try:
            self._admin = admin.AdminClient(common)
            self._consumer = Consumer({**CONSUMER_SETTINGS, **common})
        except KafkaException as error:  # such as a certificate that is none
            raise TopicRefused(str(error.args[0])) from error
        # By partition. Not the consumer's own positions, which after a change are the former ones
        # until a record arrives.
        self._held: dict[int, _Held] = {}
        self._begins_anew = False
        self._paused: set[int] = set()

    def _observe(self, error: KafkaError) -> None:
        self._last_error = error.str()
        self._refusal = refusal(error) or self._refusal

    @property
    def is_outdated(self) -> bool:
        """Whether the Secrets have changed. Raises TopicRefused."""
        return _settings(*self._given) != self._settings

    @property
    def admin(self) -> admin.AdminClient:
        return self._admin

    def describe(self) -> tuple[str, int]:
        """Id and number of partitions of the topic. Raises TopicUnavailable."""
        try:
            topics = TopicCollection([self._topic])
            found = self._admin.describe_topics(topics, request_timeout=REQUEST_S)
            description = self._result(found[self._topic])
        except KafkaException as error:
            raise self.failed(error) from error
        return str(description.topic_id), len(description.partitions)

    def cleanup_policy(self) -> str:
        """Of the topic: `delete`, `compact`, or both. Raises TopicUnavailable."""
        resource = admin.ConfigResource(admin.ConfigResource.Type.TOPIC, self._topic)
        try:
            found = self._admin.describe_configs([resource], request_timeout=REQUEST_S)
            return str(self._result(found[resource])["cleanup.policy"].value)
        except KafkaException as error:
            raise self.failed(error) from error

    def ends(self, partitions: Iterable[int]) -> dict[int, int]:
        """The offset after the last committed record of each. Raises TopicUnavailable."""
        return self._offsets(partitions, admin.OffsetSpec.latest())

    def uncommitted_ends(self, partitions: Iterable[int]) -> dict[int, int]:
        """The same with the records of open transactions. Raises TopicUnavailable."""
        latest = admin.OffsetSpec.latest()
        return self._offsets(partitions, latest, IsolationLevel.READ_UNCOMMITTED)

    def beginnings(self, partitions: Iterable[int]) -> dict[int, int]:
        """The oldest offset of each that is there. Raises TopicUnavailable."""
        return self._offsets(partitions, admin.OffsetSpec.earliest())

    def at_time(self, partitions: Iterable[int], time_ms: int) -> dict[int, int]:
        """The first record from a time on, or the end. Raises TopicUnavailable."""
        found = self._offsets(partitions, admin.OffsetSpec.for_timestamp(time_ms))
        later = [partition for partition, offset in found.items() if offset < 0]
        return {**found, **self.ends(later)}

    def _offsets(
        self,
        partitions: Iterable[int],
        spec: Any,
        isolation: IsolationLevel = IsolationLevel.READ_COMMITTED,  # not that of `list_offsets`
    ) -> dict[int, int]:
        wanted = {TopicPartition(self._topic, partition): spec for partition in partitions}
        if not wanted:
            return {}
        try:
            found = self._admin.list_offsets(
                wanted, isolation_level=isolation, request_timeout=REQUEST_S
            )
            offsets = {at.partition: self._result(future).offset for at, future in found.items()}
        except KafkaException as error:
            raise self.failed(error) from error
        # What the client gives, without an error, of a partition that has no leader.
        for partition, offset in offsets.items():
            if offset == OFFSET_INVALID:
                what = f"partition {partition} has no leader"
                cause = KafkaError(KafkaError.LEADER_NOT_AVAILABLE, what)
                raise self.failed(KafkaException(cause))
        return offsets

    def failed(self, error: KafkaException) -> TopicUnavailable:
        """Of a request of `admin`. The client would keep a leader, or a controller, that is gone
        for minutes, so it asks for the present ones."""
        with suppress(KafkaException):
            self._admin.list_topics(self._topic, _REFRESH_S)
        return self._unavailable(error)

    def _result(self, future: Future[_T]) -> _T:
        """Raises KafkaException; TopicRefused as soon as a broker has refused the client, not when
        the request ends."""
        self._refusal = None  # of another attempt
        while True:
            try:
                found = future.result(timeout=_POLL_S)
            except TimeoutError:
                self._admin.poll(0)  # calls `_observe`
                if self._refusal is not None:
                    raise TopicRefused(self._refusal) from None
            else:
                return found

    def read(self, ranges: Ranges, most_bytes: int | None = None) -> dict[int, Records]:
        """The records of [start, end) of each partition, by offset. With `most_bytes` the ranges
        may end before, but not all of them before their first record. Raises TopicUnavailable,
        RecordsRemoved."""
        self._refusal = None
        given = {p: span for p, span in ranges.items() if span[0] < span[1]}
        self._begin_at({p: start for p, (start, _) in given.items()})
        for partition, held in self._held.items():
            held.read_to(given[partition][1] if partition in given else held.first)
        self._resume(p for p in self._paused if self._held[p].next < self._held[p].end)
        deadline = time.monotonic() + READ_S
        while missing := self._missing(given):
            if most_bytes is not None and sum(self._held[p].within for p in given) >= most_bytes:
                break
            self._pause_those_ahead()
            if self._consume(min(missing, _MOST_AT_ONCE)):
                deadline = time.monotonic() + READ_S
            elif self._refusal is not None:
                raise TopicRefused(self._refusal)
            elif time.monotonic() > deadline:
                raise TopicUnavailable(self._last_error or f"no response for {READ_S:.0f} s")
        self._last_error = None
        ends = {p: min(end, self._held[p].next) for p, (_, end) in given.items()}
        if most_bytes is not None:
            ends = self._within(ends, most_bytes)
        found = {p: Records(start, ()) for p, (start, _) in ranges.items()}
        return found | {p: Records(at, self._held[p].before(at)) for p, at in ends.items()}

    def _within(self, ends: Mapping[int, int], most_bytes: int) -> dict[int, int]:
        """Ends that lie before, so that the records before them have so many bytes: partitions
        share them, as evenly as they can use them. One record is always left."""
        sizes = {p: self._held[p].sizes_before(end) for p, end in ends.items()}
        totals = {p: sum(found) for p, found in sizes.items()}
        within, left = dict(ends), most_bytes
        waiting = sorted(ends, key=lambda p: totals[p])
        for at, partition in enumerate(waiting):
            is_last = at == len(waiting) - 1
            is_first_record = is_last and left == most_bytes  # of all
            share = left // (len(waiting) - at)
            if totals[partition] > share:
                running = list(accumulate(sizes[partition]))
                count = max(bisect_right(running, share), int(is_first_record))
                if count < len(running):
                    within[partition] = self._held[partition].offsets[count]
                totals[partition] = running[count - 1] if count else 0
            left -= totals[partition]
        return within

    def close(self) -> None:
        self._consumer.close()

    def _begin_at(self, starts: Mapping[int, int]) -> None:
        """Drops what lies before; begins again where it has not all that lies after."""
        again = dict[int, int]()
        for partition, start in starts.items():
            held = self._held.get(partition)
            if held is None or self._begins_anew or not held.first <= start <= held.next:
                again[partition] = start
            else:
                held.drop_before(start)
        if not again:
            return
        self._resume(self._paused)
        if self._begins_anew:
            self._held.clear()
        self._held |= {partition: _Held(start, start) for partition, start in again.items()}
        positions = [TopicPartition(self._topic, p, held.next) for p, held in self._held.items()]
        try:
            self._consumer.assign(positions)
        except KafkaException as error:
            self._begins_anew = True
            raise self._unavailable(error) from error
        self._begins_anew = False

    def _pause_those_ahead(self) -> None:
        """Else the other partitions' records would be held while one is slow, without a bound."""
        ahead = {p: held.ahead for p, held in self._held.items() if held.next >= held.end}
        if sum(ahead.values()) >= _AHEAD_BYTES and (more := ahead.keys() - self._paused):
            self._consumer.pause([TopicPartition(self._topic, p) for p in more])
            self._paused |= more

    def _resume(self, partitions: Iterable[int]) -> None:
        if found := set(partitions):
            self._consumer.resume([TopicPartition(self._topic, p) for p in found])
            self._paused -= found

    def _missing(self, ranges: Mapping[int, tuple[int, int]]) -> int:
        """Offsets that are still to be passed."""
        return sum(max(0, end - self._held[p].next) for p, (_, end) in ranges.items())

    def _consume(self, most: int) -> int:
        """Takes what arrives; returns how many messages. Raises as `read`; then other messages may
        be lost, and the next range begins anew."""
        self._begins_anew = True
        try:
            messages = self._consumer.consume(most, _POLL_S)
        except KafkaException as error:
            raise self._unavailable(error) from error
        for message in messages:
            self._take(message)
        self._begins_anew = False
        return len(messages)

    def _take(self, message: Message) -> None:
        error, partition, offset = message.error(), message.partition(), message.offset()
        held = self._held.get(-1 if partition is None else partition)
        if error is not None and error.code() not in (_END, _REMOVED):
            refused = refusal(error)
            raise TopicUnavailable(error.str()) if refused is None else TopicRefused(refused)
        if held is None or partition is None or offset is None:
            return  # it was assigned before
        if error is None:
            if offset >= held.next:  # else it was given before, as when the leader changes
                held.add(offset, message)
        elif error.code() == _END:
            held.next = max(offset, held.next)
        else:
            raise RecordsRemoved(partition, held.next)

    def _unavailable(self, error: KafkaException) -> TopicUnavailable:
        cause = error.args[0]
        refused = self._refusal or (refusal(cause) if isinstance(cause, KafkaError) else None)
        if refused is not None:
            return TopicRefused(refused)
        return TopicUnavailable(cause.str() if isinstance(cause, KafkaError) else str(error))


def _settings(bootstrap_servers: str, security: KafkaSecuritySpec | None) -> dict[str, Any]:
    """Raises TopicRefused."""
    try:
        return client_settings(bootstrap_servers, security)
    except SecretIncomplete as error:
        raise TopicRefused(str(error)) from error
