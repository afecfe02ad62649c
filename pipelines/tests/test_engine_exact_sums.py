"""Two sums of a wide decimal's digits give its exact sum, or NULL if it overflows DECIMAL."""

from __future__ import annotations

from decimal import Decimal, localcontext

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.engine.exact_sums import combine_sums, split_sum
from rekindle.topology.sql.aggregates import Partial


def parts(value: int, scale: int) -> tuple[Decimal, Decimal]:
    """Results of Spark's DIV and % for an unscaled value."""
    sign = -1 if value < 0 else 1
    high, low = divmod(abs(value), 10**20)
    with localcontext(prec=80):
        return Decimal(sign * high), Decimal(sign * low).scaleb(-scale)


@given(
    values=st.lists(st.integers(-(10**38) + 1, 10**38 - 1), min_size=1, max_size=8),
    scale=st.integers(0, 38),
)
def test_the_sum_is_exact_or_null(values: list[int], scale: int) -> None:
    with localcontext(prec=100):
        halves = [parts(value, scale) for value in values]
        high = pa.chunked_array([pa.array([sum(h for h, _ in halves)], pa.decimal128(38, 0))])
        low = pa.chunked_array([pa.array([sum(x for _, x in halves)], pa.decimal128(38, scale))])
        expected = Decimal(sum(values)).scaleb(-scale) if abs(sum(values)) < 10**38 else None
    (found,) = combine_sums(high, low, scale).to_pylist()
    assert found == expected


def test_no_values_have_no_sum() -> None:
    nothing = pa.chunked_array([pa.nulls(2, pa.decimal128(38, 0))])
    assert combine_sums(nothing, nothing, 0).to_pylist() == [None, None]


@pytest.mark.parametrize(
    ("scale", "unit"),
    [
        (0, "CAST('100000000000000000000' AS DECIMAL(21, 0))"),
        (20, "CAST('1' AS DECIMAL(1, 0))"),
        (22, "CAST('0.01' AS DECIMAL(2, 2))"),
    ],
)
def test_digits_are_split_at_the_twentieth(scale: int, unit: str) -> None:
    high, low = split_sum(Partial("p0", "SUM(x) FILTER(WHERE y > 1)", "sum"), scale)
    assert (high.name, low.name) == ("p0__h", "p0__l")
    assert high.sql == f"SUM(CAST((x) DIV {unit} AS DECIMAL(18, 0))) FILTER(WHERE y > 1)"
    assert low.sql == f"SUM((x) % {unit}) FILTER(WHERE y > 1)"
