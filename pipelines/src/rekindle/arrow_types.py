"""The Arrow types of the schemas of a topology (`rekindle.topology.schema`).

One to one: each type of a schema has one Arrow type. The operator must not import this module: its
image has no Arrow.
"""

from __future__ import annotations

import pyarrow as pa

from rekindle.topology.schema import (
    Array,
    DataType,
    Decimal,
    Field,
    Scalar,
    Schema,
    Struct,
    type_to_ddl,
)

TIMESTAMP = pa.timestamp("us", "UTC")

_SCALARS = {
    Scalar.STRING: pa.string(),
    Scalar.BIGINT: pa.int64(),
    Scalar.INT: pa.int32(),
    Scalar.SMALLINT: pa.int16(),
    Scalar.TINYINT: pa.int8(),
    Scalar.DOUBLE: pa.float64(),
    Scalar.FLOAT: pa.float32(),
    Scalar.BOOLEAN: pa.bool_(),
    Scalar.TIMESTAMP: TIMESTAMP,
    Scalar.DATE: pa.date32(),
    Scalar.BINARY: pa.binary(),
}
_BY_ARROW_TYPE = {arrow: scalar for scalar, arrow in _SCALARS.items()}


def arrow_type(data_type: DataType | None) -> pa.DataType:
    """The Arrow type of a topology's type; an unknown type (None) has that of STRING."""
    match data_type:
        case None:
            return pa.string()
        case Scalar():
            return _SCALARS[data_type]
        case Decimal(precision, scale):
            return pa.decimal128(precision, scale)
        case Array(element):
            return pa.list_(arrow_type(element))
        case Struct(fields):
            return pa.struct([pa.field(f.name, arrow_type(f.type)) for f in fields])


def arrow_schema(schema: Schema) -> pa.Schema:
    return pa.schema([pa.field(f.name, arrow_type(f.type)) for f in schema])


def topology_type(arrow: pa.DataType) -> DataType | None:
    """The inverse of `arrow_type`; None for Arrow types that no schema of a topology has."""
    if pa.types.is_decimal128(arrow):
        return Decimal(arrow.precision, arrow.scale)
    if pa.types.is_list(arrow):
        element = topology_type(arrow.value_type)
        return None if element is None else Array(element)
    if pa.types.is_struct(arrow):
        return Struct(tuple(Field(f.name, topology_type(f.type)) for f in arrow))
    return _BY_ARROW_TYPE.get(arrow)


def arrow_to_ddl(arrow: pa.DataType) -> str:
    """An Arrow type in Spark's DDL."""
    return type_to_ddl(topology_type(arrow))
