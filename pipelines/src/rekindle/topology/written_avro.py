"""The Avro schema of the rows that a query writes. Pure.

Each column is a union of null and its type, with the default null: so a column that is added, or
left out, is a change that registries call compatible.

Paper: Avro 1.12, "Schema Declaration", "Logical Types".
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from rekindle.topology.schema import Array, DataType, Decimal, Field, Scalar, Schema, Struct

ROOT = "Row"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_SCALARS: Mapping[Scalar, Any] = {
    Scalar.STRING: "string",
    Scalar.BIGINT: "long",
    Scalar.INT: "int",
    Scalar.SMALLINT: "int",
    Scalar.TINYINT: "int",
    Scalar.DOUBLE: "double",
    Scalar.FLOAT: "float",
    Scalar.BOOLEAN: "boolean",
    Scalar.BINARY: "bytes",
    Scalar.TIMESTAMP: {"type": "long", "logicalType": "timestamp-micros"},
    Scalar.DATE: {"type": "int", "logicalType": "date"},
}


def written_avro_schema(schema: Schema) -> str:
    """As JSON; the same text for the same columns. Their names are those that Avro allows
    (`names_not_in_avro`)."""
    return json.dumps(_record(schema.fields, ROOT), separators=(",", ":"))


def names_not_in_avro(schema: Schema) -> Iterator[str]:
    """Of columns, and of fields of STRUCTs, as paths."""
    for field in schema:
        yield from _wrong_names(field, field.name)


def _wrong_names(field: Field, path: str) -> Iterator[str]:
    if not _NAME.fullmatch(field.name):
        yield path
    data_type = field.type
    while isinstance(data_type, Array):
        data_type = data_type.element
    if isinstance(data_type, Struct):
        for inner in data_type.fields:
            yield from _wrong_names(inner, f"{path}.{inner.name}")


def _record(fields: tuple[Field, ...], name: str) -> dict[str, Any]:
    return {
        "type": "record",
        "name": name,
        "fields": [
            {
                "name": field.name,
                "type": _or_null(field.type, f"{name}.{field.name}"),
                "default": None,
            }
            for field in fields
        ],
    }


def _or_null(data_type: DataType | None, name: str) -> list[Any]:
    """`name`: of the record, if it is one: its path, which no other has. All before its last point
    is a namespace."""
    match data_type:
        case None:
            found: Any = _SCALARS[Scalar.STRING]
        case Scalar():
            found = _SCALARS[data_type]
        case Decimal(precision, scale):
            found = {
                "type": "bytes",
                "logicalType": "decimal",
                "precision": precision,
                "scale": scale,
            }
        case Array(element):
            found = {"type": "array", "items": _or_null(element, name)}
        case Struct(fields):
            found = _record(fields, name)
    return ["null", found]
