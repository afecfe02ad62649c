"""Equal rows have equal digests in any Arrow layout; different rows have different ones."""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.streams.digest import digest_table

SCHEMA = pa.schema(
    [
        ("i", pa.int64()),
        ("s", pa.string()),
        ("f", pa.float64()),
        ("b", pa.bool_()),
        ("t", pa.timestamp("us", tz="UTC")),
        ("d", pa.decimal128(12, 2)),
        ("l", pa.list_(pa.string())),
        ("o", pa.struct([("x", pa.int32()), ("y", pa.list_(pa.float64()))])),
        ("m", pa.map_(pa.string(), pa.int64())),
    ]
)
_number = st.floats(allow_nan=True, width=64)
_text = st.text(max_size=5)
_row = st.fixed_dictionaries(
    {
        "i": st.none() | st.integers(-(2**63), 2**63 - 1),
        "s": st.none() | _text,
        "f": st.none() | _number,
        "b": st.none() | st.booleans(),
        "t": st.none() | st.integers(0, 2**50),
        "d": st.none() | st.decimals(-1000, 1000, places=2),
        "l": st.none() | st.lists(st.none() | _text, max_size=3),
        "o": st.none()
        | st.fixed_dictionaries(
            {
                "x": st.none() | st.integers(0, 9),
                "y": st.none() | st.lists(st.none() | _number, max_size=3),
            }
        ),
        "m": st.none() | st.lists(st.tuples(_text, st.none() | st.integers(0, 9)), max_size=3),
    }
)


def _table(rows: list[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist(rows, schema=SCHEMA)


@given(st.lists(_row, max_size=8), st.data())
def test_chunks_and_offsets_do_not_change_the_digest(
    rows: list[dict[str, Any]], data: st.DataObject
) -> None:
    whole = _table(rows)
    padded = pa.concat_tables([_table(rows[:1]), whole, _table(rows[:2])])
    skip = len(rows[:1])
    sliced = padded.combine_chunks().slice(skip, len(rows))
    cut = data.draw(st.integers(0, len(rows)))
    chunked = pa.concat_tables([sliced.slice(0, cut), sliced.slice(cut)])
    assert digest_table(whole) == digest_table(sliced) == digest_table(chunked)


@given(st.lists(_row, max_size=5), st.lists(_row, max_size=5))
def test_different_rows_have_different_digests(
    a: list[dict[str, Any]], b: list[dict[str, Any]]
) -> None:
    def canonical(value: object) -> object:
        if isinstance(value, float):
            return "nan" if math.isnan(value) else value + 0.0
        if isinstance(value, dict):
            return {k: canonical(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [canonical(v) for v in value]
        return value

    same = canonical(_table(a).to_pylist()) == canonical(_table(b).to_pylist())
    assert (digest_table(_table(a)) == digest_table(_table(b))) is same


def test_encodings_do_not_change_the_digest() -> None:
    plain = pa.table({"s": pa.array(["a", None, "b", "a"])})
    encoded = plain.column("s").dictionary_encode()
    two_dictionaries = pa.chunked_array(
        [pa.array(["a", None]).dictionary_encode(), pa.array(["b", "a"]).dictionary_encode()]
    )
    forms = [
        encoded,
        two_dictionaries,
        plain["s"].cast(pa.large_string()),
        plain["s"].cast(pa.string_view()),
    ]
    assert {digest_table(pa.table({"s": form})) for form in forms} == {digest_table(plain)}
    lists = pa.array([["a"], None, [None, "b"]])
    wide = lists.cast(pa.large_list(pa.large_string()))
    assert digest_table(pa.table({"l": lists})) == digest_table(pa.table({"l": wide}))


def test_nan_payload_and_sign_of_zero_are_ignored() -> None:
    odd_nan = struct.unpack("<d", struct.pack("<Q", 0xFFF8_0000_0000_1234))[0]
    a = pa.table({"f": np.array([odd_nan, -0.0, 1.0])})
    b = pa.table({"f": np.array([np.nan, 0.0, 1.0])})
    assert digest_table(a) == digest_table(b)


def test_bytes_under_a_null_are_ignored() -> None:
    mask = np.array([False, True])
    a = pa.table({"i": pa.array(np.array([1, 7]), mask=mask)})
    b = pa.table({"i": pa.array(np.array([1, 9]), mask=mask)})
    assert digest_table(a) == digest_table(b)


def test_order_names_and_types_change_the_digest() -> None:
    base = pa.table({"i": pa.array([1, 2])})
    others = [
        pa.table({"i": pa.array([2, 1])}),
        pa.table({"j": pa.array([1, 2])}),
        pa.table({"i": pa.array([1, 2], pa.int32())}),
        pa.table({"i": pa.array([1, None])}),
    ]
    assert digest_table(base) not in {digest_table(other) for other in others}
    assert len({digest_table(other) for other in others}) == len(others)


def test_adjacent_values_are_separated() -> None:
    a = pa.table({"s": ["ab", "c"], "z": ["", ""]})
    b = pa.table({"s": ["a", "bc"], "z": ["", ""]})
    assert digest_table(a) != digest_table(b)


def test_a_digest_survives_arrow_ipc() -> None:
    table = _table([{"i": 1, "s": "x", "f": -0.0, "l": ["p", None], "o": {"x": 1, "y": [0.5]}}])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    assert digest_table(pa.ipc.open_stream(sink.getvalue()).read_all()) == digest_table(table)


def test_a_union_is_refused() -> None:
    union = pa.UnionArray.from_sparse(pa.array([0], pa.int8()), [pa.array([1])])
    with pytest.raises(TypeError, match="no canonical digest"):
        digest_table(pa.table({"u": union}))
