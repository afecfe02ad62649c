"""Protobuf values that a Kafka sink writes: what a source of the same message reads, and which
columns are refused."""

from __future__ import annotations

import base64
import datetime as dt
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from google.protobuf import descriptor_pb2, timestamp_pb2
from hypothesis import given
from hypothesis import strategies as st
from schema_server import SchemaServer

from rekindle.arrow_types import arrow_schema
from rekindle.connectors.json_writer import UnencodableValue
from rekindle.connectors.protobuf_encoding import ProtobufEncoding
from rekindle.connectors.protobuf_values import ProtobufValues
from rekindle.connectors.record_values import ValueDecoder
from rekindle.connectors.value_writers import open_writer
from rekindle.errors import SchemaMismatch
from rekindle.topology.kinds.kafka_sink import KafkaSinkSpec
from rekindle.topology.sql.ddl import ddl_to_schema

T = descriptor_pb2.FieldDescriptorProto
_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
_US = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


def _whole(bits: int) -> st.SearchStrategy[int]:
    return st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


_TIMES = st.datetimes(timezones=st.just(dt.UTC))
_INNER = st.fixed_dictionaries(
    {"x": st.none() | _whole(32), "names": st.lists(_TEXT, max_size=2), "at": st.none() | _TIMES}
)
INNER = "STRUCT<x: INT, names: ARRAY<STRING>, at: TIMESTAMP>"
COLUMNS: list[tuple[str, str, int, str, st.SearchStrategy[Any]]] = [
    ("l", "BIGINT", T.TYPE_INT64, "", _whole(64)),
    ("l_s", "BIGINT", T.TYPE_SINT64, "", _whole(64)),
    ("l_f", "BIGINT", T.TYPE_SFIXED64, "", _whole(64)),
    ("i", "INT", T.TYPE_INT32, "", _whole(32)),
    ("i_s", "INT", T.TYPE_SINT32, "", _whole(32)),
    ("i_f", "INT", T.TYPE_SFIXED32, "", _whole(32)),
    ("h", "SMALLINT", T.TYPE_INT32, "", _whole(16)),
    ("y", "TINYINT", T.TYPE_INT64, "", _whole(8)),
    ("u", "BIGINT", T.TYPE_UINT32, "", st.integers(0, 2**32 - 1)),
    ("u_f", "BIGINT", T.TYPE_FIXED32, "", st.integers(0, 2**32 - 1)),
    ("m", "DECIMAL(20,0)", T.TYPE_UINT64, "", st.integers(0, 2**64 - 1).map(Decimal)),
    ("m_f", "DECIMAL(20,0)", T.TYPE_FIXED64, "", st.integers(0, 2**64 - 1).map(Decimal)),
    ("d", "DOUBLE", T.TYPE_DOUBLE, "", st.floats(allow_nan=False)),
    ("f", "FLOAT", T.TYPE_FLOAT, "", st.floats(allow_nan=False, width=32)),
    ("f_d", "FLOAT", T.TYPE_DOUBLE, "", st.floats(allow_nan=False, width=32)),
    ("t", "BOOLEAN", T.TYPE_BOOL, "", st.booleans()),
    ("s", "STRING", T.TYPE_STRING, "", _TEXT),
    ("b", "BINARY", T.TYPE_BYTES, "", st.binary(max_size=4)),
    ("e", "STRING", T.TYPE_ENUM, ".p.Color", st.sampled_from(["RED", "BLUE", "7", "-3"])),
    ("at", "TIMESTAMP", T.TYPE_MESSAGE, ".google.protobuf.Timestamp", _TIMES),
    ("inner", INNER, T.TYPE_MESSAGE, ".p.Row.Inner", _INNER),
]


def _file(syntax: str = "proto3") -> descriptor_pb2.FileDescriptorProto:
    """`Row` has each column, as `<name>` whose presence is known, as `<name>_implicit`, and
    repeated, as `<name>_list`."""
    made = descriptor_pb2.FileDescriptorProto(name="p.proto", package="p", syntax=syntax)
    made.dependency.append("google/protobuf/timestamp.proto")
    color = made.enum_type.add(name="Color")
    color.value.add(name="RED", number=0)
    color.value.add(name="BLUE", number=5)
    made.message_type.add(name="First")
    row = made.message_type.add(name="Row")
    row.nested_type.add(name="Other")
    inner = row.nested_type.add(name="Inner")
    _add(inner, "x", T.TYPE_INT32, "", optional=True)
    _add(inner, "names", T.TYPE_STRING, "", repeated=True)
    _add(inner, "at", T.TYPE_MESSAGE, ".google.protobuf.Timestamp")
    for name, _, kind, type_name, _ in COLUMNS:
        _add(row, name, kind, type_name, optional=True)
        _add(row, f"{name}_implicit", kind, type_name)
        _add(row, f"{name}_list", kind, type_name, repeated=True)
    for message in (row, inner):  # protoc adds an oneof for each field that is `optional`
        for field in message.field:
            if field.proto3_optional:
                field.oneof_index = len(message.oneof_decl)
                message.oneof_decl.add(name=f"_{field.name}")
    return made


def _add(
    message: Any,
    name: str,
    kind: int,
    type_name: str,
    *,
    repeated: bool = False,
    optional: bool = False,
) -> None:
    label = T.LABEL_REPEATED if repeated else T.LABEL_OPTIONAL
    field = message.field.add(name=name, number=len(message.field) + 1, type=kind, label=label)
    if type_name:
        field.type_name = type_name
    if optional and kind != T.TYPE_MESSAGE:
        field.proto3_optional = True


def _descriptors(*files: descriptor_pb2.FileDescriptorProto) -> str:
    times = descriptor_pb2.FileDescriptorProto()
    timestamp_pb2.DESCRIPTOR.CopyToProto(times)
    made = descriptor_pb2.FileDescriptorSet(file=[times, *files])
    return base64.b64encode(made.SerializeToString()).decode()


DESCRIPTORS = _descriptors(_file())
DDL = ", ".join(
    f"{name} {ddl}, {name}_implicit {ddl}, {name}_list ARRAY<{ddl}>" for name, ddl, *_ in COLUMNS
)
SCHEMA = arrow_schema(ddl_to_schema(DDL))


@st.composite
def rows(draw: st.DrawFn) -> pa.Table:
    """A NULL is only where presence is known."""
    found = []
    for _ in range(draw(st.integers(0, 3))):
        row: dict[str, Any] = {}
        for name, ddl, _, _, values in COLUMNS:
            has_presence = ddl in ("TIMESTAMP", INNER)
            row[name] = draw(st.none() | values)
            row[f"{name}_implicit"] = draw(st.none() | values if has_presence else values)
            row[f"{name}_list"] = draw(st.lists(values, max_size=2))
        found.append(row)
    return pa.Table.from_pylist(found, schema=SCHEMA)


@given(rows())
def test_what_is_written_is_read(rows: pa.Table) -> None:
    values = ProtobufEncoding(rows.schema, DESCRIPTORS, "p.Row").encode(rows)
    reader = ProtobufValues(rows.schema, DESCRIPTORS, "p.Row", has_prefix=False)
    decoded = ValueDecoder(reader, rows.schema).decode(values)
    assert decoded.bad == {}
    assert pa.Table.from_batches([decoded.rows]).equals(rows)


def encoding(ddl: str, message: str = "p.Row") -> ProtobufEncoding:
    return ProtobufEncoding(arrow_schema(ddl_to_schema(ddl)), DESCRIPTORS, message)


@pytest.mark.parametrize(
    ("ddl", "problem"),
    [
        ("innr INT", "column innr: p.Row has no field of this name; did you mean inner"),
        ("d DECIMAL(5,2)", r"column d: DECIMAL\(5, 2\) is not written to field p\.Row\.d"),
        ("i DECIMAL(5,2)", "which is int32; write another type with CAST"),
        ("f DOUBLE", "column f: DOUBLE is not written to field p.Row.f, which is float"),
        ("s DATE", "column s: DATE is not written"),
        ("l STRING", "column l: STRING is not written"),
        ("at BIGINT", r"column at: BIGINT is not .* google\.protobuf\.Timestamp"),
        ("inner STRING", "column inner: STRING is not written"),
        ("inner STRUCT<x: INT, z: INT>", r"column inner\.z: p\.Row\.Inner has no field"),
        ("inner STRUCT<x: STRING>", r"column inner\.x: STRING is not written"),
        ("l_list BIGINT", "column l_list: BIGINT is not written to a repeated field"),
        ("l ARRAY<BIGINT>", "column l: ARRAY<BIGINT> is not written"),
        ("l_list ARRAY<ARRAY<BIGINT>>", "column l_list: ARRAY<BIGINT> is not written"),
    ],
)
def test_columns_that_are_no_field_are_refused(ddl: str, problem: str) -> None:
    with pytest.raises(SchemaMismatch, match=problem):
        encoding(ddl)


def test_messages_that_columns_cannot_fill_are_refused() -> None:
    made = descriptor_pb2.FileDescriptorProto(name="q.proto", package="q", syntax="proto2")
    row = made.message_type.add(name="Row")
    row.field.add(name="id", number=1, type=T.TYPE_INT64, label=T.LABEL_REQUIRED)
    entry = row.nested_type.add(name="TagsEntry")
    entry.options.map_entry = True
    for number, name in enumerate(("key", "value"), 1):
        entry.field.add(name=name, number=number, type=T.TYPE_STRING, label=T.LABEL_OPTIONAL)
    row.field.add(
        name="tags",
        number=2,
        type=T.TYPE_MESSAGE,
        label=T.LABEL_REPEATED,
        type_name=".q.Row.TagsEntry",
    )
    row.oneof_decl.add(name="which")
    for number, name in enumerate(("a", "b"), 3):
        row.field.add(
            name=name, number=number, type=T.TYPE_STRING, label=T.LABEL_OPTIONAL, oneof_index=0
        )

    def refused(ddl: str, problem: str) -> None:
        with pytest.raises(SchemaMismatch, match=problem):
            ProtobufEncoding(arrow_schema(ddl_to_schema(ddl)), _descriptors(made), "q.Row")

    refused("a STRING", "column id: q.Row requires it")
    refused("id BIGINT, a STRING, b STRING", "column b: it is in one oneof with a")
    refused("id BIGINT, tags ARRAY<STRUCT<key: STRING>>", "column tags: a map is not written")
    written = ProtobufEncoding(pa.schema([("id", pa.int64())]), _descriptors(made), "q.Row")
    with pytest.raises(UnencodableValue, match="column id is NULL"):
        written.encode(pa.table({"id": pa.array([None], pa.int64())}))


@pytest.mark.parametrize(
    ("ddl", "row", "problem"),
    [
        ("l_implicit BIGINT", None, "column l_implicit is NULL, which field p.Row.l_implicit is"),
        ("l_list ARRAY<BIGINT>", None, "column l_list is NULL, which a repeated field is never"),
        ("l_list ARRAY<BIGINT>", [None], "column l_list is NULL, which an item is never"),
        ("inner STRUCT<names: ARRAY<STRING>>", {"names": None}, r"column inner\.names is NULL"),
        ("u BIGINT", -1, r"column u does not fit field p\.Row\.u"),
        ("e STRING", "GREEN", "column e: 'GREEN' is not among RED, BLUE"),
        ("e STRING", "99999999999", "column e does not fit"),
        ("e STRING", "9" * 5000, "column e: '9+' is not among RED, BLUE"),
    ],
)
def test_values_that_do_not_fit_name_the_column(ddl: str, row: Any, problem: str) -> None:
    made = encoding(ddl)
    schema = arrow_schema(ddl_to_schema(ddl))
    rows = pa.Table.from_pylist([{schema.names[0]: row}], schema=schema)
    with pytest.raises(UnencodableValue, match=problem):
        made.encode(rows)


class TestRegistry:
    ROWS = pa.table({"id": [1, 2]})

    def options(self, url: str, message: str) -> KafkaSinkSpec:
        other = descriptor_pb2.FileDescriptorProto(name="o.proto", package="o", syntax="proto3")
        _add(other.message_type.add(name="Other"), "x", T.TYPE_INT32, "")
        made = descriptor_pb2.FileDescriptorProto(name="r.proto", package="r", syntax="proto3")
        made.dependency.extend(["o.proto", "google/protobuf/timestamp.proto"])
        for name in ("Row", "Outer"):
            _add(made.message_type.add(name=name), "id", T.TYPE_INT64, "")
        _add(made.message_type[0], "other", T.TYPE_MESSAGE, ".o.Other")
        _add(made.message_type[1].nested_type.add(name="Row"), "id", T.TYPE_INT64, "")
        return KafkaSinkSpec.model_validate(
            {
                "bootstrapServers": "b:1",
                "topic": "t",
                "format": "protobuf",
                "protobufDescriptors": _descriptors(other, made),
                "protobufMessage": message,
                "schemaRegistry": {"url": url},
            }
        )

    @pytest.mark.parametrize(
        ("message", "place"),
        [("r.Row", b"\0"), ("r.Outer", b"\x02\x02"), ("r.Outer.Row", b"\x04\x02\0")],
    )
    def test_values_begin_with_number_and_place(self, message: str, place: bytes) -> None:
        with SchemaServer({7: {}}) as server:
            options = self.options(server.url, message)
            values = open_writer(options, self.ROWS.schema).encode(self.ROWS)
            assert open_writer(options, self.ROWS.schema).encode(self.ROWS) == values
            assert [(subject, n) for (subject, _), n in server.registered.items()] == [
                ("o.proto", 8),
                ("t-value", 9),
            ]
            assert server.schemas[9]["schemaType"] == "PROTOBUF"
            assert server.schemas[9]["references"] == [
                {"name": "o.proto", "subject": "o.proto", "version": 1}
            ]
            assert all(
                (value or b"")[: 5 + len(place)] == b"\0\0\0\0\x09" + place for value in values
            )
        reader = ProtobufValues(
            self.ROWS.schema, options.protobuf_descriptors or "", message, has_prefix=True
        )
        decoded = ValueDecoder(reader, self.ROWS.schema).decode(list(values))
        assert (decoded.rows.to_pylist(), decoded.bad) == (self.ROWS.to_pylist(), {})
