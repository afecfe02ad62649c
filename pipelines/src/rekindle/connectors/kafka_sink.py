"""The sink `kafka`: the rows of a query as records of a topic, in transactions of whole epochs.

Each partition of the query has one transactional id, which all replicas of its task share: one of
them writes, and fences the others (`rekindle.connectors.group_writer`). A transaction has the rows
of a group of epochs and their marker (`rekindle.connectors.kafka_markers`). After any failure the
producer is given up, and the next one reads the marker once it has fenced the former.

Which definition of the query may write an epoch is decided as for files
(`rekindle.connectors.epoch_ranges`), in the checkpoint store. Groups without rows have no
transaction.

Design: docs/design/exactly-once.md#topics-as-sinks.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import Any, TypeVar, assert_never

import pyarrow as pa
from confluent_kafka import KafkaError, KafkaException, Message, Producer

from rekindle.connectors.epoch_ranges import EpochRanges
from rekindle.connectors.group_writer import BeginSession, Done, GroupWriter, Look, WriteGroup
from rekindle.connectors.json_writer import UnencodableValue
from rekindle.connectors.kafka_client import (
    REQUEST_S,
    RecordsRemoved,
    TopicUnavailable,
    connection_settings,
)
from rekindle.connectors.kafka_markers import (
    PARTITION,
    Markers,
    encode_marker,
    markers_topic,
    transactional_id,
)
from rekindle.connectors.kafka_records import (
    Key,
    TimeLimits,
    record_keys,
    record_times_ms,
)
from rekindle.connectors.kafka_settings import client_settings
from rekindle.connectors.sink import SinkContext
from rekindle.connectors.value_writers import open_writer
from rekindle.errors import SinkRefused, SourceFailed
from rekindle.objects import Retry, open_objects
from rekindle.secret_files import SecretIncomplete
from rekindle.streams.epochs import NO_EPOCH, BatchKind, EpochBatch, last_of_group
from rekindle.topology.kinds.kafka_sink import KafkaSinkSpec

SESSION_S = 15.0
"""How long the begin of a session may take: a transaction of the former one is aborted."""
COMMIT_S = 30.0
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


def open_sink(options: KafkaSinkSpec, context: SinkContext) -> KafkaSink:
    """See `rekindle.connectors.sink.OpenSink`."""
    return KafkaSink(options, context)


class KafkaSink:
    """One partition of one query (see the module's docstring); not shared between threads."""

    conflict: str | None = None

    def __init__(
        self,
        options: KafkaSinkSpec,
        context: SinkContext,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._options, self._context = options, context
        self._clock, self._sleep = clock, sleep
        self._where = f"query {context.query}: topic {options.topic} at {options.bootstrap_servers}"
        if context.definition is None or context.store is None:
            raise SinkRefused(
                f"query {context.query}: a run does not write to Kafka; give --output DIR, and it "
                "writes the values of the records to files there"
            )
        self._id = transactional_id(context.topology_uid, context.query, context.partition)
        self._values = open_writer(options, context.schema)
        self._turn = GroupWriter()
        self._markers: Markers | None = None
        self._limits = TimeLimits()  # of the topic
        self._transaction_s = TRANSACTION_S
        self._began_at = 0.0  # the transaction that is open
        self._producer: Producer | None = None
        self._partitions = 1
        self._group: int | None = None  # the last epoch of the group whose transaction is open
        self._next = 0  # the epoch after the one that was written last
        self._last_error = ""  # of the connection
        self._not_delivered = ""
        self._ranges = EpochRanges(
            open_objects(context.store),
            Retry(),
            context.query,
            context.definition,
            folder=f"{context.topology_uid}/sinks",
        )

    @property
    def epochs_per_commit(self) -> int:
        return self._options.epochs_per_commit(self._context.epoch_interval_us)

    def retry_conflicts(self, may_write: Callable[[int], bool]) -> None:
        """There are no conflicts: replicas compare digests of their logs."""

    def first_epoch(self) -> int:
        try:
            return self._ranges.first_epoch()
        except OSError as error:
            raise self._refused(str(error)) from error

    def last_epoch(self, after: int = NO_EPOCH) -> int:
        first = self.first_epoch()
        self._turn.marker_read(self._read(Markers.look), self._clock())
        return max(after, first - 1, self._turn.through)

    def write(self, batch: EpochBatch) -> bool:
        if batch.kind is not BatchKind.STABLE:
            raise ValueError(f"a sink takes stable epochs only, not {batch.kind} {batch.epoch}")
        group = last_of_group(batch.epoch, self.epochs_per_commit)
        if self._group != group or self._next != batch.epoch:  # such as a group that is repeated
            self.discard()
        self._next = batch.epoch + 1
        if not batch.rows.num_rows or self._turn.through >= batch.epoch:
            return False
        try:
            self._ranges.acquire(batch.epoch)
        except OSError as error:
            raise self._refused(f"cannot write epoch {batch.epoch}: {error}") from error
        if self._group is None and not self._begin(group):
            return False
        if self._turn.through >= batch.epoch:  # as of another commitInterval: within this group
            return False
        self._produce(batch)
        return True

    def commit(self, through: int) -> None:
        if self._group is None:
            return
        producer, key = self._open_producer(), self._id.encode()
        markers = markers_topic(self._options.topic)
        try:
            producer.produce(markers, encode_marker(through), key, PARTITION)
            producer.commit_transaction(COMMIT_S)
        except (KafkaException, BufferError) as error:
            raise self._session_ended(f"cannot commit epoch {through}", error) from error
        self._group = None
        self._turn.committed(through)

    def discard(self) -> None:
        """Ends the transaction: an open one holds up those who read the topic."""
        if self._group is None:
            return
        self._group = None
        try:
            self._open_producer().abort_transaction(COMMIT_S)
        except KafkaException as error:
            _log.warning("%s", self._session_ended("cannot abort a transaction", error))

    def close(self) -> None:
        self.discard()
        self._drop_producer()
        self._drop_markers()

    # -- the session -----------------------------------------------------------------------------

    def _begin(self, group: int) -> bool:
        """Begin the transaction of a group once it is this replica's turn. False: the group is
        durable."""
        while True:
            match self._turn.next_step(group, self._clock()):
                case Done():
                    return False
                case Look(after_s):
                    self._sleep(after_s)
                    self._turn.marker_read(self._read(Markers.look), self._clock())
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
        self._group, self._not_delivered, self._last_error = group, "", ""
        self._began_at = self._clock()
        return True

    def _begin_session(self) -> None:
        self._drop_producer()
        try:
            self._limits = self._read(Markers.time_limits)
            self._producer = Producer(self._settings())
            self._partitions = self._count_partitions(self._producer)
            self._producer.init_transactions(SESSION_S)
            # Not before: until then a former session may commit.
            self._turn.session_begun(self._read(Markers.newest))
        except KafkaException as error:
            raise self._session_ended("cannot begin a session", error) from error

    def _settings(self) -> dict[str, Any]:
        options = self._options
        try:
            connection = client_settings(options.bootstrap_servers, options.security)
        except SecretIncomplete as error:
            raise self._refused(str(error)) from error
        return {
            **PRODUCER_SETTINGS,
            **connection,
            **connection_settings(self._observe),
            "transactional.id": self._id,
            "transaction.timeout.ms": int(self._transaction_s * 1000),
        }

    def _count_partitions(self, producer: Producer) -> int:
        found = producer.list_topics(self._options.topic, REQUEST_S).topics[self._options.topic]
        if found.error is not None:
            raise KafkaException(found.error)
        return len(found.partitions)

    def _open_producer(self) -> Producer:
        assert self._producer is not None, "a session has begun"
        return self._producer

    def _drop_producer(self) -> None:
        """Without an end of its transaction: the next session ends it."""
        producer, self._producer, self._group = self._producer, None, None
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
        lasted_s = self._clock() - self._began_at if self._group is not None else 0.0
        self._drop_producer()
        if code in _FENCED and lasted_s >= self._transaction_s:
            self._turn.session_lost()
            limit_s = self._transaction_s
            self._transaction_s = min(2 * limit_s, LONGEST_TRANSACTION_S)
            return self._refused(
                f"{what}: the brokers have ended a transaction that took longer than {limit_s:g} s;"
                f" the next one may take {self._transaction_s:g} s; with a shorter commitInterval "
                "it takes less"
            )
        if code in _FENCED:
            self._turn.fenced()
            return self._refused(f"{what}: another replica of this task has taken over")
        self._turn.session_lost()
        text = cause.str() if isinstance(cause, KafkaError) else str(error)
        more = [m for m in (self._not_delivered, self._last_error, _HINTS.get(code or 0)) if m]
        return self._refused("; ".join([f"{what}: {text}", *dict.fromkeys(more)]))

    # -- records ---------------------------------------------------------------------------------

    def _produce(self, batch: EpochBatch) -> None:
        options = self._options
        try:
            rows = batch.rows.cast(self._context.schema)
            values = self._values.encode(rows)
            keys = record_keys(rows, options.key)
            limits = self._limits.at(int(time.time() * 1000))
            times_ms = record_times_ms(rows, self._context.event_time, *limits)
        except (UnencodableValue, pa.ArrowException) as error:
            self.discard()
            raise self._refused(f"cannot store the rows of epoch {batch.epoch}: {error}") from error
        except SourceFailed as error:  # of the registry
            self.discard()
            raise self._refused(f"cannot write epoch {batch.epoch}: {error}") from error
        without_key = (batch.epoch + self._context.partition) % self._partitions
        try:
            for value, key, time_ms in zip(values, keys, times_ms, strict=True):
                partition = without_key if key is None else BY_KEY
                self._queue(value, key, partition, time_ms)
        except (KafkaException, BufferError) as error:
            raise self._session_ended(f"cannot write epoch {batch.epoch}", error) from error

    def _queue(self, value: bytes | None, key: Key, partition: int, time_ms: int) -> None:
        """Raises BufferError if the queue stays full: brokers do not respond."""
        producer, topic, deadline = self._open_producer(), self._options.topic, math.inf
        while True:
            try:
                producer.produce(topic, value, key, partition, None, self._delivered, time_ms)
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
        options = self._options
        try:
            if self._markers is None:
                self._markers = Markers(
                    options.bootstrap_servers, options.topic, self._id, options.security
                )
            return read(self._markers)
        except (TopicUnavailable, RecordsRemoved, ValueError) as error:
            self._drop_producer()
            self._drop_markers()  # the next client has the newest Secrets
            self._turn.session_lost()
            raise self._refused(str(error)) from error

    def _refused(self, what: str) -> SinkRefused:
        return SinkRefused(f"{self._where}: {what}")
