"""Parses Avro values: each is one record, perhaps with the number of its schema before it.

With a registry a value begins with a zero byte and the four bytes of the number of the schema that
it was written with. Fields become columns by name; the schema of the reader, if there is one, adds
aliases, and defaults of fields that a value's schema lacks. Without a default such a column is
NULL. Types are converted by the table of conversions, not by Avro's own promotions, which it
contains.

Design: docs/decisions/0062-formats-of-kafka-values.md.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from rekindle.connectors.avro_columns import AvroColumns, ColumnBuilder, UnreadableSchema
from rekindle.connectors.avro_defaults import encode_default
from rekindle.connectors.conversions import TextRules
from rekindle.connectors.record_values import Numbers, Parsed, Part, Values, present_values
from rekindle.errors import SchemaMismatch
from rekindle.topology.avro import AvroField, AvroSchema, InvalidAvroSchema, parse_avro_schema

PREFIX = struct.Struct(">bI")


class Schemas(Protocol):
    """A registry of schemas."""

    def schema(self, number: int) -> tuple[str, tuple[str, ...]]:
        """A schema, and those whose names it uses. Raises SourceFailed,
        InvalidAvroSchema."""
        ...


@dataclass(frozen=True, slots=True)
class _Reader:
    """`added`: columns that records of the schema lack, with one row."""

    columns: AvroColumns
    added: Mapping[str, pa.Array]


class AvroValues:
    """Implements `rekindle.connectors.record_values.ValueFormat`."""

    rules = TextRules()

    def __init__(self, declared: pa.Schema, schema: str | None, registry: Schemas | None) -> None:
        """Raises SchemaMismatch."""
        self._declared = declared
        self._registry = registry
        try:
            given = parse_avro_schema(schema) if schema is not None else None
            reader = given if registry is not None else None
            self._fields = {f.name: f for f in (reader.fields if reader else ())}
            self._defaults = self._default_columns(reader) if reader else {}
            self._own = self._reader(given) if given is not None and registry is None else None
        except (InvalidAvroSchema, UnreadableSchema) as error:
            raise SchemaMismatch(f"avroSchema: {error}") from error
        self._by_number: dict[int, _Reader | str] = {}

    def parse(self, values: Values) -> Parsed:
        present, numbers = present_values(values)
        if self._own is not None:
            parts, bad = list[Part](), dict[int, str]()
            self._add(self._own, present, numbers, 0, parts, bad)
            return Parsed(parts, bad)
        return self._parse_prefixed(present, numbers)

    def _parse_prefixed(self, values: Sequence[bytes], numbers: Numbers) -> Parsed:
        parts, bad = list[Part](), dict[int, str]()
        by_schema = dict[int, list[int]]()
        for at, value in enumerate(values):
            magic, schema = PREFIX.unpack_from(value) if len(value) >= PREFIX.size else (-1, 0)
            if magic == 0:
                by_schema.setdefault(schema, []).append(at)
            else:
                bad[int(numbers[at])] = (
                    "it does not begin with a zero byte and the number of a schema, as values of a "
                    "schema registry do"
                )
        for schema, places in by_schema.items():
            reader, of = self._of_number(schema), numbers[np.array(places, np.int64)]
            if isinstance(reader, str):
                bad |= dict.fromkeys(of.tolist(), f"schema {schema}: {reader}")
            else:
                chosen = [values[at] for at in places]
                self._add(reader, chosen, of, PREFIX.size, parts, bad)
        return Parsed(parts, bad)

    def _of_number(self, number: int) -> _Reader | str:
        """How records of the schema are read, or why they are not. Raises SourceFailed."""
        if number not in self._by_number:
            assert self._registry is not None, "else values have no numbers"
            try:
                text, references = self._registry.schema(number)
                found = self._reader(parse_avro_schema(text, references))
            except (InvalidAvroSchema, UnreadableSchema) as error:
                self._by_number[number] = str(error)
            else:
                self._by_number[number] = found
        return self._by_number[number]

    def _reader(self, schema: AvroSchema) -> _Reader:
        """Raises UnreadableSchema."""
        names = {
            name: self._fields[name].names if name in self._fields else (name,)
            for name in self._declared.names
        }
        columns = ColumnBuilder(schema).columns(self._declared, names)
        lacking = [name for name in self._declared.names if name not in columns.names]
        nothing = pa.nulls(1)
        return _Reader(columns, {name: self._defaults.get(name, nothing) for name in lacking})

    def _default_columns(self, reader: AvroSchema) -> dict[str, pa.Array]:
        """Those of the reader's fields that have one, each with one row. Raises InvalidAvroSchema,
        UnreadableSchema."""
        found = dict[str, pa.Array]()
        for field in reader.fields:
            if field.has_default and field.name in self._declared.names:
                found[field.name] = self._default(reader, field)
        return found

    def _default(self, reader: AvroSchema, field: AvroField) -> pa.Array:
        """As a record would have it that has this field alone."""
        alone = AvroSchema(reader.root, {**reader.records, reader.root: (field,)})
        declared = pa.schema([self._declared.field(field.name)])
        columns = ColumnBuilder(alone).columns(declared, {field.name: (field.name,)})
        rows, _, bad = columns.decode([encode_default(alone, field)])
        if bad:
            raise InvalidAvroSchema(f"field {field.name}: its default is not of its type")
        return rows.column(0)

    def _add(
        self,
        reader: _Reader,
        values: Sequence[bytes],
        numbers: Numbers,
        skipped: int,
        parts: list[Part],
        bad: dict[int, str],
    ) -> None:
        rows, good, wrong = reader.columns.decode(values, skipped)
        bad |= {int(numbers[at]): what for at, what in wrong.items()}
        found: dict[str, Any] = dict(zip(rows.schema.names, rows.columns, strict=True))
        first = pa.array(np.zeros(len(good), np.int64))
        found |= {name: value.take(first) for name, value in reader.added.items()}
        names = self._declared.names
        batch = pa.RecordBatch.from_arrays([found[name] for name in names], names=names)
        parts.append(Part(batch, numbers[good]))
