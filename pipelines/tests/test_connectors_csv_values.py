"""CSV and raw values of a message queue: each is a row by itself, and a bad one harms no other."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.arrow_types import arrow_schema
from rekindle.connectors.csv_reading import parse_csv_block
from rekindle.connectors.csv_values import CsvValues
from rekindle.connectors.record_values import Decoded, ValueDecoder
from rekindle.connectors.value_formats import open_format
from rekindle.errors import SchemaMismatch
from rekindle.topology.kinds.kafka import KafkaSourceSpec
from rekindle.topology.sql.ddl import ddl_to_schema

COLUMNS = "id BIGINT, name STRING, price DECIMAL(9,2)"


def decode(
    values: Sequence[bytes | None], columns: str = COLUMNS, format: str = "csv", **options: Any
) -> Decoded:
    given = {"bootstrapServers": "b:9092", "topic": "t", "format": format, **options}
    declared = arrow_schema(ddl_to_schema(columns))
    spec = KafkaSourceSpec.model_validate(given)
    return ValueDecoder(open_format(spec, declared), declared).decode(values)


def rows(decoded: Decoded) -> list[tuple[Any, ...]]:
    return [tuple(row.values()) for row in decoded.rows.to_pylist()]


def test_each_value_is_a_row() -> None:
    decoded = decode(
        [b'1,"a,b",1.5', None, b"2,NA,\n", b'3,"x\ny",NA\r\n'], "id INT, name STRING, p DOUBLE"
    )
    assert decoded.bad == {}
    assert rows(decoded) == [(1, "a,b", 1.5), (None,) * 3, (2, None, None), (3, "x\ny", None)]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (b"", "an empty value"),
        (b"\n", "an empty value"),
        (b"1,a", "2 values for 3 columns"),
        (b"1,a,1.5,x", "4 values for 3 columns"),
        (b"1,a,1.5\n2,b,2.5", "2 rows instead of one row"),
        (b"1,a,1.5\r2,b,2.5", "2 rows instead of one row"),
        (b'1,"a,1.5', "a quoted value is not closed"),
        (b'1,"a"x,1.5', "a quoted value is not closed"),
        (b"x,a,1.5", "'x' is not a BIGINT"),
        (b"1,a,1.555", "is not a DECIMAL"),
        (b"1,\xff,1.5", "utf-8"),
    ],
)
def test_a_bad_value_is_named_and_harms_no_other(bad: bytes, message: str) -> None:
    decoded = decode([b"1,a,1.5", bad, b"2,b,2.5"])
    assert list(decoded.bad) == [1]
    assert message in decoded.bad[1]
    assert [row[0] for row in rows(decoded)] == [1, None, 2]


def test_the_fields_of_files_apply() -> None:
    decoded = decode(
        [rb"1;x\;y;-", rb"2;'z;';5"],
        "id INT, s STRING, n INT",
        delimiter=";",
        quote="'",
        escape="\\",
        nullValue="-",
    )
    assert decoded.bad == {}
    assert rows(decoded) == [(1, "x;y", None), (2, "z;", 5)]


_CELL = st.text(st.sampled_from("a1,\"\n\r 'é\ufeff"), max_size=4)


def _written(cells: list[str]) -> bytes:
    text = io.StringIO()
    csv.writer(text, quoting=csv.QUOTE_ALL, lineterminator="").writerow(cells)
    return text.getvalue().encode()


@given(st.lists(st.tuples(_CELL, _CELL).map(list), min_size=1, max_size=5))
def test_what_is_written_is_read(values: list[list[str]]) -> None:
    decoded = decode([_written(cells) for cells in values], "a STRING, b STRING")
    assert decoded.bad == {}
    assert rows(decoded) == [tuple(cells) for cells in values]


_PIECES = st.lists(
    st.sampled_from(["1", "a", ",", '"', "\n", "\r", "\ufeff", "NA", " "]), max_size=7
)


@given(st.lists(st.none() | _PIECES.map(lambda p: "".join(p).encode()), min_size=1, max_size=6))
def test_a_value_is_read_alike_whatever_is_beside_it(values: list[bytes | None]) -> None:
    together = decode(values, "a INT, b STRING")
    for at, value in enumerate(values):
        alone = decode([value], "a INT, b STRING")
        assert alone.bad.get(0) == together.bad.get(at)
        assert rows(alone) == rows(together)[at : at + 1]


@given(_PIECES.map(lambda p: "".join(p).encode()), st.booleans())
def test_what_is_found_by_counting_is_what_a_reader_says(value: bytes, has_quotes: bool) -> None:
    options = {"quote": '"' if has_quotes else "", "escape": "a"}
    given = {"bootstrapServers": "b:9092", "topic": "t", "format": "csv", **options}
    spec = KafkaSourceSpec.model_validate(given)
    values = CsvValues(arrow_schema(ddl_to_schema("a INT, b STRING")), spec)
    if found := values._wrong_number(value):
        with pytest.raises(SchemaMismatch) as raised:
            values._one(value)
        assert str(raised.value) == found


def test_values_of_another_number_of_columns_are_found_by_counting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each costs half a millisecond otherwise."""
    parsed = list[int]()

    def parse(block: bytes, *more: Any) -> Any:
        parsed.append(block.count(b"\n") + 1)
        return parse_csv_block(block, *more)

    monkeypatch.setattr("rekindle.connectors.csv_values.parse_csv_block", parse)
    decoded = decode([b"1,a" if at % 2 else b"%d,a,1.5" % at for at in range(400)])
    assert list(decoded.bad) == list(range(1, 400, 2))
    assert decoded.bad[1] == "'1,a': 2 values for 3 columns"
    assert [row[0] for row in rows(decoded)][:5] == [0, None, 2, None, 4]
    assert sum(parsed) <= 600


def test_a_raw_value_is_the_column() -> None:
    values = [b"a", None, b"", b"\xff"]
    assert rows(decode(values, "v BINARY", "raw")) == [(b"a",), (None,), (b"",), (b"\xff",)]
    texts = decode(values, "v STRING", "raw")
    assert rows(texts) == [("a",), (None,), ("",), (None,)]
    assert list(texts.bad) == [3]
