"""Values that do not fit harm no others, however many there are, and are those that do not fit
alone."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.connectors import each_value
from rekindle.connectors.conversions import CONVERSION_FAILURES, TextRules, convert
from rekindle.connectors.each_value import convert_each

RULES = TextRules()
TYPES = (
    pa.int8(),
    pa.int16(),
    pa.int32(),
    pa.int64(),
    pa.float32(),
    pa.float64(),
    pa.decimal128(9, 2),
    pa.decimal128(2, 2),
    pa.decimal128(38, 0),
    pa.bool_(),
    pa.date32(),
    pa.timestamp("us", tz="UTC"),
    pa.binary(),
)
NUMBERS = (
    "0 -0 +7 007 127 -129 32768 99999999999999999999 1e0 1E+5 12e-1 .5e1 1.e5 0e99999999 1e39 1. "
    ".5 1.50 1.555 0.000 -0.0 nan -Infinity 1e400 3.5e38 0x1F 1_000 - + ."
)
OTHERS = (
    "true FALSE T yes aGVs é 2020-02-29 2020-02-30 0000-01-01 12020-01-01 -2020-01-01 292278-01-01 "
    "20200101 2020-1-1 1969-12-31"
)
FORMS = [*NUMBERS.split(), "0" * 40 + "1", "0." + "1" * 39, *OTHERS.split(), " 2020-01-01\u2003"]
DAYS = ("2020-02-29", "2020-02-30", "+12020-01-01")
TIMES = (
    "T10",
    "T10:00",
    "t10:00:00",
    "T23:59:60",
    "T24:00:00",
    "T10:00:00.5",
    "T10:00:00.123456789",
)
ZONES = ("", "Z", " UTC", "-0130", " +01", "+25:00", "+01:00[Europe/Paris]")
TIMES_OF_DAYS = [day + time + zone for day in DAYS for time in TIMES for zone in ZONES]
TEXTS = st.one_of(
    st.none(),
    st.sampled_from(
        ["", "x", "0x1F", "+5", "1e3", "1e400", "nan", "-inf", " 7", "٣", "1,5", "9" * 19]
    ),
    st.integers(-(2**70), 2**70).map(str),
    st.decimals(allow_nan=False, allow_infinity=False, places=3).map(str),
    st.datetimes().map(str),
    st.dates().map(str),
    st.from_regex(r"\A\d{4}-\d{2}-\d{2}[T ]\d{2}:\d{2}:\d{2}(\.\d{1,7})?(Z|\+01:00)?\Z"),
    st.sampled_from(["true", "FALSE", "no", "1"]),
)


def alone(value: str | None, target: pa.DataType) -> tuple[Any, bool]:
    """What becomes of one value, and whether it fits."""
    try:
        return convert(pa.array([value], pa.string()), target, RULES).cast(target)[0], True
    except CONVERSION_FAILURES:
        return pa.scalar(None, target), False


@given(st.lists(TEXTS, max_size=12), st.sampled_from(TYPES))
def test_each_value_is_what_it_is_alone(values: list[str | None], target: pa.DataType) -> None:
    found = convert_each(pa.array(values, pa.string()), pa.field("c", target), "c", RULES)
    expected = [alone(value, target) for value in values]
    assert set(found.bad) == {at for at, (_, fits) in enumerate(expected) if not fits}
    assert [str(value) for value in found.column] == [str(value) for value, _ in expected]


@given(st.from_regex(r"\A-?\d{1,20}(\.\d{1,20})?\Z"), st.sampled_from(TYPES))
def test_what_surely_fits_does(text: str, target: pa.DataType) -> None:
    pattern = each_value.surely_fits(target)
    if pattern is not None and pa.compute.match_substring_regex(text, pattern).as_py():
        assert alone(text, target)[1]


@given(st.text(max_size=4) | TEXTS.filter(bool), st.sampled_from(TYPES))
def test_what_fits_may_fit(text: str, target: pa.DataType) -> None:
    pattern = each_value.may_fit(target)
    if pattern is not None and alone(text, target)[1]:
        assert pa.compute.match_substring_regex(text, pattern).as_py()


@pytest.mark.parametrize("target", TYPES, ids=str)
def test_a_bad_value_beside_it_changes_no_value(target: pa.DataType) -> None:
    """Of each form; also in another type of text, as some formats have them."""
    forms = [*FORMS, *(TIMES_OF_DAYS if pa.types.is_temporal(target) else ())]
    values = [alone(form, target) for form in forms]
    bad = {at for at, (_, fits) in enumerate(values) if not fits}
    for text in (pa.string(), pa.large_string()):
        found = convert_each(pa.array(forms, text), pa.field("c", target), "c", RULES)
        assert set(found.bad) == bad
        expected = pa.concat_arrays([pa.repeat(value, 1) for value, _ in values])
        assert str(found.column) == str(expected)  # NaN is NaN


def test_a_wrong_pattern_costs_time_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(each_value, "surely_fits", lambda target: ".*")
    found = convert_each(
        pa.array(["1", "x", None, "3"]), pa.field("c", pa.int64()), "column c", RULES
    )
    assert found.column.to_pylist() == [1, None, None, 3]
    assert list(found.bad) == [1]


def test_many_bad_values_take_few_conversions(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def counted(column: pa.Array, target: pa.DataType, rules: TextRules) -> pa.Array:
        nonlocal calls
        calls += 1
        return convert(column, target, rules)

    monkeypatch.setattr(each_value, "convert", counted)
    whole, time = pa.int64(), pa.timestamp("us", tz="UTC")
    for good, bad, target, most in (
        ("{}", "bad-{}", whole, 3),
        ("{}", "9{:030}", whole, 2_100),  # each of those that may fit, and halves of these
        ("2026-01-01T00:00:00.{:06}Z", "01/31/2026 10:00:00.{:06}", time, 3),
        ("2026-01-01T00:00:00.{:06}Z", "2026-01-31T10:00:00.123{:06}Z", time, 400),
        ("2026-01-01", "31.01.2026 {}", pa.date32(), 3),
    ):
        calls = 0
        texts = [(good if n % 10 else bad).format(n) for n in range(1, 10_001)]
        found = convert_each(pa.array(texts), pa.field("c", target), "column c", RULES)
        assert len(found.bad) >= 900
        assert calls <= most
        assert found.bad[9].startswith(f"column c: '{bad.format(10)}' is not a ")


def test_a_null_in_a_column_that_has_none_is_bad() -> None:
    field = pa.field("c", pa.int64(), nullable=False)
    found = convert_each(pa.array(["1", "", "x"]), field, "column c", RULES)
    assert found.bad[1] == "column c: NULL in a NOT NULL column"
    assert "'x' is not a BIGINT" in found.bad[2]


def test_lists_and_types_that_are_not_read_are_found() -> None:
    lists = pa.array([["1"], ["x", "2"], None, []], pa.list_(pa.string()))
    found = convert_each(lists, pa.field("c", pa.list_(pa.int32())), "column c", RULES)
    assert found.column.to_pylist() == [[1], None, None, []]
    assert list(found.bad) == [1]
    found = convert_each(pa.array([1, 2]), pa.field("c", pa.date32()), "column c", RULES)
    assert sorted(found.bad) == [0, 1]
