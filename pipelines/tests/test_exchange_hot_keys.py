"""A key that more than half of a partition's rows have: found by a sample of blocks of epochs."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Callable, Sequence
from decimal import Context, Decimal
from functools import partial

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.arrow_types import arrow_type
from rekindle.exchange.hot_keys import BLOCK_EPOCHS, SHOWN_CHARS, HotKey, KeyShares
from rekindle.topology.schema import DataType, Scalar
from rekindle.topology.schema import Decimal as DecimalType

MANY = 100
ROWS = 200


def rows_with(hot: int, count: int = ROWS, seed: int = 0) -> pa.Table:
    """`hot` rows have the key ("hot", 1), each other one a key of its own."""
    names = ["hot"] * hot + [f"k{n}" for n in range(count - hot)]
    order = np.random.default_rng(seed).permutation(count)
    table = pa.table({"a": names, "b": [1] * count, "v": np.arange(count)})
    return table.take(pa.array(order))


def blocks(shares: KeyShares, rows: Callable[[int], pa.Table], first: int, count: int) -> None:
    for epoch in range(first * BLOCK_EPOCHS, (first + count) * BLOCK_EPOCHS):
        shares.add(epoch, rows(epoch))


def _rows_of(rows: pa.Table, epoch: int) -> pa.Table:
    return rows


def made(key_by: Sequence[str] = ("a", "b"), many: int = MANY) -> KeyShares:
    return KeyShares(key_by, many)


def found_after(
    rows: Callable[[int], pa.Table], count: int = 1, shares: KeyShares | None = None
) -> HotKey | None:
    shares = shares or made()
    blocks(shares, rows, 0, count)
    shares.add(count * BLOCK_EPOCHS, rows(count * BLOCK_EPOCHS).slice(0, 0))
    return shares.hot(count * BLOCK_EPOCHS)


@given(st.integers(0, ROWS), st.integers(0, 1 << 32))
def test_a_key_that_more_than_half_of_all_rows_have_is_found(hot: int, seed: int) -> None:
    rows = rows_with(hot, seed=seed)
    found = found_after(lambda epoch: rows)
    share = hot / ROWS
    if share > 0.56:
        assert found is not None
    if share < 0.44:
        assert found is None
    if found is not None:
        assert found.values == ("'hot'", "1")
        assert abs(found.share - share) < 0.06


@given(st.integers(20, ROWS), st.integers(0, 1 << 32))
def test_chunks_and_repeated_epochs_make_no_difference(size: int, seed: int) -> None:
    rows = rows_with(130, seed=seed)
    in_chunks = pa.concat_tables([rows.slice(at, size) for at in range(0, ROWS, size)])
    one, other = made(), made()
    blocks(one, lambda epoch: rows, 0, 1)
    blocks(other, lambda epoch: in_chunks, 0, 1)
    other.add(3, rows_with(0))
    end = BLOCK_EPOCHS
    for shares in (one, other):
        shares.add(end, rows)
    assert one.hot(end) is not None
    assert one.hot(end) == other.hot(end)


def test_rows_of_keys_in_turns_are_no_hot_key() -> None:
    in_turns = pa.table({"a": [f"k{n % 4}" for n in range(256)], "b": [1] * 256})
    assert found_after(lambda epoch: in_turns) is None


def test_a_hot_key_stays_until_it_has_four_tenths_of_the_rows() -> None:
    shares = made()
    assert found_after(lambda epoch: rows_with(90)) is None
    for block, hot, is_hot in ((0, 130, True), (1, 92, True), (2, 95, True), (3, 70, False)):
        blocks(shares, partial(_rows_of, rows_with(hot)), block, 1)
        epoch = (block + 1) * BLOCK_EPOCHS
        shares.add(epoch, rows_with(0).slice(0, 0))
        assert (shares.hot(epoch) is not None) is is_hot, block


def test_of_two_keys_with_half_of_the_rows_the_same_one_stays() -> None:
    def rows(epoch: int) -> pa.Table:
        one = np.random.default_rng(epoch).random(ROWS) < (0.6 if epoch < BLOCK_EPOCHS else 0.46)
        return pa.table({"a": np.where(one, "one", "two"), "b": [1] * ROWS})

    found = [found_after(rows, count) for count in (1, 2, 3, 4)]
    assert {hot.values for hot in found if hot is not None} == {("'one'", "1")}
    assert None not in found


def test_a_key_is_not_hot_without_rows() -> None:
    shares = made()
    blocks(shares, lambda epoch: rows_with(150), 0, 1)
    shares.add(BLOCK_EPOCHS, rows_with(150))
    assert shares.hot(2 * BLOCK_EPOCHS - 1) is not None
    assert shares.hot(2 * BLOCK_EPOCHS) is None  # nor if no epoch comes any more
    shares.add(9 * BLOCK_EPOCHS, rows_with(150))
    assert shares.hot(9 * BLOCK_EPOCHS) is None


def test_few_rows_are_no_hot_key() -> None:
    assert found_after(lambda epoch: rows_with(80, 80)) is None
    assert found_after(lambda epoch: rows_with(10, 10)) is None
    shares = made()
    for block, count in enumerate((120, 80, 120, 80, 30)):  # half is enough if it is hot
        blocks(shares, partial(_rows_of, rows_with(count, count)), block, 1)
    assert shares.hot(5 * BLOCK_EPOCHS - 1) is not None
    shares.add(5 * BLOCK_EPOCHS, rows_with(0))
    assert shares.hot(5 * BLOCK_EPOCHS) is None


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "NULL"),
        ("", "''"),
        ("x" * 100, f"'{'x' * (SHOWN_CHARS - 2)}…"),
        (float("nan"), "nan"),
        (-0.0, "-0.0"),
        (Decimal("1.50"), "1.50"),
        (dt.date(2020, 2, 29), "2020-02-29"),
        (True, "True"),
        (b"\xff", r"b'\xff'"),
    ],
)
def test_values_are_shown_as_short_text(value: object, text: str) -> None:
    kind = pa.string() if value is None else None
    table = pa.table({"a": pa.array([value] * MANY, kind)})
    found = found_after(lambda epoch: table, shares=made(("a",)))
    assert found is not None
    assert found.values == (text,)
    assert found.share == 1.0


_WIDTHS = {8: pa.int8(), 16: pa.int16(), 32: pa.int32(), 64: pa.int64()}


def _extremes() -> list[tuple[DataType, pa.Array]]:
    """Of each type that a key may have, the least and the greatest value that it can hold."""
    found: list[tuple[DataType, pa.Array]] = []
    for scalar in Scalar:
        kind = arrow_type(scalar)
        if pa.types.is_string(kind) or pa.types.is_binary(kind):
            found.append((scalar, pa.array([b"", b"\x00\n\x7f" * SHOWN_CHARS]).cast(kind)))
        elif pa.types.is_boolean(kind):
            found.append((scalar, pa.array([False, True])))
        elif pa.types.is_floating(kind):
            found.append((scalar, pa.array([-math.inf, math.nan], kind)))
        else:
            whole = _WIDTHS[kind.bit_width]
            least = -(1 << kind.bit_width - 1)
            found.append((scalar, pa.array([least, -1 - least], whole).cast(kind)))
    for precision, scale in ((38, 0), (38, 38)):
        most = Decimal("9" * 38).scaleb(-scale, Context(prec=38))
        kind = arrow_type(DecimalType(precision, scale))
        found.append((DecimalType(precision, scale), pa.array([most.copy_negate(), most], kind)))
    return found


@pytest.mark.parametrize(("kind", "values"), _extremes())
@pytest.mark.parametrize("at", [0, 1])
def test_a_key_of_any_type_may_be_extreme(kind: DataType, values: pa.Array, at: int) -> None:
    one = pa.chunked_array([values.slice(at, 1)] * MANY)
    found = found_after(lambda epoch: pa.table({"a": one}), shares=made(("a",)))
    assert found is not None
    assert 0 < len(found.values[0]) <= SHOWN_CHARS


def test_a_time_is_shown_in_utc() -> None:
    at = pa.array([dt.datetime(2020, 2, 29, 1, 2, 3, 4)] * MANY, arrow_type(Scalar.TIMESTAMP))
    found = found_after(lambda epoch: pa.table({"a": at}), shares=made(("a",)))
    assert found is not None
    assert found.values == ("2020-02-29 01:02:03.000004",)
