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
def test_what_surely_fails_does(text: str, target: pa.DataType) -> None:
    pattern = each_value.surely_fails(target)
    if pattern is not None and pa.compute.match_substring_regex(text, pattern).as_py():
        assert not alone(text, target)[1]


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
    for bad, most in (("bad-{}", 3), ("9{:030}", 2_100)):
        calls = 0
        texts = [f"{n}" if n % 10 else bad.format(n) for n in range(10_000)]
        found = convert_each(pa.array(texts), pa.field("c", pa.int64()), "column c", RULES)
        assert len(found.bad) == 1_000
        assert calls <= most  # each of those that may fit, and halves of these
        assert found.bad[10].startswith(f"column c: '{bad.format(10)}' is not a BIGINT")


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
