"""Topics of a broker, and what readers of committed records find in them."""

from __future__ import annotations

import time

from confluent_kafka import Message
from confluent_kafka.admin import AdminClient, NewTopic

from rekindle.connectors.kafka_client import TopicClient, TopicUnavailable

_LEADERS_S = 60.0


def create_topic(servers: str, name: str, partitions: int) -> None:
    """Returns once all partitions have leaders."""
    client = AdminClient({"bootstrap.servers": servers})
    client.create_topics([NewTopic(name, partitions, 1)])[name].result()
    reader, deadline = TopicClient(servers, name), time.monotonic() + _LEADERS_S
    while True:
        try:
            reader.ends(range(partitions))
            reader.close()
            return
        except TopicUnavailable:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


class CommittedRecords:
    """The records of a topic that were committed, in the order of each partition."""

    def __init__(self, servers: str, topic: str, partitions: int) -> None:
        self._client = TopicClient(servers, topic)
        self._at = dict.fromkeys(range(partitions), 0)
        self.messages: list[Message] = []

    @property
    def values(self) -> list[bytes]:
        return [message.value() or b"" for message in self.messages]

    def count(self) -> int:
        """Those that are new are read; none while the broker is away."""
        try:
            ends = self._client.ends(self._at)
            found = self._client.read({p: (self._at[p], ends[p]) for p in ends})
        except TopicUnavailable:
            return len(self.messages)
        for partition, records in found.items():
            self.messages += records.messages
            self._at[partition] = records.end
        return len(self.messages)

    def close(self) -> None:
        self._client.close()
