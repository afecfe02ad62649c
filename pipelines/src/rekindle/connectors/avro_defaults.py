"""Encodes the default of a field, which a schema has as JSON, as a record would have it. Pure.

Paper: Avro 1.12, "Complex Types" (the table of defaults), "Binary Encoding".
"""

from __future__ import annotations

import struct
from typing import Any

from rekindle.topology.avro import (
    ArrayOf,
    AvroField,
    AvroSchema,
    AvroType,
    Enumeration,
    Fixed,
    InvalidAvroSchema,
    MapOf,
    Primitive,
    RecordName,
    UnionOf,
)


def encode_default(schema: AvroSchema, field: AvroField) -> bytes:
    """Raises InvalidAvroSchema."""
    try:
        return _encode(schema, field.type, field.default)
    except (AttributeError, KeyError, TypeError, ValueError, struct.error, RecursionError) as error:
        raise InvalidAvroSchema(f"field {field.name}: its default is not of its type") from error


def encode_long(number: int) -> bytes:
    """A whole number of 64 bits: zigzag, then groups of seven bits."""
    left = (number << 1) ^ (number >> 63)
    found = bytearray()
    while left > 0x7F:
        found.append(left & 0x7F | 0x80)
        left >>= 7
    return bytes([*found, left])


def _encode(schema: AvroSchema, given: AvroType, value: Any) -> bytes:
    match given:
        case Primitive(kind):
            return _primitive(kind, value)
        case Fixed(size):
            data = value.encode("latin-1")
            if len(data) != size:
                raise ValueError(f"{len(data)} bytes instead of {size}")
            return bytes(data)
        case Enumeration(symbols):
            return encode_long(symbols.index(value))
        case ArrayOf(items):
            inner = b"".join(_encode(schema, items, item) for item in value)
            return encode_long(len(value)) + inner + b"\0" if value else b"\0"
        case MapOf(values):
            pairs = value.items()
            inner = b"".join(_primitive("string", k) + _encode(schema, values, v) for k, v in pairs)
            return encode_long(len(value)) + inner + b"\0" if value else b"\0"
        case UnionOf(branches):
            return _branch(schema, branches, value)
        case RecordName(name):
            fields = schema.records[name]
            return b"".join(
                _encode(schema, f.type, value[f.name] if f.name in value else _own(f))
                for f in fields
            )


def _own(field: AvroField) -> Any:
    if not field.has_default:
        raise KeyError(field.name)
    return field.default


def _branch(schema: AvroSchema, branches: tuple[AvroType, ...], value: Any) -> bytes:
    """The first one that the default is of."""
    for number, branch in enumerate(branches):
        try:
            return encode_long(number) + _encode(schema, branch, value)
        except (AttributeError, KeyError, TypeError, ValueError, struct.error):
            continue
    raise ValueError("it is of no branch")


def _primitive(kind: str, value: Any) -> bytes:
    match kind, value:
        case "null", None:
            return b""
        case "boolean", bool():
            return bytes([value])
        case "int" | "long", int() if not isinstance(value, bool):
            limit = 1 << (31 if kind == "int" else 63)
            if not -limit <= value < limit:
                raise ValueError(f"{value} is no {kind}")
            return encode_long(value)
        case "float" | "double", int() | float() if not isinstance(value, bool):
            return struct.pack("<f" if kind == "float" else "<d", value)
        case "string", str():
            data = value.encode("utf-8")
            return encode_long(len(data)) + data
        case "bytes", str():
            data = value.encode("latin-1")
            return encode_long(len(data)) + data
        case _:
            raise ValueError(f"{value!r} is no {kind}")
