"""Rows as values of a Kafka topic, by the name that `format` has in the resource: the counterpart
of `rekindle.connectors.value_formats`.

Design: docs/decisions/0062-formats-of-kafka-values.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, assert_never

import pyarrow as pa

from rekindle.arrow_types import topology_type
from rekindle.connectors.avro_defaults import encode_long
from rekindle.connectors.avro_encoding import encode_avro
from rekindle.connectors.avro_values import PREFIX
from rekindle.connectors.csv_writer import encode_csv
from rekindle.connectors.kafka_records import record_values
from rekindle.connectors.schema_registry import SchemaRegistry, WrittenSchema
from rekindle.topology.kinds.kafka_sink import KafkaSinkSpec
from rekindle.topology.schema import Field, Schema
from rekindle.topology.written_avro import written_avro_schema

if TYPE_CHECKING:
    from rekindle.connectors.protobuf_encoding import ProtobufEncoding


class ValueWriter(Protocol):
    def encode(self, rows: pa.Table) -> Sequence[bytes | None]:
        """A value for each row; None is a tombstone. Raises UnencodableValue; SourceFailed if what
        is missing is no property of the rows, such as a registry that is away."""
        ...


class JsonWriter:
    """Implements `ValueWriter`."""

    def encode(self, rows: pa.Table) -> Sequence[bytes | None]:
        return record_values(rows)


class CsvWriter:
    """Implements `ValueWriter`."""

    def encode(self, rows: pa.Table) -> Sequence[bytes | None]:
        return encode_csv(rows)


class RawWriter:
    """The value of one column. Implements `ValueWriter`."""

    def __init__(self, column: str) -> None:
        self._column = column

    def encode(self, rows: pa.Table) -> Sequence[bytes | None]:
        return list(rows.column(self._column).cast(pa.binary()).to_pylist())


class AvroWriter:
    """Records of the schema of the columns, each after a zero byte and the number that the registry
    has for it. Implements `ValueWriter`."""

    def __init__(self, registry: SchemaRegistry, topic: str, schema: pa.Schema) -> None:
        fields = tuple(Field(field.name, topology_type(field.type)) for field in schema)
        self._schema = WrittenSchema(written_avro_schema(Schema(fields)))
        self._registry, self._subject = registry, f"{topic}-value"
        self._prefix: bytes | None = None

    def encode(self, rows: pa.Table) -> Sequence[bytes | None]:
        if self._prefix is None:
            self._prefix = PREFIX.pack(0, self._registry.number_of(self._subject, self._schema))
        prefix = self._prefix
        return [prefix + record for record in encode_avro(rows)]


class ProtobufWriter:
    """Messages of a type that the columns fit; with a registry each after a zero byte, the number
    that the registry has for the file of the type, and its place there. Implements
    `ValueWriter`."""

    def __init__(
        self, encoding: ProtobufEncoding, registry: SchemaRegistry | None, topic: str
    ) -> None:
        self._encoding = encoding
        self._registry, self._subject = registry, f"{topic}-value"
        self._prefix = b"" if registry is None else None

    def encode(self, rows: pa.Table) -> Sequence[bytes | None]:
        values = self._encoding.encode(rows)
        if (prefix := self._prefix) is None:
            prefix = self._prefix = self._registered()
        return [prefix + value for value in values] if prefix else values

    def _registered(self) -> bytes:
        assert self._registry is not None, "otherwise there is no prefix"
        number = self._registry.number_of(self._subject, self._encoding.written_schema)
        place = self._encoding.place
        indexes = [0] if place == [0] else [len(place), *place]  # the first message, for short
        return PREFIX.pack(0, number) + b"".join(map(encode_long, indexes))


def open_writer(options: KafkaSinkSpec, schema: pa.Schema) -> ValueWriter:
    """Writes rows of `schema`. Raises SchemaMismatch if the format cannot have them."""
    registry = None if options.schema_registry is None else SchemaRegistry(options.schema_registry)
    match options.format:
        case "json":
            return JsonWriter()
        case "csv":
            return CsvWriter()
        case "raw":
            assert options.value_column is not None, "it was checked with the manifest"
            return RawWriter(options.value_column)
        case "avro":
            assert registry is not None, "it was checked with the manifest"
            return AvroWriter(registry, options.topic, schema)
        case "protobuf":
            # Imported on first use: a sink of another format does not need the library.
            from rekindle.connectors.protobuf_encoding import ProtobufEncoding

            descriptors, message = options.protobuf_descriptors, options.protobuf_message
            encoding = ProtobufEncoding(schema, descriptors or "", message or "")
            return ProtobufWriter(encoding, registry, options.topic)
        case _:
            assert_never(options.format)
