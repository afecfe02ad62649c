"""Avro values: every record as fastavro reads it, and what is wrong with the others."""

from __future__ import annotations

import contextlib
import datetime as dt
import io
import json
import random
import tracemalloc
from collections.abc import Sequence
from decimal import Decimal
from typing import Any, ClassVar

import fastavro
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from schema_server import SchemaServer

from rekindle.arrow_types import TIMESTAMP, arrow_schema
from rekindle.connectors.avro_values import PREFIX, AvroValues
from rekindle.connectors.record_values import Decoded, ValueDecoder
from rekindle.connectors.schema_registry import SchemaRegistry
from rekindle.errors import SchemaMismatch, SourceFailed
from rekindle.topology.avro import InvalidAvroSchema, parse_avro_schema
from rekindle.topology.kinds.kafka_security import SchemaRegistrySpec
from rekindle.topology.sql.ddl import ddl_to_schema

INNER = {
    "type": "record",
    "name": "Inner",
    "fields": [{"name": "x", "type": "int"}, {"name": "y", "type": ["null", "string"]}],
}
ALL: dict[str, Any] = {
    "type": "record",
    "name": "All",
    "namespace": "test",
    "fields": [
        {"name": "i", "type": "int"},
        {"name": "l", "type": ["null", "long"]},
        {"name": "before", "type": {"type": "map", "values": "long"}},
        {"name": "d", "type": "double"},
        {"name": "s", "type": ["string", "null"]},
        {"name": "b", "type": "bytes"},
        {"name": "t", "type": "boolean"},
        {"name": "e", "type": {"type": "enum", "name": "E", "symbols": ["A", "B", "C"]}},
        {"name": "x", "type": {"type": "fixed", "name": "F", "size": 3}},
        {"name": "inner", "type": ["null", INNER]},
        {"name": "list", "type": {"type": "array", "items": "test.Inner"}},
        {"name": "skipped", "type": ["null", "int", {"type": "array", "items": "string"}]},
        {"name": "many", "type": {"type": "array", "items": ["null", "long"]}},
        {
            "name": "tree",
            "type": [
                "null",
                {
                    "type": "record",
                    "name": "Tree",
                    "fields": [
                        {"name": "v", "type": "int"},
                        {"name": "next", "type": ["null", "Tree"]},
                    ],
                },
            ],
        },
        {"name": "f", "type": "float"},
    ],
}
COLUMNS = (
    "i INT, l BIGINT, d DOUBLE, s STRING, b BINARY, t BOOLEAN, e STRING, x BINARY, "
    "inner STRUCT<x: INT, y: STRING>, list ARRAY<STRUCT<x: INT, y: STRING>>, many ARRAY<BIGINT>, "
    "f FLOAT"
)
_INT, _LONG = st.integers(-(2**31), 2**31 - 1), st.integers(-(2**63), 2**63 - 1)
_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
_INNER = st.fixed_dictionaries({"x": _INT, "y": st.none() | _TEXT})
_TREE = st.recursive(st.none(), lambda t: st.fixed_dictionaries({"v": _INT, "next": t}))
RECORDS = st.fixed_dictionaries(
    {
        "i": _INT,
        "l": st.none() | _LONG,
        "before": st.dictionaries(_TEXT, _LONG, max_size=2),
        "d": st.floats(allow_nan=False),
        "s": st.none() | _TEXT,
        "b": st.binary(max_size=5),
        "t": st.booleans(),
        "e": st.sampled_from("ABC"),
        "x": st.binary(min_size=3, max_size=3),
        "inner": st.none() | _INNER,
        "list": st.lists(_INNER, max_size=3),
        "skipped": st.none() | _INT | st.lists(_TEXT, max_size=2),
        "many": st.lists(st.none() | _LONG, max_size=5),
        "tree": _TREE,
        "f": st.floats(width=32, allow_nan=False),
    }
)


def encoded(record: dict[str, Any], schema: dict[str, Any] = ALL) -> bytes:
    data = io.BytesIO()
    fastavro.schemaless_writer(data, fastavro.parse_schema(schema), record)
    return data.getvalue()


def decode(
    values: Sequence[bytes | None],
    schema: dict[str, Any] | None = ALL,
    columns: str = COLUMNS,
    registry: dict[int, Any] | None = None,
) -> Decoded:
    declared = arrow_schema(ddl_to_schema(columns))
    text = None if schema is None else json.dumps(schema)
    schemas = None if registry is None else Registry(registry)
    return ValueDecoder(AvroValues(declared, text, schemas), declared).decode(values)


class Registry:
    def __init__(self, schemas: dict[int, Any]) -> None:
        self._schemas = schemas

    def schema(self, number: int) -> tuple[str, tuple[str, ...]]:
        if number not in self._schemas:
            raise SourceFailed(f"no schema {number}")
        return json.dumps(self._schemas[number]), ()


def record(**fields: Any) -> dict[str, Any]:
    schema_fields = [{"name": name, "type": type_} for name, type_ in fields.items()]
    return {"type": "record", "name": "R", "fields": schema_fields}


@given(st.lists(st.none() | RECORDS, max_size=8))
def test_records_are_read_as_fastavro_reads_them(records: list[dict[str, Any] | None]) -> None:
    decoded = decode([None if r is None else encoded(r) for r in records])
    assert decoded.bad == {}
    names = decoded.rows.schema.names
    read = [dict.fromkeys(names) if r is None else {n: r[n] for n in names} for r in records]
    assert decoded.rows.to_pylist() == read


@given(st.lists(RECORDS, min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_a_damaged_record_is_read_alike_whatever_is_beside_it(
    records: list[dict[str, Any]], draw: random.Random
) -> None:
    values = [encoded(r) for r in records]
    for _ in range(draw.randrange(1, 4)):
        at = draw.randrange(len(values))
        value, place = values[at], draw.randrange(len(values[at]) + 1)
        noise = draw.randbytes(draw.randrange(4))
        values[at] = value[:place] + noise + value[place + draw.randrange(4) :]
    together = decode(values)
    for at, value in enumerate(values):
        alone = decode([value])
        assert alone.bad.get(0) == together.bad.get(at)
        assert alone.rows.to_pylist() == together.rows.slice(at, 1).to_pylist()
        if not alone.bad:
            data = io.BytesIO(value)
            try:
                read: Any = fastavro.schemaless_reader(data, fastavro.parse_schema(ALL))
            except UnicodeDecodeError:  # of a field that is passed over here
                continue
            assert data.tell() == len(value)
            wanted = {name: read[name] for name in alone.rows.schema.names}
            assert str(alone.rows.to_pylist()[0]) == str(wanted)  # NaN is not equal to itself


@given(RECORDS, st.data())
def test_a_truncated_record_is_bad(given_record: dict[str, Any], data: st.DataObject) -> None:
    value = encoded(given_record)
    cut = data.draw(st.integers(0, len(value) - 1))
    assert list(decode([value[:cut]]).bad) == [0]


@pytest.mark.parametrize(
    ("type_", "data", "message"),
    [
        ("string", b"\x0aab", "field f: the record is truncated"),
        ("string", b"\x01", "field f: a negative length"),
        ("string", b"\x02\xff", "field f: 'utf-8' codec"),
        ("string", b"\x02ab", "1 bytes follow the record"),
        ("long", b"", "the record is truncated"),
        ("long", b"\x80" * 11, "field f: a number of more than 10 bytes"),
        ("int", b"\x80\x80\x80\x80\x20", "field f: not an int of 32 bits"),
        ("boolean", b"\x02", "field f: not a boolean"),
        ({"type": "enum", "name": "E", "symbols": ["A"]}, b"\x02", "field f: 1 symbols"),
        (["null", "long"], b"\x04", "field f: 2 symbols or branches"),
        ({"type": "array", "items": "long"}, b"\x04\x02", "field f[]: the record is trunc|field f"),
        ({"type": "array", "items": "long"}, b"\xfe\xff\xff\xff\x0f", "field f: the record is"),
        ({"type": "bytes", "logicalType": "decimal", "precision": 2}, b"\x02\x64", "more than 2"),
    ],
)
def test_what_is_wrong_with_a_record_is_said(type_: Any, data: bytes, message: str) -> None:
    columns = "f ARRAY<BIGINT>" if "array" in str(type_) else "f STRING"
    columns = "f DECIMAL(2,0)" if "decimal" in str(type_) else columns
    columns = {"long": "f BIGINT", "int": "f INT", "boolean": "f BOOLEAN"}.get(str(type_), columns)
    columns = "f BIGINT" if type_ == ["null", "long"] else columns
    bad = decode([data], record(f=type_), columns).bad
    assert any(part in bad[0] for part in message.split("|"))


def test_logical_types_follow_the_table_of_conversions() -> None:
    schema = record(
        day={"type": "int", "logicalType": "date"},
        ms={"type": "long", "logicalType": "timestamp-millis"},
        us=["null", {"type": "long", "logicalType": "timestamp-micros"}],
        local={"type": "long", "logicalType": "local-timestamp-micros"},
        price={"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2},
        fixed={
            "type": "fixed",
            "name": "D",
            "size": 5,
            "logicalType": "decimal",
            "precision": 9,
            "scale": 3,
        },
        id={"type": "string", "logicalType": "uuid"},
        wide="int",
    )
    columns = (
        "day DATE, ms TIMESTAMP, us TIMESTAMP, local TIMESTAMP, price DECIMAL(12,2), "
        "fixed DECIMAL(9,3), id STRING, wide DOUBLE"
    )
    at = dt.datetime(2026, 1, 2, 3, 4, 5, 678_000, dt.UTC)
    given_record = {
        "day": dt.date(2026, 1, 2),
        "ms": at,
        "us": at,
        "local": at.replace(tzinfo=None),
        "price": Decimal("-1234567.89"),
        "fixed": Decimal("-1.001"),
        "id": "8f14e45f-ceea-467f-a9f1-0f1d6e3c5b2a",
        "wide": 7,
    }
    decoded = decode([encoded(given_record, schema)], schema, columns)
    assert decoded.bad == {}
    assert decoded.rows.to_pylist() == [given_record | {"local": at, "wide": 7.0}]


class TestSchemasOfARegistry:
    OLD = record(id="long", gone="string", name="string")
    NEW = record(extra="double", id="int", name=["null", "string"])
    READER: ClassVar[dict[str, Any]] = {
        "type": "record",
        "name": "R",
        "fields": [
            {"name": "id", "type": "long"},
            {"name": "title", "aliases": ["name"], "type": ["null", "string"]},
            {"name": "price", "type": "double", "default": 1.5},
            {"name": "tags", "type": {"type": "array", "items": "string"}, "default": []},
        ],
    }

    def values(self) -> list[bytes | None]:
        old = {"id": 1, "gone": "x", "name": "a"}
        new = {"extra": 2.5, "id": 2, "name": None}
        return [
            PREFIX.pack(0, 7) + encoded(old, self.OLD),
            None,
            PREFIX.pack(0, 9) + encoded(new, self.NEW),
            PREFIX.pack(0, 7) + encoded(old | {"id": 3}, self.OLD),
        ]

    def test_fields_are_added_and_removed(self) -> None:
        registry = {7: self.OLD, 9: self.NEW}
        decoded = decode(self.values(), None, "id BIGINT, name STRING, extra DOUBLE", registry)
        assert decoded.bad == {}
        assert [tuple(row.values()) for row in decoded.rows.to_pylist()] == [
            (1, "a", None),
            (None, None, None),
            (2, None, 2.5),
            (3, "a", None),
        ]

    def test_the_readers_schema_has_aliases_and_defaults(self) -> None:
        registry = {7: self.OLD, 9: self.NEW}
        columns = "id BIGINT, title STRING, price DOUBLE, tags ARRAY<STRING>"
        decoded = decode(self.values(), self.READER, columns, registry)
        assert decoded.bad == {}
        assert [tuple(row.values()) for row in decoded.rows.to_pylist()] == [
            (1, "a", 1.5, []),
            (None, None, None, None),
            (2, None, 1.5, []),
            (3, "a", 1.5, []),
        ]

    def test_values_of_other_schemas_are_bad(self) -> None:
        registry = {7: self.OLD, 8: record(id="bytes"), 9: record(id=["int", "string"])}
        good = PREFIX.pack(0, 7) + encoded({"id": 1, "gone": "", "name": ""}, self.OLD)
        others = [PREFIX.pack(0, 8) + b"\0", PREFIX.pack(0, 9) + b"\0\0", b"{}", b'{"id": 5}', b""]
        decoded = decode([good, *others, good], None, "id BIGINT", registry)
        assert list(decoded.rows.column("id").to_pylist()) == [1, *[None] * 5, 1]
        assert "binary" in decoded.bad[1]
        assert "schema 9: field id: a union of 2 types" in decoded.bad[2]
        assert all("a zero byte" in decoded.bad[at] for at in (3, 4, 5))

    def test_an_unknown_number_is_an_error_of_the_source(self) -> None:
        """Another replica's registry may know it."""
        with pytest.raises(SourceFailed, match="no schema 7"):
            decode(self.values(), None, "id BIGINT", {})


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ("{", "not JSON from character 2 on"),
        ('"string"', "not the schema of a record"),
        (json.dumps(record(f="strin")), "record R, field f: there is no type strin"),
        (json.dumps(record(f={"type": "array"})), "is no type"),
        (json.dumps(record(f={"type": "fixed", "name": "F"})), "fixed F has no size"),
        (json.dumps(record(f={"type": "enum", "name": "R", "symbols": []})), "R is defined twice"),
        (json.dumps({"type": "record", "name": "R", "fields": [{"name": "f"}]}), "and a type"),
        ("[" * 100_000 + "]" * 100_000, "nested too deeply"),
    ],
)
def test_a_schema_that_is_none_is_refused(schema: str, message: str) -> None:
    with pytest.raises(InvalidAvroSchema, match=message):
        parse_avro_schema(schema)


def test_a_column_that_no_field_can_be_is_refused_at_once() -> None:
    with pytest.raises(
        SchemaMismatch, match="avroSchema: field id: a record is not read as BIGINT"
    ):
        decode([], record(id=INNER), "id BIGINT")


def test_a_default_of_another_type_is_refused() -> None:
    schema = {
        "type": "record",
        "name": "R",
        "fields": [{"name": "id", "type": "long", "default": "x"}],
    }
    with pytest.raises(SchemaMismatch, match="field id: its default is not of its type"):
        decode([], schema, "id BIGINT", {})


def test_records_inside_each_other_are_limited() -> None:
    """Not by Python's stack, which is another one at each caller."""
    tree: dict[str, Any] | None = None
    for depth in range(70):
        tree = {"v": depth, "next": tree}
    schema = record(id="int", tree=ALL["fields"][13]["type"])
    decoded = decode([encoded({"id": 1, "tree": tree}, schema)], schema, "id INT")
    assert "more than 64 records inside each other" in decoded.bad[0]


def test_types_of_the_declared_columns() -> None:
    decoded = decode([encoded({"a": 5}, record(a="long"))], record(a="long"), "a INT, b TIMESTAMP")
    assert decoded.rows.schema == pa.schema([("a", pa.int32()), ("b", TIMESTAMP)])
    assert decoded.rows.to_pylist() == [{"a": 5, "b": None}]


def test_truncated_records_take_no_memory() -> None:
    """They may have all fields that are missing, by their schema."""
    schema = record(x={"type": "fixed", "name": "F", "size": 1_000_000})
    declared = pa.schema([("x", pa.binary())])
    decoder = ValueDecoder(AvroValues(declared, json.dumps(schema), None), declared)
    tracemalloc.start()
    decoded = decoder.decode([b"\0"] * 1000)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(decoded.bad) == 1000
    assert most < 20 << 20


@pytest.mark.parametrize(
    "answer",
    [
        [1],
        {},
        {"schema": 5},
        {"schema": "1" * 5000},
        {"schema": "[" * 100_000},
        {"schema": json.dumps(record(a="long")), "references": "abc"},
        {"schema": json.dumps(record(a="long")), "references": ["abc"]},
        {"schema": json.dumps(record(a="long")), "references": [{"subject": "s", "version": 1}]},
        {"schema": '{"type":"array","items":' * 500 + '"int"' + "}" * 500},
        {"schema": json.dumps(record(a={"type": "fixed", "name": "F", "size": 10**12}))},
        {"schema": json.dumps(record(a={"type": "fixed", "name": "F", "size": 2**31 - 1}))},
        {"schema": '{"type":"record","name":"r","namespace":[1],"fields":[7]}'},
    ],
)
def test_no_answer_of_a_registry_ends_a_thread(answer: Any) -> None:
    """The value is bad, or the source waits for another answer."""
    subjects = {"s/1": {"schema": '"int"', "references": [{"subject": "s", "version": 1}]}}
    declared = pa.schema([("a", pa.int64())])
    with SchemaServer({1: answer}, subjects) as server:
        registry = SchemaRegistry(SchemaRegistrySpec(url=server.url))
        decoder = ValueDecoder(AvroValues(declared, None, registry), declared)
        with contextlib.suppress(SourceFailed):
            assert decoder.decode([PREFIX.pack(0, 1) + b"\0"]).bad
        assert len(server.requests) < 5
