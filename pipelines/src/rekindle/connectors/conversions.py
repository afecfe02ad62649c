"""Converts columns of a file to the declared types, or finds the first value that does not fit.

No value silently becomes NULL or Infinity: one that its type cannot hold is an error. Strings
inside arrays and structs are converted like columns of strings. Pure: Arrow in, Arrow out.
"""

from __future__ import annotations

import base64
import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rekindle.arrow_types import arrow_to_ddl
from rekindle.errors import SchemaMismatch

_UTC = pa.timestamp("us", "UTC")
_ZONED = r"(?i)(Z|[+-]\d{2}(:?\d{2})?)$"
_DATE_AND_TIME = r"^\s*[+-]?\d{4,}-\d{2}-\d{2}[T ]"
_EXPANDED_YEAR = r"^\s*(-\d{4,}|\+?\d{5,})-"
_INFINITY = r"(?i)^[+-]?inf(inity)?$"


@dataclass(frozen=True, slots=True)
class TextRules:
    """How strings are converted. An empty string becomes NULL, unless the target is STRING, or
    BINARY in base64."""

    binary_is_base64: bool = False
    """True for JSON; otherwise the bytes of a string are the BINARY value."""


_DECIMAL_COMMA = re.compile(r"\s*[+-]?\d*,\d+\s*")
_FAILURES = (ValueError, pa.ArrowNotImplementedError)  # ArrowInvalid is a ValueError


def convert_to_field(
    column: pa.Array, field: pa.Field, where: str, first_row: int, rules: TextRules
) -> pa.Array:
    """The column in its declared type. Raises SchemaMismatch for the first value that does not fit;
    `first_row` is the number of rows before the column."""
    if column.type != field.type:
        try:
            column = convert(column, field.type, rules)
        except _FAILURES as e:
            row = _first_failing(lambda part: convert(part, field.type, rules), column)
            value = column[row].as_py()
            raise SchemaMismatch(
                f"{where}, row {first_row + row + 1}: {value!r} is not a "
                f"{arrow_to_ddl(field.type)}; {_hint(value, field)}"
            ) from e
    if column.null_count and not field.nullable:
        row = int(pc.index(column.is_null(), True).as_py())
        raise SchemaMismatch(f"{where}, row {first_row + row + 1}: NULL in a NOT NULL column")
    return column


def _hint(value: Any, field: pa.Field) -> str:
    has_digits = pa.types.is_floating(field.type) or pa.types.is_decimal(field.type)
    if has_digits and isinstance(value, str) and _DECIMAL_COMMA.fullmatch(value):
        number = f"CAST(replace({field.name}, ',', '.') AS {arrow_to_ddl(field.type)})"
        return f"numbers have a decimal point: declare it STRING and write {number} in sql"
    return "correct the file, the schema, or nullValue"


def first_unconvertible(column: pa.Array, target: pa.DataType, rules: TextRules) -> int | None:
    """The index of the first value that does not fit, None if all do."""
    try:
        convert(column, target, rules)
    except _FAILURES:
        return _first_failing(lambda part: convert(part, target, rules), column)
    return None


def convert(column: pa.Array, target: pa.DataType, rules: TextRules) -> pa.Array:
    """Raises ValueError or ArrowNotImplementedError."""
    given, types = column.type, pa.types
    if given == target:
        return column
    if types.is_struct(given) and types.is_struct(target):
        return _structs(column, target, rules)
    if _is_list(given) and _is_list(target):
        return _lists(column, target, rules)
    if types.is_string(given) or types.is_large_string(given):
        return _texts(column, target, rules)
    if types.is_timestamp(given) and types.is_timestamp(target):
        return _cast_zone(column, target)
    converted = pc.cast(column, target)
    if types.is_floating(given) and types.is_floating(target):
        _refuse_new_infinities(converted, lambda: pc.is_inf(column))
    return converted


def _is_list(type_: pa.DataType) -> bool:
    types = pa.types
    return bool(
        types.is_list(type_) or types.is_large_list(type_) or types.is_fixed_size_list(type_)
    )


def _structs(column: pa.Array, target: pa.DataType, rules: TextRules) -> pa.Array:
    """Matches fields by name, and drops those that the target does not have."""
    parts = dict(zip((f.name for f in column.type), column.flatten(), strict=True))
    missing = [f.name for f in target if f.name not in parts]
    if missing:
        raise pa.ArrowInvalid(f"no field {', '.join(missing)}")
    children = [convert(parts[f.name], f.type, rules) for f in target]
    return pa.StructArray.from_arrays(children, fields=list(target), mask=column.is_null())


def _lists(column: pa.Array, target: pa.DataType, rules: TextRules) -> pa.Array:
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
    offsets = pa.array(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32))
    items = convert(column.flatten(), target.value_type, rules)
    return pa.ListArray.from_arrays(offsets, items, type=target, mask=column.is_null())


def _texts(column: pa.Array, target: pa.DataType, rules: TextRules) -> pa.Array:
    types = pa.types
    if types.is_string(target) or types.is_large_string(target):
        return pc.cast(column, target)
    if types.is_binary(target) and rules.binary_is_base64:
        return _from_base64(column, target)
    column = pc.if_else(pc.equal(column, ""), pa.scalar(None, column.type), column)
    if types.is_timestamp(target):
        return _timestamps(column, target)
    if types.is_date(target):
        return _dates(column, target)
    converted = pc.cast(column, target)
    if types.is_floating(target):
        _refuse_new_infinities(converted, lambda: pc.match_substring_regex(column, _INFINITY))
    return converted


def _refuse_new_infinities(converted: pa.Array, infinite_before: Callable[[], pa.Array]) -> None:
    infinite = pc.is_inf(converted)
    if not pc.any(infinite).as_py():
        return
    if pc.any(pc.and_not(infinite, infinite_before())).as_py():
        raise pa.ArrowInvalid("a number is too large for its type")


def _from_base64(column: pa.Array, target: pa.DataType) -> pa.Array:
    texts = column.to_pylist()
    return pa.array(
        [None if s is None else base64.b64decode(s, validate=True) for s in texts], target
    )


def _timestamps(column: pa.Array, target: pa.DataType) -> pa.Array:
    """From ISO 8601 strings; without a zone they are UTC."""
    text = pc.utf8_trim_whitespace(column)
    for type_ in (pa.timestamp("us"), _UTC):  # most columns have no zone, or one in every value
        with contextlib.suppress(pa.ArrowInvalid):
            return _cast_zone(pc.cast(text, type_), target)
    zoned = pc.and_(
        pc.match_substring_regex(text, _DATE_AND_TIME), pc.match_substring_regex(text, _ZONED)
    )
    null = pa.scalar(None, text.type)
    expanded = pc.match_substring_regex(text, _EXPANDED_YEAR)
    four_digit = pc.if_else(expanded, null, text)
    with_zone = pc.cast(pc.if_else(zoned, four_digit, null), _UTC)
    without = pc.cast(pc.if_else(zoned, null, four_digit), pa.timestamp("us"))
    times = pc.coalesce(with_zone, pc.assume_timezone(without, "UTC"))
    if pc.any(expanded).as_py():
        texts = pc.replace_substring_regex(pc.if_else(expanded, text, null), r"(?i)Z$", "")
        times = pc.coalesce(times, _parse_expanded(texts, "us").cast(_UTC))
    return _cast_zone(times, target)


def _dates(column: pa.Array, target: pa.DataType) -> pa.Array:
    expanded = pc.match_substring_regex(column, _EXPANDED_YEAR)
    if not pc.any(expanded).as_py():
        return pc.cast(column, target)
    null = pa.scalar(None, column.type)
    days = pc.cast(_parse_expanded(pc.if_else(expanded, column, null), "D"), pa.int32()).cast(
        target
    )
    return pc.coalesce(pc.cast(pc.if_else(expanded, null, column), target), days)


def _parse_expanded(texts: pa.Array, unit: str) -> pa.Array:
    """Parses times in years outside 0 to 9999, as the sink writes them, to counts of `unit` since
    1970. Arrow's parser accepts only years of four digits."""
    counts: list[int | None] = []
    for text in texts.to_pylist():
        if text is None:
            counts.append(None)
            continue
        time = np.datetime64(text)
        count = time.astype(f"datetime64[{unit}]")
        if count.astype(time.dtype) != time or np.datetime64(str(count)) != count:
            raise pa.ArrowInvalid(f"{text} is out of range")
        counts.append(int(count.astype(np.int64)))
    return pa.array(counts, pa.int64())


def _cast_zone(column: pa.Array, target: pa.DataType) -> pa.Array:
    """Cast between timestamps with and without a zone; those without are in UTC."""
    if column.type.tz is None and target.tz is not None:
        column = pc.assume_timezone(column, "UTC")
    elif column.type.tz is not None and target.tz is None:
        column = pc.cast(column, pa.timestamp(column.type.unit, "UTC"))
        column = pc.local_timestamp(column)
    return pc.cast(column, target)


def _first_failing(convert: Callable[[pa.Array], pa.Array], column: pa.Array) -> int:
    """The index of the first value that does not convert, by binary search."""
    low, high = 0, len(column)
    while high - low > 1:
        middle = (low + high) // 2
        try:
            convert(column.slice(low, middle - low))
        except _FAILURES:
            high = middle
        else:
            low = middle
    return low
