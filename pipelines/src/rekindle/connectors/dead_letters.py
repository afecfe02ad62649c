"""Records of a source that are no rows, kept elsewhere: before the epoch of their cut record is
released, and each once, although all replicas and replays of the cut find them.

In a directory there is one file for each cut record that has any: it is created if absent, and
never replaced. A file's name has the source's operator id: another definition of the source has
other bad records. `rekindle.connectors.kafka_dead_letters` keeps them in a topic.

Design: docs/design/exactly-once.md#topics-of-kafka.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rekindle.connectors.files_sink import claim
from rekindle.errors import SinkRefused, SourceFailed
from rekindle.objects import Objects, Retry, numbered_name, to_json

Headers = tuple[tuple[str, bytes | None], ...]


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A record that is no row, where it is, and what is wrong with it. `time_ms`: Unix time."""

    topic: str
    partition: int
    offset: int
    time_ms: int | None
    key: bytes | None
    value: bytes | None
    error: str
    headers: Headers = ()

    def line(self) -> bytes:
        """As a JSON line; key and value in base64."""
        letter = {
            "topic": self.topic,
            "partition": self.partition,
            "offset": self.offset,
            "timestampMs": self.time_ms,
            "key": _base64(self.key),
            "value": _base64(self.value),
            "error": self.error,
        }
        return to_json(letter) + b"\n"


class DeadLetters(Protocol):
    """Of one partition of a source. Used by one thread."""

    def put(self, first_epoch: int, letters: Sequence[DeadLetter]) -> None:
        """Keep the bad records of the cut record that begins with an epoch. Raises SourceFailed."""
        ...

    def close(self) -> None: ...


OpenDeadLetters = Callable[[Any, str, str, int, str], DeadLetters]
"""Opens them with the options of a source, its name, operator id and partition, and the UID of the
topology."""


class DeadLetterFiles:
    """Implements `DeadLetters`."""

    def __init__(
        self,
        url: str,
        source: str,
        operator_id: str,
        partition: int,
        topology_uid: str,
        retry: Retry | None = None,
    ) -> None:
        self._url = url
        self._what = f"source {source}: deadLetters"
        self._stem = f"{source}-{operator_id}-p{partition:03d}-e"
        self._topology_uid = topology_uid
        self._retry = retry or Retry()
        self._objects: Objects | None = None

    def put(self, first_epoch: int, letters: Sequence[DeadLetter]) -> None:
        lines = b"".join(letter.line() for letter in letters)
        name = numbered_name(self._stem, first_epoch, ".jsonl")
        try:
            if self._objects is None:
                self._objects = claim(self._what, self._url, self._topology_uid, self._retry)
            objects = self._objects
            if not self._retry.run(lambda: objects.exists(name)):
                self._retry.run(lambda: objects.put(name, lines))
        except SinkRefused as error:
            raise SourceFailed(str(error)) from error
        except OSError as error:
            raise SourceFailed(f"{self._what}: cannot write {self._url}/{name}: {error}") from error

    def close(self) -> None:
        """Nothing is open."""


def _base64(data: bytes | None) -> str | None:
    return None if data is None else base64.b64encode(data).decode()
