"""JSON values of a message queue: the fast and the slow way agree, and a bad value harms no
other."""

from __future__ import annotations

import datetime as dt
import json
import math
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.arrow_types import TIMESTAMP
from rekindle.connectors.json_values import JsonValues
from rekindle.connectors.record_values import Decoded, ValueDecoder, declared_schema
from rekindle.topology.sql.ddl import ddl_to_schema
from rekindle.topology.sql.event_time import parse_event_time

SCHEMA = pa.schema(
    [("id", pa.int64()), ("name", pa.string()), ("at", TIMESTAMP), ("price", pa.decimal128(9, 2))]
)
GOOD = b'{"id":1,"name":"a","at":"2026-01-01T00:00:00Z","price":1.5}'


def decode(*values: bytes | None, schema: pa.Schema = SCHEMA) -> Decoded:
    return ValueDecoder(JsonValues(schema), schema).decode(values)


def test_each_value_is_a_row() -> None:
    decoded = decode(GOOD, b'{"id":2}')
    assert decoded.bad == {}
    assert decoded.rows.column("id").to_pylist() == [1, 2]
    assert decoded.rows.column("at").to_pylist() == [dt.datetime(2026, 1, 1, tzinfo=dt.UTC), None]


def test_a_missing_value_is_a_row_of_nulls() -> None:
    decoded = decode(GOOD, None, GOOD)
    assert decoded.bad == {}
    assert decoded.rows.column("id").to_pylist() == [1, None, 1]
    assert decode(None).rows.num_rows == 1


def test_no_values_are_no_rows() -> None:
    assert decode().rows.schema == SCHEMA


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (b"", "an empty value"),
        (b"null", "null instead of an object"),
        (b"[1]", "an array instead of an object"),
        (b'{"id":1', "not JSON"),
        (b'{"id":1}}', "not JSON"),
        (b'{"id":1}{"id":2}', "more than one object"),
        (b'{"id":1},"w":{"id":2}', "not JSON"),
        (b'{"id":1}\n{"id":2}', "more than one object"),
        (b'{"id":"1"}', "instead of a whole number"),
        (b'{"id":1,"id":2}', "field id occurs twice"),
        (b'{"id":99999999999999999999}', "is not a BIGINT"),
        (b'{"name":"\xff"}', "utf-8"),
        (b'{"name":7}', "instead of a string"),
        (b'{"at":"yesterday"}', "'yesterday' is not a TIMESTAMP"),
        (b'{"at":1767225600}', "instead of a string"),
        (b'{"price":1.555}', "is not a DECIMAL"),
        (b'{"name":"a\nb"}', "not JSON"),
    ],
)
def test_a_bad_value_is_named_and_harms_no_other(bad: bytes, message: str) -> None:
    decoded = decode(GOOD, bad, GOOD)
    assert list(decoded.bad) == [1]
    assert message in decoded.bad[1]
    assert decoded.rows.column("id").to_pylist() == [1, None, 1]


def test_values_of_several_lines_are_read() -> None:
    decoded = decode(json.dumps({"id": 3}, indent=2).encode(), b' {"id":4}\n')
    assert (decoded.rows.column("id").to_pylist(), decoded.bad) == ([3, 4], {})


def test_event_time_is_computed_and_what_it_cannot_be_is_bad() -> None:
    declared = ddl_to_schema("day STRING, id BIGINT")
    expression = parse_event_time("to_timestamp(day, 'dd/MM/yyyy')", declared)
    schema = pa.schema([("day", pa.string()), ("id", pa.int64()), ("at", TIMESTAMP)])
    format = JsonValues(declared_schema(schema, expression))
    decoded = ValueDecoder(format, schema, expression).decode(
        [b'{"day":"31/12/2025","id":1}', b'{"day":"2025-12-31","id":2}', b'{"id":3}']
    )
    assert list(decoded.bad) == [1]
    assert "does not match the format" in decoded.bad[1]
    assert decoded.rows.column("at").to_pylist()[0] == dt.datetime(2025, 12, 31, tzinfo=dt.UTC)
    assert decoded.rows.column("id").to_pylist() == [1, None, 3]


_FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "id": st.one_of(
            st.integers(-(2**65), 2**65), st.text(max_size=3), st.none(), st.booleans()
        ),
        "name": st.one_of(st.text(max_size=5), st.integers(), st.none()),
        "at": st.sampled_from(["2026-01-01", "2026-01-01T01:02:03.5+02:00", "", "x", 3, None]),
        "price": st.one_of(
            st.floats(allow_nan=False, allow_infinity=False), st.sampled_from(["7.25", "", "NaN"])
        ),
        "other": st.recursive(st.none() | st.text(max_size=3), st.lists, max_leaves=4),
    },
)
_BROKEN = st.sampled_from(
    [b"", b"{", b"}", b"{}{}", b"null", b"{}\n{}", b'{"id":1},"w":{}', b'{"a":"}', b'"{"', b"{} {}"]
)
_VALUES = st.lists(
    st.one_of(st.none(), _BROKEN, _FIELDS.map(lambda f: json.dumps(f).encode())), max_size=8
)


@given(_VALUES)
def test_a_value_is_read_alike_whatever_is_beside_it(values: list[bytes | None]) -> None:
    together = decode(*values)
    for at, value in enumerate(values):
        alone = decode(value)
        assert bool(alone.bad) == (at in together.bad)
        assert _row(alone, 0) == _row(together, at)


def _row(decoded: Decoded, at: int) -> Any:
    return decoded.rows.slice(at, 1).to_pylist()


@pytest.mark.parametrize("depth", [300, 399, 400, 500, 850, 900, 950, 980, 1000, 100_000])
def test_a_deep_value_is_bad_whatever_calls_the_decoder(depth: int) -> None:
    """Python's own limit depends on that, and replicas must not."""
    value = b'{"id":1,"other":' + b"[" * depth + b"]" * depth + b"}"

    def after(calls: int) -> bool:
        return after(calls - 1) if calls else not decode(value).bad

    assert {after(calls) for calls in (0, 30, 300)} == {depth < 400}


@pytest.mark.parametrize("text", ["-0", "-0.0", "-0e0", "0"])
def test_zero_has_its_sign_whatever_is_beside_it(text: str) -> None:
    schema = pa.schema([("x", pa.float64())])
    value = f'{{"x":{text}}}'.encode()
    alone, beside = decode(value, schema=schema), decode(value, b" {}", schema=schema)
    assert repr(alone.rows[0][0]) == repr(beside.rows[0][0])
    assert math.copysign(1.0, alone.rows[0][0].as_py()) == (-1.0 if text[0] == "-" else 1.0)


@pytest.mark.parametrize("column", ["id", "name", "at", "price"])
@pytest.mark.parametrize("text", ["1" * 1_000_000, json.dumps("x" * 1_000_000)])
def test_what_is_wrong_with_a_large_value_is_said_in_short(column: str, text: str) -> None:
    decoded = decode(f'{{"{column}":{text}}}'.encode())
    assert all(len(what) < 1000 for what in decoded.bad.values())
