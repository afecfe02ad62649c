"""Sinks of the kind `kafka`: fields and their validation.

Design: docs/design/exactly-once.md#topics-as-sinks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal

from pydantic import Field

from rekindle.errors import Problem
from rekindle.topology.durations import Duration
from rekindle.topology.kinds.base import SinkOptions
from rekindle.topology.kinds.kafka import MESSAGE_NAME, TOPIC_LENGTH, check_descriptors
from rekindle.topology.kinds.kafka_security import KafkaSecuritySpec, SchemaRegistrySpec
from rekindle.topology.problems import nearest
from rekindle.topology.schema import Scalar, Schema, is_nested, type_to_ddl
from rekindle.topology.units import format_duration
from rekindle.topology.written_avro import names_not_in_avro

_FIELDS_OF_FORMATS = (
    ("schema_registry", ("avro", "protobuf"), "the schema of Avro values is in a registry"),
    ("value_column", ("raw",), "a raw value is one column"),
    ("protobuf_descriptors", ("protobuf",), "Protobuf values are messages of a type"),
    ("protobuf_message", ("protobuf",), "Protobuf values are messages of a type"),
)
"""A field, the formats that have it, of which the first one needs it, and why."""


class KafkaSinkSpec(SinkOptions):
    connector: ClassVar[str | None] = "kafka_sink:open_sink"
    wrong_field_names: ClassVar[Mapping[str, str]] = {
        "bootstrap": "bootstrapServers",
        "brokers": "bootstrapServers",
        "keys": "key",
        "descriptors": "protobufDescriptors",
        "keyColumns": "key",
        "message": "protobufMessage",
        "registry": "schemaRegistry",
        "value": "valueColumn",
    }

    bootstrap_servers: str = Field(min_length=1)
    """Brokers to begin with: `kafka-0:9092,kafka-1:9092`."""
    topic: str = Field(min_length=1, max_length=TOPIC_LENGTH, pattern=r"^[A-Za-z0-9._-]+$")
    """The topic, which has to exist."""
    format: Literal["json", "csv", "raw", "avro", "protobuf"] = "json"
    """Format of the values: one `json` object, one row of `csv`, one `avro` record with the number
    of its schema, one `protobuf` message, or `raw`: the value of `valueColumn`."""
    schema_registry: SchemaRegistrySpec | None = None
    """With `avro`, and perhaps with `protobuf`: the registry that has, or gets, the schema of the
    columns, or the file of the message, for the subject `<topic>-value`."""
    protobuf_descriptors: str | None = Field(None, min_length=1, max_length=262144)
    """With `protobuf`: descriptors in base64:
    `protoc --include_imports --descriptor_set_out=/dev/stdout order.proto | base64 -w0`."""
    protobuf_message: str | None = Field(None, max_length=256, pattern=MESSAGE_NAME)
    """With `protobuf`: the name of the message whose fields are the columns: `shop.Order`."""
    value_column: str | None = Field(None, min_length=1, max_length=256)
    """With `raw`: the STRING or BINARY column whose bytes are the values; NULL is a tombstone."""
    key: tuple[str, ...] = Field((), max_length=16)
    """Columns that make the key of each record. Records with equal keys are in one partition of the
    topic, in the order of their epochs."""
    security: KafkaSecuritySpec | None = None
    """How the sink signs in, and TLS."""
    commit_interval: Duration | None = Field(None, gt=0)
    """How often a transaction ends; a multiple of `epochInterval` that divides
    `checkpoint.interval`. Without it, each epoch that has rows is a transaction."""

    @property
    def format_of_files(self) -> str:
        return "json"

    @property
    def secrets(self) -> tuple[str, ...]:
        registry = self.schema_registry and self.schema_registry.secret_ref
        names = (*(self.security.secrets if self.security else ()), registry)
        return tuple(sorted({name for name in names if name}))

    @property
    def waits_for(self) -> str:
        return f"topic {self.topic} at {self.bootstrap_servers}"

    def epochs_per_commit(self, epoch_interval: int) -> int:
        """`epoch_interval`: microseconds."""
        return 1 if self.commit_interval is None else self.commit_interval // epoch_interval

    def check(self, epoch_interval: int, checkpoint_interval: int, path: str) -> Iterator[Problem]:
        for field, formats, what in _FIELDS_OF_FORMATS:
            name, is_given = self.name_of(field), getattr(self, field) is not None
            if self.format == formats[0] and not is_given:
                yield Problem(f"{path}.{name}", "Missing", what, f"set {name}")
            elif self.format not in formats and is_given:
                what = f"{name} applies to {' and '.join(formats)} only"
                hint = f"leave it out: the format is {self.format}"
                yield Problem(f"{path}.{name}", "InvalidValue", what, hint)
        yield from check_descriptors(self.protobuf_descriptors, path)
        if self.commit_interval is None:
            return
        is_multiple = self.commit_interval % epoch_interval == 0
        if not is_multiple or checkpoint_interval % self.commit_interval:
            what = (
                f"{format_duration(self.commit_interval)} is not a multiple of epochInterval "
                f"({format_duration(epoch_interval)}) that divides checkpoint.interval "
                f"({format_duration(checkpoint_interval)})"
            )
            hint = "a checkpoint needs all results before it: write such a time, or leave it out"
            yield Problem(f"{path}.commitInterval", "NotAMultiple", what, hint)

    def check_columns(self, schema: Schema, path: str) -> Iterator[Problem]:
        yield from self._check_key(schema, path)
        if self.format == "csv":
            yield from self._check_csv(schema, path)
        if self.format == "avro":
            for name in names_not_in_avro(schema):
                what = f"{name} is no name in Avro, which has letters, digits and _ only"
                hint = "rename it in sql: SELECT `a-b` AS a_b"
                yield Problem(f"{path}.format", "InvalidValue", what, hint)
        if self.value_column is not None:
            yield from self._check_value_column(self.value_column, schema, path)

    def _check_csv(self, schema: Schema, path: str) -> Iterator[Problem]:
        for field in schema:
            if is_nested(field.type) or field.type is Scalar.BINARY:
                what = f"column {field.name} is a {type_to_ddl(field.type)}, which CSV has not"
                yield Problem(f"{path}.format", "InvalidValue", what, "write json, or avro")

    def _check_value_column(self, column: str, schema: Schema, path: str) -> Iterator[Problem]:
        where = f"{path}.valueColumn"
        if column not in schema.names:
            hint = nearest(column, schema.names)
            yield Problem(where, "UnknownColumn", f"unknown column {column}", hint)
        elif (found := schema.field(column).type) not in (Scalar.STRING, Scalar.BINARY, None):
            what = f"column {column} is a {type_to_ddl(found)}, not a STRING or BINARY"
            yield Problem(where, "InvalidValue", what, "write CAST(... AS STRING) in sql")

    def _check_key(self, schema: Schema, path: str) -> Iterator[Problem]:
        for at, column in enumerate(self.key):
            where = f"{path}.key[{at}]"
            if column not in schema.names:
                hint = nearest(column, schema.names)
                yield Problem(where, "UnknownColumn", f"unknown column {column}", hint)
            elif column in self.key[:at]:
                what = f"column {column} occurs twice"
                yield Problem(where, "DuplicateColumn", what, "name it once")
