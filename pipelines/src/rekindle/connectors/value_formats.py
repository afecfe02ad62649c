"""Formats of the values of a Kafka topic, by the name that `format` has in the resource."""

from __future__ import annotations

from typing import assert_never

import pyarrow as pa

from rekindle.connectors.avro_values import AvroValues
from rekindle.connectors.conversions import TextRules
from rekindle.connectors.csv_values import CsvValues
from rekindle.connectors.json_values import JsonValues
from rekindle.connectors.record_values import Parsed, Part, ValueFormat, Values
from rekindle.connectors.schema_registry import SchemaRegistry
from rekindle.topology.kinds.kafka import KafkaSourceSpec


class RawValues:
    """The value itself, as the only column. Implements `ValueFormat`."""

    rules = TextRules()

    def __init__(self, declared: pa.Schema) -> None:
        (self._name,) = declared.names

    def parse(self, values: Values) -> Parsed:
        column = pa.array(values, pa.binary())
        return Parsed([Part(pa.RecordBatch.from_arrays([column], names=[self._name]))])


def open_format(
    options: KafkaSourceSpec, declared: pa.Schema, registry: SchemaRegistry | None = None
) -> ValueFormat:
    """Parses values to the columns of `declared`. Raises SourceFailed."""
    match options.format:
        case "json":
            return JsonValues(declared)
        case "csv":
            return CsvValues(declared, options)
        case "raw":
            return RawValues(declared)
        case "avro":
            return AvroValues(declared, options.avro_schema, registry)
        case "protobuf":
            # Imported on first use: a source of another format does not need the library.
            from rekindle.connectors.protobuf_values import ProtobufValues

            return ProtobufValues(
                declared,
                options.protobuf_descriptors or "",
                options.protobuf_message or "",
                has_prefix=registry is not None,
            )
        case _:
            assert_never(options.format)
