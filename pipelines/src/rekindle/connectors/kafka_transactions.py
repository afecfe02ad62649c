"""Transactions of a topic, of whole groups of epochs: one of several replicas writes each group.

All replicas of a writer share one transactional id; a session of one fences the others
(`rekindle.connectors.group_writer`). A transaction has the records of a group and its marker
(`rekindle.connectors.kafka_markers`). After any failure the producer is given up, and the next one
reads the marker once it has fenced the former.

Design: docs/design/exactly-once.md#topics-as-sinks.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar, assert_never

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from rekindle.connectors.group_writer import BeginSession, Done, GroupWriter, Look, WriteGroup
from rekindle.connectors.kafka_client import (
    REQUEST_S,
    RecordsRemoved,
    TopicUnavailable,
    connection_settings,
)
from rekindle.connectors.kafka_markers import PARTITION, Markers, encode_marker, markers_topic
from rekindle.connectors.kafka_records import Key, TimeLimits
from rekindle.connectors.kafka_settings import client_settings
from rekindle.errors import SinkRefused
from rekindle.secret_files import SecretIncomplete
from rekindle.topology.kinds.kafka_security import KafkaSecuritySpec

SESSION_S = 15.0
"""How long the begin of a session may take: a transaction of the former one is aborted."""
COMMIT_S, COMMIT_CALL_S = 30.0, 2.0
QUEUE_S = 30.0
"""How long a full queue may take no record."""
TRANSACTION_S, LONGEST_TRANSACTION_S = 60.0, 900.0
"""After how long brokers end a transaction; twice as long after each that they have ended, up to
what they allow by default. An open one holds up readers, so it is no longer than needed."""
PRODUCER_SETTINGS = {
    "linger.ms": 5,
    "batch.size": 500_000,
    "queue.buffering.max.messages": 200_000,
    "queue.buffering.max.kbytes": 65_536,
    "message.max.bytes": 100 << 20,  # the topic has the limit
    "partitioner": "murmur2_random",  # that of Java's client; all NULL keys have a partition here
    "delivery.report.only.error": True,
}
BY_KEY = -1
"""The partition of a record that librdkafka determines."""
_FENCED = (
    KafkaError._FENCED,
    KafkaError.PRODUCER_FENCED,
    KafkaError.INVALID_PRODUCER_EPOCH,
)
_HINTS = {
    KafkaError.MSG_SIZE_TOO_LARGE: "raise max.message.bytes of the topic",
    KafkaError.INVALID_TIMESTAMP: (
        "the topic refuses the event time of a row: raise message.timestamp.after.max.ms, or set "
        "message.timestamp.type=LogAppendTime"
    ),
    KafkaError.INVALID_TRANSACTION_TIMEOUT: (
        "transactions have not ended in time: set a shorter commitInterval, or raise "
        "transaction.max.timeout.ms of the brokers"
    ),
}
_T = TypeVar("_T")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TopicRecord:
    """`partition`: BY_KEY, or its number. `time_ms`: 0 is the time of writing."""

    value: bytes | None
    key: Key
    partition: int = BY_KEY
    time_ms: int = 0
    headers: tuple[tuple[str, bytes | None], ...] = ()


class TopicTransactions:
    """Of one transactional id (see the module's docstring); not shared between threads. `where`:
    what writes to which topic, for messages. All methods but `discard` and `close` raise
    SinkRefused."""

    def __init__(
        self,
        where: str,
        bootstrap_servers: str,
        topic: str,
        security: KafkaSecuritySpec | None,
        writer: str,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._where = where
        self._servers, self._topic, self._security = bootstrap_servers, topic, security
        self._id = writer
        self._clock, self._sleep = clock, sleep
        self._turn = GroupWriter()
        self._markers: Markers | None = None
        self.limits = TimeLimits()
        """Of the topic, once a session has begun."""
        self.partitions = 1
        """Of the topic, once a session has begun."""
        self.group: int | None = None
        """The last epoch of the group whose transaction is open."""
        self._transaction_s = TRANSACTION_S
        self._began_at = 0.0  # the transaction that is open
        self._producer: Producer | None = None
        self._last_error = ""  # of the connection
        self._not_delivered = ""

    @property
    def through(self) -> int:
        """The newest epoch that is known to be durable."""
        return self._turn.through

    def look(self) -> None:
        """Find out which epochs are durable, by whomever they were written."""
        self._turn.marker_read(self._read(Markers.look), self._clock())

    def send(self, records: Iterable[TopicRecord], what: str) -> None:
        """`what`: for a message."""
        try:
            for record in records:
                self._queue(record)
        except (KafkaException, BufferError) as error:
            raise self._session_ended(f"cannot write {what}", error) from error

    def commit(self, through: int) -> None:
        """Make the open transaction durable, if there is one."""
        if self.group is None:
            return
        producer, key = self._open_producer(), self._id.encode()
        try:
            producer.produce(markers_topic(self._topic), encode_marker(through), key, PARTITION)
            self._commit(producer)
        except (KafkaException, BufferError) as error:
            raise self._session_ended(f"cannot commit epoch {through}", error) from error
        self.group = None
        self._turn.committed(through)

    def _commit(self, producer: Producer) -> None:
        """In several calls: each waits for all records, also if a broker has refused one, and the
        next one says why."""
        deadline = self._clock() + COMMIT_S
        while True:
            try:
                producer.commit_transaction(COMMIT_CALL_S)
                return
            except KafkaException as error:
                if not error.args[0].retriable() or self._clock() >= deadline:
                    raise

    def discard(self) -> None:
        """Ends the transaction: an open one holds up those who read the topic."""
        if self.group is None:
            return
        self.group = None
        try:
            self._open_producer().abort_transaction(COMMIT_S)
        except KafkaException as error:
            _log.warning("%s", self._session_ended("cannot abort a transaction", error))

    def close(self) -> None:
        self.discard()
        self._drop_producer()
        self._drop_markers()

    def refused(self, what: str) -> SinkRefused:
        return SinkRefused(f"{self._where}: {what}")

    def begin(self, group: int) -> bool:
        """Begin the transaction of a group once it is this replica's turn. False: the group is
        durable."""
        while True:
            match self._turn.next_step(group, self._clock()):
                case Done():
                    return False
                case Look(after_s):
                    self._sleep(after_s)
                    self.look()
                case BeginSession():
                    self._begin_session()
                case WriteGroup():
                    break
                case step:
                    assert_never(step)
        try:
            self._open_producer().begin_transaction()
        except KafkaException as error:
            raise self._session_ended("cannot begin a transaction", error) from error
        self.group, self._not_delivered, self._last_error = group, "", ""
        self._began_at = self._clock()
        return True

    def _begin_session(self) -> None:
        self._drop_producer()
        try:
            self.limits = self._read(Markers.time_limits)
            self._producer = Producer(self._settings())
            self.partitions = self._count_partitions(self._producer)
            self._producer.init_transactions(SESSION_S)
            # Not before: until then a former session may commit.
            self._turn.session_begun(self._read(Markers.newest))
        except KafkaException as error:
            raise self._session_ended("cannot begin a session", error) from error

    def _settings(self) -> dict[str, Any]:
        try:
            connection = client_settings(self._servers, self._security)
        except SecretIncomplete as error:
            raise self.refused(str(error)) from error
        return {
            **PRODUCER_SETTINGS,
            **connection,
            **connection_settings(self._observe),
            "transactional.id": self._id,
            "transaction.timeout.ms": int(self._transaction_s * 1000),
        }

    def _count_partitions(self, producer: Producer) -> int:
        found = producer.list_topics(self._topic, REQUEST_S).topics[self._topic]
        if found.error is not None:
            raise KafkaException(found.error)
        return len(found.partitions)

    def _open_producer(self) -> Producer:
        assert self._producer is not None, "a session has begun"
        return self._producer

    def _drop_producer(self) -> None:
        """Without an end of its transaction: the next session ends it."""
        producer, self._producer, self.group = self._producer, None, None
        if producer is not None:
            producer.purge()

    def _drop_markers(self) -> None:
        markers, self._markers = self._markers, None
        if markers is not None:
            markers.close()

    def _session_ended(self, what: str, error: Exception) -> SinkRefused:
        """The session is over, whatever the outcome of the request was."""
        cause = error.args[0] if error.args else None
        if self._producer is not None:
            try:
                self._producer.poll(0)  # what was not delivered
            except KafkaException as fatal:  # which other calls do not tell
                cause = fatal.args[0]
        code = cause.code() if isinstance(cause, KafkaError) else None
        lasted_s = self._clock() - self._began_at if self.group is not None else 0.0
        self._drop_producer()
        if code in _FENCED and lasted_s >= self._transaction_s:
            self._turn.session_lost()
            limit_s = self._transaction_s
            self._transaction_s = min(2 * limit_s, LONGEST_TRANSACTION_S)
            return self.refused(
                f"{what}: the brokers have ended a transaction that took longer than {limit_s:g} s;"
                f" the next one may take {self._transaction_s:g} s; with a shorter commitInterval "
                "it takes less"
            )
        if code in _FENCED:
            self._turn.fenced()
            return self.refused(f"{what}: another replica of this task has taken over")
        self._turn.session_lost()
        text = cause.str() if isinstance(cause, KafkaError) else str(error)
        more = [m for m in (self._not_delivered, self._last_error, _HINTS.get(code or 0)) if m]
        return self.refused("; ".join([f"{what}: {text}", *dict.fromkeys(more)]))

    def _queue(self, record: TopicRecord) -> None:
        """Raises BufferError if the queue stays full: brokers do not respond."""
        producer, deadline = self._open_producer(), math.inf
        while True:
            try:
                producer.produce(
                    self._topic,
                    record.value,
                    record.key,
                    record.partition,
                    None,
                    self._delivered,
                    record.time_ms,
                    list(record.headers) or None,
                )
                return
            except BufferError:
                deadline = min(deadline, self._clock() + QUEUE_S)
                if self._clock() > deadline:
                    raise
                producer.poll(0.1)

    def _delivered(self, error: KafkaError | None, message: Message) -> None:
        if error is not None and not self._not_delivered:
            self._not_delivered = f"a record of {len(message)} bytes: {error.str()}"

    def _observe(self, error: KafkaError) -> None:
        self._last_error = error.str()

    def _read(self, read: Callable[[Markers], _T]) -> _T:
        try:
            if self._markers is None:
                self._markers = Markers(self._servers, self._topic, self._id, self._security)
            return read(self._markers)
        except (TopicUnavailable, RecordsRemoved, ValueError) as error:
            self._drop_producer()
            self._drop_markers()  # the next client has the newest Secrets
            self._turn.session_lost()
            raise self.refused(str(error)) from error
