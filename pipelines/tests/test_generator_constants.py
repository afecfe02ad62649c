"""Constants and bounds of the generator: those that Arrow's casts take, with the same values."""

from __future__ import annotations

import decimal
import math
import re
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from rekindle.arrow_types import arrow_type
from rekindle.connectors.generator_columns import constants
from rekindle.topology.generator.columns import parse_column
from rekindle.topology.generator.constants import constant, time_us
from rekindle.topology.generator.expressions import ExpressionError
from rekindle.topology.schema import Array, DataType, Decimal, Scalar

TYPES: list[DataType] = [*Scalar, Decimal(10, 2), Decimal(38, 19), Decimal(38, 20), Decimal(4, 0)]
TYPES += [Array(Scalar.INT)]
INTEGERS = (Scalar.BIGINT, Scalar.INT, Scalar.SMALLINT, Scalar.TINYINT)
NUMBERS = st.from_regex(r"[+-]?[0-9]{0,12}(\.[0-9]{0,12})?([eE][+-]?[0-9]{1,3})?", fullmatch=True)
WORDS = st.sampled_from(
    """
    true FALSE tRue t 1 0 -0 +1 00012 1_0 ٣ - . .5 5. -.5 1e 1e5 1.e5 .e5 nan -NaN nan(a_1) nan( INF
    -infinity infinit 0x1F 0XfF 0xFFFFFFFFFFFFFFFF 0x1FFFFFFFFFFFFFFFF 0x80 0x100 -0x1 0x 0xg 127
    128 -128 -129 9223372036854775807 9223372036854775808 -9223372036854775809 1e39 1e309 1e-400
    99999999.99 99999999.994 5.120 5.123 0e50 0e-50 1e50 1e-50 100e-4 1e999999999 0.000000000000
    """.split()  # noqa: SIM905 - a table of words
)
TIMES = st.from_regex(
    r"(0000|0001|2012|2013|9999|12013)-(01|02|12|13|1)-(00|01|28|29|31)"
    r"([ Tt](06|23|24|6)(:(00|59|60)(:(00|59|60)(\.[0-9]{0,7})?)?)?)?"
    r"(Z|z|[+-](01|23|24|1)(:?(30|59|60|0))?)?",
    fullmatch=True,
)
TEXTS = st.one_of(NUMBERS, WORDS, TIMES, st.text(max_size=6), st.integers().map(str))


def cast(values: list[Any], kind: pa.DataType) -> Any:
    """What Arrow gives, None if it refuses."""
    try:
        return pc.cast(pa.array(values), kind)
    except (pa.ArrowException, ValueError, OverflowError):
        return None


def bits(values: pa.Array) -> Any:
    """What equal values have in common, NaN with NaN."""
    if pa.types.is_floating(values.type):
        return ["nan" if math.isnan(v) else repr(v) for v in values.to_pylist()]
    return values


@given(st.sampled_from(TYPES), TEXTS)
@example(Scalar.STRING, "\ud800")
@example(Decimal(38, 20), ".52E20")
def test_constants_are_those_of_arrow(kind: DataType, text: str) -> None:
    # Arrow reads decimals with such exponents as 0, sometimes.
    assume(not (isinstance(kind, Decimal) and re.search(r"[eE]-?\d{3}", text)))
    try:
        expected = cast([text], arrow_type(kind))
    except UnicodeEncodeError:
        expected = None
    if (
        isinstance(kind, Decimal)
        and expected is not None
        and expected[0].as_py() != decimal.Decimal(text)
    ):
        expected = None  # Arrow overflows in silence
    try:
        value = constant(text, kind)
    except ValueError:
        assert expected is None
    else:
        assert expected is not None
        assert bits(constants((value,), arrow_type(kind))) == bits(expected)


@given(TIMES)
def test_times_without_zone_are_those_of_arrow(text: str) -> None:
    expected = cast([text], pa.timestamp("us"))
    try:
        value = time_us(text, zoned=False)
    except ValueError:
        assert expected is None
    else:
        assert expected is not None
        assert value == expected.cast(pa.int64())[0].as_py()


def accepts(text: str, kind: DataType) -> bool:
    try:
        parse_column(text, kind)
    except ExpressionError:
        return False
    return True


EDGES = [0, 127, 128, -129, 2**24, 2**24 + 1, 2**31, -(2**53), 2**53 + 1, 2**63 - 1, 2**63]
NUMERIC = [kind for kind in TYPES if kind not in (Scalar.TIMESTAMP, Scalar.DATE, Scalar.BOOLEAN)]


@pytest.mark.parametrize("kind", NUMERIC, ids=str)
@pytest.mark.parametrize("number", EDGES)
def test_integers_are_accepted_for_the_types_that_arrow_casts_them_to(
    kind: DataType, number: int
) -> None:
    try:
        taken = pc.cast(pa.array([number], pa.int64()), arrow_type(kind)) is not None
    except (pa.ArrowException, OverflowError):
        taken = False
    assert accepts(f"integer({number}, {number})", kind) == taken
    assert accepts(f"sequence({number})", kind) == taken


@pytest.mark.parametrize("kind", [k for k in TYPES if k not in INTEGERS])
@given(st.floats(-1e30, 1e30))
@example(99.99)
@example(9999.49)
@example(9999.51)
@example(1e9)
def test_doubles_are_accepted_for_the_types_that_arrow_casts_them_to(
    kind: DataType, number: float
) -> None:
    taken = cast([number], arrow_type(kind)) is not None
    assert accepts(f"uniform({number!r}, {number!r})", kind) == taken


@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_booleans_are_accepted_for_the_types_that_arrow_casts_them_to(kind: DataType) -> None:
    assert accepts("boolean(0.5)", kind) == (cast([True], arrow_type(kind)) is not None)
