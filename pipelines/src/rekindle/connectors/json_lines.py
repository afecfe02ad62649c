"""Encodes rows as JSON lines, the same on every machine.

Times are ISO 8601 (UTC), also outside of Python's years 1 to 9999; doubles have their shortest
exact form, and -0.0 becomes 0.0, as in digests; decimals, NaN and infinities are strings; bytes are
base64. Invalid UTF-8 in a STRING becomes U+FFFD, as the WHATWG encoding standard prescribes.
"""

from __future__ import annotations

import base64
import datetime as dt
import decimal
import json
import math
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc


class UnencodableValue(ValueError):
    """A value that JSON cannot represent; the message names the column."""


def encode_lines(rows: pa.Table) -> bytes:
    """One line for each row. Raises UnencodableValue."""
    columns = []
    for field, column in zip(rows.schema, rows.columns, strict=True):
        try:
            columns.append([value for chunk in column.chunks for value in _values(chunk)])
        except (ValueError, OverflowError, pa.ArrowException) as e:
            raise UnencodableValue(
                f"column {field.name} has a {field.type} value that JSON cannot represent: {e}"
            ) from e
    names = rows.schema.names
    lines = (json_line(dict(zip(names, row, strict=True))) for row in zip(*columns, strict=True))
    return "".join(f"{line}\n" for line in lines).encode()


def same_lines(one: bytes, two: bytes) -> bool:
    """Whether two files contain the same rows, whichever release wrote them. Raises ValueError."""
    return parse_lines(one) == parse_lines(two)


def parse_lines(data: bytes) -> list[str]:
    """The rows of a file, each in a normal form: equal rows are equal strings. Raises
    ValueError."""
    # `str.splitlines` would also split at U+2028 and the like, which may occur in JSON strings
    return [json_line(json.loads(line)) for line in data.split(b"\n") if line]


def json_line(row: dict[str, Any]) -> str:
    return json.dumps(_jsonable(row), ensure_ascii=False, separators=(",", ":"))


def _values(array: pa.Array) -> list[Any]:
    """Like `to_pylist`, but times are ISO 8601 strings and strings are valid Unicode."""
    kind, t = array.type, pa.types
    if t.is_struct(kind) and kind.num_fields:
        children = zip(*(_values(child) for child in array.flatten()), strict=True)
        names = [field.name for field in kind]
        return [
            dict(zip(names, row, strict=True)) if valid else None
            for row, valid in zip(children, array.is_valid().to_pylist(), strict=True)
        ]
    if t.is_map(kind):
        entry = pa.struct(
            [pa.field("key", kind.key_type, nullable=False), ("value", kind.item_type)]
        )
        entries = _values(array.cast(pa.list_(entry)))
        return [None if e is None else [[p["key"], p["value"]] for p in e] for e in entries]
    if t.is_list(kind) or t.is_large_list(kind):
        items = iter(_values(array.flatten()))
        lengths = pc.list_value_length(array).to_pylist()
        return [None if n is None else [next(items) for _ in range(n)] for n in lengths]
    if t.is_timestamp(kind) and kind.tz in (None, "UTC") and kind.unit != "ns":
        whole = array.cast(pa.timestamp("us", kind.tz)).cast(pa.int64())
        return _iso(whole, "us", "Z" if kind.tz else "")
    if t.is_date32(kind):
        return _iso(array.cast(pa.int32()).cast(pa.int64()), "D", "")
    if t.is_string(kind) or t.is_large_string(kind):
        return _texts(array)
    return list(array.to_pylist())


def _iso(numbers: pa.Array, unit: str, zone: str) -> list[str | None]:
    """Times since 1970 in ISO 8601; without a fraction if it is zero."""
    times = pc.fill_null(numbers, 0).to_numpy().astype(f"datetime64[{unit}]")
    if np.isnat(times).any():
        raise ValueError("a time that ISO 8601 cannot represent")
    texts = np.datetime_as_string(times)
    valid = numbers.is_valid().to_pylist()
    return [
        _four_digits(str(text).removesuffix(".000000")) + zone if ok else None
        for text, ok in zip(texts, valid, strict=True)
    ]


def _four_digits(text: str) -> str:
    """Negative years with four digits; numpy writes three."""
    year, dash, rest = text[1:].partition("-")
    return f"-{year:0>4}{dash}{rest}" if text.startswith("-") else text


def _texts(array: pa.Array) -> list[str | None]:
    try:
        return list(array.to_pylist())
    except UnicodeDecodeError:
        large = pa.types.is_large_string(array.type)
        raw = array.cast(pa.large_binary() if large else pa.binary()).to_pylist()
        return [None if b is None else b.decode(errors="replace") for b in raw]


def _jsonable(value: Any) -> Any:
    """Times in ISO 8601, doubles in their shortest exact form, what JSON lacks as a string."""
    match value:
        case dict():
            return {str(k): _jsonable(v) for k, v in value.items()}
        case list() | tuple():
            return [_jsonable(v) for v in value]
        case dt.datetime():
            return value.isoformat().replace("+00:00", "Z")
        case dt.date() | dt.time():
            return value.isoformat()
        case dt.timedelta():
            return value // dt.timedelta(microseconds=1)
        case float() if math.isnan(value):
            return "NaN"
        case float() if math.isinf(value):
            return "Infinity" if value > 0 else "-Infinity"
        case float():
            return value + 0.0  # −0.0 becomes 0.0
        case decimal.Decimal():
            return str(value)
        case bytes():
            return base64.b64encode(value).decode()
        case _:
            return value
