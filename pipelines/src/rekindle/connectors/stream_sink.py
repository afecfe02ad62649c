"""A sink that other programs read: the task's output log is where it is stored.

An epoch is there as soon as it is in the log, so nothing is written again: each replica has all
epochs, and the task serves them (`rekindle.stream_sinks`) while the sink is assigned to it. Readers
hold nothing, so no epoch waits for them.

Design: docs/design/stream-sinks.md.
"""

from __future__ import annotations

from collections.abc import Callable

from rekindle.connectors.sink import SinkContext
from rekindle.streams.epochs import NO_EPOCH, EpochBatch
from rekindle.topology.kinds.stream import StreamSinkSpec


def open_sink(options: StreamSinkSpec, context: SinkContext) -> StreamSink:
    """See `rekindle.connectors.sink.OpenSink`. It belongs to whom the log belongs to."""
    return StreamSink(context)


class StreamSink:
    """See `rekindle.connectors.sink.Sink`. It is read from the log, so nothing outside is older
    than what the caller knows."""

    conflict: str | None = None

    def __init__(self, context: SinkContext) -> None:
        self._first = 0 if context.definition is None else context.definition.from_epoch

    def retry_conflicts(self, may_write: Callable[[int], bool]) -> None:
        """There are none: replicas compare the log itself."""

    def first_epoch(self) -> int:
        return self._first

    def last_epoch(self, after: int = NO_EPOCH) -> int:
        return after

    def write(self, batch: EpochBatch) -> bool:
        return bool(batch.rows.num_rows)
