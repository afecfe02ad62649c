"""A sink that other programs read from the task's output log.

An epoch is stored as soon as it is in the log, so the sink writes nothing: each replica has all
epochs, and the task serves them (`rekindle.stream_sinks`) while the sink is assigned to it. Readers
have no holds on the log, so no epoch waits for them.

Design: docs/design/stream-sinks.md.
"""

from __future__ import annotations

from collections.abc import Callable

from rekindle.connectors.sink import EpochSink, SinkContext
from rekindle.streams.epochs import NO_EPOCH, EpochBatch
from rekindle.topology.kinds.stream import StreamSinkSpec


def open_sink(options: StreamSinkSpec, context: SinkContext) -> StreamSink:
    """See `rekindle.connectors.sink.OpenSink`. Never refuses: the log belongs to this topology."""
    return StreamSink(context)


class StreamSink(EpochSink):
    """Implements `rekindle.connectors.sink.Sink`. There is no external system: the caller, which
    has the log, knows which epochs are stored."""

    conflict: str | None = None

    def __init__(self, context: SinkContext) -> None:
        self._first = 0 if context.definition is None else context.definition.from_epoch

    def retry_conflicts(self, may_write: Callable[[int], bool]) -> None:
        """There are no conflicts: replicas compare digests of their logs."""

    def first_epoch(self) -> int:
        return self._first

    def last_epoch(self, after: int = NO_EPOCH) -> int:
        return after

    def write(self, batch: EpochBatch) -> bool:
        return bool(batch.rows.num_rows)
