"""Each type of a Parquet file, at its extremes, as each declared type: exact or refused.

What is exact is computed here, from Python's own integers, fractions and bytes. What is not in the
table of conversions is refused, whatever its values.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.arrow_types import TIMESTAMP, arrow_to_ddl
from rekindle.connectors.conversions import CONVERSIONS, TextRules, convert_to_field, kind_of
from rekindle.connectors.json_reading import parse_json_block, raw_schema
from rekindle.errors import SchemaMismatch

DECLARED = [
    *(pa.string(), pa.int64(), pa.int32(), pa.int16(), pa.int8(), pa.float64(), pa.float32()),
    *(pa.bool_(), pa.decimal128(38, 0), pa.decimal128(10, 2), pa.decimal128(38, 18)),
    *(pa.decimal128(38, 38), TIMESTAMP, pa.date32(), pa.binary()),
    *(pa.list_(pa.int64()), pa.list_(pa.int32())),
    *(pa.struct([("a", pa.int64())]), pa.struct([("a", pa.decimal128(10, 1))])),
]
TICKS = {"s": 1, "ms": 1000, "us": 10**6, "ns": 10**9}  # in a second
ZONES = (None, "UTC", "Europe/Paris", "America/Coyhaique", "Mars/Olympus")
TEXTS = [
    *("5", "+5", "-0", "0xFF", "0xFFFFFFFFFFFFFFFF", "true", "1E-100000000", "1E1000000000"),
    *("1E-39", "34.1", "340282367", "2046325602179196.900685", "-0e23", "99999999999999999999"),
    *("3402823669209384634633746074317682114.56", "123456789012345678901234567890.12345"),
    *("NaN", "-inf", "1e400", "1e-400", "4.9e-324", "1e39", "abc", "1_0", "٣", "12024-06"),
]


def counts(type_: pa.DataType, values: list[int]) -> pa.Array:
    """Of a type whose values are counts: days, microseconds."""
    width = pa.int32() if type_.bit_width == 32 else pa.int64()
    return pa.array(values, width).view(type_)


def made_columns() -> Iterator[pa.Array]:
    """Of each type that Parquet has, with its extremes."""
    for signed in (True, False):
        for bits in (8, 16, 32, 64):
            type_ = getattr(pa, f"{'' if signed else 'u'}int{bits}")()
            low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
            values = {low, low + 1, 0, 1, 2**24 + 1, 2**53 + 1, high - 1, high}
            yield pa.array(sorted(v for v in values if low <= v <= high), type_)
    yield pa.array([0, 2**63 - 1]).dictionary_encode()
    floats = [0.0, -0.0, 1.0, 1.5, 65504.0, math.nan, math.inf, -math.inf]
    yield pa.array(np.array(floats, np.float16))
    yield pa.array([*floats, 16777216.0, 3.0e38], pa.float32())
    yield pa.array([*floats, 16777217.0, 2.675, 0.004, 1e300, 5e-324, 2.0**63], pa.float64())
    decimals = (pa.decimal32(5, 2), pa.decimal64(12, 3), pa.decimal128(5, 2), pa.decimal128(9, 0))
    wide = (pa.decimal128(38, 0), pa.decimal128(38, 18), pa.decimal128(38, 38))
    wider = (pa.decimal256(76, 0), pa.decimal256(50, 20))
    for type_ in (*decimals, pa.decimal128(20, 0), *wide, *wider):
        digits = [0, 1, 10 ** (type_.precision - 1), 10**type_.precision - 1]
        digits += [d for d in (46509284486016680346, 10**20, 3402823669 * 10**28) if d < digits[-1]]
        yield (
            pa.array(digits, pa.decimal256(76, 0)).view(pa.decimal256(76, type_.scale)).cast(type_)
        )
    for type_ in (pa.date32(), pa.date64(), pa.time32("s"), pa.time64("us"), pa.duration("us")):
        most = 2 ** (type_.bit_width - 1) - 1
        of_a_day = 86_400_000 if type_ == pa.date64() else 1
        yield counts(type_, [0, of_a_day, 19_000 * of_a_day, most // of_a_day * of_a_day])
    for unit, ticks in TICKS.items():
        for zone in ZONES if unit == "us" else ZONES[::2]:
            type_ = pa.timestamp(unit, zone)
            yield counts(type_, [0, 1, -1, 1_717_198_200 * ticks, 2**63 - 1, -(2**63) + 1])
    yield pa.array(TEXTS)
    for type_ in (pa.large_string(), pa.string_view()):
        yield pa.array(TEXTS[::4], type_)
    yield pa.array(TEXTS[::4]).dictionary_encode()
    for type_ in (pa.binary(), pa.large_binary(), pa.binary_view()):
        yield pa.array([b"5", b"\xff", b""], type_)
    yield pa.array([b"abc", b"\xff\xff\xff"], pa.binary(3))
    yield pa.array([True, False])
    yield pa.array([[1, 2**40], [None], []], pa.list_(pa.int64()))
    yield pa.array([[1]], pa.large_list(pa.int64()))
    yield pa.array([[1, 2]], pa.list_(pa.int64(), 2))
    yield pa.array([[1.5], [1.0]])
    yield pa.array([["5"], ["x"]])
    yield pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64()))
    yield pa.array([[1]], pa.list_view(pa.int64()))
    yield pa.array([{"a": 1}, {"a": 2**62}])
    yield pa.array([{"a": 1.5}])


@functools.cache
def columns() -> tuple[pa.Array, ...]:
    return tuple(made_columns())


@functools.cache
def read_alone(declared: pa.DataType) -> list[list[Any]]:
    """Of each column, each value as it is read in a column of its own."""
    field = pa.field("c", declared)
    return [
        [read_or_refusal(column.slice(row, 1), field) for row in range(len(column))]
        for column in columns()
    ]


def value(column: pa.Array) -> Any:
    """The one value, comparable whatever its type: a number as a fraction, a time in seconds."""
    type_, types = column.type, pa.types
    if types.is_dictionary(type_):
        return value(column.dictionary_decode())
    if types.is_list(type_) or types.is_large_list(type_) or types.is_fixed_size_list(type_):
        items = column.flatten()
        return [value(items.slice(i, 1)) for i in range(len(items))]
    if types.is_struct(type_):
        return {f.name: value(column.field(f.name)) for f in type_}
    if types.is_date(type_):
        days = column.cast(pa.date32()) if types.is_date64(type_) else column
        return Fraction(days.cast(pa.int32())[0].as_py()) * 86_400
    if types.is_timestamp(type_):
        return Fraction(column.view(pa.int64())[0].as_py(), TICKS[type_.unit])
    found = column[0].as_py()
    if isinstance(found, bool | str | bytes) or found is None:
        return found
    if isinstance(found, float) and not math.isfinite(found):
        return str(found)
    return Fraction(found)


def is_exact(given: Any, got: Any, declared: pa.DataType) -> bool:
    types = pa.types
    if isinstance(given, list):
        pairs = zip(given, got, strict=True)
        return all(is_exact(one, other, declared.value_type) for one, other in pairs)
    if isinstance(given, bytes) or isinstance(got, bytes):
        return _bytes(given) == _bytes(got)
    if not isinstance(given, str) or (isinstance(got, str) and types.is_string(declared)):
        return type(given) is type(got) and bool(given == got)
    if types.is_boolean(declared):
        return given.lower() in (("true", "1") if got else ("false", "0"))
    if types.is_floating(declared):
        nearest = np.float32(given) if types.is_float32(declared) else np.float64(given)
        return str(float(nearest)) == str(got) or Fraction(float(nearest)) == got
    return bool(Fraction(given) == got)


def _bytes(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text


def read_or_refusal(column: pa.Array, field: pa.Field) -> Any:
    """The column as declared, or the message of its refusal."""
    try:
        return convert_to_field(column, field, "column c", 6, TextRules())
    except SchemaMismatch as e:
        return str(e)


@pytest.mark.parametrize("declared", DECLARED, ids=arrow_to_ddl)
def test_each_type_of_a_file_is_read_exactly_or_refused(declared: pa.DataType) -> None:
    read = 0
    for column, found in zip(columns(), read_alone(declared), strict=True):
        for row, got in enumerate(found):
            one = column.slice(row, 1)
            if isinstance(got, str):
                assert got.startswith("column c, row 7: "), column.type
                assert f"is not a {arrow_to_ddl(declared)}; " in got, column.type
                continue
            assert got.type == declared
            assert (kind_of(column.type), kind_of(declared)) in CONVERSIONS
            assert is_exact(value(one), value(got), declared), (column.type, one)
            read += 1
    assert read > 0


@pytest.mark.parametrize("declared", DECLARED, ids=arrow_to_ddl)
def test_the_first_value_that_does_not_fit_is_named(declared: pa.DataType) -> None:
    """Also behind NULLs, and in a column whose type is not read."""
    field = pa.field("c", declared)
    for column, alone in zip(columns(), read_alone(declared), strict=True):
        refused = [n for n, got in enumerate(alone) if isinstance(got, str)]
        with_nulls = pa.concat_arrays([pa.nulls(2, column.type), column])
        found = read_or_refusal(with_nulls, field)
        if refused:
            assert str(found).startswith(f"column c, row {refused[0] + 9}: "), column.type
        else:
            assert found.null_count == with_nulls.null_count


NUMBERS = st.builds(
    lambda sign, whole, fraction, exponent: f"{sign}{whole}{fraction}{exponent}",
    st.sampled_from(["", "-"]),
    st.from_regex(r"(0|[1-9][0-9]{0,44})", fullmatch=True),
    st.one_of(st.just(""), st.from_regex(r"\.[0-9]{1,45}", fullmatch=True)),
    st.one_of(st.just(""), st.from_regex(r"[eE][+-]?[0-9]{1,3}", fullmatch=True)),
)
DECIMALS = st.integers(1, 38).flatmap(
    lambda p: st.builds(pa.decimal128, st.just(p), st.integers(0, p))
)


@given(st.lists(NUMBERS, min_size=1, max_size=5), DECIMALS)
def test_a_decimal_is_read_if_it_fits_whatever_is_beside_it(
    texts: list[str], declared: pa.DataType
) -> None:
    """From CSV, from JSON numbers and from JSON strings."""
    exact = [Fraction(text) for text in texts]
    scaled = [number * 10**declared.scale for number in exact]
    fit = [s.denominator == 1 and abs(s) < 10**declared.precision for s in scaled]
    schema = raw_schema(pa.schema([pa.field("c", declared)]))

    def from_csv() -> pa.Array:
        return convert_to_field(pa.array(texts), pa.field("c", declared), "c", 0, TextRules())

    def from_json(quote: str) -> pa.Array:
        lines = "".join(f'{{"c": {quote}{text}{quote}}}\n' for text in texts)
        return parse_json_block(lines.encode(), schema, 1, "c").column(0)

    for read in (from_csv, lambda: from_json(""), lambda: from_json('"')):
        if not all(fit):
            with pytest.raises(SchemaMismatch, match=rf"(row|line) {fit.index(False) + 1}: "):
                read()
            continue
        assert [Fraction(number) for number in read().to_pylist()] == exact


COMMON_TIMES = [
    "2024-06-01T10:00:00.123456000Z",
    "2024-06-01T10:00:00.123456z",
    "2024-06-01t10:00:00.123456Z",
    "2024-06-01 10:00:00.123456 UTC",
    "2024-06-01T12:00:00.123456 +02:00",
    "2024-06-01T12:00:00.123456000+02:00[Europe/Paris]",
]


@pytest.mark.parametrize("text", COMMON_TIMES)
def test_common_forms_of_a_time_are_read(text: str) -> None:
    got = convert_to_field(pa.array([text]), pa.field("c", TIMESTAMP), "c", 0, TextRules())
    assert got.cast(pa.int64()).to_pylist() == [1_717_236_000_123_456]


@pytest.mark.parametrize("text", ["2024-06-01T10:00:00.1234567Z", "12024-06", "2024-06", "10:00"])
def test_other_times_are_refused(text: str) -> None:
    with pytest.raises(SchemaMismatch, match=f"row 1: '{text}' is not a TIMESTAMP"):
        convert_to_field(pa.array([text]), pa.field("c", TIMESTAMP), "c", 0, TextRules())


def test_what_is_not_read_does_not_depend_on_the_lines_beside_it() -> None:
    """One line that Arrow cannot parse sends all lines of its block to the other parser."""
    schema = pa.schema([pa.field("c", pa.int64()), pa.field("d", pa.float64())])
    for other in ("1" * 5000, "[" * 100 + "]" * 100):
        line = f'{{"c": 1, "d": 0.5, "x": {other}}}\n'.encode()
        for beside in (b"", b'{"c": 1, "d": Infinity}\n'):
            assert parse_json_block(line + beside, schema, 1, "c").column(0)[0].as_py() == 1
    for bad in (b'{"c": 1, "d": 1, "x": "\xff"}\n', b'{"c": 1, "x": %b}\n' % (b"[" * 3000)):
        for beside in (b"", b'{"c": 1, "d": Infinity}\n'):
            with pytest.raises(SchemaMismatch, match="line 1"):
                parse_json_block(bad + beside, schema, 1, "c")
