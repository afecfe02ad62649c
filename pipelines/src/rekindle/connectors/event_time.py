"""Evaluates `eventTime.expression` over the raw rows of a file, exactly.

NULL and an empty string give NULL. A value that the expression cannot convert to a time is an error
that names its row: a silent NULL would put the row in the wrong epoch. Arrow in, Arrow out; does
not know files. Uses no clocks, and no time zones except those in the expression.

Design: docs/design/exactly-once.md#sources.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from typing import Any, assert_never

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rekindle.arrow_types import TIMESTAMP
from rekindle.connectors.conversions import TextRules, convert, first_unconvertible
from rekindle.errors import SchemaMismatch
from rekindle.topology.sql.event_time import (
    Column,
    Concat,
    Expression,
    LocalTime,
    ParsedTime,
    Text,
    UnixTime,
)
from rekindle.topology.sql.time_formats import MONTHS, TimeFormat

_SECOND_US = 1_000_000
_MAX_OFFSET_MINUTES = 18 * 60
"""The largest offset of a time zone from UTC, as in Spark."""
_EPOCH = dt.datetime(1970, 1, 1)
Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class _NoTime(Exception):
    """A value that cannot be converted to a time: its row in the batch, itself, and what is wrong
    with it."""

    def __init__(self, row: int, value: Any, what: str) -> None:
        super().__init__(what)
        self.row, self.value, self.what = row, value, what


def with_event_time(
    batches: Iterator[tuple[int, pa.RecordBatch]],
    expression: Expression,
    schema: pa.Schema,
    where: str,
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """The batches, which come with the number of their first row, with the event time appended as
    the last column; their new schema is `schema`. Raises SchemaMismatch."""
    for row, batch in batches:
        try:
            times = evaluate(expression, batch)
        except _NoTime as e:
            raise SchemaMismatch(
                f"{where}: eventTime.expression, row {row + e.row + 1}: {e.value!r} {e.what}; "
                "correct the file, or the expression"
            ) from e
        yield row, pa.RecordBatch.from_arrays([*batch.columns, times], schema=schema)


def evaluate(expression: Expression, batch: pa.RecordBatch) -> pa.Array:
    """The value of each row, of the expression's type."""
    match expression:
        case Column(name):
            return batch.column(batch.schema.get_field_index(name))
        case Text(value):
            return pa.array([value] * batch.num_rows, pa.string())
        case Concat(parts):
            texts = [pc.cast(evaluate(part, batch), pa.string()) for part in parts]
            return pc.binary_join_element_wise(*texts, "", null_handling="emit_null")
        case UnixTime(number, unit_us):
            return _since_epoch(evaluate(number, batch), unit_us)
        case ParsedTime(text, None):
            return _iso(evaluate(text, batch))
        case ParsedTime(text, format):
            return _formatted(evaluate(text, batch), format)
        case LocalTime(time, zone):
            return _from_zone(evaluate(time, batch), zone)
        case _:
            assert_never(expression)


def _since_epoch(numbers: pa.Array, unit_us: int) -> pa.Array:
    missing = _missing(numbers)
    if pa.types.is_floating(numbers.type):
        values = np.trunc(_numpy(pc.cast(numbers, pa.float64()), 0.0) * unit_us)
        wrong = ~(np.abs(values) < 2.0**63)  # also NaN
    else:
        values = _numpy(pc.cast(numbers, pa.int64()), 0)
        most = (2**63 - 1) // unit_us
        wrong = (values > most) | (values < -most)
        values = np.where(wrong, 0, values) * unit_us
    _refuse_any(wrong & ~missing, numbers, "is outside the range of TIMESTAMP")
    return _times(values.astype(np.int64), missing)


def _iso(values: pa.Array) -> pa.Array:
    if values.type == TIMESTAMP:
        return values
    row = first_unconvertible(values, TIMESTAMP, TextRules())
    if row is not None:
        what = "is not a time such as 2013-01-31 06:00:00; give to_timestamp a format"
        raise _NoTime(row, values[row].as_py(), what)
    return convert(values, TIMESTAMP, TextRules())


def _formatted(texts: pa.Array, format: TimeFormat | None) -> pa.Array:
    if format is None:
        raise TypeError("to_timestamp without a format is ISO 8601")
    trimmed = pc.utf8_trim_whitespace(texts)
    missing = _missing(texts) | _numpy(pc.fill_null(pc.equal(trimmed, ""), False), False)
    parts = pc.extract_regex(trimmed, format.regex)
    wrong = _missing(parts) & ~missing
    what = f"does not match the format {format.pattern!r}"
    _refuse_any(wrong, texts, what)
    by_name = dict(zip((f.name for f in parts.type), parts.flatten(), strict=True))
    values, valid = _from_parts(by_name, len(texts))
    _refuse_any(~valid & ~missing, texts, f"{what}: no such date or time")
    return _times(values, missing)


def _from_parts(parts: dict[str, pa.Array], rows: int) -> tuple[Int64s, Bools]:
    """Microseconds since 1970 of times given by their parts, and which of them are valid."""
    year = _part(parts, "year", rows) + _part(parts, "year_of_century", rows)
    if "year_of_century" in parts:
        year = year + 2000
    month = _month(parts, rows)
    day = _part(parts, "day", rows)
    hour = _part(parts, "hour", rows)
    valid = (month >= 1) & (month <= 12) & (day >= 1)
    if "am_pm" in parts:
        clock_hour = _part(parts, "clock_hour", rows)
        given = _numpy(pc.not_equal(pc.fill_null(parts["am_pm"], ""), ""), False)
        valid &= ~given | ((clock_hour >= 1) & (clock_hour <= 12))
        is_pm = _numpy(pc.equal(pc.utf8_upper(pc.fill_null(parts["am_pm"], "")), "PM"), False)
        hour = clock_hour % 12 + 12 * is_pm
    minute, second = _part(parts, "minute", rows), _part(parts, "second", rows)
    valid &= (hour < 24) & (minute < 60) & (second < 60)
    months = np.where(valid, (year - 1970) * 12 + month - 1, 0).astype("datetime64[M]")
    first = months.astype("datetime64[D]").astype(np.int64)
    length = (months + 1).astype("datetime64[D]").astype(np.int64) - first
    valid &= day <= length
    seconds = (((first + day - 1) * 24 + hour) * 60 + minute) * 60 + second
    offset_min, known = _offset(parts, rows)
    micros = (seconds - offset_min * 60) * _SECOND_US + _fraction(parts, rows)
    return micros, valid & known


def _part(parts: dict[str, pa.Array], name: str, rows: int) -> Int64s:
    """The value of a part, 0 where it is absent."""
    if name not in parts:
        return np.zeros(rows, dtype=np.int64)
    texts = pc.fill_null(parts[name], "")
    texts = pc.if_else(pc.equal(texts, ""), "0", texts)
    numbers: Int64s = _numpy(pc.cast(texts, pa.int64()), 0)
    return numbers


def _month(parts: dict[str, pa.Array], rows: int) -> Int64s:
    if "month_name" not in parts:
        return _part(parts, "month", rows)
    names = pa.array([name[:3].lower() for name in MONTHS])
    short = pc.utf8_slice_codeunits(pc.utf8_lower(parts["month_name"]), 0, 3)
    found: Int64s = _numpy(pc.index_in(short, names), -1).astype(np.int64) + 1
    return found


def _fraction(parts: dict[str, pa.Array], rows: int) -> Int64s:
    if "fraction" not in parts:
        return np.zeros(rows, dtype=np.int64)
    padded = pc.utf8_rpad(pc.fill_null(parts["fraction"], ""), 6, "0")
    micros: Int64s = _numpy(pc.cast(padded, pa.int64()), 0)
    return micros


def _offset(parts: dict[str, pa.Array], rows: int) -> tuple[Int64s, Bools]:
    """The UTC offset of each value in minutes, and which of them are valid."""
    if "zone" not in parts:
        return np.zeros(rows, dtype=np.int64), np.ones(rows, dtype=np.bool_)
    zone = pc.replace_substring(pc.fill_null(parts["zone"], ""), ":", "")
    digits = pc.utf8_rpad(pc.replace_substring_regex(zone, "^[^0-9]*", ""), 4, "0")
    number = _numpy(pc.cast(digits, pa.int64()), 0)
    sign = np.where(_numpy(pc.starts_with(zone, "-"), False), -1, 1)
    minutes: Int64s = number // 100 * 60 + number % 100
    return sign * minutes, (number % 100 < 60) & (minutes <= _MAX_OFFSET_MINUTES)


def _from_zone(times: pa.Array, zone: dt.tzinfo) -> pa.Array:
    missing = _missing(times)
    values = _numpy(pc.cast(times, pa.int64()), 0)
    seconds, index_of_row = np.unique(values // _SECOND_US, return_inverse=True)
    offsets = np.zeros(len(seconds), dtype=np.int64)
    for at, second in enumerate(seconds.tolist()):
        try:
            offset = (_EPOCH + dt.timedelta(seconds=second)).replace(tzinfo=zone).utcoffset()
        except OverflowError as e:
            row = int(np.flatnonzero((index_of_row == at) & ~missing)[0])
            what = "is outside the years that time zones support, 1 to 9999"
            raise _NoTime(row, str(np.datetime64(int(values[row]), "us")), what) from e
        offsets[at] = int((offset or dt.timedelta()).total_seconds())
    return _times(values - offsets[index_of_row] * _SECOND_US, missing)


def _times(micros: Int64s, missing: Bools) -> pa.Array:
    return pa.array(micros, pa.int64(), mask=missing).cast(TIMESTAMP)


def _missing(values: pa.Array) -> Bools:
    found: Bools = values.is_null().to_numpy(zero_copy_only=False)
    return found


def _numpy(values: pa.Array, default: Any) -> Any:
    return pc.fill_null(values, default).to_numpy(zero_copy_only=False)


def _refuse_any(wrong: Bools, values: pa.Array, what: str) -> None:
    """Raises _NoTime for the first row that is `wrong`, if there is one."""
    rows = np.flatnonzero(wrong)
    if len(rows):
        row = int(rows[0])
        raise _NoTime(row, values[row].as_py(), what)
