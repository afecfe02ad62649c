"""Records of a source that are no rows, in a directory: one file for each cut record that has any.

A file is created if absent, and never replaced, before the epoch of its cut record is released. All
replicas and replays of the cut find the same bad records, so each of them is there once. A file's
name has the source's operator id: another definition of the source has other bad records.

Design: docs/design/exactly-once.md#topics-of-kafka.
"""

from __future__ import annotations

from rekindle.connectors.files_sink import claim
from rekindle.errors import SinkRefused, SourceFailed
from rekindle.objects import Objects, Retry, numbered_name


class DeadLetters:
    """Of one partition of a source. Used by one thread."""

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

    def put(self, first_epoch: int, lines: bytes) -> None:
        """Keep the bad records of the cut record that begins with an epoch. Raises SourceFailed."""
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
