"""Rows that are written as JSON column by column have the same bytes as row by row."""

from __future__ import annotations

import datetime as dt
import decimal
import json
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rekindle.connectors import json_writer
from rekindle.connectors.json_lines import json_line, json_value, parse_objects
from rekindle.connectors.json_writer import UnencodableValue, encode_lines

_DECIMAL = decimal.Context(prec=20)
_TIMES = st.datetimes()
_VALUES: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.bool_(), st.booleans()),
    (pa.int8(), st.integers(-(2**7), 2**7 - 1)),
    (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    (pa.uint64(), st.integers(0, 2**64 - 1)),
    (pa.float32(), st.floats(width=32)),
    (pa.float64(), st.floats()),
    (pa.string(), st.text()),
    (pa.large_string(), st.text(st.sampled_from('ab"\\\n\x00\x1f\x7f\u2028\U0001f600'))),
    (pa.binary(), st.binary()),
    (pa.date32(), st.dates()),
    (pa.timestamp("us"), _TIMES),
    (pa.timestamp("ms"), _TIMES.map(lambda t: t.replace(microsecond=t.microsecond // 1000 * 1000))),
    (pa.timestamp("us", "UTC"), _TIMES.map(lambda t: t.replace(tzinfo=dt.UTC))),
    (
        pa.decimal128(20, 10),
        st.integers(-(10**20) + 1, 10**20 - 1).map(
            lambda n: decimal.Decimal(n).scaleb(-10, _DECIMAL)
        ),
    ),
    (pa.null(), st.none()),
    (pa.dictionary(pa.int8(), pa.string()), st.text(max_size=2)),
]


@st.composite
def fields(draw: st.DrawFn, depth: int = 2) -> tuple[pa.DataType, st.SearchStrategy[Any]]:
    kind = draw(
        st.sampled_from(["plain", "plain", "list", "struct", "map"] if depth else ["plain"])
    )
    if kind == "plain":
        found, values = draw(st.sampled_from(_VALUES))
    elif kind == "list":
        item, items = draw(fields(depth - 1))
        found, values = pa.list_(item), st.lists(items, max_size=3)
    elif kind == "map":
        item, items = draw(fields(depth - 1))
        found = pa.map_(pa.string(), item)
        values = st.lists(st.tuples(st.text(max_size=3), items), max_size=3)
    else:
        inner = [draw(fields(depth - 1)) for _ in range(draw(st.integers(0, 3)))]
        found = pa.struct([pa.field(f'f\u00e4"{n}', f) for n, (f, _) in enumerate(inner)])
        values = st.fixed_dictionaries({f'f\u00e4"{n}': v for n, (_, v) in enumerate(inner)})
    return found, st.one_of(st.none(), values)


@st.composite
def row_tables(draw: st.DrawFn) -> pa.Table:
    columns = draw(st.lists(fields(), min_size=1, max_size=4))
    rows = draw(st.integers(0, 6))
    arrays = [pa.array([draw(v) for _ in range(rows)], kind) for kind, v in columns]
    table = pa.table(arrays, [f"c{n}\n" for n in range(len(arrays))])
    cut = draw(st.integers(0, rows))
    parts = pa.concat_tables([table.slice(0, cut), table.slice(cut)])
    return draw(st.sampled_from([table, parts, parts.slice(cut // 2)]))


_OF_NULLS = pa.map_(pa.string(), pa.list_(pa.null()))


@example(pa.table({"c": pa.array([[("", [None, None])]], _OF_NULLS)}))
@given(row_tables())
def test_bytes_are_those_of_row_by_row(table: pa.Table) -> None:
    lines = "".join(f"{json_line(row)}\n" for row in table.to_pylist())
    assert encode_lines(table) == lines.encode()


def test_rows_are_encoded_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    table = pa.table({"s": [f"row {n}" * (n % 7) for n in range(100)], "n": range(100)})
    whole = encode_lines(table)
    monkeypatch.setattr(json_writer, "MAX_BATCH_BYTES", 100)
    assert encode_lines(table) == whole
    assert [json.loads(line) for line in whole.splitlines()] == table.to_pylist()


def test_not_a_time_is_refused_by_column() -> None:
    not_a_time = pa.array([-(2**63)], pa.int64()).cast(pa.timestamp("us"))  # NumPy's NaT
    with pytest.raises(UnencodableValue, match="column t has a"):
        encode_lines(pa.table({"t": not_a_time}))


def test_what_is_under_a_null_does_not_matter() -> None:
    numbers = pa.array([-(2**63), 1], pa.int64())
    valid = pa.py_buffer(b"\x02")
    hidden = pa.Array.from_buffers(pa.timestamp("us"), 2, [valid, numbers.buffers()[1]])
    assert encode_lines(pa.table({"t": hidden})) == (
        b'{"t":null}\n{"t":"1970-01-01T00:00:00.000001"}\n'
    )


def test_decimals_have_no_exponent() -> None:
    numbers = [decimal.Decimal("0E-18"), decimal.Decimal("-1E-18"), decimal.Decimal("12E+2")]
    rows = pa.table({"d": pa.array(numbers, pa.decimal128(38, 18))})
    texts = [line["d"] for line in parse_objects(encode_lines(rows))]
    assert texts == ["0." + "0" * 18, "-0." + "0" * 17 + "1", "1200." + "0" * 18]
    assert [json_value(number) for number in numbers] == [f'"{number:f}"' for number in numbers]
