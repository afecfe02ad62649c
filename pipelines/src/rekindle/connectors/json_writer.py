"""Encodes rows as JSON lines, column by column, the same on every machine.

Each column becomes an Arrow array of JSON texts; the texts of a row are joined by Arrow. Only types
that Arrow writes in another way than `rekindle.connectors.json_lines` (doubles, decimals, bytes)
are encoded in Python, value by value. Times may be outside of Python's years 1 to 9999. Invalid
UTF-8 in a STRING becomes U+FFFD, as the WHATWG encoding standard prescribes.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from json.encoder import encode_basestring
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rekindle.connectors.json_lines import json_value

MAX_BATCH_ROWS = 65_536
MAX_BATCH_BYTES = 64 << 20
"""Limits of the rows that are encoded at once: their JSON texts have to fit into 2 GB, and an
escaped string is up to six times as long."""
_SPECIAL = r'[\x00-\x1f"\\]'
_DAY_US = 86_400_000_000
_FIRST_DAY, _AFTER_LAST_DAY = -719_162, 2_932_897  # 0001-01-01, 10000-01-01
_NULL = "null"
_NOT_FINITE = {repr(v): json_value(v) for v in (math.nan, math.inf, -math.inf)}


class UnencodableValue(ValueError):
    """A value that JSON cannot represent; the message names the column."""


def encode_lines(rows: pa.Table) -> bytes:
    """One line for each row. Raises UnencodableValue."""
    if not rows.num_rows or not rows.num_columns:
        return b""
    size = max(1, min(MAX_BATCH_ROWS, rows.num_rows * MAX_BATCH_BYTES // max(1, rows.nbytes)))
    pieces = (rows.slice(start, size) for start in range(0, rows.num_rows, size))
    return b"".join(_encode(piece) for piece in pieces)


def _encode(rows: pa.Table) -> bytes:
    columns = []
    for field, column in zip(rows.schema, rows.columns, strict=True):
        try:
            columns.append(json_texts(column.combine_chunks()))
        except (ValueError, OverflowError, pa.ArrowException) as e:
            raise UnencodableValue(
                f"column {field.name} has a {field.type} value that JSON cannot represent: {e}"
            ) from e
    lines = _object(rows.schema.names, columns, "}\n")
    _, offsets, data = lines.buffers()
    ends = np.frombuffer(offsets, np.int32)[lines.offset : lines.offset + len(lines) + 1]
    return bytes(memoryview(data)[int(ends[0]) : int(ends[-1])])


def _object(names: Sequence[str], columns: Sequence[pa.Array], end: str = "}") -> pa.Array:
    parts: list[Any] = []
    for at, (name, column) in enumerate(zip(names, columns, strict=True)):
        key = encode_basestring(name)
        parts += [f"{',' if at else '{'}{key}:", column]
    return _joined(*parts, end)


def _joined(*parts: Any) -> pa.Array:
    """The concatenated texts of each row. (Arrow's last argument is the separator.)"""
    return pc.binary_join_element_wise(*parts, "")


def json_texts(array: pa.Array) -> pa.Array:
    """The JSON text of each value."""
    texts = _non_null(array)
    if not array.null_count:
        return texts
    return pc.if_else(array.is_valid(), texts, pa.scalar(_NULL))


def _non_null(array: pa.Array) -> pa.Array:
    """The JSON text of each value that is not NULL; for a NULL any text, or NULL."""
    data_type, types = array.type, pa.types
    if types.is_integer(data_type) or types.is_boolean(data_type):
        return array.cast(pa.string())
    if types.is_floating(data_type):
        return _doubles(array)
    if types.is_string(data_type) or types.is_large_string(data_type):
        return _strings(array)
    if types.is_timestamp(data_type) and data_type.tz in (None, "UTC") and data_type.unit != "ns":
        return _timestamps(
            array.cast(pa.timestamp("us", data_type.tz)).cast(pa.int64()), bool(data_type.tz)
        )
    if types.is_date32(data_type):
        return _dates(array.cast(pa.int32()).cast(pa.int64()))
    if types.is_decimal(data_type):
        return _by_value(array, lambda value: f'"{value:f}"')
    if types.is_binary(data_type) or types.is_large_binary(data_type):
        return _by_value(array, lambda value: f'"{base64.b64encode(value).decode()}"')
    if types.is_struct(data_type) and data_type.num_fields:
        names = [field.name for field in data_type]
        return _object(names, [json_texts(child) for child in array.flatten()])
    if types.is_map(data_type):
        if _holds_null_type(data_type):
            return _by_value(array, json_value)
        entry = pa.struct(
            [pa.field("k", data_type.key_type, nullable=False), ("v", data_type.item_type)]
        )
        return _lists(array.cast(pa.list_(entry)), _pairs)
    if types.is_list(data_type) or types.is_large_list(data_type):
        return _lists(array, json_texts)
    return _by_value(array, json_value)


def _holds_null_type(data_type: pa.DataType) -> bool:
    """Whether the type contains Arrow's null type, such as that of Spark's empty arrays; Arrow
    cannot cast lists of it."""
    children = (data_type.field(n).type for n in range(data_type.num_fields))
    return pa.types.is_null(data_type) or any(_holds_null_type(child) for child in children)


def _by_value(array: pa.Array, encode: Callable[[Any], str]) -> pa.Array:
    values: Iterable[Any] = array.to_pylist()
    return pa.array([None if v is None else encode(v) for v in values], pa.string())


def _doubles(array: pa.Array) -> pa.Array:
    """The shortest exact form, as Python writes it; 0.0 for -0.0."""
    values = array.to_numpy(zero_copy_only=False).astype(np.float64) + 0.0
    texts: Iterator[str] = map(repr, values.tolist())
    if not np.isfinite(values).all():  # a NULL is NaN here
        texts = (_NOT_FINITE.get(text, text) for text in texts)
    return pa.array(texts, pa.string(), size=len(array))


def valid_texts(array: pa.Array) -> pa.Array:
    """Strings, with U+FFFD in place of invalid UTF-8."""
    try:
        array.validate(full=True)
    except pa.ArrowInvalid:
        array = _replaced(array)
    return array.cast(pa.string())


def _strings(array: pa.Array) -> pa.Array:
    array = valid_texts(array)
    if pc.any(pc.match_substring_regex(array, _SPECIAL)).as_py():
        return _by_value(array, encode_basestring)
    return _joined('"', array, '"')


def _replaced(array: pa.Array) -> pa.Array:
    """The strings with U+FFFD in place of invalid UTF-8."""
    large = pa.types.is_large_string(array.type)
    raw = array.cast(pa.large_binary() if large else pa.binary()).to_pylist()
    return pa.array([None if b is None else b.decode(errors="replace") for b in raw], pa.string())


def _timestamps(micros: pa.Array, has_zone: bool) -> pa.Array:
    zone = "Z" if has_zone else ""
    if not _in_range(micros, _FIRST_DAY * _DAY_US, _AFTER_LAST_DAY * _DAY_US):
        return _joined('"', _iso(micros, "us"), f'{zone}"')
    texts = micros.cast(pa.timestamp("us")).cast(pa.string())  # 2013-01-01 06:00:00.000000
    return _joined(
        '"',
        pc.utf8_slice_codeunits(texts, 0, 10),
        "T",
        pc.utf8_slice_codeunits(texts, 11, 19),
        pc.replace_substring(pc.utf8_slice_codeunits(texts, 19), ".000000", ""),
        f'{zone}"',
    )


def _dates(days: pa.Array) -> pa.Array:
    if not _in_range(days, _FIRST_DAY, _AFTER_LAST_DAY):
        return _joined('"', _iso(days, "D"), '"')
    return _joined('"', days.cast(pa.int32()).cast(pa.date32()).cast(pa.string()), '"')


def _in_range(numbers: pa.Array, first: int, end: int) -> bool:
    found = pc.min_max(numbers)
    return not found["min"].is_valid or (
        found["min"].as_py() >= first and found["max"].as_py() < end
    )


def _iso(numbers: pa.Array, unit: str) -> pa.Array:
    """Times since 1970 in ISO 8601, of any year; without a fraction if it is zero."""
    times = pc.fill_null(numbers, 0).to_numpy(zero_copy_only=False).astype(f"datetime64[{unit}]")
    if np.isnat(times).any():
        raise ValueError("a time that ISO 8601 cannot represent")
    texts = np.datetime_as_string(times)
    return pa.array(
        [_four_digits(str(text).removesuffix(".000000")) for text in texts], pa.string()
    )


def _four_digits(text: str) -> str:
    """The time with four digits in a negative year, of which numpy may write three."""
    year, dash, rest = text[1:].partition("-")
    return f"-{year:0>4}{dash}{rest}" if text.startswith("-") else text


def _lists(array: pa.Array, encode: Callable[[pa.Array], pa.Array]) -> pa.Array:
    lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    items = encode(array.flatten())
    return _joined("[", pc.binary_join(pa.ListArray.from_arrays(offsets, items), ","), "]")


def _pairs(entries: pa.Array) -> pa.Array:
    keys, values = (json_texts(child) for child in entries.flatten())
    return _joined("[", keys, ",", values, "]")
