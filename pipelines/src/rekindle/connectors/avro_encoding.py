"""Encodes rows as Avro records of the schema of their columns (`rekindle.topology.written_avro`).

Column by column: a column becomes one byte string for each row, and those of a row are joined.
Pure. Paper: Avro 1.12, "Binary Encoding".
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from rekindle.connectors.avro_defaults import encode_long
from rekindle.connectors.json_writer import valid_texts

_NULL, _PRESENT = b"\x00", b"\x02"
"""Which branch of the union of null and a type follows."""
_NO_ITEMS = b"\x00"
_DECIMAL = 16  # bytes of Arrow's, with 38 digits


def encode_avro(rows: pa.Table) -> list[bytes]:
    """A record for each row."""
    if not rows.num_columns:
        return [b""] * rows.num_rows
    columns = [_encode(column.combine_chunks()) for column in rows.columns]
    return [b"".join(values) for values in zip(*columns, strict=True)]


def _encode(column: pa.Array) -> list[bytes]:
    """The values as unions of null and their type."""
    encoded = _encode_present(column)
    if not column.null_count:
        return [_PRESENT + value for value in encoded]
    valid = column.is_valid().to_pylist()
    return [
        _PRESENT + value if is_there else _NULL
        for value, is_there in zip(encoded, valid, strict=True)
    ]


def _encode_present(column: pa.Array) -> Sequence[bytes]:
    """Of each value; anything for NULL."""
    types, data_type = pa.types, column.type
    if types.is_struct(data_type):
        fields = [_encode(child) for child in column.flatten()]
        return [b"".join(values) for values in zip(*fields, strict=True)]
    if types.is_list(data_type):
        return _lists(column)
    if types.is_string(data_type):
        return _prefixed(valid_texts(column).cast(pa.binary()).to_pylist())
    if types.is_binary(data_type):
        return _prefixed(column.to_pylist())
    if types.is_decimal(data_type):
        return _decimals(column)
    if types.is_timestamp(data_type):
        return _each(column.cast(pa.int64()), encode_long)
    if types.is_date(data_type):
        return _each(column.cast(pa.int32()), encode_long)
    if types.is_boolean(data_type):
        return _each(column, lambda value: b"\x01" if value else b"\x00")
    if types.is_float32(data_type):
        return _floats(column, struct.Struct("<f"))
    if types.is_float64(data_type):
        return _floats(column, struct.Struct("<d"))
    assert types.is_integer(data_type), f"{data_type} is not a type of a column"
    return _each(column, encode_long)


def _each(column: pa.Array, encode: Callable[[Any], bytes]) -> list[bytes]:
    """Equal values, of which a column often has many, are encoded once."""
    distinct = column.dictionary_encode()
    values = [encode(value) for value in distinct.dictionary.to_pylist()]
    return [b"" if at is None else values[at] for at in distinct.indices.to_pylist()]


def _prefixed(values: Sequence[bytes | None]) -> list[bytes]:
    return [b"" if value is None else encode_long(len(value)) + value for value in values]


def _floats(column: pa.Array, layout: struct.Struct) -> list[bytes]:
    """Not by distinct values: -0.0 equals 0.0."""
    return [b"" if value is None else layout.pack(value) for value in column.to_pylist()]


def _decimals(column: pa.Array) -> list[bytes]:
    """The fewest bytes of two's complement, after their number."""
    data = memoryview(column.buffers()[1])
    found = list[bytes]()
    for first in range(
        _DECIMAL * column.offset, _DECIMAL * (column.offset + len(column)), _DECIMAL
    ):
        unscaled = int.from_bytes(data[first : first + _DECIMAL], "little", signed=True)
        size = (unscaled + (unscaled < 0)).bit_length() // 8 + 1
        found.append(encode_long(size) + unscaled.to_bytes(size, "big", signed=True))
    return found


def _lists(column: pa.ListArray) -> list[bytes]:
    """One block, and its end."""
    items = _encode(column.flatten())
    found, first = list[bytes](), 0
    for length in pc.fill_null(pc.list_value_length(column), 0).to_pylist():
        block = b"".join(items[first : first + length])
        found.append(encode_long(length) + block + _NO_ITEMS if length else _NO_ITEMS)
        first += length
    return found
