"""Protobuf values: every message as the library reads it, and what is wrong with the others."""

from __future__ import annotations

import base64
import datetime as dt
import tracemalloc
from collections.abc import Sequence
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, timestamp_pb2
from hypothesis import given
from hypothesis import strategies as st

from rekindle.arrow_types import arrow_schema
from rekindle.connectors.protobuf_messages import find_message
from rekindle.connectors.protobuf_values import ProtobufValues
from rekindle.connectors.record_values import Decoded, ValueDecoder
from rekindle.errors import SchemaMismatch
from rekindle.topology.kinds.kafka import check_descriptors
from rekindle.topology.sql.ddl import ddl_to_schema

T = descriptor_pb2.FieldDescriptorProto
COLUMNS = (
    "id BIGINT, name STRING, big DECIMAL(20,0), ratio DOUBLE, data BINARY, paid BOOLEAN, "
    "color STRING, inner STRUCT<x: INT, missing: STRING>, inners ARRAY<STRUCT<x: INT>>, "
    "tags ARRAY<STRING>, at TIMESTAMP, absent INT"
)


def file() -> descriptor_pb2.FileDescriptorProto:
    made = descriptor_pb2.FileDescriptorProto(name="shop.proto", package="shop", syntax="proto3")
    made.dependency.append("google/protobuf/timestamp.proto")
    first = made.message_type.add(name="Other")
    first.field.add(name="x", number=1, type=T.TYPE_INT32, label=T.LABEL_OPTIONAL)
    color = made.enum_type.add(name="Color")
    color.value.add(name="RED", number=0)
    color.value.add(name="BLUE", number=5)
    order = made.message_type.add(name="Order")
    inner = order.nested_type.add(name="Inner")
    inner.field.add(name="x", number=1, type=T.TYPE_SINT32, label=T.LABEL_OPTIONAL)
    fields: list[tuple[str, int, str, bool]] = [
        ("id", T.TYPE_INT64, "", False),
        ("name", T.TYPE_STRING, "", False),
        ("big", T.TYPE_UINT64, "", False),
        ("ratio", T.TYPE_DOUBLE, "", False),
        ("data", T.TYPE_BYTES, "", False),
        ("paid", T.TYPE_BOOL, "", False),
        ("color", T.TYPE_ENUM, ".shop.Color", False),
        ("inner", T.TYPE_MESSAGE, ".shop.Order.Inner", False),
        ("inners", T.TYPE_MESSAGE, ".shop.Order.Inner", True),
        ("tags", T.TYPE_STRING, "", True),
        ("at", T.TYPE_MESSAGE, ".google.protobuf.Timestamp", False),
        ("not_a_column", T.TYPE_STRING, "", False),
    ]
    for number, (name, kind, type_name, repeated) in enumerate(fields, 1):
        label = T.LABEL_REPEATED if repeated else T.LABEL_OPTIONAL
        field = order.field.add(name=name, number=number, label=label)
        field.type = kind
        if type_name:
            field.type_name = type_name
    return made


def descriptors() -> str:
    times = descriptor_pb2.FileDescriptorProto()
    timestamp_pb2.DESCRIPTOR.CopyToProto(times)
    made = descriptor_pb2.FileDescriptorSet(file=[times, file()])
    return base64.b64encode(made.SerializeToString()).decode()


def message_class(name: str = "shop.Order") -> Any:
    pool = descriptor_pool.DescriptorPool()
    for each in descriptor_pb2.FileDescriptorSet.FromString(base64.b64decode(descriptors())).file:
        pool.Add(each)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(name))


ORDER = message_class()


def decode(
    values: Sequence[bytes | None],
    columns: str = COLUMNS,
    message: str = "shop.Order",
    *,
    has_prefix: bool = False,
) -> Decoded:
    declared = arrow_schema(ddl_to_schema(columns))
    format = ProtobufValues(declared, descriptors(), message, has_prefix=has_prefix)
    return ValueDecoder(format, declared).decode(values)


_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
_INNER = st.fixed_dictionaries({}, optional={"x": st.integers(-(2**31), 2**31 - 1)})
MESSAGES = st.fixed_dictionaries(
    {},
    optional={
        "id": st.integers(-(2**63), 2**63 - 1),
        "name": _TEXT,
        "big": st.integers(0, 2**64 - 1),
        "ratio": st.floats(allow_nan=False),
        "data": st.binary(max_size=4),
        "paid": st.booleans(),
        "color": st.sampled_from([0, 5, 7]),
        "inner": _INNER,
        "inners": st.lists(_INNER, max_size=3),
        "tags": st.lists(_TEXT, max_size=3),
        "at": st.fixed_dictionaries(
            {"seconds": st.integers(-(10**9), 10**9), "nanos": st.sampled_from([0, 5000])}
        ),
        "not_a_column": _TEXT,
    },
)


def expected(message: dict[str, Any]) -> dict[str, Any]:
    inner, at = message.get("inner"), message.get("at")
    epoch = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
    return {
        "id": message.get("id", 0),
        "name": message.get("name", ""),
        "big": message.get("big", 0),
        "ratio": message.get("ratio", 0.0),
        "data": message.get("data", b""),
        "paid": message.get("paid", False),
        "color": {0: "RED", 5: "BLUE", 7: "7"}[message.get("color", 0)],
        "inner": None if inner is None else {"x": inner.get("x", 0), "missing": None},
        "inners": [{"x": each.get("x", 0)} for each in message.get("inners", [])],
        "tags": message.get("tags", []),
        "at": None
        if at is None
        else epoch + dt.timedelta(seconds=at["seconds"], microseconds=at["nanos"] // 1000),
        "absent": None,
    }


@given(st.lists(st.none() | MESSAGES, max_size=6))
def test_messages_are_read_as_they_were_written(messages: list[dict[str, Any] | None]) -> None:
    values = [None if m is None else ORDER(**m).SerializeToString() for m in messages]
    decoded = decode(values)
    assert decoded.bad == {}
    nothing = dict.fromkeys(decoded.rows.schema.names)
    assert decoded.rows.to_pylist() == [nothing if m is None else expected(m) for m in messages]


@given(st.lists(MESSAGES, min_size=1, max_size=4), st.data())
def test_a_damaged_message_is_read_alike_whatever_is_beside_it(
    messages: list[dict[str, Any]], data: st.DataObject
) -> None:
    values = [ORDER(**m).SerializeToString() for m in messages]
    at = data.draw(st.integers(0, len(values) - 1))
    place = data.draw(st.integers(0, len(values[at])))
    noise = data.draw(st.binary(max_size=3))
    values[at] = values[at][:place] + noise + values[at][place + data.draw(st.integers(0, 3)) :]
    together = decode(values)
    for number, value in enumerate(values):
        alone = decode([value])
        assert alone.bad.get(0) == together.bad.get(number)
        assert str(alone.rows.to_pylist()) == str(together.rows.slice(number, 1).to_pylist())


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (b"\xff", "Error parsing message"),
        (ORDER(at={"nanos": 5}).SerializeToString(), "5 nanoseconds is none of microseconds"),
        (ORDER(at={"seconds": 2**62}).SerializeToString(), "is no TIMESTAMP"),
        (b"\x12\x01\xff", "Error parsing message"),  # a name that is no UTF-8
    ],
)
def test_a_bad_message_is_named_and_harms_no_other(bad: bytes, message: str) -> None:
    good = ORDER(id=1).SerializeToString()
    decoded = decode([good, bad, good])
    assert list(decoded.bad) == [1]
    assert message in decoded.bad[1]
    assert decoded.rows.column("id").to_pylist() == [1, None, 1]


def test_values_of_a_registry_name_their_message() -> None:
    order = b"\0\0\0\0\x07\x02\x02" + ORDER(id=3).SerializeToString()  # one index: 1
    other = b"\0\0\0\0\x07\0" + message_class("shop.Other")(x=4).SerializeToString()
    bad = [other, b"\0\0\0\0\x07", b"{}", b"\0\0\0\0\x07\x02\x80", b"\0\0\0\0\x07\xff\xff"]
    decoded = decode([order, *bad], "id INT", has_prefix=True)
    assert decoded.rows.column("id").to_pylist() == [3, None, None, None, None, None]
    assert list(decoded.bad) == [1, 2, 3, 4, 5]
    assert "the message at [0] of its file, not at [1]" in decoded.bad[1]
    first = decode([other], "x INT", "shop.Other", has_prefix=True)
    assert first.rows.column("x").to_pylist() == [4]
    nested = b"\0\0\0\0\x07\x04\x02\0" + message_class("shop.Order.Inner")(x=5).SerializeToString()
    inner = decode([nested], "x INT", "shop.Order.Inner", has_prefix=True)
    assert inner.rows.column("x").to_pylist() == [5]


@pytest.mark.parametrize(
    ("columns", "message", "error"),
    [
        ("id INT", "shop.Ordr", "shop.Ordr is not among the descriptors, which have .*shop.Order"),
        ("id INT, tags STRING", "shop.Order", "field tags: a repeated field is not read as STRING"),
        ("inner INT", "shop.Order", "field inner: a message is not read as INT"),
    ],
)
def test_what_cannot_be_read_is_refused_at_once(columns: str, message: str, error: str) -> None:
    with pytest.raises(SchemaMismatch, match=error):
        decode([], columns, message)


def test_descriptors_without_their_imports_are_refused() -> None:
    made = descriptor_pb2.FileDescriptorSet(file=[file()])
    text = base64.b64encode(made.SerializeToString()).decode()
    declared = arrow_schema(ddl_to_schema("id INT"))
    for given_text, error in ((text, "--include_imports"), ("AAAA", "not a FileDescriptorSet")):
        with pytest.raises(SchemaMismatch, match=error):
            ProtobufValues(declared, given_text, "shop.Order", has_prefix=False)


def test_few_values_are_messages_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each may hold so many empty messages that memory is a hundred times the value."""
    value = b"\x4a\x00" * 5000  # `inners`

    def most_memory(values: int) -> int:
        tracemalloc.start()
        assert decode([value] * values).bad == {}
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    monkeypatch.setattr("rekindle.connectors.protobuf_values._BLOCK_BYTES", len(value))
    most_memory(1)
    assert most_memory(16) < 2 * most_memory(1)


@pytest.mark.parametrize("text", ["a", "\ufeff", "é", "====", "a b"])
def test_descriptors_that_are_no_base64_name_their_field(text: str) -> None:
    (problem,) = check_descriptors(text, "spec.sources[0].kafka")
    assert problem.path == "spec.sources[0].kafka.protobufDescriptors"
    with pytest.raises(SchemaMismatch, match="not a FileDescriptorSet"):
        find_message(text, "m.M")
