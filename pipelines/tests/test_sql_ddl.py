"""Spark's DDL becomes a schema, exactly, or is refused with the position in the text."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from schema_parts import arrow_schema_of

from rekindle.arrow_types import TIMESTAMP, arrow_schema, arrow_to_ddl
from rekindle.topology.problems import InvalidSql
from rekindle.topology.schema import type_in_operator_id
from rekindle.topology.sql.ddl import ddl_to_schema


@pytest.mark.parametrize(
    ("ddl", "kind"),
    [
        ("STRING", pa.string()),
        ("bigint", pa.int64()),
        ("INT", pa.int32()),
        ("SMALLINT", pa.int16()),
        ("TINYINT", pa.int8()),
        ("DOUBLE", pa.float64()),
        ("FLOAT", pa.float32()),
        ("BOOLEAN", pa.bool_()),
        ("DECIMAL", pa.decimal128(10, 0)),
        ("DECIMAL(5)", pa.decimal128(5, 0)),
        ("DECIMAL(38, 18)", pa.decimal128(38, 18)),
        ("TIMESTAMP", TIMESTAMP),
        ("DATE", pa.date32()),
        ("BINARY", pa.binary()),
        ("ARRAY<ARRAY<INT>>", pa.list_(pa.list_(pa.int32()))),
        ("STRUCT<a: INT, `b c` STRING>", pa.struct([("a", pa.int32()), ("b c", pa.string())])),
    ],
)
def test_each_type_has_one_arrow_type(ddl: str, kind: pa.DataType) -> None:
    schema = ddl_to_schema(f"x {ddl}")
    assert arrow_schema(schema) == pa.schema([("x", kind)])
    assert type_in_operator_id(schema.fields[0].type) == str(kind)


def test_columns_keep_their_order_and_spelling() -> None:
    schema = ddl_to_schema(" Origin STRING,\n  `dep delay`: DOUBLE , date DATE, `a``b` INT ")
    assert schema.names == ["Origin", "dep delay", "date", "a`b"]


@pytest.mark.parametrize(
    ("ddl", "message"),
    [
        ("", "expected a column name, the text ends at character 1"),
        ("a", "expected a type, the text ends at character 2"),
        ("a STRNG", "unknown type STRNG at character 3"),
        ("a INT,", "expected a column name, the text ends at character 7"),
        ("a INT b", "a comma is missing: unexpected 'b' at character 7"),
        ("a INT)", "unexpected ')' at character 6"),
        ("a INT; DROP", "unexpected ';' at character 6"),
        ("a ARRAY<INT", "expected '>', the text ends at character 12"),
        ("a INT `b c` INT", "a comma is missing: unexpected 'b c' at character 7"),
        ("a INT COMMENT x", "column constraints and comments cannot be used"),
        ("a INT NOT NULL", "column constraints and comments cannot be used"),
        ("a DECIMAL(40, 2)", "DECIMAL(40, 2) is out of range"),
        ("a MAP<STRING, INT>", "the type MAP at character 3 is not supported yet"),
        ("a VARCHAR(3)", "the type VARCHAR at character 3 is not supported yet"),
        ("a INT, A STRING", "column A occurs twice"),
    ],
)
def test_invalid_ddl_is_refused_with_its_position(ddl: str, message: str) -> None:
    with pytest.raises(InvalidSql) as caught:
        ddl_to_schema(ddl)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("ddl", "hint"),
    [
        ("a DATETIME", "use TIMESTAMP"),
        ("a text", "use STRING"),
        ("a INT64", "use BIGINT"),
        ("a STRNG", "did you mean STRING?"),
    ],
)
def test_an_unknown_type_has_a_hint(ddl: str, hint: str) -> None:
    with pytest.raises(InvalidSql) as caught:
        ddl_to_schema(ddl)
    assert caught.value.problems[0].hint == hint


@pytest.mark.parametrize("kind", ["ARRAY<", "STRUCT<a: "])
def test_types_are_nested_as_deep_as_parquet_allows(kind: str) -> None:
    schema = arrow_schema_of(f"a ARRAY<INT>, x {kind * 32}INT{'>' * 32}")
    written = pa.BufferOutputStream()
    pq.write_table(schema.empty_table(), written)
    assert pq.read_table(pa.BufferReader(written.getvalue())).schema == schema
    for depth in (33, 1500):
        with pytest.raises(InvalidSql) as caught:
            ddl_to_schema(f"x {kind * depth}INT{'>' * depth}")
        assert [f.reason for f in caught.value.problems] == ["TooDeep"]


_TYPES = st.recursive(
    st.sampled_from(
        [pa.string(), pa.int64(), pa.int8(), pa.float32(), pa.decimal128(7, 3), TIMESTAMP]
    ),
    lambda inner: st.one_of(
        inner.map(pa.list_),
        st.lists(inner, min_size=1, max_size=3).map(
            lambda kinds: pa.struct([(f"f{i}", k) for i, k in enumerate(kinds)])
        ),
    ),
    max_leaves=6,
)


@given(_TYPES)
def test_a_type_written_as_ddl_is_read_back(kind: pa.DataType) -> None:
    assert arrow_schema_of(f"x {arrow_to_ddl(kind)}").field(0).type == kind
