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

import time
from collections.abc import Callable

import pyarrow as pa

from rekindle.connectors.epoch_ranges import EpochRanges
from rekindle.connectors.json_writer import UnencodableValue
from rekindle.connectors.kafka_markers import transactional_id
from rekindle.connectors.kafka_records import record_keys, record_times_ms
from rekindle.connectors.kafka_transactions import BY_KEY, TopicRecord, TopicTransactions
from rekindle.connectors.sink import SinkContext
from rekindle.connectors.value_writers import open_writer
from rekindle.errors import SchemaMismatch, SinkRefused, SourceFailed
from rekindle.objects import Retry, open_objects
from rekindle.streams.epochs import NO_EPOCH, BatchKind, EpochBatch, last_of_group
from rekindle.topology.kinds.kafka_sink import KafkaSinkSpec


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
        where = f"query {context.query}: topic {options.topic} at {options.bootstrap_servers}"
        if context.definition is None or context.store is None:
            raise SinkRefused(
                f"query {context.query}: a run does not write to Kafka; give --output DIR, and it "
                "writes the values of the records to files there"
            )
        try:
            self._values = open_writer(options, context.schema)
        except SchemaMismatch as error:
            raise SinkRefused(f"{where}: {error}") from error
        self._topic = TopicTransactions(
            where,
            options.bootstrap_servers,
            options.topic,
            options.security,
            transactional_id(context.topology_uid, context.query, context.partition),
            clock,
            sleep,
        )
        self._next = 0  # the epoch after the one that was written last
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
            raise self._topic.refused(str(error)) from error

    def last_epoch(self, after: int = NO_EPOCH) -> int:
        first = self.first_epoch()
        self._topic.look()
        return max(after, first - 1, self._topic.through)

    def write(self, batch: EpochBatch) -> bool:
        if batch.kind is not BatchKind.STABLE:
            raise ValueError(f"a sink takes stable epochs only, not {batch.kind} {batch.epoch}")
        group = last_of_group(batch.epoch, self.epochs_per_commit)
        if self._topic.group != group or self._next != batch.epoch:  # such as one that is repeated
            self.discard()
        self._next = batch.epoch + 1
        if not batch.rows.num_rows or self._topic.through >= batch.epoch:
            return False
        try:
            self._ranges.acquire(batch.epoch)
        except OSError as error:
            raise self._topic.refused(f"cannot write epoch {batch.epoch}: {error}") from error
        if self._topic.group is None and not self._topic.begin(group):
            return False
        if self._topic.through >= batch.epoch:  # as of another commitInterval: within this group
            return False
        self._produce(batch)
        return True

    def commit(self, through: int) -> None:
        self._topic.commit(through)

    def discard(self) -> None:
        self._topic.discard()

    def close(self) -> None:
        self._topic.close()

    def _produce(self, batch: EpochBatch) -> None:
        options = self._options
        try:
            rows = batch.rows.cast(self._context.schema)
            values = self._values.encode(rows)
            keys = record_keys(rows, options.key)
            limits = self._topic.limits.at(int(time.time() * 1000))
            times_ms = record_times_ms(rows, self._context.event_time, *limits)
        except (UnencodableValue, pa.ArrowException) as error:
            self.discard()
            what = f"cannot store the rows of epoch {batch.epoch}: {error}"
            raise self._topic.refused(what) from error
        except SourceFailed as error:  # of the registry
            self.discard()
            raise self._topic.refused(f"cannot write epoch {batch.epoch}: {error}") from error
        without_key = (batch.epoch + self._context.partition) % self._topic.partitions
        self._topic.send(
            (
                TopicRecord(value, key, without_key if key is None else BY_KEY, time_ms)
                for value, key, time_ms in zip(values, keys, times_ms, strict=True)
            ),
            f"epoch {batch.epoch}",
        )
