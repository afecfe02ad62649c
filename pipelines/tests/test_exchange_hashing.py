"""The hash of rows: equal values have equal hashes, which never change."""

from __future__ import annotations

import datetime as dt
import math
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.exchange.hashing import hash_rows


def hashes(*columns: Any) -> list[int]:
    table = pa.table({f"c{i}": c for i, c in enumerate(columns)})
    return [int(h) for h in hash_rows(table, table.column_names)]


NOON = dt.datetime(2020, 2, 29, 12, tzinfo=dt.UTC)
GOLDEN = {
    "integers": (
        pa.array([0, 1, -1, 2**63 - 1]),
        [0xC3EAD2DE3106B238, 0x8735473C4FD1F2C0, 0x4D0CCB67ABB67B9C, 0x27FD444A3238178B],
    ),
    "strings": (
        pa.array(["", "a", "ü", "key-1"]),
        [0x93E2F87E79D9F700, 0x1D5975C72E044945, 0x5864B1424E484A4B, 0x2BE908EB67DA00CA],
    ),
    "binary": (
        pa.array([b"", b"a", b"\xff"]),
        [0x93E2F87E79D9F700, 0x1D5975C72E044945, 0x3B5269E1810054C0],
    ),
    "doubles": (
        pa.array([0.0, 1.5, math.nan, math.inf]),
        [0x5E33AD0805BC26AF, 0xA010DD674E948E00, 0x1F453C656D033EC5, 0xB55C19A605495614],
    ),
    "booleans": (
        pa.array([True, False, None]),
        [0xE2ED15B566BCC407, 0x7A4328E1BD10F6D2, 0xECE5753B2C19AB6C],
    ),
    "dates": (pa.array([NOON.date()]), [0x702BA2C761AE4D22]),
    "timestamps": (pa.array([NOON]), [0x9844F27EF4983AA3]),
    "decimals": (
        pa.array([Decimal("1.50"), Decimal("-3.00")]),
        [0x36E05B1C6E584731, 0x71EE3C6242B37880],
    ),
    "nulls": (pa.array([None], pa.string()), [0xECE5753B2C19AB6C]),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_hashes_never_change(name: str) -> None:
    column, expected = GOLDEN[name]
    assert hashes(column) == expected


def test_a_row_of_two_columns_has_a_golden_hash_too() -> None:
    assert hashes(["a", None], [1, 2]) == [0x35FE9DF8DFAF44F8, 0xDD497E6E7195C290]


def test_all_widths_of_integers_hash_alike() -> None:
    kinds = [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint32(), pa.uint64()]
    assert len({tuple(hashes(pa.array([1, 100, None], k))) for k in kinds}) == 1


def test_encodings_of_strings_hash_alike() -> None:
    plain = pa.array(["a", None, "b", "a"])
    encodings = [plain, plain.cast(pa.large_string()), plain.dictionary_encode()]
    encodings.append(plain.cast(pa.string_view()))
    encodings.append(pa.chunked_array([plain.slice(0, 1), plain.slice(1)]))
    assert len({tuple(hashes(e)) for e in encodings}) == 1


def test_units_and_scales_do_not_change_the_hash() -> None:
    stamps = [
        pa.array([NOON], pa.timestamp(u, z)) for u in ("s", "us", "ns") for z in ("UTC", None)
    ]
    assert len({tuple(hashes(s)) for s in stamps}) == 1
    scales = [pa.array([Decimal("2.5")], pa.decimal128(10, s)) for s in (1, 2, 6)]
    assert len({tuple(hashes(s)) for s in scales}) == 1
    days = [pa.array([NOON.date()], k) for k in (pa.date32(), pa.date64())]
    assert len({tuple(hashes(d)) for d in days}) == 1


def test_all_zeros_all_nans_and_all_nulls_hash_alike() -> None:
    odd = np.array([0x7FF8000000000001, 0xFFF8000000000000], dtype=np.uint64).view(np.float64)
    assert len(set(hashes(pa.array([0.0, -0.0])))) == 1
    assert len(set(hashes(pa.array(odd)))) == 1
    assert hashes(pa.array([None], pa.int64())) == hashes(pa.array([None], pa.string()))
    assert hashes(pa.array([0])) != hashes(pa.array([None], pa.int64()))


def test_hashes_depend_on_the_order_of_columns() -> None:
    assert hashes([1], [2]) != hashes([2], [1])
    assert len(set(hash_rows(pa.table({"a": [1, 2]}), []).tolist())) == 1
    assert len(hash_rows(pa.table({"a": pa.array([], pa.string())}), ["a"])) == 0


def test_nested_columns_are_refused() -> None:
    with pytest.raises(TypeError, match="column c0"):
        hashes(pa.array([[1]]))


@given(st.lists(st.one_of(st.none(), st.text(max_size=6)), min_size=1, max_size=50))
def test_a_row_hashes_alone_as_among_others(values: list[str | None]) -> None:
    together = hashes(pa.array(values, pa.string()))
    assert together == [hashes(pa.array([v], pa.string()))[0] for v in values]


def test_keys_spread_over_partitions() -> None:
    for column in (pa.array(range(64_000)), pa.array([f"key-{i}" for i in range(64_000)])):
        counts = np.bincount(np.array(hashes(column), dtype=np.uint64) % np.uint64(64))
        assert counts.min() > 850
        assert counts.max() < 1150
