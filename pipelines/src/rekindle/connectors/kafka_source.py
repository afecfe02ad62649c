"""The source `kafka`: records of a topic, as rows.

A task reads the partitions p of the topic with p mod `partitions` equal to its own number; a split
is one of them. What an epoch contains is planned (`rekindle.connectors.planned_cuts`).

Design: docs/decisions/0058-planned-cuts.md.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from confluent_kafka import TIMESTAMP_NOT_AVAILABLE, Message

from rekindle.arrow_types import arrow_schema
from rekindle.connectors.cut_records import Position
from rekindle.connectors.dead_letters import DeadLetter
from rekindle.connectors.kafka_client import (
    RecordsRemoved,
    TopicClient,
    TopicRefused,
    TopicUnavailable,
)
from rekindle.connectors.kafka_records import dead_letter
from rekindle.connectors.live_source import Reach, SourceRows
from rekindle.connectors.record_values import ValueDecoder, declared_schema
from rekindle.connectors.schema_registry import SchemaRegistry
from rekindle.connectors.source import SourceContext
from rekindle.connectors.value_formats import open_format
from rekindle.engine.memory import plan_memory
from rekindle.errors import SchemaMismatch, SourceFailed, SourceRefused
from rekindle.topology.kinds.kafka import KafkaSourceSpec
from rekindle.topology.kinds.kafka_security import KafkaSecuritySpec
from rekindle.topology.problems import InvalidSql
from rekindle.topology.schema import Schema
from rekindle.topology.sql.event_time import Expression, parse_event_time

PARTITIONS_S = 10.0
"""How often the topic's id and number of partitions are asked for."""

_log = logging.getLogger(__name__)


def open_source(options: KafkaSourceSpec, context: SourceContext) -> KafkaSource:
    """Raises SourceFailed; SourceRefused if what it signs in with is incomplete or wrong."""
    source = KafkaSource(options, context)
    source.require_access()
    return source


class KafkaSource:
    """Implements `rekindle.connectors.live_source.LiveSource`."""

    def __init__(
        self,
        options: KafkaSourceSpec,
        context: SourceContext,
        connect: Callable[[str, str, KafkaSecuritySpec | None], TopicClient] = TopicClient,
    ) -> None:
        node, spec = context.node, context.spec
        self._options = options
        self._name = spec.name
        self._partition, self._partitions = context.partition, node.partitions
        self._schema = arrow_schema(node.schema)
        self._event_time = node.event_time
        added = {field.name for field in options.added_columns.values()}
        expression = spec.event_time.expression if spec.event_time else None
        names = [f.name for f in node.schema if f.name not in added]
        payload = pa.schema([self._schema.field(name) for name in names])
        event_time = _parsed(expression, node.schema, set(names))
        registry = options.schema_registry
        self._registry = SchemaRegistry(registry) if registry is not None else None
        self._where = f"source {self._name}: topic {options.topic} at {options.bootstrap_servers}"
        try:
            format = open_format(options, declared_schema(payload, event_time), self._registry)
        except SchemaMismatch as error:
            raise SchemaMismatch(f"source {self._name}: {error}") from error
        self._values = ValueDecoder(format, payload, event_time)
        memory = context.memory or plan_memory()
        self._epoch_bytes = memory.epoch_bytes
        self._connect = connect
        self._connected: TopicClient | None = None
        self._described_at = 0.0
        self._topic_id, self._count = "", 0
        self._removed: set[int] = set()  # partitions whose records are gone at the position

    @property
    def schema(self) -> pa.Schema:
        return self._schema

    def require_access(self) -> None:
        """Raises SourceRefused if the brokers or the registry do not accept the source; not if
        they are away."""
        try:
            if self._options.security is not None:
                self._describe_if_due()
        except SourceRefused:
            self.close()
            raise
        except SourceFailed as error:
            _log.warning("%s", error)
        try:
            if self._registry is not None:
                self._registry.check()
        except SourceRefused as error:
            self.close()
            raise SourceRefused(f"{self._where}: {error}") from error
        except SourceFailed as error:
            _log.warning("%s: %s", self._where, error)

    @property
    def _client(self) -> TopicClient:
        """Raises TopicUnavailable."""
        if self._connected is None:
            options = self._options
            self._connected = self._connect(
                options.bootstrap_servers, options.topic, options.security
            )
        return self._connected

    def _failed(self, error: TopicUnavailable) -> SourceFailed:
        if not isinstance(error, TopicRefused):
            return SourceFailed(f"{self._where}: {error}")
        with contextlib.suppress(TopicRefused):
            if self._connected is not None and self._connected.is_outdated:
                self.close()  # the next call signs in with what the Secrets have now
        return SourceRefused(
            f"{self._where}: {error}; correct the source's security, or its Secrets"
        )

    @property
    def identity(self) -> str:
        """The id of the topic. Raises SourceFailed."""
        self._describe_if_due()
        return self._topic_id

    def ends(self, after: Position | None) -> Reach:
        try:
            return self._ends(after)
        except TopicUnavailable as error:
            raise self._failed(error) from error

    def _ends(self, after: Position | None) -> Reach:
        self._describe_if_due()
        known = {int(split): offset for split, offset in (after or {}).items()}
        own = sorted(known.keys() | set(range(self._partition, self._count, self._partitions)))
        if not own:
            raise SourceFailed(
                f"{self._where} has {self._count} partitions: the source can have no more "
                f"partitions than that, and has {self._partitions}"
            )
        start = {**known, **self._starts([p for p in own if p not in known], after is None)}
        ends = self._client.ends(own)
        if any(ends[p] < start[p] for p in own):
            self._described_at = 0.0  # the topic may be another one
            self._describe_if_due()
        if self._removed:
            start |= self._oldest(self._removed & start.keys(), start)
            self._removed.clear()
        written = self._client.uncommitted_ends([p for p in own if start[p] == ends[p]])
        end = _limited(start, ends, self._options.max_rows_per_epoch)
        return Reach(
            {str(p): start[p] for p in own},
            {str(p): end[p] for p in own},
            frozenset(str(p) for p in own if end[p] >= ends[p]),
            self._topic_id,
            frozenset(str(p) for p, offset in written.items() if offset > ends[p]),
            {str(p): ends[p] for p in own},
        )

    def _starts(self, new: Sequence[int], is_first: bool) -> dict[int, int]:
        """Where partitions begin that were not read before."""
        if is_first and self._options.starting_offsets == "Latest":
            return self._client.ends(new)
        if is_first and (time_ms := self._options.starting_time_ms) is not None:
            return self._client.at_time(new, time_ms)
        given = self._options.starting_positions if is_first else None
        if given is None:
            return self._client.beginnings(new)
        if unknown := sorted(p for p in given if p >= self._count):
            raise SourceFailed(
                f"{self._where} has {self._count} partitions, and startingOffsets names "
                f"partition {unknown[0]}"
            )
        named = given.keys() & set(new)
        ends = self._client.ends(named)
        for partition in sorted(named):
            if given[partition] > ends[partition]:
                raise SourceFailed(
                    f"{self._where}: startingOffsets begins partition {partition} at "
                    f"{given[partition]}, and it ends at {ends[partition]}"
                )
        others = self._client.beginnings([p for p in new if p not in named])
        return others | {p: given[p] for p in named}

    def _oldest(self, partitions: set[int], start: Mapping[int, int]) -> dict[int, int]:
        """The oldest offsets that are there."""
        oldest = self._client.beginnings(partitions)
        for partition, offset in oldest.items():
            if offset > start[partition]:
                _log.warning(
                    "%s: offsets %d to %d of partition %d were removed before they were read",
                    self._where,
                    start[partition],
                    offset - 1,
                    partition,
                )
        return {p: max(offset, start[p]) for p, offset in oldest.items()}

    def _describe_if_due(self) -> None:
        now = time.monotonic()
        if self._count and now - self._described_at < PARTITIONS_S:
            return
        try:
            topic_id, self._count = self._client.describe()
            policy = self._client.cleanup_policy()
        except TopicUnavailable as error:
            raise self._failed(error) from error
        if self._topic_id and topic_id != self._topic_id:
            raise SourceFailed(replaced(self._where))
        if "compact" in policy:
            raise SourceFailed(
                f"{self._where} has cleanup.policy={policy}: records that compaction removes are "
                "missing in replays, so results would differ; set cleanup.policy=delete, or copy "
                "the records to a topic that has it"
            )
        self._topic_id, self._described_at = topic_id, now

    def read_some(self, start: Position, end: Position) -> SourceRows:
        return self._read(start, end, self._epoch_bytes)

    def read(self, start: Position, end: Position) -> SourceRows:
        return self._read(start, end, None)

    def _read(self, start: Position, end: Position, most_bytes: int | None) -> SourceRows:
        ranges = {int(split): (start[split], end[split]) for split in end}
        try:
            found = self._client.read(ranges, most_bytes)
        except TopicUnavailable as error:
            raise self._failed(error) from error
        except RecordsRemoved as error:
            if self._options.on_data_loss == "Skip":
                self._removed.add(error.partition)
            raise SourceFailed(
                f"{self._where}: {error}: records were removed before they were read; keep them "
                "for longer, or set onDataLoss: Skip to go on with the oldest ones"
            ) from error
        counts = {p: len(found[p].messages) for p in sorted(found)}
        messages = [message for p in counts for message in found[p].messages]
        try:
            decoded = self._values.decode([message.value() for message in messages])
        except SourceFailed as error:  # of the registry
            raise type(error)(f"{self._where}: {error}") from error
        bad = dict(decoded.bad)
        rows = self._table(decoded.rows, messages, bad)
        example = self._bad(messages, bad)
        good = np.ones(len(messages), dtype=np.bool_)
        good[list(bad)] = False
        kept = pa.array(good)
        newest = self._newest(rows, kept, counts)
        if bad:
            rows = rows.filter(kept)
        read_to = {str(p): records.end for p, records in found.items()}
        return SourceRows(read_to, rows, newest, len(bad), example, self._dead(messages, bad))

    def waiting_for(self) -> str:
        return f"topic {self._options.topic} at {self._options.bootstrap_servers}"

    def close(self) -> None:
        if self._connected is not None:
            self._connected.close()
            self._connected = None

    def _bad(self, messages: Sequence[Message], bad: Mapping[int, str]) -> str:
        """Describes the first bad record. Raises SchemaMismatch."""
        if not bad:
            return ""
        at = min(bad)
        where = f"partition {messages[at].partition()}, offset {messages[at].offset()}"
        example = f"{self._where}, {where}: {bad[at]}"
        if self._options.on_bad_record == "Fail":
            raise SchemaMismatch(
                f"{example}; set onBadRecord: Drop to go on without such "
                "records, or DeadLetter to keep them elsewhere"
            )
        return example

    def _dead(self, messages: Sequence[Message], bad: Mapping[int, str]) -> list[DeadLetter]:
        """The bad records, if they are to be kept."""
        if self._options.on_bad_record != "DeadLetter":
            return []
        return [dead_letter(messages[at], bad[at]) for at in sorted(bad)]

    def _table(
        self, decoded: pa.RecordBatch, messages: Sequence[Message], bad: dict[int, str]
    ) -> pa.Table:
        """With the columns that are not in the values. Adds to `bad`."""
        columns = dict(zip(decoded.schema.names, decoded.columns, strict=True))
        for field in self._options.added_columns.values():
            columns[field.name] = self._added(field.name, messages, bad)
        arrays = [columns[name] for name in self._schema.names]
        return pa.Table.from_arrays(arrays, schema=self._schema)

    def _added(self, name: str, messages: Sequence[Message], bad: dict[int, str]) -> pa.Array:
        options, data_type = self._options, self._schema.field(name).type
        values: list[Any]
        if name == options.key_column:
            values = [message.key() for message in messages]
        elif name == options.headers_column:
            values = _unless_bad(_headers, messages, name, bad)
        elif name == options.partition_column:
            values = [message.partition() for message in messages]
        elif name == options.offset_column:
            values = [message.offset() for message in messages]
        else:
            values = _unless_bad(_time_us, messages, name, bad)
            return pa.array(values, pa.int64()).cast(data_type)
        return pa.array(values, data_type)

    def _newest(self, rows: pa.Table, kept: pa.Array, counts: Mapping[int, int]) -> dict[str, int]:
        if self._event_time is None:
            return {}
        times = pc.if_else(kept, rows.column(self._event_time).cast(pa.int64()), None)
        newest, first = {}, 0
        for partition, count in counts.items():
            found = pc.max(times.slice(first, count)).as_py()
            first += count
            if found is not None:
                newest[str(partition)] = int(found)
        return newest


def replaced(where: str) -> str:
    """What is wrong if another topic has the name."""
    return (
        f"{where} was deleted and created again: what was read from the former topic cannot be "
        "read again; give the source another name to read the new one"
    )


def _parsed(expression: str | None, schema: Schema, columns: set[str]) -> Expression | None:
    """`columns`: those of the values. Raises SourceFailed."""
    if expression is None:
        return None
    try:
        return parse_event_time(expression, Schema(tuple(f for f in schema if f.name in columns)))
    except InvalidSql as error:
        raise SourceFailed(f"eventTime.expression: {error}") from error


def _limited(start: Mapping[int, int], ends: Mapping[int, int], most: int) -> dict[int, int]:
    """How far each partition is read: they share `most` offsets, as evenly as they can use them."""
    left, end = most, dict(start)
    waiting = sorted(start, key=lambda p: ends[p] - start[p])
    for at, partition in enumerate(waiting):
        share = left // (len(waiting) - at)
        taken = max(0, min(ends[partition] - start[partition], share))
        end[partition] += taken
        left -= taken
    return end


def _unless_bad(
    read: Callable[[Message], Any], messages: Sequence[Message], name: str, bad: dict[int, str]
) -> list[Any]:
    """What is read of each; None, and what is wrong is in `bad`, where that raises ValueError."""
    values = []
    for at, message in enumerate(messages):
        try:
            values.append(read(message))
        except ValueError as error:
            values.append(None)
            bad.setdefault(at, f"column {name}: {error}")
    return values


def _headers(message: Message) -> list[dict[str, Any]] | None:
    headers = message.headers()  # raises UnicodeDecodeError, which is a ValueError
    if headers is None:
        return None
    return [{"key": header[0], "value": header[1]} for header in headers]


def _time_us(message: Message) -> int | None:
    kind, time_ms = message.timestamp()
    if kind == TIMESTAMP_NOT_AVAILABLE:
        return None
    if not -(2**63) <= time_ms * 1000 < 2**63:
        raise ValueError(f"the record's time, {time_ms} ms, is no TIMESTAMP of microseconds")
    return time_ms * 1000
