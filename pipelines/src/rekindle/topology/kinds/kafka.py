"""The source kind `kafka`: fields and their validation.

Design: docs/decisions/0058-planned-cuts.md.
"""

from __future__ import annotations

import base64
import datetime as dt
import re
from collections.abc import Iterator, Mapping
from typing import ClassVar, Final, Literal

from pydantic import Field, field_validator

from rekindle.errors import Problem
from rekindle.topology.avro import InvalidAvroSchema, parse_avro_schema
from rekindle.topology.kinds.base import SourceOptions
from rekindle.topology.kinds.csv_fields import check_csv_fields
from rekindle.topology.kinds.kafka_security import KafkaSecuritySpec, SchemaRegistrySpec
from rekindle.topology.schema import Array, DataType, Scalar, Schema, Struct
from rekindle.topology.schema import Field as SchemaField

MARKERS_SUFFIX: Final = ".rekindle-epochs"
"""The markers of what is written to a topic are in the topic with its name and this suffix."""
TOPIC_LENGTH: Final = 249 - len(MARKERS_SUFFIX)
MESSAGE_NAME: Final = r"^[A-Za-z_][A-Za-z0-9_]*([.][A-Za-z_][A-Za-z0-9_]*)*$"
_HEADER = Struct((SchemaField("key", Scalar.STRING), SchemaField("value", Scalar.BINARY)))
_ADDED: Mapping[str, DataType] = {
    "key_column": Scalar.BINARY,
    "headers_column": Array(_HEADER),
    "partition_column": Scalar.INT,
    "offset_column": Scalar.BIGINT,
    "timestamp_column": Scalar.TIMESTAMP,
}
"""The types of the columns that these fields name: those of Spark's Kafka source."""
_RAW = (Scalar.STRING, Scalar.BINARY)
_FORMATS_OF: Mapping[str, tuple[str, ...]] = {
    "avro_schema": ("avro",),
    "schema_registry": ("avro", "protobuf"),
    "protobuf_descriptors": ("protobuf",),
    "protobuf_message": ("protobuf",),
}


class KafkaSourceSpec(SourceOptions):
    connector: ClassVar[str | None] = "kafka_source:open_source"
    is_live: ClassVar[bool] = True
    has_raw_columns: ClassVar[bool] = True
    can_be_partitioned: ClassVar[bool] = True
    # With `Fail` no epoch has a bad record, so it may become `Drop`.
    not_in_id: ClassVar[frozenset[str]] = frozenset(
        {
            "bootstrap_servers",
            "dead_letter_topic",
            "dead_letters",
            "max_rows_per_epoch",
            "on_bad_record",
            "on_data_loss",
            "schema_registry.secret_ref",
            "schema_registry.url",
            "security",
        }
    )
    wrong_field_names: ClassVar[Mapping[str, str]] = {
        "bootstrap": "bootstrapServers",
        "brokers": "bootstrapServers",
        "deadLetter": "deadLetters",
        "deadLetterUrl": "deadLetters",
        "deadLettersTopic": "deadLetterTopic",
        "startingoffset": "startingOffsets",
    }

    bootstrap_servers: str = Field(min_length=1)
    """Brokers to begin with: `kafka-0:9092,kafka-1:9092`."""
    topic: str = Field(min_length=1, max_length=249, pattern=r"^[A-Za-z0-9._-]+$")
    """The topic."""
    format: Literal["json", "csv", "raw", "avro", "protobuf"]
    """Format of the values: one `json` object, one row of `csv` with the columns of the schema in
    their order, one `avro` record, one `protobuf` message, or `raw`: the value is that of the only
    column of the schema."""
    avro_schema: str | None = Field(None, min_length=1, max_length=65536)
    """Schema of Avro values, as JSON. With `schemaRegistry` it is that of the reader: its defaults
    and aliases apply to values of older and newer schemas."""
    schema_registry: SchemaRegistrySpec | None = None
    """Registry of the schemas of Avro or Protobuf values; each value begins with a zero byte and
    the four bytes of its schema's number."""
    protobuf_descriptors: str | None = Field(None, min_length=1, max_length=262144)
    """Descriptors of Protobuf messages in base64:
    `protoc --include_imports --descriptor_set_out=/dev/stdout order.proto | base64 -w0`."""
    protobuf_message: str | None = Field(None, max_length=256, pattern=MESSAGE_NAME)
    """Name of the message that a Protobuf value is: `shop.Order`."""
    delimiter: str = Field(",", min_length=1, max_length=2)
    """Character between the values of a CSV row; `\\t` is a tab."""
    quote: str = Field('"', max_length=1)
    """Character around CSV values that contain delimiters, line ends or quotes; `""`: none."""
    escape: str | None = Field(None, min_length=1, max_length=1)
    """Escape character of CSV: the next character is taken literally."""
    null_value: str = "NA"
    """CSV text that means NULL, unless it is in quotes."""
    security: KafkaSecuritySpec | None = None
    """How the source signs in, and TLS."""
    starting_offsets: str = "Earliest"
    """Where the source begins when it is new: `Earliest`, `Latest`, the records from a time on
    (`2026-01-31T06:00:00Z`), or an offset for each partition (`0=120, 1=340`). Partitions that are
    not named, or are added later, are read from their beginning."""
    max_rows_per_epoch: int = Field(200_000, gt=0, le=10_000_000)
    """How much of the topic one task reads for an epoch at most, in offsets. What is left is in
    the next one."""
    on_bad_record: Literal["Fail", "Drop", "DeadLetter"] = "Fail"
    """What happens with a record that is not what `schema` says: the source stops at it, or it is
    dropped, and counted, or it is also written to `deadLetters` or `deadLetterTopic`."""
    dead_letters: str | None = Field(None, min_length=1)
    """With `onBadRecord: DeadLetter`: URL of a directory in which bad records are kept as JSON
    lines, each once; same schemes as `spec.checkpoint.store`."""
    dead_letter_topic: str | None = Field(
        None, min_length=1, max_length=TOPIC_LENGTH, pattern=r"^[A-Za-z0-9._-]+$"
    )
    """With `onBadRecord: DeadLetter`, in place of `deadLetters`: a topic of the same brokers that
    has bad records as they were, each once, with headers that say where they come from."""
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

    @field_validator("delimiter")
    @classmethod
    def _tab(cls, value: str) -> str:
        return "\t" if value == r"\t" else value

    @property
    def starting_time_ms(self) -> int | None:
        """Unix time, if it begins at a time. Raises ValueError."""
        if self.starting_offsets in ("Earliest", "Latest") or "=" in self.starting_offsets:
            return None
        time = dt.datetime.fromisoformat(self.starting_offsets)
        if time.tzinfo is None:
            raise ValueError("a time without a zone")
        return int(time.timestamp() * 1000)

    @property
    def starting_positions(self) -> dict[int, int] | None:
        """By partition, if offsets are given. Raises ValueError."""
        if "=" not in self.starting_offsets:
            return None
        found = dict[int, int]()
        for part in self.starting_offsets.split(","):
            given = re.fullmatch(r"\s*(\d{1,9})\s*=\s*(\d{1,18})\s*", part, re.ASCII)
            if given is None or int(given[1]) in found:
                raise ValueError(f"{part.strip()!r} is no partition and offset, or is repeated")
            found[int(given[1])] = int(given[2])
        return found

    @property
    def secrets(self) -> tuple[str, ...]:
        registry = self.schema_registry and self.schema_registry.secret_ref
        names = (*(self.security.secrets if self.security else ()), registry)
        return tuple(sorted({name for name in names if name}))

    def describe(self) -> str:
        return f"{self.format} of topic {self.topic}"

    @property
    def output_url(self) -> str | None:
        return self.dead_letters

    @property
    def dead_letter_connector(self) -> str | None:
        return None if self.dead_letter_topic is None else "kafka_dead_letters:open_dead_letters"

    def check(self, event_time: str | None, path: str) -> Iterator[Problem]:
        places = sum(place is not None for place in (self.dead_letters, self.dead_letter_topic))
        if places != (self.on_bad_record == "DeadLetter"):
            what = "onBadRecord: DeadLetter and deadLetters, or deadLetterTopic, belong together"
            hint = "write DeadLetter and one of the two, or none of them"
            yield Problem(f"{path}.deadLetters", "InvalidValue", what, hint)
        if self.dead_letter_topic == self.topic:
            what, hint = "the source would read its bad records again", "write another topic"
            yield Problem(f"{path}.deadLetterTopic", "InvalidValue", what, hint)
        try:
            _ = self.starting_time_ms, self.starting_positions
        except ValueError:
            what = (
                f"{self.starting_offsets!r} is not Earliest, Latest, a time with a zone, or an "
                "offset for each partition"
            )
            hint = "write a time like 2026-01-31T06:00:00Z, or offsets like 0=120, 1=340"
            yield Problem(f"{path}.startingOffsets", "InvalidValue", what, hint)
        yield from check_csv_fields(self, self.format, path)
        for field, formats in _FORMATS_OF.items():
            if getattr(self, field) is not None and self.format not in formats:
                name = self.name_of(field)
                what = f"{name} applies to {' and '.join(formats)} only"
                hint = f"leave it out: the format is {self.format}"
                yield Problem(f"{path}.{name}", "InvalidValue", what, hint)
        if self.format == "avro":
            yield from self._check_avro(path)
        if self.format == "protobuf":
            yield from self._check_protobuf(path)

    def _check_protobuf(self, path: str) -> Iterator[Problem]:
        for field in ("protobuf_descriptors", "protobuf_message"):
            if getattr(self, field) is None:
                what = "Protobuf values are messages of a type"
                hint = "set protobufDescriptors and protobufMessage"
                yield Problem(f"{path}.{self.name_of(field)}", "Missing", what, hint)
        yield from check_descriptors(self.protobuf_descriptors, path)

    def _check_avro(self, path: str) -> Iterator[Problem]:
        if self.avro_schema is None and self.schema_registry is None:
            what, hint = "Avro values have a schema", "set avroSchema, schemaRegistry, or both"
            yield Problem(f"{path}.avroSchema", "Missing", what, hint)
        if self.avro_schema is not None:
            try:
                _ = parse_avro_schema(self.avro_schema)
            except InvalidAvroSchema as error:
                hint = 'write JSON: {"type": "record", "name": ..., "fields": [...]}'
                yield Problem(f"{path}.avroSchema", "InvalidValue", str(error), hint)

    def check_declared(self, schema: Schema, path: str) -> Iterator[Problem]:
        types = [field.type for field in schema]
        if self.format == "raw" and (len(types) != 1 or types[0] not in _RAW):
            what = "a raw value is one STRING or BINARY"
            hint = "declare one column of such a type, and take it apart in sql"
            yield Problem(f"{path}.format", "InvalidValue", what, hint)


def check_descriptors(descriptors: str | None, path: str) -> Iterator[Problem]:
    """`path`: of the object that has them."""
    try:
        base64.b64decode(descriptors or "", validate=True)
    except ValueError as error:
        what, hint = f"not base64: {error}", "write it with base64 -w0"
        yield Problem(f"{path}.protobufDescriptors", "InvalidValue", what, hint)
