"""Bad records of a source in a topic: of each cut record in one transaction with its marker.

All replicas of the source find the same ones, and one of them writes them, as with the rows of a
sink (`rekindle.connectors.kafka_transactions`); the others wait until they are there. The
transactional id has the source's operator id: another definition of the source has other bad
records. Values and keys are as they were; headers say where they come from, and what is wrong.

Design: docs/decisions/0065-bad-records-in-a-topic.md.
"""

from __future__ import annotations

from collections.abc import Sequence

from rekindle.connectors.dead_letters import DeadLetter
from rekindle.connectors.kafka_transactions import BY_KEY, TopicRecord, TopicTransactions
from rekindle.errors import SinkRefused, SourceFailed
from rekindle.topology.kinds.kafka import KafkaSourceSpec

TOPIC, PARTITION, OFFSET, TIME_MS, ERROR = (
    f"rekindle.{name}" for name in ("topic", "partition", "offset", "timestampMs", "error")
)
"""Names of the headers."""


def open_dead_letters(
    options: KafkaSourceSpec, source: str, operator_id: str, partition: int, topology_uid: str
) -> DeadLetterTopic:
    """See `rekindle.connectors.dead_letters.OpenDeadLetters`."""
    return DeadLetterTopic(options, source, operator_id, partition, topology_uid)


class DeadLetterTopic:
    """Implements `DeadLetters`."""

    def __init__(
        self,
        options: KafkaSourceSpec,
        source: str,
        operator_id: str,
        partition: int,
        topology_uid: str,
    ) -> None:
        topic, servers = options.dead_letter_topic, options.bootstrap_servers
        assert topic is not None, "else there is nothing to open"
        self._topic = TopicTransactions(
            f"source {source}: deadLetterTopic {topic} at {servers}",
            servers,
            topic,
            options.security,
            f"rekindle-{topology_uid}-{source}-{operator_id}-{partition}",
        )

    def put(self, first_epoch: int, letters: Sequence[DeadLetter]) -> None:
        try:
            if self._topic.through < first_epoch:
                self._topic.look()
            if self._topic.through >= first_epoch or not self._topic.begin(first_epoch):
                return
            records = (self._record(letter) for letter in letters)
            self._topic.send(records, f"the bad records of epoch {first_epoch}")
            self._topic.commit(first_epoch)
        except SinkRefused as error:
            raise SourceFailed(str(error)) from error

    def close(self) -> None:
        self._topic.close()

    def _record(self, letter: DeadLetter) -> TopicRecord:
        """Without a key by the partition that it comes from, so that their order is kept."""
        # Not as the time of the record: the topic may refuse it, or remove the record at once.
        time = () if letter.time_ms is None else ((TIME_MS, str(letter.time_ms).encode()),)
        headers = (
            *letter.headers,
            (TOPIC, letter.topic.encode()),
            (PARTITION, str(letter.partition).encode()),
            (OFFSET, str(letter.offset).encode()),
            *time,
            (ERROR, letter.error.encode(errors="replace")),
        )
        partition = BY_KEY if letter.key is not None else letter.partition % self._topic.partitions
        return TopicRecord(letter.value, letter.key, partition, 0, headers)
