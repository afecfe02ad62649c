"""The markers of sinks in Kafka: which epochs of a query's partition are durable.

They are the records of a compacted topic beside the one of the rows, by transactional id. A marker
is written in the transaction of its rows, so it is there if, and only if, they are.

A committed marker may be behind an open transaction of another producer, where `read_committed`
ends. So `newest` reads to the end of what is written, and waits until all of it is decided: for a
writer that has begun a session, it is certain. `look` reads what is committed now.

Design: docs/design/exactly-once.md#topics-as-sinks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from confluent_kafka import KafkaError, KafkaException, TopicCollection, admin

from rekindle.connectors.kafka_client import REQUEST_S, TopicClient, TopicUnavailable
from rekindle.connectors.kafka_records import MOST_MS, TimeLimits
from rekindle.objects import to_json
from rekindle.streams.epochs import NO_EPOCH
from rekindle.topology.kinds.kafka import MARKERS_SUFFIX
from rekindle.topology.kinds.kafka_security import KafkaSecuritySpec

PARTITION = 0
"""All markers are in this partition of their topic."""
_FORMAT = 1
_CONFIG = {
    "cleanup.policy": "compact",
    # Newer than that is not compacted, and every start of a sink reads it.
    "segment.ms": "600000",
    "segment.bytes": "1048576",
    "min.cleanable.dirty.ratio": "0.1",
}


def markers_topic(topic: str) -> str:
    return topic + MARKERS_SUFFIX


def transactional_id(topology_uid: str, query: str, partition: int) -> str:
    return f"rekindle-{topology_uid}-{query}-{partition}"


def encode_marker(through: int) -> bytes:
    return to_json({"format": _FORMAT, "through": through})


def decode_marker(data: bytes | None) -> int:
    """Raises ValueError."""
    try:
        marker = json.loads(data or b"")
        if marker["format"] > _FORMAT:
            raise ValueError(f"it has format {marker['format']}, this release reads {_FORMAT}")
        return int(marker["through"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"{data!r} is no marker") from error


def _limit_ms(config: Mapping[str, admin.ConfigEntry], name: str) -> int | None:
    """None: no limit, or a broker that does not have this setting."""
    limit = int(config[name].value or -1) if name in config else -1
    return limit if 0 <= limit < MOST_MS else None


class Markers:
    """Of one transactional id. Used by one thread. All methods raise TopicUnavailable,
    RecordsRemoved, ValueError."""

    def __init__(
        self, bootstrap_servers: str, topic: str, writer: str, security: KafkaSecuritySpec | None
    ) -> None:
        self._topic, self._markers = topic, markers_topic(topic)
        self._writer = writer.encode()
        self._through = NO_EPOCH
        self._position: int | None = None
        self._topic_id = ""
        self._client = TopicClient(bootstrap_servers, self._markers, security)
        self._admin = self._client.admin

    def look(self) -> int:
        self._open()
        return self._read_to(self._client.ends([PARTITION])[PARTITION])

    def newest(self) -> int:
        self._open()
        self._require_same_topic()
        end = self._client.uncommitted_ends([PARTITION])[PARTITION]
        try:
            return self._read_to(end)
        except TopicUnavailable as error:
            if self._client.ends([PARTITION])[PARTITION] >= end:
                raise
            raise TopicUnavailable(
                f"a transaction of another producer is open in topic {self._markers}: this goes on "
                "once it has ended"
            ) from error

    def time_limits(self) -> TimeLimits:
        """Of the topic of the rows: it removes records by their time, and refuses some."""
        try:
            config = self._config()
        except KafkaException as error:
            raise self._client.failed(error) from error
        if config["message.timestamp.type"].value == "LogAppendTime":
            return TimeLimits()
        settings = ("retention.ms", "message.timestamp.before.max.ms")
        past = [limit for name in settings if (limit := _limit_ms(config, name)) is not None]
        future = _limit_ms(config, "message.timestamp.after.max.ms")
        return TimeLimits(min(past, default=None), future)

    def close(self) -> None:
        self._client.close()

    def _read_to(self, end: int) -> int:
        start = self._position
        if start is None:
            start = self._client.beginnings([PARTITION])[PARTITION]
        if end < start:
            self._require_same_topic()
            raise TopicUnavailable(
                f"topic {self._markers} ends at {end} and was read to {start}: the broker that "
                "leads it has not caught up"
            )
        if end > start:
            found = self._client.read({PARTITION: (start, end)})[PARTITION]
            for message in found.messages:
                if message.key() == self._writer:
                    self._through = decode_marker(message.value())
            start = found.end
        self._position = start
        return self._through

    def _require_same_topic(self) -> None:
        """A client that has read a former one is of no use."""
        found, _ = self._client.describe()
        if found != self._topic_id:
            raise TopicUnavailable(
                f"topic {self._markers} was deleted and created again (topic id {found} instead of "
                f"{self._topic_id}), and what it said is lost: restarted tasks may write results "
                "again"
            )

    def _open(self) -> None:
        """Before the first read: creates the topic if it does not exist."""
        if self._position is not None:
            return
        try:
            replicas = self._replicas(self._topic)
            if replicas is None:
                raise TopicUnavailable(f"there is no topic {self._topic}: create it")
            if self._replicas(self._markers) is None:
                self._create(replicas)
            policy = self._client.cleanup_policy()
            self._topic_id, _ = self._client.describe()
        except KafkaException as error:
            what = self._client.failed(error)
            raise type(what)(f"topic {self._markers}: {what}") from error
        if policy != "compact":
            raise TopicUnavailable(
                f"topic {self._markers} has cleanup.policy={policy}, which would remove what says "
                "which epochs are written: set cleanup.policy=compact"
            )

    def _config(self) -> dict[str, admin.ConfigEntry]:
        """Of the topic of the rows."""
        resource = admin.ConfigResource(admin.ConfigResource.Type.TOPIC, self._topic)
        found = self._admin.describe_configs([resource], request_timeout=REQUEST_S)
        return dict(found[resource].result())

    def _replicas(self, topic: str) -> int | None:
        """The replication factor; None if there is no such topic."""
        topics = TopicCollection([topic])
        future = self._admin.describe_topics(topics, request_timeout=REQUEST_S)[topic]
        try:
            return len(future.result().partitions[PARTITION].replicas)
        except KafkaException as error:
            if error.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
                return None
            raise

    def _create(self, replicas: int) -> None:
        """On as many brokers as the topic of the rows, and acknowledged by as many."""
        config, of_rows, name = dict(_CONFIG), self._config(), "min.insync.replicas"
        if name in of_rows:
            config[name] = str(of_rows[name].value)
        topic = admin.NewTopic(self._markers, 1, replicas, config=config)
        future = self._admin.create_topics([topic], request_timeout=REQUEST_S)[self._markers]
        try:
            future.result()
        except KafkaException as error:
            if error.args[0].code() == KafkaError.TOPIC_ALREADY_EXISTS:
                return
            settings = " ".join(f"--config {name}={value}" for name, value in config.items())
            raise TopicUnavailable(
                f"topic {self._markers} cannot be created ({error.args[0].str()}): allow it, or "
                f"create it with --partitions 1 {settings}"
            ) from error
