"""The schema of a stream: its columns, with types of Spark's DDL. Plain values.

Validation and compilation work with these, so that the operator needs no Arrow. The data plane
converts them (`rekindle.arrow_types`).

Design: docs/design/compilation.md#operator-ids.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum


class Scalar(Enum):
    """A type without parameters. The name of a member is Spark's, its value is the name in operator
    ids (`type_in_operator_id`)."""

    STRING = "string"
    BIGINT = "int64"
    INT = "int32"
    SMALLINT = "int16"
    TINYINT = "int8"
    DOUBLE = "double"
    FLOAT = "float"
    BOOLEAN = "bool"
    TIMESTAMP = "timestamp[us, tz=UTC]"
    DATE = "date32[day]"
    BINARY = "binary"


@dataclass(frozen=True, slots=True)
class Decimal:
    precision: int
    scale: int


@dataclass(frozen=True, slots=True)
class Array:
    element: DataType


@dataclass(frozen=True, slots=True)
class Struct:
    fields: tuple[Field, ...]


DataType = Scalar | Decimal | Array | Struct


@dataclass(frozen=True, slots=True)
class Field:
    """A column, or a field of a STRUCT. `type` is None if it cannot be inferred without Spark; DDL,
    Arrow schemas and operator ids then have STRING."""

    name: str
    type: DataType | None


@dataclass(frozen=True, slots=True)
class Schema:
    fields: tuple[Field, ...] = ()

    def __iter__(self) -> Iterator[Field]:
        return iter(self.fields)

    @property
    def names(self) -> list[str]:
        return [field.name for field in self.fields]

    def field(self, name: str) -> Field:
        return next(field for field in self.fields if field.name == name)

    def append(self, field: Field) -> Schema:
        return Schema((*self.fields, field))


INTEGER_BITS = {Scalar.BIGINT: 64, Scalar.INT: 32, Scalar.SMALLINT: 16, Scalar.TINYINT: 8}
"""The integer types, with their widths."""


def is_integer(data_type: DataType | None) -> bool:
    return data_type in INTEGER_BITS


def is_floating(data_type: DataType | None) -> bool:
    return data_type in (Scalar.DOUBLE, Scalar.FLOAT)


def is_number(data_type: DataType | None) -> bool:
    """False for strings: Spark casts them to numbers, and those that are none become NULL."""
    return is_integer(data_type) or is_floating(data_type) or isinstance(data_type, Decimal)


def is_nested(data_type: DataType | None) -> bool:
    return isinstance(data_type, Array | Struct)


def is_sortable(data_type: DataType | None) -> bool:
    match data_type:
        case Array():
            return False
        case Struct(fields):
            return all(is_sortable(field.type) for field in fields)
        case _:
            return True


def type_to_ddl(data_type: DataType | None) -> str:
    """A type in Spark's DDL; the inverse of `rekindle.topology.sql.ddl.ddl_to_schema`."""
    match data_type:
        case None:
            return Scalar.STRING.name
        case Scalar():
            return data_type.name
        case Decimal(precision, scale):
            return f"DECIMAL({precision}, {scale})"
        case Array(element):
            return f"ARRAY<{type_to_ddl(element)}>"
        case Struct(fields):
            return f"STRUCT<{', '.join(f'`{f.name}`: {type_to_ddl(f.type)}' for f in fields)}>"


def type_in_operator_id(data_type: DataType | None) -> str:
    """A type in operator ids. These are Arrow's names; they must not change between releases."""
    match data_type:
        case None:
            return Scalar.STRING.value
        case Scalar():
            return data_type.value
        case Decimal(precision, scale):
            return f"decimal128({precision}, {scale})"
        case Array(element):
            return f"list<item: {type_in_operator_id(element)}>"
        case Struct(fields):
            return (
                f"struct<{', '.join(f'{f.name}: {type_in_operator_id(f.type)}' for f in fields)}>"
            )
