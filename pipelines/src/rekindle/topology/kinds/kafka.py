"""The source kind `kafka`: fields and their validation.

Design: docs/decisions/0058-planned-cuts.md.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal

from pydantic import Field

from rekindle.errors import Problem
from rekindle.topology.kinds.base import SourceOptions
from rekindle.topology.schema import Array, DataType, Scalar, Struct
from rekindle.topology.schema import Field as SchemaField

_HEADER = Struct((SchemaField("key", Scalar.STRING), SchemaField("value", Scalar.BINARY)))
_ADDED: Mapping[str, DataType] = {
    "key_column": Scalar.BINARY,
    "headers_column": Array(_HEADER),
    "partition_column": Scalar.INT,
    "offset_column": Scalar.BIGINT,
    "timestamp_column": Scalar.TIMESTAMP,
}
"""The types of the columns that these fields name: those of Spark's Kafka source."""


class KafkaSourceSpec(SourceOptions):
    connector: ClassVar[str | None] = "kafka_source:open_source"
    is_live: ClassVar[bool] = True
    has_raw_columns: ClassVar[bool] = True
    can_be_partitioned: ClassVar[bool] = True
    # With `Fail` no epoch has a bad record, so it may become `Drop`.
    not_in_id: ClassVar[frozenset[str]] = frozenset(
        {"bootstrap_servers", "dead_letters", "max_rows_per_epoch", "on_bad_record", "on_data_loss"}
    )
    wrong_field_names: ClassVar[Mapping[str, str]] = {
        "bootstrap": "bootstrapServers",
        "brokers": "bootstrapServers",
        "deadLetter": "deadLetters",
        "deadLetterUrl": "deadLetters",
        "startingoffset": "startingOffsets",
    }

    bootstrap_servers: str = Field(min_length=1)
    """Brokers to begin with: `kafka-0:9092,kafka-1:9092`."""
    topic: str = Field(min_length=1, max_length=249, pattern=r"^[A-Za-z0-9._-]+$")
    """The topic."""
    format: Literal["json"]
    """Format of the values; `json` is one object in each."""
    starting_offsets: str = "Earliest"
    """Where the source begins when it is new: `Earliest`, `Latest`, or the records from a time on:
    `2026-01-31T06:00:00Z`. Partitions that are added later are read from their beginning."""
    max_rows_per_epoch: int = Field(200_000, gt=0, le=10_000_000)
    """How much of the topic one task reads for an epoch at most, in offsets. What is left is in
    the next one."""
    on_bad_record: Literal["Fail", "Drop", "DeadLetter"] = "Fail"
    """What happens with a record that is not what `schema` says: the source stops at it, or it is
    dropped, and counted, or it is also written to `deadLetters`."""
    dead_letters: str | None = Field(None, min_length=1)
    """With `onBadRecord: DeadLetter`: URL of a directory in which bad records are kept as JSON
    lines, each once; same schemes as `spec.checkpoint.store`."""
    on_data_loss: Literal["Fail", "Skip"] = "Fail"
    """What happens if records that were not read yet are removed from the topic: the source stops,
    or goes on with the oldest ones that are there."""
    key_column: str | None = Field(None, min_length=1)
    """BINARY column that is added to the schema: the key of each record."""
    headers_column: str | None = Field(None, min_length=1)
    """Column that is added to the schema: the headers of each record,
    `ARRAY<STRUCT<key: STRING, value: BINARY>>`."""
    partition_column: str | None = Field(None, min_length=1)
    """INT column that is added to the schema: the partition of each record."""
    offset_column: str | None = Field(None, min_length=1)
    """BIGINT column that is added to the schema: the offset of each record."""
    timestamp_column: str | None = Field(None, min_length=1)
    """TIMESTAMP column that is added to the schema: the time of each record according to Kafka.
    `eventTime` may name it."""

    @property
    def added_columns(self) -> dict[str, SchemaField]:
        names = {field: getattr(self, field) for field in _ADDED}
        return {
            self.name_of(field): SchemaField(name, _ADDED[field])
            for field, name in names.items()
            if name is not None
        }

    @property
    def starting_time_ms(self) -> int | None:
        """Unix time, if it begins at a time. Raises ValueError."""
        if self.starting_offsets in ("Earliest", "Latest"):
            return None
        time = dt.datetime.fromisoformat(self.starting_offsets)
        if time.tzinfo is None:
            raise ValueError("a time without a zone")
        return int(time.timestamp() * 1000)

    def describe(self) -> str:
        return f"{self.format} of topic {self.topic}"

    @property
    def output_url(self) -> str | None:
        return self.dead_letters

    def check(self, event_time: str | None, path: str) -> Iterator[Problem]:
        if (self.on_bad_record == "DeadLetter") != (self.dead_letters is not None):
            what = "onBadRecord: DeadLetter and deadLetters belong together"
            hint = "write both, or neither"
            yield Problem(f"{path}.deadLetters", "InvalidValue", what, hint)
        try:
            _ = self.starting_time_ms
        except ValueError:
            what = f"{self.starting_offsets!r} is not Earliest, Latest or a time with a zone"
            hint = "write a time like 2026-01-31T06:00:00Z"
            yield Problem(f"{path}.startingOffsets", "InvalidValue", what, hint)
